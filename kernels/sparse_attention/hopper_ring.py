"""The ring of the sparse Hopper kernel: what a producer warp loads by TMA, and where a warpgroup finds a step."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..int8_attention.hopper_ring import _load


class Traits(NamedTuple):
    """What the kernel is compiled for.

    BM: query rows of a warpgroup; a step has twice as many keys, BN.  D: channels of query and key, HEAD_DIM: those of
    the output.  STAGES: slots of the ring, a power of two.  HAS_TABLE: the bias has rows of its own, which steps at the
    beginning need.  OFFSETS: whether each half of a step has a number that is added.  KIND: dtype of a dense mask, or
    "none".  BROUGHT: whether TMA brings its tiles; a step reads them from global memory else.
    AS_FLOAT: as int8_attention.hopper_ring.Traits has it.
    """

    BM: int
    BN: int
    D: int
    HEAD_DIM: int
    STAGES: int
    HAS_BIAS: bool
    HAS_TABLE: bool
    HAS_MASK: bool
    OFFSETS: bool
    HAS_FLOOR: bool
    HAS_LSE: bool
    KIND: str
    BROUGHT: bool
    AS_FLOAT: bool


@gluon.jit
def _slot_of(w, t, shared, both):
    """Position in the ring of step t of warpgroup w, as lists._position has it."""
    j = gl.maximum(t - shared, 0)
    return gl.where(t < shared, t, shared + j + gl.minimum(j + w, both))


@gluon.jit
def _in_ring(position, T: gl.constexpr):
    """Slot of a position and the phase of its barrier; by bits, because a step begins with it."""
    return position & (T.STAGES - 1), (position & T.STAGES) // T.STAGES


@gluon.jit
def _tiles_of(SLOT):
    """Key tiles whose keys, and whose values, a slot brings; -1: none."""
    return gl.load(SLOT), gl.load(SLOT + 1), gl.load(SLOT + 2), gl.load(SLOT + 3)


@gluon.jit
def _readers(OFFSETS, position, shared, both, longer, width, T: gl.constexpr):
    """Which warpgroups read the mask in the step whose keys a slot brings: where a tile is not of one number, and in
    their first step. Past the last step this reads what is not used.

    longer: the warpgroup that has more slots of its own.
    """
    first = False
    second = False
    if T.BROUGHT:
        own = position - shared
        alternates = own < 2 * both
        group = gl.where(alternates, own & 1, longer)
        step = gl.where(own < 0, position, shared + gl.where(alternates, own >> 1, own - both))
        OFFSETS += step * 2
        a = gl.load(OFFSETS)
        a2 = gl.load(OFFSETS + 1)
        b = gl.load(OFFSETS + width * 2)
        b2 = gl.load(OFFSETS + width * 2 + 1)
        first = ((own < 0) | (group == 0)) & ((a != a) | (a2 != a2) | (step == 0))
        second = ((own < 0) | (group == 1)) & ((b != b) | (b2 != b2) | (step == 0))
    return first, second


@gluon.jit
def _bring_mask(mask_desc, whose, row, keys, keys2, mask_s, full, empty, phase, T: gl.constexpr, GROUP: gl.constexpr):
    """Load a step's tiles of the mask for a warpgroup once it has read the last ones; the phase of the next wait."""
    mbarrier.wait(empty.index(GROUP), phase)
    fence_async_shared()
    mbarrier.expect(full.index(GROUP), 2 * mask_desc.block_type.nbytes)
    row += GROUP * T.BM
    _load(mask_desc, [whose[0], whose[1], row, keys * 64], full.index(GROUP), mask_s.index(2 * GROUP))
    _load(mask_desc, [whose[0], whose[1], row, keys2 * 64], full.index(GROUP), mask_s.index(2 * GROUP + 1))
    return phase ^ 1


