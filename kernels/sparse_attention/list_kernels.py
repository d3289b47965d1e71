"""The kernels that make lists of key tiles (see lists.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from ..int8_attention.bias import ABSORBING
from ..int8_attention.limits import interpreting

# In log2: a tile this far under what each row of it has elsewhere counts for nothing (see bias.NEGLIGIBLE).
NEGLIGIBLE = -11818.0
_NEGLIGIBLE = tl.constexpr(NEGLIGIBLE)
_LOG2E = tl.constexpr(1.4426950408889634)

# The interpreter of Triton before 3.4 answers a scan with a tuple.
_NO_SCAN = tl.constexpr(interpreting() and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 4))


@triton.jit
def _in_log2(x):
    """Biases times log2(e), and less of what is over 1e38: finite ones stay finite, and in their order.

    A row of finfo.min everywhere is the mean of the values, not an empty row.
    """
    return x * 0.75 + tl.minimum(tl.maximum(x * 0.6926950408889634, -6.926950408889634e37), 6.926950408889634e37)


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
def _counts(top, least):
    """Whether a tile with the largest bias `top` (natural log) counts in a list whose largest one is `least`."""
    return (top >= least + _NEGLIGIBLE / _LOG2E) & (top != float("-inf"))


@triton.jit
def _entry(KEEP, LOW, HIGH, TOP, least, t, inside, s_k, FROM_MASK: tl.constexpr, HAS_TOP: tl.constexpr):
    """Whether key tiles `t` are visited, and the offset of their scores (log2).

    least: what each row has elsewhere: of a mask in log2, of a bias by key in natural log, which is taken off.
    """
    offset = tl.zeros(t.shape, tl.float32)
    if FROM_MASK:
        low = tl.load(LOW + t, mask=inside, other=0.0)
        high = tl.load(HIGH + t, mask=inside, other=float("-inf"))
        negligible = (high < least + _NEGLIGIBLE).to(tl.int32)  # not ">=": NaN is visited
        visited = inside & (high != float("-inf")) & (negligible == 0)
        offset = tl.where(low == high, high, float("nan"))
    else:
        visited = inside & (tl.load(KEEP + t.to(tl.int64) * s_k, mask=inside, other=0) != 0)
    if HAS_TOP:
        top = tl.load(TOP + t, mask=inside, other=float("-inf"))
        visited = visited & _counts(top, least)
        # Rows that see a NaN or +inf answer NaN whatever is added.
        offset = tl.where(top == float("inf"), 0.0, (top - least) * _LOG2E)
    return visited, offset


@triton.jit
def _least(KEEP, FLOOR, TOP, nk, s_k, FROM_MASK: tl.constexpr, HAS_TOP: tl.constexpr, BLOCK: tl.constexpr):
    """What _entry() takes: the floor of a mask's rows, or the largest finite bias of the tiles that are kept, or 0."""
    least = 0.0
    if FROM_MASK:
        least = tl.load(FLOOR)
    if HAS_TOP:
        tops = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, nk, BLOCK):
            t = start + tl.arange(0, BLOCK)
            seen = tl.load(KEEP + t.to(tl.int64) * s_k, mask=t < nk, other=0) != 0
            top = tl.load(TOP + t, mask=(t < nk) & seen, other=float("-inf"))
            tops = tl.maximum(tops, tl.where(top == float("inf"), float("-inf"), top))
        largest = tl.max(tops, 0)
        least = tl.where(largest == float("-inf"), 0.0, largest)
    return least


@triton.jit
def _highest(HIGH, t, visited):
    """The largest bias of tiles `t`, where they are visited."""
    return tl.max(tl.load(HIGH + t, mask=visited, other=float("-inf")), 0)


@triton.jit
def _store_anchor(ANCHOR, least):
    """What is added to the LSE of a list, and 0 where it absorbs every score in float32, else 1."""
    tl.store(ANCHOR, least)
    tl.store(ANCHOR + 1, tl.where(tl.abs(least) < ABSORBING, 1.0, 0.0))


