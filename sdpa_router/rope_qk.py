"""rms_rope_quantize(): RMSNorm, rotary embedding and int8 quantisation of query and key in one pass."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from .decide import Call
from .decision import show
from .entry import kernel_entry
from .qk import Prepared, QuantizedQK
from .quantized import (
    ROTATION_OF_PAIRS,
    check_flag,
    choose_config,
    default_scale,
    heads_inside,
    key_row,
    native_layout,
    quantize_qk,
    require_kernel,
    version_of,
)
from .rope_tables import check_gradient, shown, tables_of
from .scalars import is_real, is_whole

if TYPE_CHECKING:
    from .kernels.int8_attention.fused import Rows

# One sequence, or two that follow each other, such as the text and the image of a joint attention.
Segments = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Weight = torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None


@kernel_entry
def rms_rope_quantize(
    query: Segments,
    key: Segments,
    query_weight: Weight,
    key_weight: Weight,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    interleaved: bool,
    eps: float | None,
    scale: float | None = None,
    attn_mask: torch.Tensor | None = None,
    across_heads: bool = False,
    rotary_dim: int | None = None,
    key_cos: torch.Tensor | None = None,
    key_sin: torch.Tensor | None = None,
    enable_gqa: bool = False,
    lse: bool = False,
    precision: str = "auto",
) -> QuantizedQK:
    """Norm, rotate and quantise a query and key that come straight from their projections; int8_attention() takes it.

    query [B, H, Q, D], key [B, Hkv, K, D]: fp16 or bf16, any strides with a contiguous last axis. A pair of tensors is
    one sequence in two parts, and then a weight may be a pair too. query_weight, key_weight: of the RMSNorm, any float
    dtype: [D] for a norm of each head; [H * D] and [Hkv * D] for one across all heads of a token (Wan, LTX); None for
    all ones, when across_heads says which norm.  eps: what the norm adds to the mean square; None leaves the norm out.
    cos, sin: [Q, R / 2], an angle a pair, or [Q, R] with each of them twice, as diffusers keeps them; or with a batch
    axis before, or batch and heads, each 1 or full. None leaves RoPE out. key_cos, key_sin: those of the keys, where
    they are not the same.  interleaved: whether the pairs are channels (2j, 2j + 1), else (j, j + R / 2). rotary_dim:
    R, even, by default D; the other channels stay as they are. scale, attn_mask, enable_gqa, precision: as for
    int8_attention(); the mask's garbage-proofness holds.  lse: whether the LSE will be asked for.

    Norm and RoPE are computed in float32 and rounded to 16 bits once, before a Hadamard rotation (QuaRot); models round
    after each of the two. Without either it is quantize_qk(). Raises ValueError for what does not fit together, naming
    the argument, what was given and what is expected; UnsupportedError for a call that the kernel can't answer.

    >>> quantized = rms_rope_quantize(q, k, norm_q.weight, norm_k.weight, cos, sin, interleaved=True, eps=1e-6)
    >>> out = int8_attention(quantized, value)
    """
    queries, query_weight = _there("query", query, query_weight)
    keys, key_weight = _there("key", key, key_weight)
    if keys[0].shape[0] != queries[0].shape[0] or keys[0].shape[3] != queries[0].shape[3]:
        raise ValueError(
            f"key is {show(keys[0].shape)}; expected the batch and head_dim of query {show(queries[0].shape)}"
        )
    whole = [_whole(parts) for parts in (queries, keys)]
    require_kernel(Call(whole[0], whole[1], whole[1], attn_mask, 0.0, False, scale, enable_gqa), "auto", precision)
    head_dim = whole[0].shape[3]
    rotary = head_dim if rotary_dim is None else rotary_dim
    unused = cos is None and rotary_dim is None
    if not unused and not (is_whole(rotary) and 0 < rotary <= head_dim and rotary % 2 == 0):
        raise ValueError(f"rotary_dim is {rotary!r}; expected an even number up to head_dim, {head_dim}")
    rotary, eps = int(rotary), _checked_eps(eps)
    for name, flag in (("interleaved", interleaved), ("across_heads", across_heads), ("lse", lse)):
        check_flag(name, flag)
    across = across_heads or _is_across(query_weight, whole[0]) or _is_across(key_weight, whole[1])
    if cos is None and (key_cos is not None or key_sin is not None):
        raise ValueError("key_cos or key_sin is given; expected None, for cos is None and RoPE is left out")
    if cos is not None and key_cos is None and key_sin is not None:
        raise ValueError("key_cos is None; expected a tensor, for key_sin is given")
    if cos is not None and key_cos is None and whole[0].shape[2] != whole[1].shape[2]:
        raise ValueError(
            f"key_cos is None; expected cosines for {whole[1].shape[2]} keys, for cos is of {whole[0].shape[2]} queries"
        )
    if eps is None and cos is None and query_weight is None and key_weight is None and len(queries) == len(keys) == 1:
        return quantize_qk(queries[0], keys[0], attn_mask, scale, enable_gqa=enable_gqa, lse=lse, precision=precision)
    tables = {
        "cos": (cos, sin),
        "key_cos": (cos, sin) if key_cos is None else (key_cos, key_sin),
    }
    shape = (rotary, interleaved)
    query_rows = _rows(
        "query", queries, query_weight, across, eps, tables_of("cos", "sin", *tables["cos"], whole[0], *shape)
    )
    names = ("cos", "sin") if key_cos is None else ("key_cos", "key_sin")
    key_rows = _rows("key", keys, key_weight, across, eps, tables_of(*names, *tables["key_cos"], whole[1], *shape))
    return _quantize(
        query_rows, key_rows, whole[0], eps, across, default_scale(whole[0], scale), attn_mask,
        0 if cos is None else rotary, interleaved, lse, precision,
    )  # fmt: skip


def _quantize(
    query: Rows,
    key: Rows,
    whole: torch.Tensor,
    eps: float | None,
    across: bool,
    scale: float,
    attn_mask: torch.Tensor | None,
    rotary: int,
    interleaved: bool,
    lse: bool,
    precision: str,
) -> QuantizedQK:
    from .kernels.int8_attention.fused import Norm, Rope, rms_rope_quantize_key, rms_rope_quantize_query

    config = choose_config(query.x, "auto", precision)
    norm, rope = Norm(eps, across), Rope(rotary, interleaved)
    with torch.cuda.device_of(query.x):
        keys, rotation = rms_rope_quantize_key(
            key, key_row(attn_mask), config, norm, rope,
            group=query.x.shape[1] // key.x.shape[1], per_token=precision == "high",
        )  # fmt: skip
        shift = keys.shift if lse else None
        queries = rms_rope_quantize_query(query, scale, config, norm, rope, rotation, shift=shift)
    return QuantizedQK(
        queries.query,
        queries.query_scale,
        keys.key,
        keys.key_scale.flatten(2),
        kv_len=key.length,
        head_dim=whole.shape[3],
        dtype=whole.dtype,
        softmax_scale=scale,
        layout=native_layout(config, precision, ROTATION_OF_PAIRS),
        attn_mask=attn_mask,
        mask_version=version_of(attn_mask),
        key_shift=keys.shift,
        lse_term=queries.lse_term,
        heads_inside=heads_inside(query.x),
        prepared=Prepared(config, keys.bias, keys.anchor, keys.live, keys.key_norm),
    )


def _segments(name: str, given: Segments) -> tuple[torch.Tensor, ...]:
    parts = given if isinstance(given, tuple) else (given,)
    if len(parts) not in (1, 2) or not all(isinstance(part, torch.Tensor) and part.dim() == 4 for part in parts):
        raise ValueError(
            f"{name} is {shown(given)}; expected a tensor [batch, heads, length, head_dim] or a pair of them"
        )
    first = parts[0]
    for part in parts:
        alike = part.shape[:2] == first.shape[:2] and part.shape[3] == first.shape[3] and part.dtype == first.dtype
        if not alike or part.device != first.device or (part.stride(3) != 1 and part.shape[3] > 1):
            raise ValueError(
                f"{name} has a part {show(part.dtype)} {show(part.shape)} with strides {show(part.stride())} on "
                f"{part.device}; expected {show(first.dtype)} [{first.shape[0]}, {first.shape[1]}, length, "
                f"{first.shape[3]}] with a contiguous last axis on {first.device}"
            )
    return parts


def _there(name: str, given: Segments, weight: Weight) -> tuple[tuple[torch.Tensor, ...], Weight]:
    """The segments and their weights; of two of which one is empty, the other: one sequence, and one kernel for it."""
    parts = _segments(name, given)
    lengths = [part.shape[2] for part in parts]
    if len(parts) == 2 and 0 in lengths and (not isinstance(weight, tuple) or len(weight) == 2):
        used = 0 if lengths[0] else 1
        return (parts[used],), weight[used] if isinstance(weight, tuple) else weight
    return parts, weight


def _whole(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A tensor of the whole sequence's shape, for the decision: its values are not read."""
    if len(parts) == 1:
        return parts[0]
    length = sum(part.shape[2] for part in parts)
    longer = max(parts, key=lambda part: part.shape[2])  # one may be empty
    return longer[:, :, :1].expand(-1, -1, length, -1) if length else longer


