"""What a consumer warpgroup of the Hopper kernel does: it walks the ring step by step, a tile of keys each."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from .hopper_parts import _accumulator, _packed, _product, _softmax, _started
from .hopper_rows import _bound, _by_group, _by_thread, _decayed, _lowered, _write_parts


@gluon.jit
def _step(
    j, own, place, slot, phase, s, acc, rest, packed, total, top, given,
    T: gl.constexpr, P: gl.constexpr, ONLINE: gl.constexpr, GROUP: gl.constexpr, OPENS: gl.constexpr,
):  # fmt: skip
    """Scores of tile j, then P @ V of tile j - 1 with the softmax of tile j under it.

    AHEAD: the scores of tile j + 1 are made under the softmax, too; those of tile j are s.
    own: where the scale of tile j lies.  place: where the keys are whose scores are made here, and values j - 1.
    OPENS: whether that is a new slot, and that of `own` is read no more.  given: what all steps have in common.
    """
    q, q_scale, rows, SINK, M, N, tiles, masked, ring = given
    k_s, v_s, rest_s, scale_s, bias_s, full, empty, turn = ring
    SPLIT: gl.constexpr = T.REST > 0
    if OPENS:
        mbarrier.wait(full.index(slot), phase)
    if T.TURNS:
        mbarrier.wait(turn.index(GROUP), (j & 1) if GROUP == 0 else (j & 1) ^ 1)  # the first turn is free
    started = _started(q, k_s.index(place), T, ONLINE)
    acc = _product(packed, v_s.index(place), acc, P, T.BM, T.BN)
    if SPLIT:
        rest = _product(packed, rest_s.index(place), rest, P, T.BM, T.BN)
    if T.TURNS:
        mbarrier.arrive(turn.index((GROUP + 1) % T.CONSUMERS), count=1)
    if not T.AHEAD:
        s = warpgroup_mma_wait(1 + SPLIT, deps=[started])
    col = (tiles - 1 - j) * T.BN
    # Where BN is a program's query rows, the diagonal crosses the first tile only; _attend has done that one.
    if T.CAUSAL and T.CONSUMERS * T.BM != T.BN:
        if j < masked:
            p, part, top, decay = _softmax(
                s, q_scale, scale_s.index(own), bias_s.index(own), rows, col, N, top, T, True, ONLINE
            )
        else:
            p, part, top, decay = _softmax(
                s, q_scale, scale_s.index(own), bias_s.index(own), rows, col, N, top, T, False, ONLINE
            )
    else:
        p, part, top, decay = _softmax(
            s, q_scale, scale_s.index(own), bias_s.index(own), rows, col, N, top, T, False, ONLINE
        )
    E: gl.constexpr = p.type.layout
    if M < 0:
        # Never taken, but ptxas can't know: it would hoist the wait for P @ V above the exponentials.
        gl.store(SINK + gl.arange(0, T.BM, layout=gl.SliceLayout(1, part.type.layout)), gl.max(part, 1))
    if T.FP8 and not ONLINE:
        p, part, top, decay = _lowered(p, part, top, False)
    # The weights pass through the wait, so that their packing can't overwrite the operand of the product in flight.
    if SPLIT:
        if T.AHEAD:
            acc, rest, p, s = warpgroup_mma_wait(0, deps=[acc, rest, p, started])
        else:
            acc, rest, p = warpgroup_mma_wait(0, deps=[acc, rest, p])
    elif T.AHEAD:
        acc, p, s = warpgroup_mma_wait(0, deps=[acc, p, started])
    else:
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    if OPENS:
        mbarrier.arrive(empty.index(own // (1 + T.AHEAD)), count=1)
    if ONLINE or T.FP8:
        total *= _by_group(decay, E)
        acc = _decayed(acc, decay, T)
        if SPLIT:
            rest = _decayed(rest, decay, T)
    return s, acc, rest, _packed(p, v_s.dtype, P, T), total + part, top


@gluon.jit
def _next(slot, phase, STAGES: gl.constexpr):
    """The slot of the ring after this one, and the phase of its barrier."""
    slot += 1
    if slot == STAGES:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def _attend(given, T: gl.constexpr, ONLINE: gl.constexpr, GROUP: gl.constexpr):
    """Walk the ring: P @ V [BM, COLUMNS] and [BM, REST] before division, row sums and tops [BM] of one warpgroup."""
    q, q_scale, rows, _SINK, _M, N, tiles, _masked, ring = given
    k_s, v_s, rest_s, scale_s, bias_s, full, empty, _turn = ring
    BITS: gl.constexpr = v_s.dtype.primitive_bitwidth
    ACC: gl.constexpr = _accumulator(T.COLUMNS, BITS)
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=32 // BITS)
    S: gl.constexpr = _accumulator(T.BN, 8)
    top = gl.full([T.BM], -1.0e30 if ONLINE else 0.0, gl.float32, layout=gl.SliceLayout(1, S))
    if T.FP8 and not ONLINE:
        top = _by_thread(T, S)
    acc = gl.full([T.BM, T.COLUMNS], 0.0, gl.float32, layout=ACC)
    rest = 0
    if T.REST > 0:
        rest = gl.full([T.BM, T.REST], 0.0, gl.float32, layout=_accumulator(T.REST, BITS))
    mbarrier.wait(full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=[_started(q, k_s.index(0), T, ONLINE)])
    after = s
    if T.AHEAD:
        after = _started(q, k_s.index(1), T, ONLINE)
    p, total, top, _decay = _softmax(
        s, q_scale, scale_s.index(0), bias_s.index(0), rows, (tiles - 1) * T.BN, N, top, T, T.CAUSAL or T.TAIL, ONLINE
    )
    if T.FP8 and not ONLINE:
        p, total, top, _decay = _lowered(p, total, top, True)
    # Nothing but the next scores is in flight; p passes, so that the slot is not given back before it is made.
    if T.AHEAD:
        after, p = warpgroup_mma_wait(0, deps=[after, p])
    else:
        p = warpgroup_mma_wait(0, deps=[p])
        mbarrier.arrive(empty.index(0), count=1)
    packed = _packed(p, v_s.dtype, P, T)
    # The slot to be opened; AHEAD also the one before, and the scores of odd and of even steps have registers of their
    # own, because they would be moved otherwise.
    before = 0
    slot = 1
    phase = 0
    odd = after
    even = after
    for j in range(1, tiles):
        if T.AHEAD:
            if j % 2 == 1:
                even, acc, rest, packed, total, top = _step(
                    j, before * 2 + 1, slot * 2, slot, phase, odd, acc, rest, packed, total, top, given,
                    T, P, ONLINE, GROUP, True,
                )  # fmt: skip
            else:
                odd, acc, rest, packed, total, top = _step(
                    j, slot * 2, slot * 2 + 1, slot, phase, even, acc, rest, packed, total, top, given,
                    T, P, ONLINE, GROUP, False,
                )  # fmt: skip
                before = slot
                slot, phase = _next(slot, phase, T.STAGES)
        else:
            _none, acc, rest, packed, total, top = _step(
                j, slot, slot, slot, phase, s, acc, rest, packed, total, top, given, T, P, ONLINE, GROUP, True
            )
            slot, phase = _next(slot, phase, T.STAGES)
    mbarrier.wait(full.index(slot), phase)
    place = slot
    if T.AHEAD:
        place = slot * 2 + (tiles - 1) % 2
    acc = _product(packed, v_s.index(place), acc, P, T.BM, T.BN)
    if T.REST > 0:
        rest = _product(packed, rest_s.index(place), rest, P, T.BM, T.BN)
        acc, rest = warpgroup_mma_wait(0, deps=[acc, rest])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    if T.FP8 and not ONLINE:
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
    bound = _bound(q8, Q_SCALE + first, rows, K_NORM + kv_head * k_tiles, M, k_tiles, T.BM, T.D)
    given = (q, q_scale, rows, LSE, M, N, tiles, masked, ring)
    if bound <= limit:
        acc, rest, total, top = _attend(given, T, False, GROUP)
        _write_parts(acc, rest, total, top, rows, OUT, LSE, V_SCALE, LSE_TERM + first, anchor, keep, M, s_om, s_lm, T)
    else:
        acc, rest, total, top = _attend(given, T, True, GROUP)
        _write_parts(acc, rest, total, top, rows, OUT, LSE, V_SCALE, LSE_TERM + first, anchor, keep, M, s_om, s_lm, T)
