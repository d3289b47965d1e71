"""Banded windows whose keys have a bias besides: the table of the windows with it, relative to each list's largest."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..int8_attention.bias import ABSORBING, _raw_bias, mask_rows
from ..int8_attention.launch import empty, launch
from .list_kernels import NEGLIGIBLE
from .lists import TILE, Lists
from .windows import Plan

_TILES = 16  # key tiles of a step


@triton.jit
def _rows(FADE, MASK, ROW_OF, t, nk, N, s_n, IS_BOOL: tl.constexpr, TILE: tl.constexpr):
    """Of key tiles `t`: their rows of the table, what fades them (log2; -inf outside the window), and their bias."""
    r = tl.load(ROW_OF + t, mask=t < nk, other=-1)[:, None]
    c = tl.arange(0, TILE)[None, :]
    n = t[:, None] * TILE + c
    fade = tl.load(FADE + r * TILE + c, mask=(r >= 0) & (n < N), other=float("-inf"))
    return r, fade, _raw_bias(MASK, n, N, s_n, IS_BOOL)


@triton.jit(do_not_specialize=["N", "nk", "heads", "table_rows", "lists"])
def _window_bias(
    FADE, MASK, ROW_OF, TABLE, ANCHOR, N, nk, heads, table_rows, lists, s_b, s_h, s_n,
    IS_BOOL: tl.constexpr, PAIRED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One program a list and a row of the mask."""
    which = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    MASK += (row // heads) * s_b + (row % heads) * s_h
    ROW_OF += which * nk
    TABLE += row * table_rows * TILE
    c = tl.arange(0, TILE)[None, :]
    tops = tl.full([TILES, TILE], float("-inf"), tl.float32)
    for start in range(0, nk, TILES):
        t = start + tl.arange(0, TILES)
        _r, fade, b = _rows(FADE, MASK, ROW_OF, t, nk, N, s_n, IS_BOOL, TILE)
        finite = (fade != float("-inf")) & (tl.abs(b) < float("inf"))
        tops = tl.maximum(tops, tl.where(finite, b + fade * 0.6931471805599453, float("-inf")))
    largest = tl.max(tl.max(tops, 1), 0)
    least = tl.where(largest == float("-inf"), 0.0, largest)
    some = tl.where(tl.abs(least) < ABSORBING, 1.0, 0.0)
    for start in range(0, nk, TILES):
        t = start + tl.arange(0, TILES)
        r, fade, b = _rows(FADE, MASK, ROW_OF, t, nk, N, s_n, IS_BOOL, TILE)
        # What absorbs scores absorbs the fade as well.
        faded = (b - least) * 1.4426950408889634 + fade * some
        value = tl.where(fade == float("-inf"), float("-inf"), faded)
        tl.store(TABLE + r * TILE + c, value, mask=r >= 0)
    if which == 0:
        tl.store(TABLE + c, tl.zeros([1, TILE], tl.float32))
        tl.store(TABLE + TILE + c, tl.full([1, TILE], float("-inf"), tl.float32))
    pair = tl.arange(0, 4 if PAIRED else 2)
    at = (row * lists + which) * (4 if PAIRED else 2) + pair
    tl.store(ANCHOR + at, tl.where(pair % 2 == 0, least, some))


@triton.jit(do_not_specialize=["nk", "lists", "table_rows"])
def _kept_in_windows(
    TABLE, ROW_OF, KEPT, nk, lists, table_rows, LOWEST: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr
):
    """One program TILES key tiles of a row of the mask: 0 for keys that count in at least one list, else -inf."""
    row = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * TILES + tl.arange(0, TILES)
    n = t[:, None] * TILE + tl.arange(0, TILE)[None, :]
    kept = tl.zeros([TILES, TILE], tl.int32)
    for which in range(0, lists):
        r = tl.load(ROW_OF + which * nk + t, mask=t < nk, other=-1)[:, None]
        at = TABLE + (row * table_rows + r) * TILE + tl.arange(0, TILE)[None, :]
        value = tl.load(at, mask=r >= 0, other=float("-inf"))
        kept = kept | ((value > LOWEST) | (value != value)).to(tl.int32)
    tl.store(KEPT + row * nk * TILE + n, tl.where(kept != 0, 0.0, float("-inf")), mask=(t < nk)[:, None])


def with_bias(found: Plan, attn_mask: torch.Tensor, kv_len: int) -> tuple[Lists, torch.Tensor, torch.Tensor]:
    """Lists, table [Bm, Hm, R, 64] and kept keys [Bm, Hm, N] of a plan with own_rows under a mask of the keys.

    attn_mask: [1 or B, 1 or H, 1, K] of any strides, bool or floating.
    """
    assert found.row_of is not None
    rows, strides = mask_rows(attn_mask)
    lists, nk = found.row_of.shape
    table_rows, paired, device = found.table.shape[2], found.lists.paired, attn_mask.device
    table = empty((*rows, table_rows, TILE), torch.float32, device)
    anchor = empty((*rows, lists, 4 if paired else 2), torch.float32, device)
    kept = empty((*rows, nk * TILE), torch.float32, device)
    is_bool = attn_mask.dtype == torch.bool
    launch(
        _window_bias, (lists, rows[0] * rows[1]), found.table, attn_mask.view(torch.uint8) if is_bool else attn_mask,
        found.row_of, table, anchor, kv_len, nk, rows[1], table_rows, lists, *strides,
        IS_BOOL=is_bool, PAIRED=paired, TILE=TILE, TILES=_TILES, num_warps=4,
    )  # fmt: skip
    launch(
        _kept_in_windows, (triton.cdiv(nk, _TILES), rows[0] * rows[1]), table, found.row_of, kept,
        nk, lists, table_rows, LOWEST=NEGLIGIBLE, TILE=TILE, TILES=_TILES, num_warps=4,
    )  # fmt: skip
    # Biases are relative to each list's largest one now: no floor is under 0.
    return found.lists._replace(anchor=anchor, anchors=lists, floor=None), table, kept
