"""Quantised query and key to and from the layouts of SageAttention and comfy-kitchen: pure functions.

int8 values mean something only with the rows that share a scale and with the place of the softmax scale; both differ
between libraries, on purpose. A layout says them, from_*() reads tensors by it, and to_*() gives tensors that the
library's own kernel takes. Tensors are [batch, heads, length, D] (SageAttention's "HND"; a transposed view of "NHD").

From a foreign layout to ours nothing is rounded, and back again the same tensors come out, but for scales of no row,
which are 0 then. Scales that are given are at least 0. From ours to a foreign one the scales are coarser, so rows whose
scales differ inside a group must be rounded a second time: that raises ValueError unless requantize=True. To find out,
the scales are read, which waits for the GPU.

What can't be converted, by any of these: a query and a key that went through different rotations of head_dim (a
Hadamard-rotated key with a query that is not rotated); a bias per key, which is no part of these layouts, so pass the
mask on; a value.

Of another head_dim our query and key are padded to D = 32, 64, 128 or 256: pad the value for the library's kernel too.
"""

from __future__ import annotations

import torch

from .qk import Groups, Layout, QuantizedQK, expect_type
from .quantized import check_flag
from .relayout import Foreign, convert, give, read

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


def to_sage_block(quantized: QuantizedQK, *, requantize: bool = False) -> Foreign:
    """To the layout of SageAttention 1.0.6's and 2.x's Triton kernels.

    query_scale [B, H, ceil(Q / 128)], one for 128 rows, softmax_scale * log2(e) in it; key_scale [B, Hkv, ceil(K /
    64)], one for 64 keys. D is 64, 96 or 128. Its 1.0.6 kernel reads past the last key: let K be a multiple of 64.

    >>> foreign = to_sage_block(quantized, requantize=True)
    >>> out = forward(foreign.query, foreign.key, value, foreign.query_scale, foreign.key_scale)
    """
    return give(quantized, SAGE_BLOCK, requantize)


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
    return read(given, SAGE_BLOCK, 1.0, dtype, attn_mask, query_rotation, key_rotation)


def to_sage_warp(quantized: QuantizedQK, *, sm90: bool = False, requantize: bool = False) -> Foreign:
    """To the layout of SageAttention 2.x's CUDA kernels with qk_quant_gran="per_warp".

    query_scale [B, H, 4 * ceil(Q / 128)], one for 32 rows; key_scale [B, Hkv, ceil(K / 64)], one for 64 keys. sm90:
    its kernels for Hopper, query_scale [B, H, 4 * ceil(Q / 64)], one for 16 rows; one key scale for 128 keys. The
    softmax scale is the kernel's argument sm_scale. D is 64 or 128.
    """
    return give(quantized, _sage_layout(sm90, SAGE_SM90_WARP, SAGE_WARP), requantize)


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
    layout = _sage_layout(sm90, SAGE_SM90_WARP, SAGE_WARP)
    return read(given, layout, softmax_scale, dtype, attn_mask, query_rotation, key_rotation)


def to_sage_thread(quantized: QuantizedQK, *, sm90: bool = False, requantize: bool = False) -> Foreign:
    """To the layout of SageAttention 2.x's CUDA kernels with qk_quant_gran="per_thread".

    query_scale [B, H, 32 * ceil(Q / 128)]: of each 32 rows, rows i, i + 8, i + 16, i + 24 share one; key_scale
    [B, Hkv, 4 * ceil(K / 64)]: of each 64 keys, the keys {8j + 2t, 8j + 2t + 1} share scale t. sm90: query_scale
    [B, H, 32 * ceil(Q / 64)], rows i and i + 8 of each 16; keys as above of each 128. The softmax scale is the kernel's
    argument sm_scale. D is 64 or 128.
    """
    return give(quantized, _sage_layout(sm90, SAGE_SM90_THREAD, SAGE_THREAD), requantize)


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
    layout = _sage_layout(sm90, SAGE_SM90_THREAD, SAGE_THREAD)
    return read(given, layout, softmax_scale, dtype, attn_mask, query_rotation, key_rotation)


def to_comfy_kitchen(quantized: QuantizedQK, *, cta_k: int = 64, requantize: bool = False) -> Foreign:
    """To the layout of comfy-kitchen's PrequantizedInt8Attention on CUDA: q, q_scale, k, k_scale, attention_scale.

    D, its kernel's head_dim, is 64, 128 or 256. Up to 128 query_scale is [B, H, 32 * ceil(Q / 128)]: of each 32 rows,
    rows i, i + 8, i + 16, i + 24 share one; at 256 it is [B, H, 64 * ceil(Q / 128)], rows i and i + 8 of each 16.
    key_scale [B, Hkv, 4 * ceil(K / cta_k)]: of each cta_k (64 or 128) keys, {8j + 2t, 8j + 2t + 1} share scale t. The
    softmax scale is attention_scale. Its value is int8, transposed and padded to cta_k keys, and stays its own affair.
    """
    expect_type("quantized", quantized, QuantizedQK, "a QuantizedQK")
    return give(quantized, _comfy_layout(quantized.query, cta_k), requantize)


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
    expect_type("query", query, torch.Tensor, "a tensor")
    layout = _comfy_layout(query, cta_k)
    return read(given, layout, softmax_scale, dtype, attn_mask, query_rotation, key_rotation, head_dim)


def _sage_layout(sm90: bool, hopper: Layout, others: Layout) -> Layout:
    check_flag("sm90", sm90)
    return hopper if sm90 else others


def _comfy_layout(query: torch.Tensor, cta_k: int) -> Layout:
    if type(cta_k) is not int or cta_k not in (64, 128):
        raise ValueError(f"cta_k is {cta_k!r}; expected 64 or 128")
    if query.shape[-1:] == (256,):
        return COMFY_KITCHEN_D256_64 if cta_k == 64 else COMFY_KITCHEN_D256_128
    return COMFY_KITCHEN_64 if cta_k == 64 else COMFY_KITCHEN_128
