"""Sparse int8 attention for Hopper (sm_90) in Gluon: pairs of 64-query tiles, each with its own list of 64-key tiles.

The schedule is that of int8_attention/hopper.py. What differs is the ring: a slot brings two key tiles, joined into one
128-key operand, because a product with 64 keys is bound by shared memory. First come the slots of tiles that both query
tiles see, read by both warpgroups; then slots of tiles that one of them sees, in turns (see lists.py).
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..int8_attention.configs import Config, padded_head_dim
from ..int8_attention.hopper import BOUND, _describe
from ..int8_attention.hopper_parts import _accumulator, _bound, _scores, _write
from ..int8_attention.hopper_ring import _load
from ..int8_attention.quantize import Quantized
from .configs import WORDS
from .forward import mask_strides, table_strides
from .lists import TILE, Lists

_KEYS = 2 * TILE  # keys of a slot
_COLUMNS = 64  # of the values: what a TMA load brings of each row, 128 bytes

_RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # in Triton 3.9
_KINDS = {None: "none", torch.bool: "bool", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@gluon.constexpr_function
def _wide(columns, bits):
    """Layout in shared memory of a slot's [128, columns]: what loads of [64, 128 bytes] side by side leave there."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, columns * bits // 8), element_bitwidth=bits, rank=2)


@gluon.jit
def _viewed(memory, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The same shared memory in another shape and layout."""
    if _RENAMED:
        view = memory.reinterpret(memory.dtype, SHAPE, LAYOUT)
    else:
        view = memory._reinterpret(memory.dtype, SHAPE, LAYOUT)
    return view


@gluon.jit
def _slot_of(w, t, shared, both):
    """Position in the ring of step t of warpgroup w, as lists._position has it."""
    j = gl.maximum(t - shared, 0)
    return gl.where(t < shared, t, shared + j + gl.minimum(j + w, both))


@gluon.jit
def _tiles_of(SLOT):
    """Key tiles whose keys, and whose values, a slot brings; -1: none."""
    return gl.load(SLOT), gl.load(SLOT + 1), gl.load(SLOT + 2), gl.load(SLOT + 3)


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, scale_desc, bias_desc, q_s, k_s, v_s, scale_s, bias_s, q_full, full, empty,
    TILES, BIAS_ROWS, start, head, b, h_kv, kv_head, k_tiles, table, slots,
    BM: gl.constexpr, D: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_TABLE: gl.constexpr,
):  # fmt: skip
    """Fill slot after slot as the list says; keys come with their scales and their bias."""
    STAGES: gl.constexpr = full.type.shape[0]
    COLUMNS: gl.constexpr = D // 64
    BIAS_BYTES: gl.constexpr = 256 if HAS_BIAS else 0
    K_BYTES: gl.constexpr = 2 * (k_desc.block_type.nbytes + 128 + BIAS_BYTES)
    V_BYTES: gl.constexpr = 2 * COLUMNS * v_desc.block_type.nbytes
    for wg in gl.static_range(2):
        mbarrier.expect(q_full.index(wg), q_desc.block_type.nbytes)
        _load(q_desc, [head, start + wg * BM, 0], q_full.index(wg), q_s.index(wg))
    slot = 0
    phase = 1
    next_keys, next_keys2, next_values, next_values2 = _tiles_of(TILES)
    for position in range(slots):
        keys, keys2, values, values2 = next_keys, next_keys2, next_values, next_values2
        # A slot ahead: the list has room behind its end.
        next_keys, next_keys2, next_values, next_values2 = _tiles_of(TILES + position * 4 + 4)
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
            if HAS_BIAS:
                if HAS_TABLE:
                    keys = gl.load(BIAS_ROWS + position * 2)
                    keys2 = gl.load(BIAS_ROWS + position * 2 + 1)
                _load(bias_desc, [(table + keys) * 64], full.index(slot), bias_s.index(slot * 2))
                _load(bias_desc, [(table + keys2) * 64], full.index(slot), bias_s.index(slot * 2 + 1))
        if values >= 0:
            for c in gl.static_range(COLUMNS):
                at = (slot * COLUMNS + c) * 2
                _load(v_desc, [b, h_kv, values * 64, c * 64], full.index(slot), v_s.index(at))
                _load(v_desc, [b, h_kv, values2 * 64, c * 64], full.index(slot), v_s.index(at + 1))
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1


@gluon.constexpr_function
def _by_words():
    """Layout of a step's mask as words of two keys, [64, 2, 32]: a thread loads four words of a row at once."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 16], [0, 1, 0], [8, 0, 0]],
        lane_bases=[[0, 0, 4], [0, 0, 8], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]], block_bases=[], shape=[64, 2, 32],
    )  # fmt: skip


