"""Sparse int8 attention for Hopper (sm_90) in Gluon: pairs of 64-query tiles, each with its own list of 64-key tiles.

The schedule is that of int8_attention/hopper.py. What differs is the ring: a slot brings two key tiles, joined into one
128-key operand, because a product with 64 keys is bound by shared memory. First come the slots of tiles that both query
tiles see, read by both warpgroups; then slots of tiles that one of them sees, in turns (see lists.py). Mixed tiles of a
16-bit dense mask come by TMA, too: a step's at a time for each warpgroup, where its query lay before.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..int8_attention.bias import row_strides
from ..int8_attention.configs import Config, padded_head_dim
from ..int8_attention.hopper import _describe, limit_of
from ..int8_attention.hopper_parts import _AS_FLOAT_BITS, _accumulator, _scores
from ..int8_attention.hopper_ring import _barriers
from ..int8_attention.hopper_rows import _bound, _write
from ..int8_attention.launch import launch
from ..int8_attention.quantize import Quantized
from .configs import BROUGHT_MASKS, WORDS
from .forward import mask_strides, own_rows
from .hopper_memory import _memory, _query_memory
from .hopper_parts import _give_back, _read_mask, _softmax, _started_as_float
from .hopper_ring import Traits, _await, _entry_of, _in_ring, _producer, _release, _slot_of
from .lists import TILE, Lists

_COLUMNS = 64  # of the values: what a TMA load brings of each row, 128 bytes
_KINDS = {None: "none", torch.bool: "bool", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@gluon.jit
def _mask_of(reads, rows, entry, phase, T: gl.constexpr):
    """The mask of a step as _softmax() takes it: words that are read now, or the place where TMA brings it."""
    _SINK, MASK, M, N, s_mq, brought = reads
    if T.BROUGHT:
        mask = (brought[0], brought[1], brought[2], phase)
    else:
        mask = _read_mask(MASK, rows, entry[2], entry[3], M, N, s_mq)
    return mask


@gluon.jit
def _step(
    at, acc, weights, total, top, q, q_scale, rows, entry, reads, ring,
    T: gl.constexpr, READS: gl.constexpr, ONLINE: gl.constexpr,
):  # fmt: skip
    """Scores of step t, then P @ V of the step before with the softmax of this one under it."""
    t, position, mask_phase, shared, both = at
    SINK, _MASK, M, N, _s_mq, _brought = reads
    k_s, v_s, scale_s, bias_s, full, empty = ring
    P: gl.constexpr = weights.type.layout
    slot, phase = _in_ring(position, T)
    mask = 0
    if READS and T.HAS_MASK:
        mask = _mask_of(reads, rows, entry, mask_phase, T)
    _await(full, empty, slot, phase, t - shared >= both)
    ADDED: gl.constexpr = _AS_FLOAT_BITS if _started_as_float(T, READS, ONLINE) else 0
    s = _scores(q, k_s.index(slot), _accumulator(T.BN, 8), T.BM, T.BN, T.D, ADDED)
    acc = warpgroup_mma(weights, v_s.index(slot), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    p, total, top, decay = _softmax(
        s, q_scale, scale_s.index(slot), bias_s.index(slot), entry, mask, N, total, top, T, READS, ONLINE
    )
    if M < 0:
        # Never taken, but ptxas can't know: it would hoist the wait for P @ V above the exponentials.
        gl.store(SINK + gl.arange(0, T.BM, layout=gl.SliceLayout(1, total.type.layout)), gl.max(total, 1))
    # The weights pass through the wait, so that their packing can't overwrite the operand of the product in flight.
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    _release(empty, slot, t < shared)
    if ONLINE:
        acc *= gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout)), 1)
    return acc, gl.convert_layout(p.to(v_s.dtype), P), total, top


@gluon.jit
def _attend(
    q, q_scale, rows, OFFSETS, TILES, counts, reads, ring, GROUP: gl.constexpr, T: gl.constexpr, ONLINE: gl.constexpr
):
    """Walk this warpgroup's slots: P @ V [BM, D] before division, row sums [BM] and row maxima [BM]."""
    steps, shared, both, alone, biased = counts
    N = reads[3]
    k_s, v_s, scale_s, bias_s, full, empty = ring
    S: gl.constexpr = _accumulator(T.BN, 8)
    ACC: gl.constexpr = _accumulator(T.D, 16)
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    E: gl.constexpr = gl.full([T.BM, T.BN], 0.0, gl.float32, layout=S).reshape([T.BM, 2, T.BN // 16, 4, 2]).type.layout
    G: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, E)))
    top = gl.full([T.BM], -3.4028234e38 if ONLINE else 0.0, gl.float32, layout=gl.SliceLayout(1, S))
    total = gl.full([T.BM, 4], 0.0, gl.float32, layout=G)
    acc = gl.full([T.BM, T.D], 0.0, gl.float32, layout=ACC)
    position = _slot_of(GROUP, 0, shared, both)
    slot, _phase = _in_ring(position, T)
    entry = _entry_of(OFFSETS, TILES, 0, position, alone, T)
    mask = 0
    if T.HAS_MASK:
        mask = _mask_of(reads, rows, entry, 0, T)
    mbarrier.wait(full.index(slot), 0)
    ADDED: gl.constexpr = _AS_FLOAT_BITS if _started_as_float(T, True, ONLINE) else 0
    s = warpgroup_mma_wait(0, deps=[_scores(q, k_s.index(slot), S, T.BM, T.BN, T.D, ADDED)])
    p, total, top, _decay = _softmax(
        s, q_scale, scale_s.index(slot), bias_s.index(slot), entry, mask, N, total, top, T, True, ONLINE
    )
    p = warpgroup_mma_wait(0, deps=[p])  # as in int8_attention/hopper_steps.py
    _release(empty, slot, shared > 0)
    weights = gl.convert_layout(p.to(v_s.dtype), P)
    position = _slot_of(GROUP, 1, shared, both)
    entry = _entry_of(OFFSETS, TILES, 1, position, alone, T)
    mask_phase = 1
    for t in range(1, steps):
        # A step ahead: a branch hangs on these loads.
        following = _slot_of(GROUP, t + 1, shared, both)
        ahead = _entry_of(OFFSETS, TILES, t + 1, following, alone, T)
        if T.HAS_MASK or T.HAS_TABLE:
            if T.HAS_MASK:
                needs = (entry[0] != entry[0]) | (entry[1] != entry[1])
            else:
                needs = t < biased
            at = (t, position, mask_phase, shared, both)
            if needs:
                acc, weights, total, top = _step(
                    at, acc, weights, total, top, q, q_scale, rows, entry, reads, ring, T, True, ONLINE
                )
                if T.BROUGHT:
                    mask_phase ^= 1
            else:
                acc, weights, total, top = _step(
                    at, acc, weights, total, top, q, q_scale, rows, entry, reads, ring, T, False, ONLINE
                )
        else:
            acc, weights, total, top = _step(
                (t, position, 0, shared, both), acc, weights, total, top, q, q_scale, rows, entry, reads, ring,
                T, True, ONLINE,
            )  # fmt: skip
        position = following
        entry = ahead
    position = _slot_of(GROUP, steps, shared, both)
    slot, phase = _in_ring(position, T)
    _await(full, empty, slot, phase, steps - shared >= both)
    acc = warpgroup_mma(weights, v_s.index(slot), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    _release(empty, slot, False)
    return acc, gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, S)), top