def _is_across(weight: Weight, whole: torch.Tensor) -> bool:
    """Whether this weight belongs to a norm across all heads."""
    weights = weight if isinstance(weight, tuple) else (weight,)
    heads, size = whole.shape[1], (whole.shape[1] * whole.shape[3],)
    return heads > 1 and any(isinstance(one, torch.Tensor) and tuple(one.shape) == size for one in weights)


def _checked_eps(eps: float | None) -> float | None:
    if eps is not None and not (is_real(eps) and 0 <= eps < math.inf):
        raise ValueError(f"eps is {eps!r}; expected a finite number of at least 0, or None for no norm")
    return None if eps is None else float(eps)


def _rows(
    name: str,
    parts: tuple[torch.Tensor, ...],
    weight: Weight,
    across: bool,
    eps: float | None,
    tables: tuple[torch.Tensor | None, torch.Tensor | None],
) -> Rows:
    from .kernels.int8_attention.fused import Rows

    weights = weight if isinstance(weight, tuple) else (weight,) * len(parts)
    if len(weights) != len(parts):
        raise ValueError(f"{name}_weight has {len(weights)} parts; expected {len(parts)}, as {name} has")
    heads, head_dim = parts[0].shape[1], parts[0].shape[3]
    size = heads * head_dim if across else head_dim
    for one in weights:
        if one is not None and not (isinstance(one, torch.Tensor) and one.is_floating_point()):
            given = show(one.dtype) if isinstance(one, torch.Tensor) else f"of type {type(one).__name__}"
            raise ValueError(f"{name}_weight is {given}; expected a floating tensor or None")
        check_gradient(f"{name}_weight", one)
        if one is not None and (eps is None or one.shape != (size,) or one.device != parts[0].device):
            expected = "None, for eps is None" if eps is None else f"[{size}] on {parts[0].device}"
            raise ValueError(f"{name}_weight is {show(one.shape)} on {one.device}; expected {expected}")
    if any(one is None for one in weights) and not all(one is None for one in weights):
        weights = tuple(parts[0].new_ones(size) if one is None else one for one in weights)
    weights = tuple(None if one is None else one.detach().contiguous() for one in weights)
    if len({one.dtype for one in weights if one is not None}) > 1:
        weights = tuple(None if one is None else one.float() for one in weights)
    second = parts[1] if len(parts) == 2 else None
    return Rows(parts[0], weights[0], *tables, second, weights[1] if second is not None else None)
