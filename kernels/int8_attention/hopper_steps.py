"""What a consumer warpgroup of the Hopper kernel does: it walks the ring step by step, a tile of keys each."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from .hopper_parts import _accumulator, _of_keys, _packed, _product, _softmax, _started, _words
from .hopper_rows import _bound, _by_group, _by_thread, _decayed, _gap, _lowered, _write_parts


@gluon.jit
def _step(
    j, slot, phase, acc, rest, packed, decay, total, top, given,
    T: gl.constexpr, P: gl.constexpr, ONLINE: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Scores of tile j, then P @ V of tile j - 1 with the softmax of tile j under it.

    decay: of the rows at tile j - 1, by which P @ V of the tiles before it is behind.  given: what all steps share.
    """
    q, q_scale, rows, SINK, M, N, tiles, masked, ring = given
    k_s, v_s, rest_s, scale_s, bias_s, full, empty, turn = ring
    SPLIT: gl.constexpr = T.REST > 0
    BY_NEED: gl.constexpr = T.FP8 and not ONLINE
    mbarrier.wait(full.index(slot), phase)
    if T.TURNS:
        mbarrier.wait(turn.index(GROUP), (j & 1) if GROUP == 0 else (j & 1) ^ 1)  # the first turn is free
    s = _started(q, k_s.index(slot), T, ONLINE)
    acc, rest = _added(acc, rest, packed, decay, v_s.index(slot), rest_s.index(slot), T, P, ONLINE)
    if T.TURNS:
        mbarrier.arrive(turn.index((GROUP + 1) % T.CONSUMERS), count=1)
    # Under the products where registers are left for it, so that the softmax need not wait for it.
    EARLY: gl.constexpr = T.FP8 and not (T.HIGH or T.HAS_BIAS)
    if EARLY:
        of_keys = _of_keys(q_scale, scale_s.index(slot), bias_s.index(slot), T)
    s = warpgroup_mma_wait(1 + SPLIT, deps=[s])
    if not EARLY:
        of_keys = _of_keys(q_scale, scale_s.index(slot), bias_s.index(slot), T)
    col = (tiles - 1 - j) * T.BN
    # Where BN is a program's query rows, the diagonal crosses the first tile only; _attend has done that one.
    if T.CAUSAL and T.CONSUMERS * T.BM != T.BN:
        if j < masked:
            p, part, top, decay = _softmax(s, q_scale, of_keys, rows, col, N, top, T, True, ONLINE)
        else:
            p, part, top, decay = _softmax(s, q_scale, of_keys, rows, col, N, top, T, False, ONLINE)
    else:
        p, part, top, decay = _softmax(s, q_scale, of_keys, rows, col, N, top, T, False, ONLINE)
    # ptxas would hoist the wait for P @ V above the exponentials, were there nothing between them.
    if BY_NEED:
        low, high, total, top, decay = _lowered(p, part, total, top, False, T)
    elif T.HAS_LSE and not T.HAS_BIAS:
        _gap(part, M)
    elif M < 0:
        gl.store(SINK + gl.arange(0, T.BM, layout=gl.SliceLayout(1, part.type.layout)), gl.max(part, 1))  # never
    # Weights pass through the wait, so that their packing can't overwrite the operand of the product in flight.
    if BY_NEED:
        acc, low, high = warpgroup_mma_wait(0, deps=[acc, low, high])
    else:
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    if SPLIT:
        rest = warpgroup_mma_wait(0, deps=[rest])
    mbarrier.arrive(empty.index(slot), count=1)
    if BY_NEED:
        packed = _words(low, high)
    else:
        packed = _packed(p, v_s.dtype, P, T)
    if ONLINE:
        E: gl.constexpr = p.type.layout
        total *= _by_group(decay, E)
    if not BY_NEED:
        total += part
    if ONLINE and not _decays_late(T, ONLINE):
        acc = _decayed(acc, decay, T)
        if SPLIT:
            rest = _decayed(rest, decay, T)
    return acc, rest, packed, decay, total, top


@gluon.constexpr_function
def _decays_late(T, ONLINE):
    """Whether P @ V decays under the next scores: 16 bits are faster so with a bias or 96 columns, else slower."""
    return T.FP8 or (ONLINE and (T.HAS_BIAS or T.REST > 0))


@gluon.jit
def _added(acc, rest, packed, decay, v, v_rest, T: gl.constexpr, P: gl.constexpr, ONLINE: gl.constexpr):
    """acc, and rest where there is one, plus P @ V, started; times decay first unless they have been."""
    LATE: gl.constexpr = _decays_late(T, ONLINE)
    if LATE:
        acc = _decayed(acc, decay, T)
    acc = _product(packed, v, acc, P, T.BM, T.BN)
    if T.REST > 0:
        if LATE:
            rest = _decayed(rest, decay, T)
        rest = _product(packed, v_rest, rest, P, T.BM, T.BN)
    return acc, rest


