"""Quantised query and key to and from the layouts of SageAttention and comfy-kitchen: pure functions.

int8 values mean something only with the rows that share a scale and with the place of the softmax scale; both differ
between libraries, on purpose. A layout says them, from_*() reads tensors by it, and to_*() gives tensors that the
library's own kernel takes. Tensors are [batch, heads, length, D] (SageAttention's "HND"; a transposed view of "NHD").

From a foreign layout to ours nothing is rounded, and back again the same tensors come out. From ours to a foreign one
the scales are coarser, so rows whose scales differ inside a group must be rounded a second time: that raises ValueError
unless requantize=True. To find out, the scales are read, which waits for the GPU.

What can't be converted, by any of these: a query and a key that went through different rotations of head_dim (a
Hadamard-rotated key with a query that is not rotated); a bias per key, which is no part of these layouts, so pass the
mask on; a value.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch

from .decision import show
from .kernels.int8_attention.limits import LIMITS
from .mask import MaskKind, classify_mask
from .qk import Groups, Layout, QuantizedQK, expect
from .quantized import version_of

__all__ = [
    "COMFY_KITCHEN_64",
    "COMFY_KITCHEN_128",
    "COMFY_KITCHEN_D256_64",
    "COMFY_KITCHEN_D256_128",
    "SAGE_BLOCK",
    "SAGE_SM90_THREAD",
    "SAGE_SM90_WARP",
    "SAGE_THREAD",
    "SAGE_WARP",
    "Foreign",
    "convert",
    "from_comfy_kitchen",
    "from_sage_block",
    "from_sage_thread",
    "from_sage_warp",
    "to_comfy_kitchen",
    "to_sage_block",
    "to_sage_thread",
    "to_sage_warp",
]

SAGE_BLOCK = Layout("sage, per block", Groups(128), Groups(64), folded=True)
SAGE_WARP = Layout("sage, per warp", Groups(32), Groups(64), folded=False)
SAGE_THREAD = Layout("sage, per thread", Groups(32, 8), Groups(64, 4), folded=False)
SAGE_SM90_WARP = Layout("sage, per warp, sm90", Groups(16), Groups(128), folded=False)
SAGE_SM90_THREAD = Layout("sage, per thread, sm90", Groups(16, 8), Groups(128, 4), folded=False)
COMFY_KITCHEN_64 = Layout("comfy-kitchen, 64 keys", Groups(32, 8), Groups(64, 4), folded=False)
COMFY_KITCHEN_128 = Layout("comfy-kitchen, 128 keys", Groups(32, 8), Groups(128, 4), folded=False)
COMFY_KITCHEN_D256_64 = Layout("comfy-kitchen, D 256, 64 keys", Groups(16, 8), Groups(64, 4), folded=False)
COMFY_KITCHEN_D256_128 = Layout("comfy-kitchen, D 256, 128 keys", Groups(16, 8), Groups(128, 4), folded=False)
# Query rows of a thread block, to which scales are padded.
_QUERY_BLOCK = {SAGE_SM90_WARP.name: 64, SAGE_SM90_THREAD.name: 64}
_WIDTHS = {"sage": (64, 96, 128), "comfy-kitchen": (64, 128, 256)}


class Foreign(NamedTuple):
    """What a foreign kernel takes: int8 query [B, H, Q, D] and key [B, Hkv, K, D], float32 scales [B, heads, groups].

    softmax_scale: to be passed to the kernel, which multiplies it by log2(e); None where query_scale holds both.
    """

    query: torch.Tensor
    query_scale: torch.Tensor
    key: torch.Tensor
    key_scale: torch.Tensor
    softmax_scale: float | None


def to_sage_block(quantized: QuantizedQK, *, requantize: bool = False) -> Foreign:
    """To the layout of SageAttention 1.0.6's and 2.x's Triton kernels.

    query_scale [B, H, ceil(Q / 128)], one for 128 rows, softmax_scale * log2(e) in it; key_scale [B, Hkv, ceil(K /
    64)], one for 64 keys. D is 64, 96 or 128. Its 1.0.6 kernel reads past the last key: let K be a multiple of 64.

    >>> foreign = to_sage_block(quantized, requantize=True)
    >>> out = forward(foreign.query, foreign.key, value, foreign.query_scale, foreign.key_scale)
    """
    return _to(quantized, SAGE_BLOCK, requantize)


def from_sage_block(
    query: torch.Tensor,
    query_scale: torch.Tensor,
    key: torch.Tensor,
    key_scale: torch.Tensor,
    *,
    dtype: torch.dtype,
    attn_mask: torch.Tensor | None = None,
    query_rotation: str = "none",
    key_rotation: str = "none",
) -> QuantizedQK:
    """From what SageAttention's per_block_int8() returns; shapes as in to_sage_block(), scales also with a last axis 1.

    dtype: of the value that comes with them, and of the output.  attn_mask: as for int8_attention().
    query_rotation, key_rotation: a name for what head_dim was rotated by; SageAttention rotates by nothing. The LSE is
    that of the keys as quantised, so without what was subtracted from them (its k - mean).
    """
    given = Foreign(query, query_scale, key, key_scale, None)
    return _from(given, SAGE_BLOCK, 1.0, dtype, attn_mask, query_rotation, key_rotation)


def to_sage_warp(quantized: QuantizedQK, *, sm90: bool = False, requantize: bool = False) -> Foreign:
    """To the layout of SageAttention 2.x's CUDA kernels with qk_quant_gran="per_warp".

    query_scale [B, H, 4 * ceil(Q / 128)], one for 32 rows; key_scale [B, Hkv, ceil(K / 64)], one for 64 keys. sm90:
    its kernels for Hopper, query_scale [B, H, 4 * ceil(Q / 64)], one for 16 rows; one key scale for 128 keys. The
    softmax scale is the kernel's argument sm_scale. D is 64 or 128.
    """
    return _to(quantized, SAGE_SM90_WARP if sm90 else SAGE_WARP, requantize)


def from_sage_warp(
    query: torch.Tensor,
    query_scale: torch.Tensor,
    key: torch.Tensor,
    key_scale: torch.Tensor,
    *,
    softmax_scale: float,
    dtype: torch.dtype,
    sm90: bool = False,
    attn_mask: torch.Tensor | None = None,
    query_rotation: str = "none",
    key_rotation: str = "none",
) -> QuantizedQK:
    """From what SageAttention's per_warp_int8() returns; shapes as in to_sage_warp(), the rest as in from_sage_block().

    sm90: called with BLKQ=64, WARPQ=16, BLKK=128.  softmax_scale: what the kernel would get as sm_scale.
    """
    given = Foreign(query, query_scale, key, key_scale, softmax_scale)
    layout = SAGE_SM90_WARP if sm90 else SAGE_WARP
    return _from(given, layout, softmax_scale, dtype, attn_mask, query_rotation, key_rotation)


def to_sage_thread(quantized: QuantizedQK, *, sm90: bool = False, requantize: bool = False) -> Foreign:
    """To the layout of SageAttention 2.x's CUDA kernels with qk_quant_gran="per_thread".

    query_scale [B, H, 32 * ceil(Q / 128)]: of each 32 rows, rows i, i + 8, i + 16, i + 24 share one; key_scale
    [B, Hkv, 4 * ceil(K / 64)]: of each 64 keys, the keys {8j + 2t, 8j + 2t + 1} share scale t. sm90: query_scale
    [B, H, 32 * ceil(Q / 64)], rows i and i + 8 of each 16; keys as above of each 128. The softmax scale is the kernel's
    argument sm_scale. D is 64 or 128.
    """
    return _to(quantized, SAGE_SM90_THREAD if sm90 else SAGE_THREAD, requantize)


def from_sage_thread(
    query: torch.Tensor,
    query_scale: torch.Tensor,
    key: torch.Tensor,
    key_scale: torch.Tensor,
    *,
    softmax_scale: float,
    dtype: torch.dtype,
    sm90: bool = False,
    attn_mask: torch.Tensor | None = None,
    query_rotation: str = "none",
    key_rotation: str = "none",
) -> QuantizedQK:
    """From what SageAttention's per_thread_int8() returns; shapes as in to_sage_thread(), the rest as above.

    sm90: called with BLKQ=64, WARPQ=16, BLKK=128, WARPK=128.
    """
    given = Foreign(query, query_scale, key, key_scale, softmax_scale)
    layout = SAGE_SM90_THREAD if sm90 else SAGE_THREAD
    return _from(given, layout, softmax_scale, dtype, attn_mask, query_rotation, key_rotation)


def to_comfy_kitchen(quantized: QuantizedQK, *, cta_k: int = 64, requantize: bool = False) -> Foreign:
    """To the layout of comfy-kitchen's PrequantizedInt8Attention on CUDA: q, q_scale, k, k_scale, attention_scale.

    D, its kernel's head_dim, is 64, 128 or 256. Up to 128 query_scale is [B, H, 32 * ceil(Q / 128)]: of each 32 rows,
    rows i, i + 8, i + 16, i + 24 share one; at 256 it is [B, H, 64 * ceil(Q / 128)], rows i and i + 8 of each 16.
    key_scale [B, Hkv, 4 * ceil(K / cta_k)]: of each cta_k (64 or 128) keys, {8j + 2t, 8j + 2t + 1} share scale t. The
    softmax scale is attention_scale. Its value is int8, transposed and padded to cta_k keys, and stays its own affair.
    """
    return _to(quantized, _comfy_layout(quantized.query.shape[3], cta_k), requantize)


def from_comfy_kitchen(
    query: torch.Tensor,
    query_scale: torch.Tensor,
    key: torch.Tensor,
    key_scale: torch.Tensor,
    *,
    softmax_scale: float,
    dtype: torch.dtype,
    cta_k: int,
    head_dim: int | None = None,
    attn_mask: torch.Tensor | None = None,
    query_rotation: str = "comfy-kitchen",
    key_rotation: str = "comfy-kitchen",
) -> QuantizedQK:
    """From the fields q, q_scale, k, k_scale, attention_scale, input_dtype, cta_k, original_head_dim of comfy-kitchen's
    PrequantizedInt8Attention; shapes as in to_comfy_kitchen(), the rest as in from_sage_block().

    Its query and key are both rotated, by a transform that depends on D and on the number of keys, and its keys lack
    one of them (an anchor), so the LSE is that of the keys as quantised. Its attn_mask is prepared for its own kernel:
    give the one that it was made from.
    """
    given = Foreign(query, query_scale, key, key_scale, softmax_scale)
    layout = _comfy_layout(query.shape[-1], cta_k)
    return _from(given, layout, softmax_scale, dtype, attn_mask, query_rotation, key_rotation, head_dim)


def convert(quantized: QuantizedQK, layout: Layout, *, requantize: bool = False) -> QuantizedQK:
    """Return the same query and key with the scales of another layout; int8 values change only with requantize=True.

    A value that was quantised with them stays behind; the mask must stay as it is, for the attention reads it.
    Raises ValueError, without requantize=True, where rows that would share a scale have different ones.
    """
    kv_len, q_len = quantized.kv_len, quantized.query.shape[2]
    source = quantized.layout
    factor = 1.0
    if layout.folded and not source.folded:
        factor = quantized.softmax_scale * math.log2(math.e)
    query, query_scale = quantized.query, quantized.query_scale
    if factor < 0:
        query = query.neg()
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


def _to(quantized: QuantizedQK, layout: Layout, requantize: bool) -> Foreign:
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


def _from(
    given: Foreign,
    layout: Layout,
    softmax_scale: float,
    dtype: torch.dtype,
    attn_mask: torch.Tensor | None,
    query_rotation: str,
    key_rotation: str,
    head_dim: int | None = None,
) -> QuantizedQK:
    if query_rotation != key_rotation:
        raise ValueError(f"key_rotation is {key_rotation!r}; expected {query_rotation!r}, that of query")
    if not abs(softmax_scale) <= LIMITS.max_scale:
        raise ValueError(f"softmax_scale is {softmax_scale}; expected a finite number of at most {LIMITS.max_scale:g}")
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


def _comfy_layout(width: int, cta_k: int) -> Layout:
    if cta_k not in (64, 128):
        raise ValueError(f"cta_k is {cta_k}; expected 64 or 128")
    if width == 256:
        return COMFY_KITCHEN_D256_64 if cta_k == 64 else COMFY_KITCHEN_D256_128
    return COMFY_KITCHEN_64 if cta_k == 64 else COMFY_KITCHEN_128


def _check_width(layout: Layout, name: str, tensor: torch.Tensor) -> None:
    widths = _WIDTHS[layout.name.partition(",")[0].partition(" ")[0]]
    if tensor.shape[-1] not in widths:
        raise ValueError(f"{name} has {tensor.shape[-1]} channels; expected one of {widths}, which {layout.name} takes")


def _scales(name: str, scale: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    flat = scale.squeeze(3) if scale.dim() == 4 and scale.shape[3] == 1 else scale
    expect(f"{name}'s dtype", flat.dtype, torch.float32)
    expect(f"{name}'s shape", tuple(flat.shape), (*rows.shape[:2], count))
    return flat
