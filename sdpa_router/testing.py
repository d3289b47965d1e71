"""float64 oracle, error measures and budget, and input makers: public, so that users can check their own GPU."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Scores held at once by the oracle: 2**26 float64 are 512 MiB, a few times that with temporaries.
_ORACLE_SCORES = 2**26


@dataclass(frozen=True)
class ErrorBudget:
    """Largest accepted errors against float64.

    gaussian and outliers bound `relative_error` of the int8 route on `gaussian()` and `outliers()` inputs: int8 scores
    with one scale per row and per small group of keys measure 0.0097 to 0.0119. lse bounds `lse_error`.
    sdpa bounds torch's own fp16 and bf16 answers, measured at 0.0023.
    """

    gaussian: float = 0.0125
    outliers: float = 0.02
    lse: float = 0.01
    sdpa: float = 0.005


BUDGET = ErrorBudget()


@torch.no_grad()
def sdpa_oracle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """Answer scaled dot-product attention in float64, in blocks of queries, so that long sequences fit.

    query [B, H, Q, D], key [B, Hkv, K, D], value [B, Hkv, K, E] of any float dtype; attn_mask broadcasts to
    [B, H, Q, K], bool (True = keep) or additive. Returns out [B, H, Q, E] and lse [B, H, Q] (natural log), both
    float64. A query without a key gets 0 and -inf. Raises ValueError for shapes that SDPA does not take.

    >>> q = torch.zeros(1, 1, 2, 4)
    >>> sdpa_oracle(q, torch.zeros(1, 1, 8, 4), torch.ones(1, 1, 8, 4))[1]
    tensor([[[2.0794, 2.0794]]], dtype=torch.float64)
    """
    group = _check_shapes(query, key, value, attn_mask, is_causal, enable_gqa)
    batch, heads, q_len, head_dim = query.shape
    kv_len = key.shape[2]
    out = query.new_zeros(batch, heads, q_len, value.shape[3], dtype=torch.float64)
    lse = query.new_full((batch, heads, q_len), -math.inf, dtype=torch.float64)
    if kv_len == 0:
        return out, lse
    factor = 1 / math.sqrt(head_dim) if scale is None else scale
    mask = None if attn_mask is None else attn_mask.expand(batch, heads, q_len, kv_len)
    rows = max(1, _ORACLE_SCORES // kv_len)
    for b, h in itertools.product(range(batch), range(heads)):
        keys, values = key[b, h // group].double(), value[b, h // group].double()
        for start in range(0, q_len, rows):
            block = slice(start, min(start + rows, q_len))
            scores = (query[b, h, block].double() * factor) @ keys.T
            _apply_mask(scores, None if mask is None else mask[b, h, block], start if is_causal else None)
            out[b, h, block], lse[b, h, block] = _softmax_times(scores, values)
    return out, lse


def _check_shapes(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> int:
    """Return the query heads per key head, or raise ValueError."""
    if not query.dim() == key.dim() == value.dim() == 4:
        raise ValueError(f"the oracle takes [B, H, L, D] tensors, given ranks {query.dim(), key.dim(), value.dim()}")
    if is_causal and attn_mask is not None:
        raise ValueError("given is_causal together with attn_mask: SDPA takes one of them")
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads != kv_heads and not (enable_gqa and heads % kv_heads == 0):
        raise ValueError(f"given {heads} query heads and {kv_heads} key heads with enable_gqa={enable_gqa}")
    if query.shape[3] != key.shape[3] or key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0]:
        raise ValueError(f"shapes do not fit: {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}")
    return heads // kv_heads


def _apply_mask(scores: Tensor, mask: Tensor | None, causal_start: int | None) -> None:
    """Add the mask of a block of queries to its scores [rows, K], in place; causal is aligned top left."""
    if mask is not None and mask.dtype == torch.bool:
        scores.masked_fill_(~mask, -math.inf)
    elif mask is not None:
        scores += mask
    if causal_start is not None:
        rows, kv_len = scores.shape
        last = torch.arange(causal_start, causal_start + rows, device=scores.device)
        scores.masked_fill_(torch.arange(kv_len, device=scores.device) > last[:, None], -math.inf)


def _softmax_times(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return softmax(scores) @ values and the log-sum-exp; rows that are -inf everywhere give 0 and -inf."""
    top = scores.amax(dim=-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    weights = scores.sub_(top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    out = torch.where(total == 0, 0.0, weights @ values / total)
    return out, (total.log() + top).squeeze(-1)


def relative_error(out: Tensor, ref: Tensor) -> float:
    """Return rms(out - ref) / rms(ref), computed in float64; 0 if both are 0, NaN if either holds a NaN.

    >>> relative_error(torch.tensor([1.0, 1.1]), torch.tensor([1.0, 1.0]))  # doctest: +ELLIPSIS
    0.0707...
    """
    ref = ref.double()
    difference = torch.linalg.vector_norm(out.double() - ref).item()
    size = torch.linalg.vector_norm(ref).item()
    if size == 0:
        return difference if math.isnan(difference) else (math.inf if difference else 0.0)
    return float(difference / size)


def lse_error(lse: Tensor, ref: Tensor) -> float:
    """Return the rms difference of two log-sum-exps; infinite if -inf (an empty row) meets a number, NaN for a NaN.

    >>> lse_error(torch.tensor([1.0, -math.inf]), torch.tensor([1.01, -math.inf]))  # doctest: +ELLIPSIS
    0.0070...
    """
    lse, ref = lse.double(), ref.double()
    difference = torch.where(lse == ref, 0.0, (lse - ref).abs())
    return float(difference.square().mean().sqrt().item()) if difference.numel() else 0.0


def gaussian(
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    head_dim: int,
    *,
    kv_heads: int | None = None,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Make N(0, 1) query [B, H, Q, D], key and value [B, Hkv, K, D]; equal arguments give equal tensors."""
    generator = torch.Generator(device).manual_seed(seed)
    kv_shape = (batch, heads if kv_heads is None else kv_heads, kv_len, head_dim)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    return draw((batch, heads, q_len, head_dim)), draw(kv_shape), draw(kv_shape)


def outliers(
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    head_dim: int,
    *,
    kv_heads: int | None = None,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Make inputs that are hard to quantise: N(0, 1) with channel 0 of q and k times 8 and a common key of rms 40."""
    query, key, value = gaussian(
        batch, heads, q_len, kv_len, head_dim, kv_heads=kv_heads, dtype=torch.float32, device=device, seed=seed
    )
    generator = torch.Generator(device).manual_seed(seed + 1)
    common = 40 * torch.randn(key.shape[1], 1, head_dim, generator=generator, device=device)
    query[..., 0] *= 8
    key[..., 0] *= 8
    return query.to(dtype), (key + common).to(dtype), value.to(dtype)


def raised_cosine(length: int, floor: float = 1e-4, device: torch.device | str = "cpu") -> Tensor:
    """Return a float32 bias [length] that falls from 0 to log(floor) along half a cosine."""
    position = (torch.arange(length, dtype=torch.float64, device=device) + 0.5) / max(1, length)
    return (math.log(floor) * (1 - torch.cos(math.pi * position)) / 2).float()


def fade_bias(kv_len: int, *, skirt: float = 0.4, floor: float = 1e-4, device: torch.device | str = "cpu") -> Tensor:
    """Make a float32 key bias [1, 1, 1, K]: 0, then a raised cosine to log(floor) over the last `skirt` of them."""
    faded = round(kv_len * skirt)
    bias = torch.zeros(kv_len, device=device)
    bias[kv_len - faded :] = raised_cosine(faded, floor, device)
    return bias.view(1, 1, 1, kv_len)


@dataclass(frozen=True)
class BandedWindow:
    """A window over a packed video sequence: bias, float32 [1, 1, 1, K], and its contiguous parts by name."""

    bias: Tensor
    parts: dict[str, slice]

    @property
    def kv_len(self) -> int:
        """Number of keys."""
        return int(self.bias.shape[-1])


def banded_window(
    *,
    text: int = 512,
    refs: int = 128,
    audio: int = 200,
    frame: int = 1560,
    core: int = 13,
    skirt: int = 4,
    floor: float = 1e-4,
    device: torch.device | str = "cpu",
) -> BandedWindow:
    """Make the key bias of one window of a long video, keys packed as [text | refs | audio | video].

    text, refs, audio: keys of each; frame: keys of one latent frame; core: frames seen in full; skirt: frames on
    either side that fade from 0 to log(floor), the more the farther. The default is 33600 keys (480p, 21 frames).
    """
    prefix, faded = text + refs + audio, skirt * frame
    fade = raised_cosine(faded, floor, device)
    flat = torch.zeros(prefix + core * frame + 2 * faded, device=device)
    edges = [0, prefix, prefix + faded, prefix + faded + core * frame, flat.numel()]
    names = ("prefix", "skirt before", "core", "skirt after")
    parts = {name: slice(start, stop) for name, start, stop in zip(names, edges, edges[1:], strict=False)}
    flat[parts["skirt before"]] = fade.flip(0)
    flat[parts["skirt after"]] = fade
    return BandedWindow(flat.view(1, 1, 1, -1), parts)