@gluon.jit
def _attend(given, T: gl.constexpr, ONLINE: gl.constexpr, GROUP: gl.constexpr):
    """Walk the ring: P @ V [BM, COLUMNS] and [BM, REST] before division, row sums and tops [BM] of one warpgroup."""
    q, q_scale, rows, _SINK, _M, N, tiles, _masked, ring = given
    k_s, v_s, rest_s, scale_s, bias_s, full, empty, _turn = ring
    BITS: gl.constexpr = v_s.dtype.primitive_bitwidth
    ACC: gl.constexpr = _accumulator(T.COLUMNS, BITS)
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=32 // BITS)
    S: gl.constexpr = _accumulator(T.BN, 8)
    BY_NEED: gl.constexpr = T.FP8 and not ONLINE
    top = gl.full([T.BM], -1.0e30 if ONLINE else 0.0, gl.float32, layout=gl.SliceLayout(1, S))
    if BY_NEED:
        top = _by_thread(T, S)
    acc = gl.full([T.BM, T.COLUMNS], 0.0, gl.float32, layout=ACC)
    rest = 0
    if T.REST > 0:
        rest = gl.full([T.BM, T.REST], 0.0, gl.float32, layout=_accumulator(T.REST, BITS))
    mbarrier.wait(full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=[_started(q, k_s.index(0), T, ONLINE)])
    of_keys = _of_keys(q_scale, scale_s.index(0), bias_s.index(0), T)
    p, total, top, decay = _softmax(
        s, q_scale, of_keys, rows, (tiles - 1) * T.BN, N, top, T, T.CAUSAL or T.TAIL, ONLINE
    )
    # Nothing is in flight, but the slot must not be given back before p is made.
    p = warpgroup_mma_wait(0, deps=[p])
    mbarrier.arrive(empty.index(0), count=1)
    if BY_NEED:
        low, high, total, top, decay = _lowered(p, total, gl.zeros_like(total), top, True, T)
        packed = _words(low, high)
    else:
        packed = _packed(p, v_s.dtype, P, T)
    slot = 1
    phase = 0
    for j in range(1, tiles):
        acc, rest, packed, decay, total, top = _step(
            j, slot, phase, acc, rest, packed, decay, total, top, given, T, P, ONLINE, GROUP
        )
        slot += 1
        if slot == T.STAGES:
            slot = 0
            phase ^= 1
    mbarrier.wait(full.index(slot), phase)
    acc, rest = _added(acc, rest, packed, decay, v_s.index(slot), rest_s.index(slot), T, P, ONLINE)
    acc = warpgroup_mma_wait(0, deps=[acc])
    if T.REST > 0:
        rest = warpgroup_mma_wait(0, deps=[rest])
    if BY_NEED:
        top = gl.convert_layout(gl.max(top, 1), gl.SliceLayout(1, S))
    return acc, rest, gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, S)), top


@gluon.jit
def _consumer(work, T: gl.constexpr, GROUP: gl.constexpr):
    """One warpgroup: BM query rows of one head."""
    Q_SCALE, K_NORM, ANCHOR, LSE_TERM, V_SCALE, OUT, LSE, q_s, q_full, ring = work[:10]
    block, first, kv_head, k_tiles, M, N, tiles, masked, s_om, s_lm, limit = work[10:]
    S: gl.constexpr = _accumulator(T.BN, 8)
    rows = (block * T.CONSUMERS + GROUP) * T.BM + gl.arange(0, T.BM, layout=gl.SliceLayout(1, S))
    q_scale = gl.load(Q_SCALE + first + rows, mask=rows < M, other=0.0)
    anchor = 0.0
    keep = 1.0
    if T.HAS_BIAS:
        anchor = gl.load(ANCHOR)
        keep = gl.load(ANCHOR + 1)
        q_scale *= keep
    mbarrier.wait(q_full.index(GROUP), 0)
    q8 = q_s.index(GROUP).reshape([T.BM, T.D])
    q = q8
    if T.Q_REGISTERS:
        q = q8.load(gl.DotOperandLayout(operand_index=0, parent=S, k_width=4))
    bound = _bound(q8, Q_SCALE + first, rows, K_NORM + kv_head * k_tiles, M, k_tiles, T.BM, T.D, T.CONSUMERS == 3)
    given = (q, q_scale, rows, LSE, M, N, tiles, masked, ring)
    if bound <= limit:
        acc, rest, total, top = _attend(given, T, False, GROUP)
        _write_parts(acc, rest, total, top, rows, OUT, LSE, V_SCALE, LSE_TERM + first, anchor, keep, M, s_om, s_lm, T)
    else:
        acc, rest, total, top = _attend(given, T, True, GROUP)
        _write_parts(acc, rest, total, top, rows, OUT, LSE, V_SCALE, LSE_TERM + first, anchor, keep, M, s_om, s_lm, T)
