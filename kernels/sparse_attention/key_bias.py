"""A mask with one row for all queries, by key tile, and which keys count for quantisation.

Biases of a tile are kept relative to its own largest one, and that relative to the largest of each list (lists.py): a
list whose biases lie far below those of others keeps all digits of its scores.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..int8_attention.bias import _raw_bias, mask_rows, row_strides
from ..int8_attention.launch import empty, launch
from .list_kernels import _NEGLIGIBLE, _counts
from .lists import TILE, Lists

_TILES = 16  # key tiles of a program


class KeyBias(NamedTuple):
    """table: float32 [Bm, Hm, nk, 64], log2 units, each tile's largest finite value 0, masked and padding keys -inf.

    top: float32 [Bm, Hm, nk], natural logarithm: what was subtracted; -inf where all keys of a tile are masked, +inf
    where one has a bias of NaN or +inf.
    """

    table: torch.Tensor
    top: torch.Tensor


@triton.jit(do_not_specialize=["N", "nk", "heads"])
def _tile_bias(
    MASK, TABLE, TOP, N, nk, heads, s_b, s_h, s_n,
    HAS_MASK: tl.constexpr, IS_BOOL: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One program TILES key tiles of one row of the mask."""
    row = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * TILES + tl.arange(0, TILES)
    n = t[:, None] * TILE + tl.arange(0, TILE)[None, :]
    b = tl.zeros([TILES, TILE], tl.float32)
    if HAS_MASK:
        b = _raw_bias(MASK + (row // heads) * s_b + (row % heads) * s_h, n, N, s_n, IS_BOOL)
    b = tl.where(n < N, b, float("-inf"))
    top = tl.max(tl.where(tl.abs(b) < float("inf"), b, float("-inf")), 1)  # not NaN either
    endless = tl.max(((b != b) | (b == float("inf"))).to(tl.int32), 1)
    relative = (b - tl.where(top == float("-inf"), 0.0, top)[:, None]) * 1.4426950408889634
    tl.store(TABLE + row * nk * TILE + n, relative, mask=(t < nk)[:, None])
    tl.store(TOP + row * nk + t, tl.where(endless != 0, float("inf"), top), mask=t < nk)


def key_bias(attn_mask: torch.Tensor | None, kv_len: int, like: torch.Tensor) -> KeyBias:
    """attn_mask [1 or B, 1 or H, 1, K] of any strides, bool or floating; None: the padding of the last tile alone."""
    rows, strides, nk = [1, 1], [0, 0, 0], triton.cdiv(kv_len, TILE)
    if attn_mask is not None:
        rows, strides = mask_rows(attn_mask)
    table = empty((*rows, nk, TILE), torch.float32, like.device)
    top = empty((*rows, nk), torch.float32, like.device)
    is_bool = attn_mask is not None and attn_mask.dtype == torch.bool
    given = top if attn_mask is None else attn_mask.view(torch.uint8) if is_bool else attn_mask
    launch(
        _tile_bias, (triton.cdiv(nk, _TILES), rows[0] * rows[1]), given, table, top, kv_len, nk, rows[1], *strides,
        HAS_MASK=attn_mask is not None, IS_BOOL=is_bool, TILE=TILE, TILES=_TILES, num_warps=4,
    )  # fmt: skip
    return KeyBias(table, top)


@triton.jit(do_not_specialize=["nq", "nk", "heads", "anchors"])
def _kept_keys(
    KEEP, TABLE, TOP, ANCHOR, KEPT, nq, nk, heads, anchors, s_b, s_h, s_q, s_k, s_tb, s_th,
    HAS_TOP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program TILE key tiles of one row of lists: 0 for keys that count for at least one query tile, else -inf."""
    row = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = t < nk
    KEEP += (row // heads) * s_b + (row % heads) * s_h + t[None, :].to(tl.int64) * s_k
    bias_row = (row // heads) * s_tb + (row % heads) * s_th
    if HAS_TOP:
        top = tl.load(TOP + bias_row * nk + t, mask=inside, other=float("-inf"))
    kept = tl.zeros([TILE], tl.int32)
    for start in range(0, nq, TILE):
        q = start + tl.arange(0, TILE)
        seen = tl.load(KEEP + q[:, None].to(tl.int64) * s_q, mask=(q < nq)[:, None] & inside[None, :], other=0) != 0
        if HAS_TOP:
            least = tl.load(ANCHOR + (row * anchors + q) * 2, mask=q < nq, other=0.0)
            seen = seen & _counts(top[None, :], least[:, None])
        kept = tl.maximum(kept, tl.max(seen.to(tl.int32), 0))
    n = t[:, None] * TILE + tl.arange(0, TILE)[None, :]
    counts = tl.broadcast_to((kept != 0)[:, None], [TILE, TILE])
    if HAS_TOP:
        relative = tl.load(TABLE + bias_row * nk * TILE + n, mask=inside[:, None], other=0.0)
        counts = counts & ((relative > _NEGLIGIBLE) | (relative != relative))
    tl.store(KEPT + row * nk * TILE + n, tl.where(counts, 0.0, float("-inf")), mask=inside[:, None])


def kept_keys(keep: torch.Tensor, bias: KeyBias | None, lists: Lists | None) -> torch.Tensor:
    """Which keys count, float32 [Rb, Rh, 64 * nk] as quantize() takes them.

    keep: as in lists.Tiles.  bias: of the keys, with the lists that were made of it; or None for neither.
    """
    rows = [1 if keep.stride(axis) == 0 else keep.shape[axis] for axis in (0, 1)]
    steps = (0, 0)
    if bias is not None:
        rows = [max(given, n) for given, n in zip(rows, bias.top.shape, strict=False)]
        steps = row_strides(bias.top)
    nq, nk = keep.shape[2:]
    kept = empty((*rows, nk * TILE), torch.float32, keep.device)
    strides = [keep.stride(axis) if keep.shape[axis] > 1 else 0 for axis in (0, 1)] + list(keep.stride()[2:])
    anchor = lists.anchor if lists is not None and lists.anchor is not None else kept
    table, top = bias if bias is not None else (kept, kept)
    launch(
        _kept_keys, (triton.cdiv(nk, TILE), rows[0] * rows[1]), keep.view(torch.uint8), table, top, anchor, kept,
        nq, nk, rows[1], nq + nq % 2 if lists is not None and lists.paired else nq, *strides, *steps,
        HAS_TOP=bias is not None, TILE=TILE, num_warps=4,
    )  # fmt: skip
    return kept


@triton.jit(do_not_specialize=["nk", "kv_heads", "rows"])
def _forget_unseen(KEPT, NORM, nk, kv_heads, rows, s_b, s_h, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """One program BLOCK key tiles of one key head, which `rows` rows of lists share: no norm where none sees them."""
    head = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = (head // kv_heads) * s_b + (head % kv_heads) * rows * s_h
    seen = tl.full([BLOCK], float("-inf"), tl.float32)
    for r in range(rows):
        at = ((first + r * s_h) * nk + t) * TILE
        seen = tl.maximum(seen, tl.load(KEPT + at, mask=t < nk, other=float("-inf")))
    tl.store(NORM + head * nk + t, 0.0, mask=(t < nk) & (seen != 0.0))


def forget_unseen(key_norm: torch.Tensor, kept: torch.Tensor) -> None:
    """Let tiles of keys that count for nobody have no norm: key_norm [B, Hkv, nk], kept as kept_keys() makes it.

    It must hold the same for all 64 keys of a tile.
    """
    batch, kv_heads, nk = key_norm.shape
    grid = (triton.cdiv(nk, 256), batch * kv_heads)
    group = max(1, kept.shape[1] // kv_heads)
    launch(
        _forget_unseen, grid, kept, key_norm, nk, kv_heads, group, *row_strides(kept),
        TILE=TILE, BLOCK=256, num_warps=2,
    )  # fmt: skip
