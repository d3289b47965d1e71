"""What a block of query rows attends, as lists of 64-key tiles, made on the device without a synchronisation."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..int8_attention.limits import interpreting

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
    floor: float32 [L] or [L, 2]: each row of the tile has a key whose bias (log2) is at least this; or None for 0.
    blocks: int32 [n, 3] or None: first row, end and list of each block of query rows; None: the query's tiles in order.
    step_b, step_h: lists from one batch, one head to the next.
    """

    tiles: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor | None
    bias_rows: torch.Tensor | None
    floor: torch.Tensor | None
    blocks: torch.Tensor | None
    step_b: int
    step_h: int
    paired: bool


# In log2: a tile this far under what each row of it has elsewhere counts for nothing (see bias.NEGLIGIBLE).
NEGLIGIBLE = -11818.0
_NEGLIGIBLE = tl.constexpr(NEGLIGIBLE)


# The interpreter of Triton before 3.4 answers a scan with a tuple.
_NO_SCAN = tl.constexpr(interpreting() and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 4))


@triton.jit
def _before(one, BLOCK: tl.constexpr):
    """How many of the ones in one [BLOCK] come before each."""
    if _NO_SCAN:
        i = tl.arange(0, BLOCK)
        count = tl.sum(tl.where(i[None, :] < i[:, None], one[None, :], 0), 1)
    else:
        count = tl.cumsum(one, 0) - one
    return count


@triton.jit
def _entry(KEEP, LOW, HIGH, TOP, floor, t, inside, s_k, FROM_MASK: tl.constexpr, HAS_TOP: tl.constexpr):
    """Whether key tiles `t` are visited, the offset of their scores and the largest bias in them (log2)."""
    offset = tl.zeros(t.shape, tl.float32)
    top = tl.zeros(t.shape, tl.float32)
    if FROM_MASK:
        low = tl.load(LOW + t, mask=inside, other=0.0)
        high = tl.load(HIGH + t, mask=inside, other=float("-inf"))
        negligible = (high < floor + _NEGLIGIBLE).to(tl.int32)  # not ">=": NaN is visited
        visited = inside & (high != float("-inf")) & (negligible == 0)
        offset = tl.where(low == high, high, float("nan"))
    else:
        visited = inside & (tl.load(KEEP + t.to(tl.int64) * s_k, mask=inside, other=0) != 0)
    if HAS_TOP:
        top = tl.load(TOP + t, mask=inside, other=float("-inf"))
        visited = visited & (top != float("-inf"))
    return visited, offset, top


