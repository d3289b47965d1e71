"""What a block of query rows attends, as lists of 64-key tiles, made on the device without a synchronisation."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from ..int8_attention.launch import empty, launch
from .list_kernels import _make_lists, _make_pairs

TILE = 64  # rows of a query tile and keys of a key tile
BLOCK = 1024  # key tiles that a step of the kernels below looks at: as many as fit the registers


class Tiles(NamedTuple):
    """Which key tiles each query tile sees: a mask, or the summary of a dense mask.

    keep: bool [Rb, Rh, nq, nk], any strides, True where a tile is attended; Rb and Rh are 1 where rows are shared.
    With a dense mask instead: low and high, float32 [Rb, Rh, nq, nk] contiguous, the least and the largest of a tile
    in log2 units (low NaN: read the mask), and floor, float32 [Rb, Rh, nq], the least of the rows' largest values.
    """

    keep: torch.Tensor | None
    low: torch.Tensor | None = None
    high: torch.Tensor | None = None
    floor: torch.Tensor | None = None


class Lists(NamedTuple):
    """What the kernels walk. A list belongs to a query tile (portable) or to a pair of them (Hopper).

    Portable: tiles int32 [L, W], the key tile of each entry; counts int32 [L]; offsets float32 [L, W] or None, added to
    the scores of an entry (log2; NaN: read the mask); bias_rows int32 [L, W] or None, row of the bias table.
    Hopper (`paired`): tiles int32 [L, W, 4], for each slot of the ring the two key tiles whose keys it brings and the
    two whose values (-1: none); counts int32 [L, 8]: slots that both warpgroups use, slots of either alone, whether the
    last step of either has one tile only, and with bias_rows how many steps at the beginning need them;
    offsets float32 [L, 2, W, 2], by warpgroup, step and half of the step; bias_rows int32 [L, W, 2].
    floor: float32 [L] or [L, 2]: each row of the tile has a key whose bias (log2) is at least this, and none is over
    -floor; or None for 0.
    anchor: float32 [.., L, 2], paired [.., L, 2, 2], by list and warpgroup: what was taken off the biases (natural
    log), and 0 where that absorbs every score in float32, else 1; or None without a bias by key.
    anchors: lists to step in `anchor` for the next row of the bias; 0 where lists belong to one.
    blocks: int32 [n, 3] or None: first row, end and list of each block of query rows; None: the query's tiles in order.
    step_b, step_h: lists from one batch, one head to the next.
    """

    tiles: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor | None
    bias_rows: torch.Tensor | None
    floor: torch.Tensor | None
    anchor: torch.Tensor | None
    anchors: int
    blocks: torch.Tensor | None
    step_b: int
    step_h: int
    paired: bool


def make_lists(tiles: Tiles, top: torch.Tensor | None, *, paired: bool) -> Lists:
    """Lists of `tiles`; top: of the keys' KeyBias, if they have one, whose masked tiles are left out.

    A list is made for each batch and head that the tiles or the bias tell apart.
    """
    given = tiles.low if tiles.low is not None else tiles.keep
    assert given is not None
    nq, nk = given.shape[2:]
    rows, steps = list(given.shape[:2]), (0, 0)
    if top is not None:
        rows = [max(ours, theirs) for ours, theirs in zip(rows, top.shape, strict=False)]
        steps = (top.shape[1] if top.shape[0] > 1 else 0), (1 if top.shape[1] > 1 else 0)
    per_head = (nq + 1) // 2 if paired else nq
    width = nk // 2 + 6 if paired else nk
    lists = _empty_lists(rows, per_head, width, tiles.low is not None, top is not None, paired, given.device)
    strides = [given.stride(axis) if given.shape[axis] > 1 else 0 for axis in (0, 1)] + list(given.stride()[2:])
    keep = None if tiles.keep is None else tiles.keep.view(torch.uint8)
    unused = lists.counts
    block = min(BLOCK, triton.next_power_of_2(nk))
    launch(
        _make_pairs if paired else _make_lists, (rows[0] * rows[1] * per_head,),
        *(unused if t is None else t for t in (keep, tiles.low, tiles.high, tiles.floor, top)),
        lists.tiles, lists.counts, *(unused if t is None else t for t in (lists.offsets, lists.floor, lists.anchor)),
        nq, nk, rows[1], *([width] if paired else []), *strides, *steps,
        FROM_MASK=tiles.low is not None, HAS_TOP=top is not None, BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip
    return lists


def _empty_lists(
    rows: list[int], per_head: int, width: int, from_mask: bool, biased: bool, paired: bool, device: torch.device
) -> Lists:
    """Memory for the lists of rows[0] by rows[1] batches and heads."""
    count, float32 = rows[0] * rows[1] * per_head, torch.float32
    offsets, floor, anchor = None, None, None
    if from_mask or biased:
        offsets = empty((count, 2, width, 2) if paired else (count, width), float32, device)
    if from_mask and paired:
        floor = empty((count, 2), float32, device)
    if biased:
        anchor = empty((count, 2, 2) if paired else (count, 2), float32, device)
    return Lists(
        empty((count, width, 4) if paired else (count, width), torch.int32, device),
        empty((count, 8) if paired else (count,), torch.int32, device),
        offsets, None, floor, anchor, 0, None,
        rows[1] * per_head if rows[0] > 1 else 0, per_head if rows[1] > 1 else 0, paired,
    )  # fmt: skip
