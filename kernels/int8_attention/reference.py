"""Plain-torch reference of the int8 attention: the same rounding points as the kernels, no code in common with them.

For tests, on CPU tensors; it materialises the scores, so keep it small.
"""

from __future__ import annotations

import math

import torch

_LOG2E = math.log2(math.e)


def int8_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    pv: str = "auto",
    precision: str = "auto",
    block_n: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out [B, H, Lq, D] in query's dtype, lse [B, H, Lq] float32, natural log).

    query [B, H, Lq, D]; key, value [B, Hkv, Lk, D] with H a multiple of Hkv; attn_mask None or per key
    [1 or B, 1 or H, 1, 1 or Lk], bool (True = keep) or floating (added); pv, precision: as for int8_attention();
    block_n: keys of a step, which share a scale unless precision is "high".
    """
    heads, q_len, head_dim = query.shape[1:]
    kv_heads, kv_len = key.shape[1:3]
    group = heads // kv_heads
    softmax_scale = 1 / math.sqrt(head_dim) if scale is None else scale
    bias, anchor, absorbed = _bias(attn_mask, query, kv_len)
    visible = (bias > -8192 * _LOG2E) | bias.isnan()  # [B, H, Lk]
    kept = visible.unflatten(1, (kv_heads, group)).any(2)

    rotation = _rotation(head_dim)
    q = _pad(query, len(rotation)) @ rotation
    k = _pad(key, len(rotation)) @ rotation
    shift = _shift(k, kept)
    k = torch.where(kept[..., None], k - shift, 0.0)

    q_peak = q.abs().amax(-1, keepdim=True)
    q8 = (q * (127 / q_peak).nan_to_num(0, 0, 0)).round()
    shared = 1 if precision == "high" else block_n
    blocks = torch.nn.functional.pad(k, (0, 0, 0, -kv_len % shared)).unflatten(2, (-1, shared))
    k_peak = blocks.abs().amax((-1, -2), keepdim=True)
    k8 = (blocks * (127 / k_peak).nan_to_num(0, 0, 0)).round().flatten(2, 3)[:, :, :kv_len]
    k_scale = (k_peak / 127).expand(-1, -1, -1, shared, -1).flatten(2, 3)[:, :, :kv_len, 0]

    exact = (q8.double() @ k8.double().repeat_interleave(group, 1).transpose(-1, -2)).float()
    scores = exact * (q_peak / 127 * (softmax_scale * _LOG2E)) * k_scale.repeat_interleave(group, 1)[:, :, None]
    scores = torch.where(absorbed[:, :, None, None], 0.0, scores) + bias[:, :, None]
    if is_causal:
        future = torch.ones(q_len, kv_len, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    v_scale = torch.ones(())
    if pv == "fp8":
        value, v_scale = _to_e4m3(value.float(), kept)
        v_scale = v_scale.repeat_interleave(group, 1)
    out, lse = _online_softmax(scores, value.repeat_interleave(group, 1), block_n, fp8=pv == "fp8")
    term = (q * shift.repeat_interleave(group, 1)).sum(-1) * softmax_scale
    lse = lse + torch.where(absorbed[:, :, None], 0.0, term) + anchor[:, :, None]
    return (out * v_scale).to(query.dtype), lse


def _to_e4m3(value: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values with a power of two for each channel as scale, over the kept keys; others are 0."""
    value = torch.where(kept[..., None], value, 0.0)
    peak = value.abs().amax(2, keepdim=True)
    scale = torch.where(peak > 0, torch.exp2(peak.log2().floor() - 5), 1.0)
    return (value / scale).to(torch.float8_e4m3fn), scale


def _bias(attn_mask: torch.Tensor | None, query: torch.Tensor, kv_len: int) -> tuple[torch.Tensor, ...]:
    """Bias [B, H, Lk] in log2 units under its largest value, that value [B, H], and whether it absorbs the scores."""
    shape = (*query.shape[:2], kv_len)
    if attn_mask is None:
        bias = torch.zeros(shape, device=query.device)
    elif attn_mask.dtype == torch.bool:
        bias = torch.where(attn_mask[:, :, 0], 0.0, -math.inf).expand(shape)
    else:
        bias = attn_mask[:, :, 0].float().expand(shape)
    anchor = bias.masked_fill(~bias.isfinite(), -math.inf).amax(-1)
    anchor = anchor.masked_fill(anchor == -math.inf, 0.0)
    return (bias - anchor[..., None]) * _LOG2E, anchor, anchor.abs() >= 2**24


def _rotation(head_dim: int) -> torch.Tensor:
    """Orthonormal random-sign Hadamard, float32, of head_dim padded to a power of two; blocks of at most 128."""
    padded = max(32, 2 ** math.ceil(math.log2(head_dim)))
    block = min(padded, 128)
    matrix = torch.ones(1, 1)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.tensor([1.0 - 2.0 * (i * 40503 >> 9 & 1) for i in range(block)])
    rotation: torch.Tensor = torch.block_diag(*[signs[:, None] * matrix / math.sqrt(block)] * (padded // block))
    return rotation


def _pad(x: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(x.float(), (0, width - x.shape[-1]))


def _shift(k: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """[B, Hkv, 1, D]: mean over the kept keys (of all; the kernel samples long sequences, which changes no answer)."""
    kept = kept[..., None]
    total = torch.where(kept, k, 0.0).sum(2, keepdim=True)
    return total / kept.sum(2, keepdim=True).clamp(min=1)


def _online_softmax(
    scores: torch.Tensor, value: torch.Tensor, block_n: int, fp8: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over blocks of keys; P is rounded to the value's dtype under the running maximum, as in the kernel.

    fp8: the maximum is rounded up to a whole number, as log2, and P is at most 2^8 under it.
    """
    top = torch.full(scores.shape[:-1], -1e30, device=scores.device)
    total = torch.zeros_like(top)
    out = torch.zeros(*scores.shape[:-1], value.shape[-1], device=scores.device)
    for s, v in zip(scores.split(block_n, -1), value.split(block_n, 2), strict=True):
        peak = s.nan_to_num(nan=-math.inf).amax(-1)
        new_top = torch.fmax(top, (peak - 8).ceil() if fp8 else peak)
        p = torch.exp2(s - new_top[..., None])
        decay = torch.exp2(top - new_top)
        total = total * decay + p.sum(-1)
        out = out * decay[..., None] + p.to(v.dtype).float() @ v.float()
        top = new_top
    empty = total == 0
    out = torch.where(empty[..., None], 0.0, out / torch.where(empty, 1.0, total)[..., None])
    return out, torch.where(empty, -math.inf, (top + torch.log2(total)) / _LOG2E)