@gluon.jit
def _words_of(tile, tile2, L: gl.constexpr):
    """Index of each word of a step in a row of the mask, [1, 2, 32]: the halves are key tiles of their own."""
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    half = gl.expand_dims(gl.expand_dims(gl.where(half == 0, tile * 32, tile2 * 32), 0), 2)
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    return half + gl.expand_dims(gl.expand_dims(word, 0), 1)


@gluon.jit
def _read_mask(MASK, rows, tile, tile2, M, N, s_mq):
    """The mask of a step as words of two keys each, [64, 2, 32]; the loads come before the waits of the step."""
    L: gl.constexpr = _by_words()
    row = gl.convert_layout(gl.minimum(rows, M - 1).to(gl.int64) * s_mq, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    n = _words_of(tile, tile2, L)
    # Rows start with whole 16 bytes (configs.in_words); what Triton knew of that is lost on the way into a warpgroup.
    at = gl.multiple_of(gl.max_contiguous(MASK + gl.expand_dims(gl.expand_dims(row, 1), 2) + n, [1, 1, 32]), [1, 1, 16])
    if gl.maximum(tile, tile2) * 64 + 64 <= N:
        words = gl.load(at)
    else:
        words = gl.load(at, mask=n < N // 2, other=0)
    return words


@gluon.jit
def _add_mask(x, words, tile, tile2, N, KIND: gl.constexpr, EXACT: gl.constexpr):
    """Scores with the mask added (log2 units); -inf past the last key."""
    E: gl.constexpr = x.type.layout
    # Four neighbours exchange words, so that each has those of its own columns.
    words = gl.convert_layout(words.reshape([64, 2, 8, 4]), gl.SliceLayout(4, E))
    if KIND == "fp32":
        low = words.to(gl.int32).to(gl.float32, bitcast=True)
        high = (words >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    elif KIND == "bf16":
        low = (words << 16).to(gl.float32, bitcast=True)
        high = (words & -65536).to(gl.float32, bitcast=True)
    elif KIND == "fp16":
        low = words.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        high = (words >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    else:
        low = words & 255
        high = words & -256
    y = gl.convert_layout(gl.join(low, high), E)
    if KIND == "bool":
        x = gl.where(y != 0, x, float("-inf"))
    else:
        if EXACT:
            # Rows may hold nothing but finfo.min, which must stay finite: their answer is the mean of the values.
            x += gl.where(gl.abs(y) < 2.0e38, y * 1.4426950408889634, y)
        else:
            x += y * 1.4426950408889634
    if gl.maximum(tile, tile2) * 64 + 64 > N:
        L: gl.constexpr = _by_words()
        n = gl.convert_layout(_words_of(tile, tile2, L).reshape([1, 2, 8, 4]), gl.SliceLayout(4, E))
        x = gl.where(gl.expand_dims(n, 4) < N // 2, x, float("-inf"))
    return x


@gluon.jit
def _softmax(
    s, q_scale, k_scale, bias, offset, offset2, words, tile, tile2, N, total, top,
    S: gl.constexpr, T: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, HAS_BIAS: gl.constexpr,
    IS_MIXED: gl.constexpr, KIND: gl.constexpr, ONLINE: gl.constexpr,
):  # fmt: skip
    """One step of the softmax in log2 units: weights [BM, BN], row sums by thread [BM, 4], row maximum, decay.

    T is the layout of [BM, 2, 4]: row, half of the step, and the scale of keys {8j + 2t, 8j + 2t + 1} of that half.
    """
    G: gl.constexpr = gl.SliceLayout(1, T)
    s5 = s.reshape([BM, 2, BN // 16, 4, 2])
    E: gl.constexpr = s5.type.layout
    q3 = gl.expand_dims(gl.expand_dims(gl.convert_layout(q_scale, gl.SliceLayout(1, gl.SliceLayout(2, T))), 1), 2)
    scale = q3 * gl.expand_dims(k_scale.slice(0, 4, dim=1).load(gl.SliceLayout(0, T)), 0)
    x = s5.to(gl.float32) * gl.convert_layout(gl.expand_dims(gl.expand_dims(scale, 2), 4), E)
    if IS_MIXED:
        # A half with a number is read like the other; one without a tile has -inf.
        offset = 0.0
        offset2 = gl.where(offset2 == float("-inf"), offset2, 0.0)
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, T)))
    add = gl.expand_dims(gl.expand_dims(gl.where(half == 0, offset, offset2), 0), 2)
    x += gl.convert_layout(gl.expand_dims(gl.expand_dims(add, 2), 4), E)
    if IS_MIXED:
        x = _add_mask(x, words, tile, tile2, N, KIND, ONLINE)
    if HAS_BIAS:
        columns = gl.expand_dims(bias.load(gl.SliceLayout(0, S)), 0)
        x += gl.convert_layout(columns.reshape([1, 2, BN // 16, 4, 2]), E)
    decay = top
    if ONLINE:
        peak = gl.max(gl.max(gl.max(gl.max(x, 4), 2), 1), 1)
        new_top = gl.maximum(top, gl.convert_layout(peak, gl.SliceLayout(1, S)))
        decay = gl.exp2(top - new_top)
        top = new_top
        top3 = gl.convert_layout(top, gl.SliceLayout(1, gl.SliceLayout(2, T)))
        top5 = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(top3, 1), 2), 2), 4)
        x -= gl.convert_layout(top5, E)
        total *= gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, G)), 1)
    p = gl.exp2(x)
    total += gl.sum(gl.sum(gl.sum(p, 4), 2), 1)
    return gl.convert_layout(p.reshape([BM, BN]), S), total, top, decay


@gluon.jit
def _entry_of(OFFSETS, TILES, t, position, alone, HAS_MASK: gl.constexpr):
    """What is added to the scores of either half of step t, and the key tiles of the halves where a mask is read.

    `alone` is the step whose second half holds no tile. Past the last step this reads what is not used.
    """
    offset = 0.0
    offset2 = gl.where(t == alone, float("-inf"), 0.0)
    tile = 0
    tile2 = 0
    if HAS_MASK:
        offset = gl.load(OFFSETS + t * 2)
        offset2 = gl.load(OFFSETS + t * 2 + 1)
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


@gluon.jit
def _step(
    t, position, shared, both, acc, weights, total, top, q, q_scale, rows, offset, offset2, tile, tile2, SINK, MASK,
    M, N, s_mq, k_s, v_s, scale_s, bias_s, full, empty,
    S: gl.constexpr, T: gl.constexpr, P: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    HAS_BIAS: gl.constexpr, IS_MIXED: gl.constexpr, KIND: gl.constexpr, ONLINE: gl.constexpr,
):  # fmt: skip
    """Scores of step t, then P @ V of the step before with the softmax of this one under it."""
    STAGES: gl.constexpr = full.type.shape[0]
    slot = position % STAGES
    words = 0
    if IS_MIXED:
        words = _read_mask(MASK, rows, tile, tile2, M, N, s_mq)
    _await(full, empty, slot, (position // STAGES) & 1, t - shared >= both)
    s = _scores(q, k_s.index(slot), S, BM, BN, D)
    acc = warpgroup_mma(weights, v_s.index(slot), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    p, total, top, decay = _softmax(
        s, q_scale, scale_s.index(slot), bias_s.index(slot), offset, offset2, words, tile, tile2, N,
        total, top, S, T, BM, BN, HAS_BIAS, IS_MIXED, KIND, ONLINE,
    )  # fmt: skip
    if M < 0:
        # Never taken, but ptxas can't know: it would hoist the wait for P @ V above the exponentials.
        gl.store(SINK + gl.arange(0, BM, layout=gl.SliceLayout(1, total.type.layout)), gl.max(total, 1))
    # The weights pass through the wait, so that their packing can't overwrite the operand of the product in flight.
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    _release(empty, slot, t < shared)
    if ONLINE:
        acc *= gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout)), 1)
    return acc, gl.convert_layout(p.to(v_s.dtype), P), total, top


@gluon.jit
def _attend(
    q, q_scale, rows, SINK, MASK, OFFSETS, TILES, M, N, s_mq, steps, shared, both, alone, biased,
    k_s, v_s, scale_s, bias_s, full, empty,
    GROUP: gl.constexpr, S: gl.constexpr, ACC: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_TABLE: gl.constexpr, HAS_MASK: gl.constexpr, KIND: gl.constexpr, ONLINE: gl.constexpr,
):  # fmt: skip
    """Walk this warpgroup's slots: P @ V [BM, D] before division, row sums [BM] and row maxima [BM]."""
    STAGES: gl.constexpr = full.type.shape[0]
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    E: gl.constexpr = gl.zeros([BM, BN], gl.float32, layout=S).reshape([BM, 2, BN // 16, 4, 2]).type.layout
    T: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, E))
    top = gl.full([BM], -3.4028234e38 if ONLINE else 0.0, gl.float32, layout=gl.SliceLayout(1, S))
    total = gl.zeros([BM, 4], gl.float32, layout=gl.SliceLayout(1, T))
    acc = gl.zeros([BM, D], gl.float32, layout=ACC)
    position = _slot_of(GROUP, 0, shared, both)
    slot = position % STAGES
    offset, offset2, tile, tile2 = _entry_of(OFFSETS, TILES, 0, position, alone, HAS_MASK)
    words = 0
    if HAS_MASK:
        words = _read_mask(MASK, rows, tile, tile2, M, N, s_mq)
    mbarrier.wait(full.index(slot), 0)
    s = warpgroup_mma_wait(0, deps=[_scores(q, k_s.index(slot), S, BM, BN, D)])
    p, total, top, _decay = _softmax(
        s, q_scale, scale_s.index(slot), bias_s.index(slot), offset, offset2, words, tile, tile2, N,
        total, top, S, T, BM, BN, HAS_BIAS, HAS_MASK, KIND, ONLINE,
    )  # fmt: skip
    _release(empty, slot, shared > 0)
    weights = gl.convert_layout(p.to(v_s.dtype), P)
    position = _slot_of(GROUP, 1, shared, both)
    offset, offset2, tile, tile2 = _entry_of(OFFSETS, TILES, 1, position, alone, HAS_MASK)
    for t in range(1, steps):
        # A step ahead: a branch hangs on these loads.
        following = _slot_of(GROUP, t + 1, shared, both)
        ahead, ahead2, tile_ahead, tile2_ahead = _entry_of(OFFSETS, TILES, t + 1, following, alone, HAS_MASK)
        if HAS_MASK:
            if (offset != offset) | (offset2 != offset2):
                acc, weights, total, top = _step(
                    t, position, shared, both, acc, weights, total, top, q, q_scale, rows, offset, offset2, tile, tile2,
                    SINK, MASK, M, N, s_mq, k_s, v_s, scale_s, bias_s, full, empty,
                    S, T, P, BM, BN, D, HAS_BIAS, True, KIND, ONLINE,
                )  # fmt: skip
            else:
                acc, weights, total, top = _step(
                    t, position, shared, both, acc, weights, total, top, q, q_scale, rows, offset, offset2, tile, tile2,
                    SINK, MASK, M, N, s_mq, k_s, v_s, scale_s, bias_s, full, empty,
                    S, T, P, BM, BN, D, HAS_BIAS, False, KIND, ONLINE,
                )  # fmt: skip
        elif HAS_TABLE:
            if t < biased:
                acc, weights, total, top = _step(
                    t, position, shared, both, acc, weights, total, top, q, q_scale, rows, offset, offset2, tile, tile2,
                    SINK, MASK, M, N, s_mq, k_s, v_s, scale_s, bias_s, full, empty,
                    S, T, P, BM, BN, D, True, False, KIND, ONLINE,
                )  # fmt: skip
            else:
                acc, weights, total, top = _step(
                    t, position, shared, both, acc, weights, total, top, q, q_scale, rows, offset, offset2, tile, tile2,
                    SINK, MASK, M, N, s_mq, k_s, v_s, scale_s, bias_s, full, empty,
                    S, T, P, BM, BN, D, False, False, KIND, ONLINE,
                )  # fmt: skip
        else:
            acc, weights, total, top = _step(
                t, position, shared, both, acc, weights, total, top, q, q_scale, rows, offset, offset2, tile, tile2,
                SINK, MASK, M, N, s_mq, k_s, v_s, scale_s, bias_s, full, empty,
                S, T, P, BM, BN, D, HAS_BIAS, False, KIND, ONLINE,
            )  # fmt: skip
        position, offset, offset2, tile, tile2 = following, ahead, ahead2, tile_ahead, tile2_ahead
    position = _slot_of(GROUP, steps, shared, both)
    slot = position % STAGES
    _await(full, empty, slot, (position // STAGES) & 1, steps - shared >= both)
    acc = warpgroup_mma(weights, v_s.index(slot), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    _release(empty, slot, False)
    return acc, gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, S)), top


@gluon.jit
def _consumer(
    Q_SCALE, K_NORM, ANCHOR, LSE_TERM, OUT, LSE, MASK, OFFSETS, TILES, COUNTS, FLOOR, q_s, k_s, v_s, scale_s, bias_s,
    q_full, full, empty, start, stop, first, kv_head, k_tiles, M, N, width, s_om, s_lm, s_mq, limit,
    GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, HEAD_DIM: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_TABLE: gl.constexpr, HAS_MASK: gl.constexpr, HAS_FLOOR: gl.constexpr,
    KIND: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: BM query rows of one head."""
    S: gl.constexpr = _accumulator(BN, 8)
    ACC: gl.constexpr = _accumulator(D, 16)
    rows = start + GROUP * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, S))
    q_scale = gl.load(Q_SCALE + first + rows, mask=rows < stop, other=0.0)
    anchor = 0.0
    keep = 1.0
    if HAS_BIAS:
        anchor = gl.load(ANCHOR)
        keep = gl.load(ANCHOR + 1)
        q_scale *= keep
    OFFSETS += GROUP * width * 2
    shared = gl.load(COUNTS)
    slots = gl.load(COUNTS + 1 + GROUP)
    both = gl.minimum(slots, gl.load(COUNTS + 2 - GROUP))
    steps = shared + slots - 1
    alone = gl.where(gl.load(COUNTS + 3 + GROUP) != 0, steps - 1, -1)
    biased = 0
    if HAS_TABLE:
        biased = gl.load(COUNTS + 5)
    mbarrier.wait(q_full.index(GROUP), 0)
    q8 = q_s.index(GROUP).reshape([BM, D])
    q = q8.load(gl.DotOperandLayout(operand_index=0, parent=S, k_width=4))
    bound = _bound(q8, Q_SCALE + first, rows, K_NORM + kv_head * k_tiles, stop, k_tiles, BM, D)
    if HAS_FLOOR:
        bound -= gl.load(FLOOR + GROUP)
    if slots == 0:
        nothing = gl.zeros([BM], gl.float32, layout=gl.SliceLayout(1, S))
        _write(
            gl.zeros([BM, D], gl.float32, layout=ACC), nothing, nothing, rows, OUT, LSE, LSE_TERM + first, anchor, keep,
            stop, s_om, s_lm, ACC, D, HEAD_DIM, HAS_LSE,
        )  # fmt: skip
    else:
        if bound <= limit:
            acc, total, top = _attend(
                q, q_scale, rows, LSE, MASK, OFFSETS, TILES, M, N, s_mq, steps, shared, both, alone, biased,
                k_s, v_s, scale_s, bias_s, full, empty,
                GROUP, S, ACC, BM, BN, D, HAS_BIAS, HAS_TABLE, HAS_MASK, KIND, False,
            )  # fmt: skip
            _write(
                acc, total, top, rows, OUT, LSE, LSE_TERM + first, anchor, keep, stop, s_om, s_lm,
                ACC, D, HEAD_DIM, HAS_LSE,
            )  # fmt: skip
        else:
            acc, total, top = _attend(
                q, q_scale, rows, LSE, MASK, OFFSETS, TILES, M, N, s_mq, steps, shared, both, alone, biased,
                k_s, v_s, scale_s, bias_s, full, empty,
                GROUP, S, ACC, BM, BN, D, HAS_BIAS, HAS_TABLE, HAS_MASK, KIND, True,
            )  # fmt: skip
            _write(
                acc, total, top, rows, OUT, LSE, LSE_TERM + first, anchor, keep, stop, s_om, s_lm,
                ACC, D, HEAD_DIM, HAS_LSE,
            )  # fmt: skip


@gluon.jit
def _barriers(STAGES: gl.constexpr):
    """Barriers, initialised: one a warpgroup's query, one a full and one an empty slot of the ring."""
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    return q_full, full, empty


@gluon.jit(do_not_specialize=["M", "N", "k_tiles", "heads", "group", "width", "step_b", "step_h", "table_rows"])
def _attention(
    q_desc, k_desc, v_desc, scale_desc, bias_desc, Q_SCALE, K_NORM, ANCHOR, LSE_TERM, MASK, OUT, LSE,
    TILES, COUNTS, OFFSETS, BIAS_ROWS, FLOOR, BLOCKS, M, N, k_tiles, heads, group, width, step_b, step_h, table_rows,
    s_ob, s_oh, s_om, s_lb, s_lh, s_lm, s_bias_b, s_bias_h, s_mb, s_mh, s_mq, limit,
    BM: gl.constexpr, D: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_TABLE: gl.constexpr, HAS_MASK: gl.constexpr, HAS_FLOOR: gl.constexpr, KIND: gl.constexpr,
    HAS_LSE: gl.constexpr,
):  # fmt: skip
    """One program two tiles of query rows of one head: a warpgroup each, and one warp that loads for both."""
    BN: gl.constexpr = 2 * BM
    block = gl.program_id(0)
    head = gl.program_id(1)
    b = head // heads
    h = head % heads
    h_kv = h // group
    kv_head = b * (heads // group) + h_kv
    start = block * 2 * BM
    stop = M
    list_row = block.to(gl.int64)
    if HAS_TABLE:
        start = gl.load(BLOCKS + block * 3)
        stop = gl.load(BLOCKS + block * 3 + 1)
        list_row = gl.load(BLOCKS + block * 3 + 2).to(gl.int64)
    list_row += b.to(gl.int64) * step_b + h * step_h
    bias_row = b * s_bias_b + h * s_bias_h
    first = head.to(gl.int64) * M
    OUT += b.to(gl.int64) * s_ob + h.to(gl.int64) * s_oh
    LSE += b.to(gl.int64) * s_lb + h.to(gl.int64) * s_lh
    MASK += b.to(gl.int64) * s_mb + h.to(gl.int64) * s_mh
    TILES += list_row * width * 4
    OFFSETS += list_row * width * 4
    BIAS_ROWS += list_row * width * 2
    COUNTS += list_row * 8
    FLOOR += list_row * 2
    slots = gl.load(COUNTS) + gl.load(COUNTS + 1) + gl.load(COUNTS + 2)
    ANCHOR += bias_row * 2
    FLOATS: gl.constexpr = scale_desc.layout
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    q_s = gl.allocate_shared_memory(q_desc.dtype, [2] + q_desc.block_type.shape, q_desc.layout)  # noqa: RUF005
    k_s = gl.allocate_shared_memory(k_desc.dtype, [2 * STAGES] + k_desc.block_type.shape, k_desc.layout)  # noqa: RUF005
    v_s = gl.allocate_shared_memory(
        v_desc.dtype, [2 * STAGES * (D // 64)] + v_desc.block_type.shape, v_desc.layout  # noqa: RUF005
    )  # fmt: skip
    scale_s = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 32], FLOATS)
    bias_s = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 64], FLOATS)
    k_wide = _viewed(k_s, [STAGES, BN, D], _wide(D, 8))
    v_wide = _viewed(v_s, [STAGES, BN, D], _wide(D, 16))
    scale_wide = _viewed(scale_s, [STAGES, 2, 32], ROWS)
    bias_wide = _viewed(bias_s, [STAGES, BN], FLOATS)
    q_full, full, empty = _barriers(STAGES)
    gl.warp_specialize([
        (_consumer, (Q_SCALE, K_NORM, ANCHOR, LSE_TERM, OUT, LSE, MASK, OFFSETS, TILES, COUNTS, FLOOR,
                     q_s, k_wide, v_wide, scale_wide, bias_wide, q_full, full, empty,
                     start, stop, first, kv_head, k_tiles, M, N, width, s_om, s_lm, s_mq, limit,
                     0, BM, BN, D, HEAD_DIM, HAS_BIAS, HAS_TABLE, HAS_MASK, HAS_FLOOR, KIND, HAS_LSE)),
        (_consumer, (Q_SCALE, K_NORM, ANCHOR, LSE_TERM, OUT, LSE, MASK, OFFSETS, TILES, COUNTS, FLOOR,
                     q_s, k_wide, v_wide, scale_wide, bias_wide, q_full, full, empty,
                     start, stop, first, kv_head, k_tiles, M, N, width, s_om, s_lm, s_mq, limit,
                     1, BM, BN, D, HEAD_DIM, HAS_BIAS, HAS_TABLE, HAS_MASK, HAS_FLOOR, KIND, HAS_LSE)),
        (_producer, (q_desc, k_desc, v_desc, scale_desc, bias_desc, q_s, k_s, v_s, scale_s, bias_s, q_full, full, empty,
                     TILES, BIAS_ROWS, start, head, b, h_kv, kv_head, k_tiles, bias_row * table_rows, slots,
                     BM, D, HAS_BIAS, HAS_TABLE)),
    ], [4, 1], [240, 32])  # fmt: skip


def attention(
    quantized: Quantized,
    value: torch.Tensor,
    lists: Lists,
    config: Config,
    *,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Run the kernel as forward.attention() says; lists are paired, `value` is describable (see configs)."""
    batch, heads, q_len, head_dim = out.shape
    kv_heads, kv_len = value.shape[1:3]
    padded = padded_head_dim(head_dim)
    scale = quantized.key_scale.view(-1)
    words = None if mask is None else mask.view(WORDS[mask.dtype])
    unused = quantized.query_scale
    blocks = triton.cdiv(q_len, 2 * TILE) if lists.blocks is None else lists.blocks.shape[0]
    _attention[(blocks, batch * heads)](
        _describe(quantized.query.view(-1, q_len, padded), [1, TILE, padded]),
        _describe(quantized.key.view(-1, quantized.key.shape[2], padded), [1, TILE, padded]),
        _describe(value, [1, 1, TILE, _COLUMNS]),
        _describe(scale, [32]),
        _describe(bias.view(-1) if bias is not None else scale, [TILE]),
        quantized.query_scale, quantized.key_norm,
        *(unused if t is None else t for t in (quantized.anchor, quantized.lse_term, words, out, lse)),
        lists.tiles, lists.counts,
        *(unused if t is None else t for t in (lists.offsets, lists.bias_rows, lists.floor, lists.blocks)),
        q_len, kv_len, quantized.key.shape[2] // TILE, heads, heads // kv_heads, lists.tiles.shape[1], lists.step_b,
        lists.step_h, 0 if bias is None else bias.shape[2],
        *out.stride()[:3], *(lse.stride() if lse is not None else (0, 0, 0)), *table_strides(bias),
        *mask_strides(words)[:3], BOUND[value.dtype],
        BM=TILE, D=padded, HEAD_DIM=head_dim, STAGES=config.num_stages, HAS_BIAS=bias is not None,
        HAS_TABLE=lists.bias_rows is not None, HAS_MASK=mask is not None, HAS_FLOOR=lists.floor is not None,
        KIND=_KINDS[None if mask is None else mask.dtype], HAS_LSE=lse is not None,
        num_warps=config.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