@gluon.jit
def _producer(work, T: gl.constexpr):
    """Fill slot after slot as the list says; keys come with their scales and their bias, and then with their mask."""
    q_desc, k_desc, v_desc, scale_desc, bias_desc, q_s, k_s, v_s, scale_s, bias_s, q_full, full, empty = work[:13]
    TILES, BIAS_ROWS, start, head, b, h_kv, kv_head, k_tiles, table, slots, masked = work[13:]
    mask_desc, mask_s, mask_full, mask_empty, whose, OFFSETS, shared, both, longer, width = masked
    COLUMNS: gl.constexpr = T.D // 64
    BIAS_BYTES: gl.constexpr = 256 if T.HAS_BIAS else 0
    K_BYTES: gl.constexpr = 2 * (k_desc.block_type.nbytes + 128 + BIAS_BYTES)
    V_BYTES: gl.constexpr = 2 * COLUMNS * v_desc.block_type.nbytes
    for wg in gl.static_range(2):
        mbarrier.expect(q_full.index(wg), q_desc.block_type.nbytes)
        _load(q_desc, [head, start + wg * T.BM, 0], q_full.index(wg), q_s[wg])
    slot = 0
    phase = 1
    # A mask's memory held the query before, which its warpgroup gives back like a tile.
    mask_phase = 0
    mask_phase2 = 0
    next_keys, next_keys2, next_values, next_values2 = _tiles_of(TILES)
    next_first, next_second = _readers(OFFSETS, 0, shared, both, longer, width, T)
    for position in range(slots):
        keys, keys2, values, values2 = next_keys, next_keys2, next_values, next_values2
        first, second = next_first, next_second
        # A slot ahead: the list has room behind its end.
        next_keys, next_keys2, next_values, next_values2 = _tiles_of(TILES + position * 4 + 4)
        next_first, next_second = _readers(OFFSETS, position + 1, shared, both, longer, width, T)
        mbarrier.wait(empty.index(slot), phase)
        if values < 0:
            mbarrier.expect(full.index(slot), K_BYTES)
        else:
            if keys < 0:
                mbarrier.expect(full.index(slot), V_BYTES)
            else:
                mbarrier.expect(full.index(slot), K_BYTES + V_BYTES)
        if keys >= 0:
            _load(k_desc, [kv_head, keys * 64, 0], full.index(slot), k_s.index(slot * 2))
            _load(k_desc, [kv_head, keys2 * 64, 0], full.index(slot), k_s.index(slot * 2 + 1))
            _load(scale_desc, [(kv_head * k_tiles + keys) * 4], full.index(slot), scale_s.index(slot * 2))
            _load(scale_desc, [(kv_head * k_tiles + keys2) * 4], full.index(slot), scale_s.index(slot * 2 + 1))
            if T.HAS_BIAS:
                if T.HAS_TABLE:
                    keys = gl.load(BIAS_ROWS + position * 2)
                    keys2 = gl.load(BIAS_ROWS + position * 2 + 1)
                _load(bias_desc, [(table + keys) * 64], full.index(slot), bias_s.index(slot * 2))
                _load(bias_desc, [(table + keys2) * 64], full.index(slot), bias_s.index(slot * 2 + 1))
        if values >= 0:
            for c in gl.static_range(COLUMNS):
                at = (slot * COLUMNS + c) * 2
                _load(v_desc, [b, h_kv, values * 64, c * 64], full.index(slot), v_s.index(at))
                _load(v_desc, [b, h_kv, values2 * 64, c * 64], full.index(slot), v_s.index(at + 1))
        if T.BROUGHT:
            if (keys >= 0) & first:
                mask_phase = _bring_mask(
                    mask_desc, whose, start, keys, keys2, mask_s, mask_full, mask_empty, mask_phase, T, 0
                )  # fmt: skip
            if (keys >= 0) & second:
                mask_phase2 = _bring_mask(
                    mask_desc, whose, start, keys, keys2, mask_s, mask_full, mask_empty, mask_phase2, T, 1
                )  # fmt: skip
        slot += 1
        if slot == T.STAGES:
            slot = 0
            phase ^= 1


@gluon.jit
def _entry_of(OFFSETS, TILES, t, position, alone, T: gl.constexpr):
    """What is added to the scores of either half of step t, and the key tiles of the halves where a mask is read.

    `alone` is the step whose second half holds no tile. Past the last step this reads what is not used.
    """
    offset = 0.0
    offset2 = gl.where(t == alone, float("-inf"), 0.0)
    tile = 0
    tile2 = 0
    if T.OFFSETS:
        offset = gl.load(OFFSETS + t * 2)
        offset2 = gl.load(OFFSETS + t * 2 + 1)
    if T.HAS_MASK:
        tile = gl.load(TILES + position * 4)
        tile2 = gl.load(TILES + position * 4 + 1)
    return offset, offset2, tile, tile2


@gluon.jit
def _await(full, empty, slot, phase, foreign):
    """Wait until a slot is full. Where the slot's last user may be the other warpgroup alone, first for its release:
    a barrier tells only odd from even phases, and one that is a whole phase behind would look full."""
    mbarrier.wait(empty.index(slot), phase ^ 1, pred=foreign)
    mbarrier.wait(full.index(slot), phase)


@gluon.jit
def _release(empty, slot, is_shared):
    """Give a slot back; one that no other warpgroup reads counts for two."""
    if is_shared:
        mbarrier.arrive(empty.index(slot), count=1)
    else:
        mbarrier.arrive(empty.index(slot), count=2)
