"""Classify an attention mask from its shape, strides and dtype; its values are never read."""

from __future__ import annotations

import torch

from .decision import MaskInfo, MaskKind

__all__ = ["MaskInfo", "MaskKind", "classify_mask", "key_view"]

# SDPA accepts these ranks; a one-dimensional mask raises an IndexError in torch.
_RANKS = (2, 3, 4)


def classify_mask(attn_mask: torch.Tensor | None, batch: int, heads: int, q_len: int, kv_len: int) -> MaskInfo:
    """Say how `attn_mask` varies over [batch, heads, q_len, kv_len], without reading or moving a value.

    PER_KEY: after broadcasting, the query axis has size 1 or stride 0, whatever batch, heads and keys do.
    FULL: a row for each query in memory, even if all rows are equal: finding out would synchronise the GPU.
    INVALID: not a dense tensor, or it doesn't broadcast to these four sizes. Dtypes are judged by decide().

    >>> classify_mask(torch.zeros(1, 1, 1, 512), 1, 8, 4096, 512).kind
    <MaskKind.PER_KEY: 'per_key'>
    """
    if attn_mask is None:
        return MaskInfo(MaskKind.NONE, "no mask")
    if not isinstance(attn_mask, torch.Tensor):
        return MaskInfo(MaskKind.INVALID, "not a tensor")
    if attn_mask.is_nested or attn_mask.layout != torch.strided:
        return MaskInfo(MaskKind.INVALID, "a nested or sparse tensor")
    shape, strides = tuple(attn_mask.shape), attn_mask.stride()
    is_bool = attn_mask.dtype == torch.bool
    if len(shape) not in _RANKS:
        why = "SDPA takes masks of rank 2, 3 or 4"
        return MaskInfo(MaskKind.INVALID, why, is_bool=is_bool, shape=shape, dtype=attn_mask.dtype)
    missing = 4 - len(shape)
    sizes = (1,) * missing + shape
    if not all(size in (1, full) for size, full in zip(sizes, (batch, heads, q_len, kv_len), strict=True)):
        why = "does not broadcast to batch, heads, queries and keys"
        return MaskInfo(MaskKind.INVALID, why, is_bool=is_bool, shape=shape, dtype=attn_mask.dtype)
    varies = [size != 1 and stride != 0 for size, stride in zip(sizes, (0,) * missing + strides, strict=True)]
    kind, why = MaskKind.PER_KEY, "constant along the queries"
    if varies[2]:
        kind, why = MaskKind.FULL, "a row for each query; pass mask[..., :1, :] if all rows are equal"
    return MaskInfo(kind, why, varies[0], varies[1], is_bool, shape, attn_mask.dtype)


def key_view(attn_mask: torch.Tensor) -> torch.Tensor:
    """View a PER_KEY mask as [1 or B, 1 or H, 1, 1 or K]: the query axis is cut to one row, nothing is copied."""
    if attn_mask.dim() == 4 and attn_mask.shape[2] == 1:
        return attn_mask
    row = attn_mask.narrow(-2, 0, 1)
    return row[(None,) * (4 - row.dim())]