@triton.jit(do_not_specialize=["nq", "nk", "heads"])
def _make_lists(
    KEEP, LOW, HIGH, FLOOR, TOP, TILES, COUNTS, OFFSETS, LEAST, ANCHOR, nq, nk, heads, s_b, s_h, s_q, s_k, s_tb, s_th,
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
    least = _least(KEEP, FLOOR + row, TOP, nk, s_k, FROM_MASK, HAS_TOP, BLOCK)
    count = tl.full([], 0, tl.int32)
    for start in range(0, nk, BLOCK):
        t = start + tl.arange(0, BLOCK)
        visited, offset = _entry(KEEP, LOW, HIGH, TOP, least, t, t < nk, s_k, FROM_MASK, HAS_TOP)
        one = visited.to(tl.int32)
        place = row * nk + count + _before(one, BLOCK)
        tl.store(TILES + place, t, mask=visited)
        if FROM_MASK or HAS_TOP:
            tl.store(OFFSETS + place, offset, mask=visited)
        count += tl.sum(one, 0)
    tl.store(COUNTS + row, count)
    if HAS_TOP:
        _store_anchor(ANCHOR + row * 2, least)


@triton.jit
def _position(w, j, shared, both):
    """Slot of step `shared + j` of warpgroup w: their own slots alternate while both have some."""
    return shared + j + tl.minimum(j + w, both)


@triton.jit
def _place(TILES, OFFSETS, w, rank, t, offset, use, alone, shared, both, width, HAS_OFFSETS: tl.constexpr):
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
    if HAS_OFFSETS:
        offsets = OFFSETS + w * width * 2 + (shared + step) * 2
        tl.store(offsets + half, offset, mask=use)
        tl.store(offsets + 1, tl.full(rank.shape, float("-inf"), tl.float32), mask=twice)


@triton.jit(do_not_specialize=["nq", "nk", "heads", "width"])
def _make_pairs(
    KEEP, LOW, HIGH, FLOOR, TOP, TILES, COUNTS, OFFSETS, LEAST, ANCHOR, nq, nk, heads, width,
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
    HAS_OFFSETS: tl.constexpr = FROM_MASK or HAS_TOP
    FLOOR += row // pairs * nq + first
    least_a = _least(KEEP, FLOOR, TOP, nk, s_k, FROM_MASK, HAS_TOP, BLOCK)
    least_b = _least(KEEP + step * s_q, FLOOR + step, TOP, nk_b, s_k, FROM_MASK, HAS_TOP, BLOCK)
    common = tl.full([], 0, tl.int32)
    own_a = tl.full([], 0, tl.int32)
    own_b = tl.full([], 0, tl.int32)
    high_a = tl.full([], float("-inf"), tl.float32)
    high_b = tl.full([], float("-inf"), tl.float32)
    for start in range(0, nk, BLOCK):
        t = start + tl.arange(0, BLOCK)
        a, _ = _entry(KEEP, LOW, HIGH, TOP, least_a, t, t < nk, s_k, FROM_MASK, HAS_TOP)
        c, _ = _entry(
            KEEP + step * s_q, LOW + step * nk, HIGH + step * nk, TOP, least_b, t, t < nk_b, s_k,
            FROM_MASK, HAS_TOP,
        )  # fmt: skip
        both_see = (a & c).to(tl.int32)
        common += tl.sum(both_see, 0)
        own_a += tl.sum(a.to(tl.int32) - both_see, 0)
        own_b += tl.sum(c.to(tl.int32) - both_see, 0)
        if FROM_MASK:
            high_a = tl.maximum(high_a, _highest(HIGH, t, a))
            high_b = tl.maximum(high_b, _highest(HIGH + step * nk, t, c))
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
        _store_anchor(ANCHOR + row * 4, least_a)
        _store_anchor(ANCHOR + row * 4 + 2, least_b)
    if FROM_MASK:
        # Scores are bounded on both sides: a bias over 0 counts like one as far under it.
        tl.store(LEAST + row * 2, tl.minimum(least_a, -high_a))
        tl.store(LEAST + row * 2 + 1, tl.minimum(least_b, -high_b))
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
        a, offset_a = _entry(KEEP, LOW, HIGH, TOP, least_a, t, t < nk, s_k, FROM_MASK, HAS_TOP)
        c, offset_b = _entry(
            KEEP + step * s_q, LOW + step * nk, HIGH + step * nk, TOP, least_b, t, t < nk_b, s_k,
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
        if HAS_OFFSETS:
            tl.store(OFFSETS + j * 2 + half, offset_a, mask=paired)
            tl.store(OFFSETS + (width + j) * 2 + half, offset_b, mask=paired)
        one_a = a.to(tl.int32) - paired.to(tl.int32)
        one_b = c.to(tl.int32) - paired.to(tl.int32)
        only_a = one_a != 0
        only_b = one_b != 0
        rank_a = seen_a + _before(one_a, BLOCK)
        rank_b = seen_b + _before(one_b, BLOCK)
        _place(TILES, OFFSETS, 0, rank_a, t, offset_a, only_a, alone_a, shared, both, width, HAS_OFFSETS)
        _place(TILES, OFFSETS, 1, rank_b, t, offset_b, only_b, alone_b, shared, both, width, HAS_OFFSETS)
        seen += tl.sum(one, 0)
        seen_a += tl.sum(one_a, 0)
        seen_b += tl.sum(one_b, 0)
