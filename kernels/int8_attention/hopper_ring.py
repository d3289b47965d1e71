"""The ring of the Hopper kernel: what a producer warp loads by TMA and consumer warpgroups read, and its barriers."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Triton 3.9 has only the new name.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


class Traits(NamedTuple):
    """What the kernel is compiled for.

    BM, BN: query rows of a warpgroup, keys of a step.  D: channels of query and key, HEAD_DIM: those of the output, as
    COLUMNS + REST.  STAGES: slots of the ring.  CONSUMERS: warpgroups.
    Q_REGISTERS: whether the query is held there.  AS_FLOAT: whether bounded scores are made floats of by what their
    product starts from.  HIGH: a scale for each key.  FP8: P @ V in e4m3.  POLYNOMIAL: as in Config, of bounded scores.
    TURNS: whether warpgroups start their products one after the other, so that the softmax of each runs under the
    products of the others; left alone all wait for their scores together, and then do exponentials together.
    """

    BM: int
    BN: int
    D: int
    HEAD_DIM: int
    COLUMNS: int
    REST: int
    STAGES: int
    CONSUMERS: int
    Q_REGISTERS: bool
    AS_FLOAT: bool
    HAS_BIAS: bool
    HAS_LSE: bool
    CAUSAL: bool
    TAIL: bool
    HIGH: bool
    FP8: bool
    POLYNOMIAL: int = 0
    TURNS: bool = False


@gluon.jit
def _tile_of(j, tiles, LIVE, HAS_BIAS: gl.constexpr):
    """Key tile of step j: the j-th one that is not masked altogether, or from the last to the first."""
    if HAS_BIAS:
        tile = gl.load(LIVE + 1 + j)
    else:
        tile = tiles - 1 - j
    return tile


@gluon.jit
def _load_values(v_desc, rest_desc, b, h_kv, n, full, v, rest, T: gl.constexpr):
    """Values of a tile of keys: [BN, DV], or [DV, BN] in e4m3; in two parts where the columns are no power of two."""
    if T.FP8:
        _load(v_desc, [b, h_kv, 0, n], full, v)
        if T.REST > 0:
            _load(rest_desc, [b, h_kv, T.COLUMNS, n], full, rest)
    else:
        _load(v_desc, [b, h_kv, n, 0], full, v)
        if T.REST > 0:
            _load(rest_desc, [b, h_kv, n, T.COLUMNS], full, rest)


@gluon.jit
def _producer(work, T: gl.constexpr):
    """Slot j of the ring: keys, their scales and their bias of step j, and the values of step j - 1."""
    q_desc, k_desc, v_desc, rest_desc, scale_desc, bias_desc, q_s, q_full, ring = work[:9]
    LIVE, block, head, b, h_kv, kv_head, k_tiles, bias_row, tiles = work[9:]
    k_s, v_s, rest_s, scale_s, bias_s, full, empty, _turn = ring
    K_BYTES: gl.constexpr = k_desc.block_type.nbytes + scale_desc.block_type.nbytes + (T.BN * 4 if T.HAS_BIAS else 0)
    V_BYTES: gl.constexpr = v_desc.block_type.nbytes + (rest_desc.block_type.nbytes if T.REST > 0 else 0)
    SCALES: gl.constexpr = T.BN if T.HIGH else 4
    CONSUMERS: gl.constexpr = T.CONSUMERS
    for wg in gl.static_range(CONSUMERS):
        mbarrier.expect(q_full.index(wg), q_desc.block_type.nbytes)
        _load(q_desc, [head, (block * T.CONSUMERS + wg) * T.BM, 0], q_full.index(wg), q_s.index(wg))
    slot = 0
    phase = 1
    for j in range(tiles + 1):
        mbarrier.wait(empty.index(slot), phase)
        if j < tiles:
            if j == 0:
                mbarrier.expect(full.index(slot), K_BYTES)
            else:
                mbarrier.expect(full.index(slot), K_BYTES + V_BYTES)
            tile = _tile_of(j, tiles, LIVE, T.HAS_BIAS)
            _load(k_desc, [kv_head, tile * T.BN, 0], full.index(slot), k_s.index(slot))
            _load(scale_desc, [(kv_head * k_tiles + tile) * SCALES], full.index(slot), scale_s.index(slot))
            if T.HAS_BIAS:
                _load(bias_desc, [(bias_row * k_tiles + tile) * T.BN], full.index(slot), bias_s.index(slot))
        else:
            mbarrier.expect(full.index(slot), V_BYTES)
        if j > 0:
            n = _tile_of(j - 1, tiles, LIVE, T.HAS_BIAS) * T.BN
            _load_values(v_desc, rest_desc, b, h_kv, n, full.index(slot), v_s.index(slot), rest_s.index(slot), T)
        slot += 1
        if slot == T.STAGES:
            slot = 0
            phase ^= 1


@gluon.jit
def _barriers(STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Barriers, initialised: one a warpgroup's query, one a full and one an empty slot of the ring."""
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    return q_full, full, empty


@gluon.jit
def _turns(CONSUMERS: gl.constexpr):
    """A barrier a warpgroup, initialised, that tells it to start the products of its next tile."""
    turn = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(turn.index(i), count=1)
    return turn


@gluon.jit
def _buffer(desc, count: gl.constexpr):
    """Shared memory for `count` blocks of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [count] + desc.block_type.shape, desc.layout)  # noqa: RUF005
