"""Quantised query and key from one layout to another, and to and from the tensors of other libraries (layouts.py)."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch

from .decision import show
from .kernels.int8_attention.limits import LIMITS
from .mask import MaskKind, classify_mask
from .qk import Groups, Layout, QuantizedQK, expect, expect_type
from .quantized import check_flag, negated, version_of
from .rope_tables import check_gradient
from .scalars import is_real

# Query rows of a thread block, to which scales are padded.
_QUERY_BLOCK = {"sage, per warp, sm90": 64, "sage, per thread, sm90": 64}  # elsewhere 128
_WIDTHS = {"sage, per block": (64, 96, 128), "sage": (64, 128), "comfy-kitchen": (64, 128, 256)}


class Foreign(NamedTuple):
    """What a foreign kernel takes: int8 query [B, H, Q, D] and key [B, Hkv, K, D], float32 scales [B, heads, groups].

    softmax_scale: to be passed to the kernel, which multiplies it by log2(e); None where query_scale holds both.
    """

    query: torch.Tensor
    query_scale: torch.Tensor
    key: torch.Tensor
    key_scale: torch.Tensor
    softmax_scale: float | None


def convert(quantized: QuantizedQK, layout: Layout, *, requantize: bool = False) -> QuantizedQK:
    """Return the same query and key with the scales of another layout; int8 values change only with requantize=True.

    A value that was quantised with them stays behind; the mask must stay as it is, for the attention reads it.
    Raises ValueError, without requantize=True, where rows that would share a scale have different ones.
    """
    expect_type("quantized", quantized, QuantizedQK, "a QuantizedQK")
    expect_type("layout", layout, Layout, "a Layout")
    check_flag("requantize", requantize)
    kv_len, q_len = quantized.kv_len, quantized.query.shape[2]
    source = quantized.layout
    factor = 1.0
    if layout.folded and not source.folded:
        factor = quantized.softmax_scale * math.log2(math.e)
    query, query_scale = quantized.query, quantized.query_scale
    if factor < 0:
        query = negated(query)
    if factor != 1.0:
        query_scale = query_scale * abs(factor)
    query, query_scale = _regroup("query", query, query_scale, source.query, layout.query, q_len, requantize)
    key = quantized.key[:, :, :kv_len]
    key, key_scale = _regroup("key", key, quantized.key_scale, source.key, layout.key, kv_len, requantize)
    return dataclasses.replace(
        quantized,
        query=query,
        query_scale=query_scale,
        key=key,
        key_scale=key_scale,
        # Scales that hold the softmax scale keep it: taking it out would round.
        layout=dataclasses.replace(layout, folded=source.folded or layout.folded, rotation=source.rotation),
        prepared=None,
        value=None,  # what its order is, the layout does not say
    )


def give(quantized: QuantizedQK, layout: Layout, requantize: bool) -> Foreign:
    """Return what a foreign kernel of this layout takes; raises ValueError for what it can't be given."""
    expect_type("quantized", quantized, QuantizedQK, "a QuantizedQK")
    _check_width(layout, "quantized.query", quantized.query)
    converted = convert(quantized, layout, requantize=requantize)
    block = _QUERY_BLOCK.get(layout.name, 128)
    count = -(-quantized.query.shape[2] // block) * (block // layout.query.block) * layout.query.scales
    missing = count - converted.query_scale.shape[2]
    query_scale = torch.nn.functional.pad(converted.query_scale, (0, missing))
    scale: float | None = quantized.softmax_scale
    if layout.folded:
        scale = None
    elif converted.layout.folded:
        scale = math.log(2.0)  # the kernel multiplies by log2(e), and all else is in query_scale
    return Foreign(converted.query, query_scale, converted.key.contiguous(), converted.key_scale, scale)


def read(
    given: Foreign,
    layout: Layout,
    softmax_scale: float,
    dtype: torch.dtype,
    attn_mask: torch.Tensor | None,
    query_rotation: str,
    key_rotation: str,
    head_dim: int | None = None,
) -> QuantizedQK:
    """Return what a foreign library quantised; raises ValueError for parts that are not of this layout."""
    expect_type("query_rotation", query_rotation, str, "a name")
    if query_rotation != key_rotation:
        raise ValueError(f"key_rotation is {key_rotation!r}; expected {query_rotation!r}, that of query")
    parts = {"query": given.query, "query_scale": given.query_scale, "key": given.key, "key_scale": given.key_scale}
    for name, part in parts.items():
        expect_type(name, part, torch.Tensor, "a tensor")
        check_gradient(name, part)
    if not is_real(softmax_scale) or not abs(softmax_scale) <= LIMITS.max_scale:
        raise ValueError(f"softmax_scale is {softmax_scale}; expected a finite number of at most {LIMITS.max_scale:g}")
    softmax_scale = float(softmax_scale)
    if dtype not in LIMITS.dtypes:
        raise ValueError(f"dtype is {show(dtype)}; expected {show(LIMITS.dtypes)}")
    for name, tensor in (("query", given.query), ("key", given.key)):
        if tensor.dim() != 4 or tensor.dtype != torch.int8:
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; expected torch.int8 with 4 axes")
        _check_width(layout, name, tensor)
    q_len, kv_len = given.query.shape[2], given.key.shape[2]
    _check_mask(attn_mask, dtype, (*given.query.shape[:3], kv_len))
    block = _QUERY_BLOCK.get(layout.name, 128)
    padded = -(-q_len // block) * (block // layout.query.block) * layout.query.scales
    query_scale = _scales("query_scale", given.query_scale, given.query, padded)
    key_scale = _scales("key_scale", given.key_scale, given.key, layout.key.count(kv_len))
    folded = layout.folded
    # What to_*() gives for a query whose scales hold the softmax scale.
    if not folded and softmax_scale == math.log(2.0):
        folded, softmax_scale = True, 1.0
    return QuantizedQK(
        given.query,
        query_scale[..., : layout.query.count(q_len)],
        given.key,
        key_scale,
        kv_len=kv_len,
        head_dim=given.query.shape[3] if head_dim is None else head_dim,
        dtype=dtype,
        softmax_scale=softmax_scale,
        layout=dataclasses.replace(layout, folded=folded, rotation=query_rotation),
        attn_mask=attn_mask,
        mask_version=version_of(attn_mask),
    )


def _check_mask(attn_mask: torch.Tensor | None, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """Raise ValueError for what is no mask of keys over [batch, heads, queries, keys]."""
    if attn_mask is None:
        return
    expect_type("attn_mask", attn_mask, torch.Tensor, "a tensor or None")
    info = classify_mask(attn_mask, sizes[0], sizes[1], sizes[2], sizes[3])
    if info.kind is not MaskKind.PER_KEY or info.dtype not in (torch.bool, torch.float32, dtype):
        raise ValueError(
            f"attn_mask is {show(info.dtype)} {show(info.shape)}; expected bool, float32 or {show(dtype)}, one row for "
            f"all queries, that broadcasts to {show(sizes)}"
        )


def _regroup(
    name: str, rows: torch.Tensor, scale: torch.Tensor, source: Groups, target: Groups, length: int, requantize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [B, H, L, D] and their scales by `source` -> the same by `target`."""
    if source == target:
        return rows, scale[..., : target.count(length)]
    each = scale[..., source.index(length, scale.device)]
    index = target.index(length, scale.device).expand_as(each)
    shared = each.new_zeros((*each.shape[:2], target.count(length)))
    shared.scatter_reduce_(2, index, each, "amax")
    new = shared.gather(2, index)
    if torch.equal(new, each):
        return rows, shared
    if not requantize:
        raise ValueError(
            f"{name}'s scales differ inside groups that would share one; expected one scale for each group of "
            f"{target}, or requantize=True, which rounds the values again"
        )
    ratio = torch.where(new > 0, each / new, 0.0)
    return (rows * ratio[..., None]).round().to(torch.int8), shared


def _check_width(layout: Layout, name: str, tensor: torch.Tensor) -> None:
    widths = next(widths for name, widths in _WIDTHS.items() if layout.name.startswith(name))
    if tensor.shape[-1] not in widths:
        raise ValueError(f"{name} has {tensor.shape[-1]} channels; expected one of {widths}, which {layout.name} takes")


def _scales(name: str, scale: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    flat = scale.squeeze(3) if scale.dim() == 4 and scale.shape[3] == 1 else scale
    expect(f"{name}'s dtype", flat.dtype, torch.float32)
    expect(f"{name}'s shape", tuple(flat.shape), (*rows.shape[:2], count))
    return flat