@triton.jit(do_not_specialize=["nq", "nk", "heads"])
def _make_lists(
    KEEP, LOW, HIGH, FLOOR, TOP, TILES, COUNTS, OFFSETS, LEAST, nq, nk, heads, s_b, s_h, s_q, s_k, s_tb, s_th,
    FROM_MASK: tl.constexpr, HAS_TOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a query tile: its key tiles in order."""
    row = tl.program_id(0).to(tl.int64)
    q = row % nq
    h = row // nq % heads
    b = row // nq // heads
    KEEP += b * s_b + h * s_h + q * s_q
    LOW += row * nk
    HIGH += row * nk
    TOP += (b * s_tb + h * s_th) * nk
    floor = 0.0
    if FROM_MASK:
        floor = tl.load(FLOOR + row)
    least = tl.full([], float("-inf"), tl.float32)
    count = tl.full([], 0, tl.int32)
    for start in range(0, nk, BLOCK):
        t = start + tl.arange(0, BLOCK)
        visited, offset, top = _entry(KEEP, LOW, HIGH, TOP, floor, t, t < nk, s_k, FROM_MASK, HAS_TOP)
        one = visited.to(tl.int32)
        place = row * nk + count + _before(one, BLOCK)
        tl.store(TILES + place, t, mask=visited)
        if FROM_MASK:
            tl.store(OFFSETS + place, offset, mask=visited)
        least = tl.maximum(least, tl.max(tl.where(visited, top, float("-inf")), 0))
        count += tl.sum(one, 0)
    tl.store(COUNTS + row, count)
    if HAS_TOP:
        tl.store(LEAST + row, least)


@triton.jit
def _position(w, j, shared, both):
    """Slot of step `shared + j` of warpgroup w: their own slots alternate while both have some."""
    return shared + j + tl.minimum(j + w, both)


@triton.jit
def _place(TILES, OFFSETS, w, rank, t, offset, use, alone, shared, both, width, FROM_MASK: tl.constexpr):
    """Write tiles `t` into their slots among warpgroup w's own, by rank in its list; the one of rank `alone` twice."""
    step = rank // 2
    half = rank % 2
    keys = TILES + _position(w, step, shared, both) * 4
    values = TILES + _position(w, step + 1, shared, both) * 4 + 2
    tl.store(keys + half, t, mask=use)
    tl.store(values + half, t, mask=use)
    twice = use & (rank == alone)
    tl.store(keys + 1, t, mask=twice)
    tl.store(values + 1, t, mask=twice)
    if FROM_MASK:
        offsets = OFFSETS + w * width * 2 + (shared + step) * 2
        tl.store(offsets + half, offset, mask=use)
        tl.store(offsets + 1, tl.full(rank.shape, float("-inf"), tl.float32), mask=twice)


@triton.jit(do_not_specialize=["nq", "nk", "heads", "width"])
def _make_pairs(
    KEEP, LOW, HIGH, FLOOR, TOP, TILES, COUNTS, OFFSETS, LEAST, nq, nk, heads, width,
    s_b, s_h, s_q, s_k, s_tb, s_th, FROM_MASK: tl.constexpr, HAS_TOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a pair of query tiles: key tiles that both see come first, two a slot, then those of either alone.

    Slot p brings the keys of its step and the values of the step before of the same warpgroup.
    """
    pairs = (nq + 1) // 2
    row = tl.program_id(0).to(tl.int64)
    first = row % pairs * 2
    h = row // pairs % heads
    b = row // pairs // heads
    step = tl.where(first + 1 < nq, 1, 0)
    nk_b = step * nk  # without a second query tile nothing is kept for it
    line = (row // pairs * nq + first) * nk
    KEEP += b * s_b + h * s_h + first * s_q
    LOW += line
    HIGH += line
    TOP += (b * s_tb + h * s_th) * nk
    TILES += row * width * 4
    OFFSETS += row * width * 4
    floor_a = 0.0
    floor_b = 0.0
    if FROM_MASK:
        floor_a = tl.load(FLOOR + row // pairs * nq + first)
        floor_b = tl.load(FLOOR + row // pairs * nq + first + step)
    common = tl.full([], 0, tl.int32)
    own_a = tl.full([], 0, tl.int32)
    own_b = tl.full([], 0, tl.int32)
    least_a = tl.full([], float("-inf"), tl.float32)
    least_b = tl.full([], float("-inf"), tl.float32)
    for start in range(0, nk, BLOCK):
        t = start + tl.arange(0, BLOCK)
        a, _, top = _entry(KEEP, LOW, HIGH, TOP, floor_a, t, t < nk, s_k, FROM_MASK, HAS_TOP)
        c, _, _ = _entry(
            KEEP + step * s_q, LOW + step * nk, HIGH + step * nk, TOP, floor_b, t, t < nk_b, s_k,
            FROM_MASK, HAS_TOP,
        )  # fmt: skip
        both_see = (a & c).to(tl.int32)
        common += tl.sum(both_see, 0)
        own_a += tl.sum(a.to(tl.int32) - both_see, 0)
        own_b += tl.sum(c.to(tl.int32) - both_see, 0)
        least_a = tl.maximum(least_a, tl.max(tl.where(a, top, float("-inf")), 0))
        least_b = tl.maximum(least_b, tl.max(tl.where(c, top, float("-inf")), 0))
    shared = common // 2
    own_a += common % 2  # a common tile without a partner goes to both as their own
    own_b += common % 2
    slots_a = tl.where(shared + own_a > 0, (own_a + 1) // 2 + 1, 0)  # one more: the values of the last step
    slots_b = tl.where(shared + own_b > 0, (own_b + 1) // 2 + 1, 0)
    both = tl.minimum(slots_a, slots_b)
    tl.store(COUNTS + row * 8, shared)
    tl.store(COUNTS + row * 8 + 1, slots_a)
    tl.store(COUNTS + row * 8 + 2, slots_b)
    tl.store(COUNTS + row * 8 + 3, own_a % 2)
    tl.store(COUNTS + row * 8 + 4, own_b % 2)
    if HAS_TOP:
        tl.store(LEAST + row * 2, least_a)
        tl.store(LEAST + row * 2 + 1, least_b)
    if FROM_MASK:
        tl.store(LEAST + row * 2, floor_a)
        tl.store(LEAST + row * 2 + 1, floor_b)
    two = tl.arange(0, 2)
    none = tl.full([2], -1, tl.int32)
    start_a = _position(0, 0, shared, both)
    start_b = _position(1, 0, shared, both)
    tl.store(TILES + _position(0, slots_a - 1, shared, both) * 4 + two, none, mask=two < 2 * slots_a)
    tl.store(TILES + _position(1, slots_b - 1, shared, both) * 4 + two, none, mask=two < 2 * slots_b)
    tl.store(TILES + tl.where(shared > 0, 0, start_a) * 4 + 2 + two, none, mask=two < 2 * slots_a)
    tl.store(TILES + tl.where(shared > 0, 0, start_b) * 4 + 2 + two, none, mask=two < 2 * slots_b)
    alone_a = tl.where(own_a % 2 == 1, own_a - 1, -1)
    alone_b = tl.where(own_b % 2 == 1, own_b - 1, -1)
    seen = tl.full([], 0, tl.int32)
    seen_a = tl.full([], 0, tl.int32)
    seen_b = tl.full([], 0, tl.int32)
    for start in range(0, nk, BLOCK):
        t = start + tl.arange(0, BLOCK)
        a, offset_a, _ = _entry(KEEP, LOW, HIGH, TOP, floor_a, t, t < nk, s_k, FROM_MASK, HAS_TOP)
        c, offset_b, _ = _entry(
            KEEP + step * s_q, LOW + step * nk, HIGH + step * nk, TOP, floor_b, t, t < nk_b, s_k,
            FROM_MASK, HAS_TOP,
        )  # fmt: skip
        one = (a & c).to(tl.int32)
        rank = seen + _before(one, BLOCK)
        paired = a & c & (rank < shared * 2)
        j = rank // 2
        half = rank % 2
        tl.store(TILES + j * 4 + half, t, mask=paired)
        tl.store(TILES + (j + 1) * 4 + 2 + half, t, mask=paired & (j + 1 < shared))
        tl.store(TILES + start_a * 4 + 2 + half, t, mask=paired & (j + 1 == shared))
        tl.store(TILES + start_b * 4 + 2 + half, t, mask=paired & (j + 1 == shared))
        if FROM_MASK:
            tl.store(OFFSETS + j * 2 + half, offset_a, mask=paired)
            tl.store(OFFSETS + (width + j) * 2 + half, offset_b, mask=paired)
        one_a = a.to(tl.int32) - paired.to(tl.int32)
        one_b = c.to(tl.int32) - paired.to(tl.int32)
        only_a = one_a != 0
        only_b = one_b != 0
        rank_a = seen_a + _before(one_a, BLOCK)
        rank_b = seen_b + _before(one_b, BLOCK)
        _place(TILES, OFFSETS, 0, rank_a, t, offset_a, only_a, alone_a, shared, both, width, FROM_MASK)
        _place(TILES, OFFSETS, 1, rank_b, t, offset_b, only_b, alone_b, shared, both, width, FROM_MASK)
        seen += tl.sum(one, 0)
        seen_a += tl.sum(one_a, 0)
        seen_b += tl.sum(one_b, 0)


@triton.jit(do_not_specialize=["N"])
def _tile_tops(BIAS, TOP, N, TILE: tl.constexpr):
    """Largest bias of each tile of keys; NaN counts as +inf, so that its tile is visited."""
    at = tl.program_id(1).to(tl.int64) * N + tl.program_id(0) * TILE + tl.arange(0, TILE)
    b = tl.load(BIAS + at)
    tl.store(TOP + (at // TILE), tl.max(tl.where(b != b, float("inf"), b), 0), mask=tl.arange(0, TILE) == 0)


def tile_tops(bias: torch.Tensor) -> torch.Tensor:
    """Largest bias of each key tile, float32 [Bm, Hm, nk], of a prepared bias [Bm, Hm, 64 * nk]."""
    tiles = bias.shape[2] // TILE
    top = torch.empty((*bias.shape[:2], tiles), dtype=torch.float32, device=bias.device)
    _tile_tops[(tiles, bias.shape[0] * bias.shape[1])](bias, top, bias.shape[2], TILE=TILE, num_warps=1)
    return top


@triton.jit(do_not_specialize=["nq", "nk", "heads", "N"])
def _seen_keys(KEEP, SEEN, nq, nk, heads, N, s_b, s_h, s_q, s_k, TILE: tl.constexpr):
    """One program TILE key tiles of one head: whether any query tile keeps them, for each of their keys."""
    row = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * TILE + tl.arange(0, TILE)
    KEEP += (row // heads) * s_b + (row % heads) * s_h + t[None, :].to(tl.int64) * s_k
    kept = tl.zeros([TILE], tl.int32)
    for start in range(0, nq, TILE):
        q = start + tl.arange(0, TILE)
        inside = (q < nq)[:, None] & (t < nk)[None, :]
        kept = tl.maximum(kept, tl.max(tl.load(KEEP + q[:, None] * s_q, mask=inside, other=0).to(tl.int32), 0))
    n = t[:, None] * TILE + tl.arange(0, TILE)[None, :]
    tl.store(SEEN + row * N + n, tl.broadcast_to(kept[:, None], [TILE, TILE]).to(tl.uint8), mask=n < N)


def seen_keys(keep: torch.Tensor, kv_len: int) -> torch.Tensor:
    """Keys that at least one query sees, bool [Rb, Rh, 1, K], of keep as in Tiles."""
    rows_b, rows_h = (1 if keep.stride(axis) == 0 else keep.shape[axis] for axis in (0, 1))
    nq, nk = keep.shape[2:]
    seen = torch.empty((rows_b, rows_h, 1, kv_len), dtype=torch.bool, device=keep.device)
    strides = [keep.stride(axis) if keep.shape[axis] > 1 else 0 for axis in (0, 1)] + list(keep.stride()[2:])
    _seen_keys[(triton.cdiv(nk, TILE), rows_b * rows_h)](
        keep.view(torch.uint8), seen.view(torch.uint8), nq, nk, rows_h, kv_len, *strides, TILE=TILE, num_warps=4
    )  # fmt: skip
    return seen


def make_lists(tiles: Tiles, top: torch.Tensor | None, *, paired: bool) -> Lists:
    """Lists of `tiles`; top: tile_tops() of the keys' bias, if they have one, whose masked tiles are left out.

    A list is made for each batch and head that the tiles or the bias tell apart.
    """
    given = tiles.low if tiles.low is not None else tiles.keep
    assert given is not None
    batch, heads, nq, nk = given.shape
    rows_b = max(batch, top.shape[0] if top is not None else 1)
    rows_h = max(heads, top.shape[1] if top is not None else 1)
    per_head = (nq + 1) // 2 if paired else nq
    width = nk // 2 + 6 if paired else nk
    count = rows_b * rows_h * per_head
    device = given.device
    strides = [given.stride(axis) if given.shape[axis] > 1 else 0 for axis in (0, 1)] + list(given.stride()[2:])
    entries = torch.empty((count, width, 4) if paired else (count, width), dtype=torch.int32, device=device)
    counts = torch.empty((count, 8) if paired else (count,), dtype=torch.int32, device=device)
    offsets = None
    if tiles.low is not None:
        offsets = torch.empty((count, 2, width, 2) if paired else (count, width), dtype=torch.float32, device=device)
    floor = None
    if top is not None or (paired and tiles.low is not None):
        floor = torch.empty((count, 2) if paired else (count,), dtype=torch.float32, device=device)
    unused = counts
    steps = (0, 0)
    if top is not None:
        steps = (top.shape[1] if top.shape[0] > 1 else 0), (1 if top.shape[1] > 1 else 0)
    keep = None if tiles.keep is None else tiles.keep.view(torch.uint8)
    arguments = (
        *(unused if t is None else t for t in (keep, tiles.low, tiles.high, tiles.floor, top)),
        entries, counts, unused if offsets is None else offsets, unused if floor is None else floor, nq, nk, rows_h,
    )  # fmt: skip
    flags = {"FROM_MASK": tiles.low is not None, "HAS_TOP": top is not None}
    block = min(BLOCK, triton.next_power_of_2(nk))
    if paired:
        _make_pairs[(count,)](*arguments, width, *strides, *steps, BLOCK=block, num_warps=max(1, block // 256), **flags)
    else:
        _make_lists[(count,)](*arguments, *strides, *steps, BLOCK=block, num_warps=max(1, block // 256), **flags)
    step_h = per_head if rows_h > 1 else 0
    step_b = rows_h * per_head if rows_b > 1 else 0
    return Lists(entries, counts, offsets, None, floor, None, step_b, step_h, paired)