@gluon.jit
def _consumer(work, T: gl.constexpr, GROUP: gl.constexpr):
    """One warpgroup: BM query rows of one head."""
    Q_SCALE, K_NORM, ANCHOR, LSE_TERM, OUT, LSE, MASK, OFFSETS, TILES, COUNTS, FLOOR, q_s, q_full, ring = work[:14]
    start, stop, first, kv_head, k_tiles, M, N, width, s_om, s_lm, s_mq, limit, brought = work[14:]
    S: gl.constexpr = _accumulator(T.BN, 8)
    ACC: gl.constexpr = _accumulator(T.D, 16)
    rows = start + GROUP * T.BM + gl.arange(0, T.BM, layout=gl.SliceLayout(1, S))
    q_scale = gl.load(Q_SCALE + first + rows, mask=rows < stop, other=0.0)
    anchor = 0.0
    keep = 1.0
    if T.HAS_BIAS:
        anchor = gl.load(ANCHOR + GROUP * 2)
        keep = gl.load(ANCHOR + GROUP * 2 + 1)
        q_scale *= keep
    OFFSETS += GROUP * width * 2
    shared = gl.load(COUNTS)
    slots = gl.load(COUNTS + 1 + GROUP)
    both = gl.minimum(slots, gl.load(COUNTS + 2 - GROUP))
    steps = shared + slots - 1
    alone = gl.where(gl.load(COUNTS + 3 + GROUP) != 0, steps - 1, -1)
    biased = 0
    if T.HAS_TABLE:
        biased = gl.load(COUNTS + 5)
    mbarrier.wait(q_full.index(GROUP), 0)
    q8 = q_s[GROUP].reshape([T.BM, T.D])
    q = q8.load(gl.DotOperandLayout(operand_index=0, parent=S, k_width=4))
    bound = _bound(q8, Q_SCALE + first, rows, K_NORM + kv_head * k_tiles, stop, k_tiles, T.BM, T.D, False)
    if T.HAS_FLOOR:
        bound -= gl.load(FLOOR + GROUP)
    mask = (0, 0, 0)
    if T.BROUGHT:
        mask = (brought[0].index(GROUP), brought[1].index(GROUP), brought[2].index(GROUP))
        _give_back(mask[2])  # the query was read, and so its memory is free for a mask
    counts = (steps, shared, both, alone, biased)
    reads = (LSE, MASK, M, N, s_mq, mask)
    if slots == 0:
        nothing = gl.full([T.BM], 0.0, gl.float32, layout=gl.SliceLayout(1, S))
        _write(
            gl.full([T.BM, T.D], 0.0, gl.float32, layout=ACC), nothing, nothing, rows, OUT, LSE, LSE_TERM + first,
            anchor, keep, stop, s_om, s_lm, ACC, T.D, T.HEAD_DIM, T.HAS_LSE,
        )  # fmt: skip
    else:
        if bound <= limit:
            acc, total, top = _attend(q, q_scale, rows, OFFSETS, TILES, counts, reads, ring, GROUP, T, False)
            _write(
                acc, total, top, rows, OUT, LSE, LSE_TERM + first, anchor, keep, stop, s_om, s_lm,
                ACC, T.D, T.HEAD_DIM, T.HAS_LSE,
            )  # fmt: skip
        else:
            acc, total, top = _attend(q, q_scale, rows, OFFSETS, TILES, counts, reads, ring, GROUP, T, True)
            _write(
                acc, total, top, rows, OUT, LSE, LSE_TERM + first, anchor, keep, stop, s_om, s_lm,
                ACC, T.D, T.HEAD_DIM, T.HAS_LSE,
            )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "M", "N", "k_tiles", "heads", "group", "width", "step_b", "step_h", "table_rows", "anchors", "s_mb", "s_mh",
    ]
)  # fmt: skip
def _attention(
    q_desc, k_desc, v_desc, scale_desc, bias_desc, mask_desc, Q_SCALE, K_NORM, ANCHOR, LSE_TERM, MASK, OUT, LSE,
    TILES, COUNTS, OFFSETS, BIAS_ROWS, FLOOR, BLOCKS, M, N, k_tiles, heads, group, width, step_b, step_h,
    table_rows, anchors, s_ob, s_oh, s_om, s_lb, s_lh, s_lm, s_bias_b, s_bias_h, s_mb, s_mh, s_mq, limit,
    T: gl.constexpr,
):  # fmt: skip
    """One program two tiles of query rows of one head: a warpgroup each, and one warp that loads for both."""
    block = gl.program_id(0)
    head = gl.program_id(1)
    b = head // heads
    h = head % heads
    h_kv = h // group
    kv_head = b * (heads // group) + h_kv
    start = block * 2 * T.BM
    stop = M
    list_row = block.to(gl.int64)
    if T.HAS_TABLE:
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
    ANCHOR += (bias_row * anchors + list_row) * 4
    shared, slots_a, slots_b = gl.load(COUNTS), gl.load(COUNTS + 1), gl.load(COUNTS + 2)
    k_s, v_s, scale_s, bias_s, joined = _memory(q_desc, k_desc, v_desc, scale_desc, bias_desc, T)
    q_s, brought = _query_memory(q_desc, mask_desc, T)
    boxes, tiles, mask_full, mask_empty = brought
    q_full, full, empty = _barriers(T.STAGES, 2)
    ring = (joined[0], joined[1], joined[2], joined[3], full, empty)
    work = (Q_SCALE, K_NORM, ANCHOR, LSE_TERM, OUT, LSE, MASK, OFFSETS, TILES, COUNTS, FLOOR, q_s, q_full, ring,
            start, stop, first, kv_head, k_tiles, M, N, width, s_om, s_lm, s_mq, limit,
            (tiles, mask_full, mask_empty))  # fmt: skip
    masked = (mask_desc, boxes, mask_full, mask_empty, (b * s_mb, h * s_mh), OFFSETS, shared,
              gl.minimum(slots_a, slots_b), gl.where(slots_b > slots_a, 1, 0), width)  # fmt: skip
    loads = (q_desc, k_desc, v_desc, scale_desc, bias_desc, q_s, k_s, v_s, scale_s, bias_s, q_full, full, empty,
             TILES, BIAS_ROWS, start, head, b, h_kv, kv_head, k_tiles, bias_row * table_rows,
             shared + slots_a + slots_b, masked)  # fmt: skip
    gl.warp_specialize(
        [(_consumer, (work, T, 0)), (_consumer, (work, T, 1)), (_producer, (loads, T))], [4, 1], [240, 32]
    )


def traits(
    config: Config, head_dim: int, kind: str, *, has_bias: bool, has_table: bool, has_floor: bool, has_lse: bool
) -> Traits:
    """What the kernel is compiled for; kind: as in Traits."""
    has_mask = kind != "none"
    return Traits(
        BM=TILE, BN=2 * TILE, D=padded_head_dim(head_dim), HEAD_DIM=head_dim, STAGES=config.num_stages,
        HAS_BIAS=has_bias, HAS_TABLE=has_table, HAS_MASK=has_mask, OFFSETS=has_mask or (has_bias and not has_table),
        HAS_FLOOR=has_floor, HAS_LSE=has_lse, KIND=kind, BROUGHT=kind in BROUGHT_MASKS,
        AS_FLOAT=bool(config.as_float),
    )  # fmt: skip


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
    kind = _KINDS[None if mask is None else mask.dtype]
    # Where TMA brings tiles, a step along an axis is one of the descriptor's, and there are no words.
    boxes, words = scale, None
    steps: tuple[int, ...] = (0, 0, 0)
    if mask is not None and kind in BROUGHT_MASKS:
        boxes = own_rows(mask)
        steps = (*(int(n > 1) for n in boxes.shape[:2]), 0)
    elif mask is not None:
        words = mask.view(WORDS[mask.dtype])
        steps = mask_strides(words)[:3]
    unused = quantized.query_scale
    blocks = triton.cdiv(q_len, 2 * TILE) if lists.blocks is None else lists.blocks.shape[0]
    launch(
        _attention, (blocks, batch * heads),
        _describe(quantized.query.view(-1, q_len, padded), [1, TILE, padded]),
        _describe(quantized.key.view(-1, quantized.key.shape[2], padded), [1, TILE, padded]),
        _describe(value, [1, 1, TILE, _COLUMNS]),
        _describe(scale, [32]),
        _describe(bias.view(-1) if bias is not None else scale, [TILE]),
        _describe(boxes, [TILE] if boxes is scale else [1, 1, TILE, TILE]),
        quantized.query_scale, quantized.key_norm,
        *(unused if t is None else t for t in (lists.anchor, quantized.lse_term, words, out, lse)),
        lists.tiles, lists.counts,
        *(unused if t is None else t for t in (lists.offsets, lists.bias_rows, lists.floor, lists.blocks)),
        q_len, kv_len, quantized.key.shape[2] // TILE, heads, heads // kv_heads, lists.tiles.shape[1], lists.step_b,
        lists.step_h, 0 if bias is None else bias.shape[2], lists.anchors,
        *out.stride()[:3], *(lse.stride() if lse is not None else (0, 0, 0)),
        *((0, 0) if bias is None else row_strides(bias)), *steps,
        limit_of(value.dtype, bias is not None or kind not in (_KINDS[None], _KINDS[torch.bool])),
        T=traits(
            config, head_dim, kind, has_bias=bias is not None, has_table=lists.bias_rows is not None,
            has_floor=lists.floor is not None, has_lse=lse is not None,
        ),
        num_warps=config.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
