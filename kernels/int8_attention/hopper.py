"""int8 attention forward kernel for Hopper (sm_90) in Gluon: softmax(scale * Q K^T + bias) V over quantised Q and K.

FlashAttention-3's schedule (Shah et al., 2024): one warp loads tiles by TMA; two warpgroups of 64 query rows each start
the scores of tile i before P @ V of tile i-1, and do the exponentials of tile i under it.

No running maximum where none is needed: |scores| <= |q| * max|k| (Cauchy-Schwarz) is known from the quantised operands,
and where that is at most BOUND (log2) exp2(score) can neither overflow nor vanish in float32 or bfloat16. Such a
warpgroup (nearly all of them) skips the maximum, the shuffles and the rescaling; the others run the online softmax.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .configs import Config, padded_head_dim
from .quantize import Quantized, row_strides

# Triton 3.9 has only the new name.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
# exp2 of +-60 summed over 2^17 keys leaves a float32 room for values up to 2^50; float16 P ends at 2^16 and 2^-14.
BOUND = {torch.bfloat16: 60.0, torch.float16: 12.0}
_SCALES = 32  # floats that one TMA load of key scales brings (its unit is 128 bytes); the first 4 are the tile's
_ROWS = 64  # query rows of a warpgroup; a program has two of them


@gluon.constexpr_function
def _accumulator(n, bits):
    """Layout of a warpgroup's [64, n] product of operands of `bits` bits."""
    shape = [16, min(n, 128 if bits == 8 else 256), 256 // bits]
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=shape)


@gluon.jit
def _tile_of(j, tiles, LIVE, HAS_BIAS: gl.constexpr):
    """Key tile of step j: the j-th one that is not masked altogether, or from the last to the first."""
    if HAS_BIAS:
        tile = gl.load(LIVE + 1 + j)
    else:
        tile = tiles - 1 - j
    return tile


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, scale_desc, bias_desc, q_s, k_s, v_s, scale_s, bias_s, q_full, full, empty,
    LIVE, block, head, b, h_kv, kv_head, k_tiles, bias_row, tiles,
    BM: gl.constexpr, BN: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Slot j of the ring: keys, their scales and their bias of step j, and the values of step j - 1."""
    STAGES: gl.constexpr = k_s.type.shape[0]
    BIAS_BYTES: gl.constexpr = BN * 4 if HAS_BIAS else 0
    K_BYTES: gl.constexpr = k_desc.block_type.nbytes + 128 + BIAS_BYTES
    V_BYTES: gl.constexpr = v_desc.block_type.nbytes
    for wg in gl.static_range(2):
        mbarrier.expect(q_full.index(wg), q_desc.block_type.nbytes)
        _load(q_desc, [head, (block * 2 + wg) * BM, 0], q_full.index(wg), q_s.index(wg))
    tile = _tile_of(0, tiles, LIVE, HAS_BIAS)
    previous = 0  # a value of its own: Triton carries no name round a loop that enters it as another name's alias
    slot = 0
    phase = 1
    for j in range(tiles):
        mbarrier.wait(empty.index(slot), phase)
        if j == 0:
            mbarrier.expect(full.index(slot), K_BYTES)
        else:
            mbarrier.expect(full.index(slot), K_BYTES + V_BYTES)
        _load(k_desc, [kv_head, tile * BN, 0], full.index(slot), k_s.index(slot))
        _load(scale_desc, [(kv_head * k_tiles + tile) * 4], full.index(slot), scale_s.index(slot))
        if HAS_BIAS:
            _load(bias_desc, [(bias_row * k_tiles + tile) * BN], full.index(slot), bias_s.index(slot))
        if j > 0:
            _load(v_desc, [b, h_kv, previous * BN, 0], full.index(slot), v_s.index(slot))
        previous = tile
        tile = _tile_of(gl.minimum(j + 1, tiles - 1), tiles, LIVE, HAS_BIAS)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    mbarrier.wait(empty.index(slot), phase)
    mbarrier.expect(full.index(slot), V_BYTES)
    _load(v_desc, [b, h_kv, previous * BN, 0], full.index(slot), v_s.index(slot))


@gluon.jit
def _scores(q, k, S: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr):
    """int8 [BM, D] x [BN, D] -> int32 [BM, BN], started."""
    zero = gl.zeros([BM, BN], gl.int32, layout=S)
    return warpgroup_mma(q, k.reshape([BN, D]).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _softmax(
    s, q_scale, k_scale, bias, rows, col, N, total, top,
    S: gl.constexpr, G: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, HAS_BIAS: gl.constexpr, MASKED: gl.constexpr,
    CAUSAL: gl.constexpr, ONLINE: gl.constexpr,
):  # fmt: skip
    """One tile of the softmax in log2 units: weights [BM, BN], row sums by thread [BM, 4], row maximum, decay.

    Keys {8j + 2t, 8j + 2t + 1} of a tile share a scale; they are what one thread holds, as [BM, BN / 8, 4, 2] shows.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    COL: gl.constexpr = gl.SliceLayout(0, S)
    s4 = s.reshape([BM, BN // 8, 4, 2])
    E: gl.constexpr = s4.type.layout
    scale = gl.expand_dims(gl.convert_layout(q_scale, gl.SliceLayout(1, G)), 1) * gl.expand_dims(
        k_scale.slice(0, 4).load(gl.SliceLayout(0, G)), 0
    )
    x = s4.to(gl.float32) * gl.convert_layout(gl.expand_dims(gl.expand_dims(scale, 1), 3), E)
    if HAS_BIAS:
        x += gl.convert_layout(gl.expand_dims(bias.load(COL), 0).reshape([1, BN // 8, 4, 2]), E)
    if MASKED:
        n = gl.expand_dims(col + gl.arange(0, BN, layout=COL), 0)
        keep = n < N
        if CAUSAL:
            keep = keep & (n <= gl.expand_dims(rows, 1))
        kept = gl.where(keep, gl.convert_layout(x.reshape([BM, BN]), S), float("-inf"))
        x = gl.convert_layout(kept.reshape([BM, BN // 8, 4, 2]), E)
    decay = top
    if ONLINE:
        if HAS_BIAS or MASKED:
            peak = gl.max(gl.max(gl.max(x, 3), 1), 1)
        else:
            # The scale is not negative: the order of the int8 scores is the order of the scores.
            peak = gl.max(gl.max(gl.max(s4, 3), 1).to(gl.float32) * scale, 1)
        new_top = gl.maximum(top, gl.convert_layout(peak, ROW))
        decay = gl.exp2(top - new_top)
        top = new_top
        top2 = gl.expand_dims(gl.convert_layout(top, gl.SliceLayout(1, G)), 1)
        x -= gl.convert_layout(gl.expand_dims(gl.expand_dims(top2, 1), 3), E)
        total *= gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, G)), 1)
    p = gl.exp2(x)
    total += gl.sum(gl.sum(p, 3), 1)
    return gl.convert_layout(p.reshape([BM, BN]), S), total, top, decay


@gluon.jit
def _step(
    j, slot, phase, acc, weights, total, top, q, q_scale, rows, SINK, M, N, tiles, masked,
    k_s, v_s, scale_s, bias_s, full, empty,
    S: gl.constexpr, G: gl.constexpr, P: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    HAS_BIAS: gl.constexpr, CAUSAL: gl.constexpr, ONLINE: gl.constexpr,
):  # fmt: skip
    """Scores of tile j, then P @ V of tile j - 1 with the softmax of tile j under it."""
    mbarrier.wait(full.index(slot), phase)
    s = _scores(q, k_s.index(slot), S, BM, BN, D)
    acc = warpgroup_mma(weights, v_s.index(slot).reshape([BN, D]), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    col = (tiles - 1 - j) * BN
    # Where BN is a program's 2 * BM rows, the diagonal crosses the first tile only; _attend has done that one.
    if CAUSAL and 2 * BM != BN:
        if j < masked:
            p, total, top, decay = _softmax(
                s, q_scale, scale_s.index(slot), bias_s.index(slot), rows, col, N, total, top,
                S, G, BM, BN, HAS_BIAS, True, CAUSAL, ONLINE,
            )  # fmt: skip
        else:
            p, total, top, decay = _softmax(
                s, q_scale, scale_s.index(slot), bias_s.index(slot), rows, col, N, total, top,
                S, G, BM, BN, HAS_BIAS, False, CAUSAL, ONLINE,
            )  # fmt: skip
    else:
        p, total, top, decay = _softmax(
            s, q_scale, scale_s.index(slot), bias_s.index(slot), rows, col, N, total, top,
            S, G, BM, BN, HAS_BIAS, False, CAUSAL, ONLINE,
        )  # fmt: skip
    if M < 0:
        # Never taken, but ptxas can't know: it would hoist the wait for P @ V above the exponentials.
        gl.store(SINK + gl.arange(0, BM, layout=gl.SliceLayout(1, G)), gl.max(total, 1))
    # The weights pass through the wait, so that their packing can't overwrite the operand of the product in flight.
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    mbarrier.arrive(empty.index(slot), count=1)
    if ONLINE:
        acc *= gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout)), 1)
    return acc, gl.convert_layout(p.to(v_s.dtype), P), total, top


@gluon.jit
def _attend(
    q, q_scale, rows, SINK, M, N, tiles, masked, k_s, v_s, scale_s, bias_s, full, empty,
    S: gl.constexpr, ACC: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    HAS_BIAS: gl.constexpr, CAUSAL: gl.constexpr, TAIL: gl.constexpr, ONLINE: gl.constexpr,
):  # fmt: skip
    """Walk the ring: P @ V [BM, D] before division, row sums [BM] and row maxima [BM] of one warpgroup."""
    STAGES: gl.constexpr = k_s.type.shape[0]
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    by_thread = gl.zeros([BM, BN], gl.float32, layout=S).reshape([BM, BN // 8, 4, 2])
    G: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, by_thread.type.layout))
    top = gl.full([BM], -1.0e30 if ONLINE else 0.0, gl.float32, layout=gl.SliceLayout(1, S))
    total = gl.zeros([BM, 4], gl.float32, layout=G)
    acc = gl.zeros([BM, D], gl.float32, layout=ACC)
    mbarrier.wait(full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=[_scores(q, k_s.index(0), S, BM, BN, D)])
    p, total, top, _decay = _softmax(
        s, q_scale, scale_s.index(0), bias_s.index(0), rows, (tiles - 1) * BN, N, total, top,
        S, G, BM, BN, HAS_BIAS, CAUSAL or TAIL, CAUSAL, ONLINE,
    )  # fmt: skip
    mbarrier.arrive(empty.index(0), count=1)
    weights = gl.convert_layout(p.to(v_s.dtype), P)
    slot = 1
    phase = 0
    for j in range(1, tiles):
        acc, weights, total, top = _step(
            j, slot, phase, acc, weights, total, top, q, q_scale, rows, SINK, M, N, tiles, masked,
            k_s, v_s, scale_s, bias_s, full, empty, S, G, P, BM, BN, D, HAS_BIAS, CAUSAL, ONLINE,
        )  # fmt: skip
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    mbarrier.wait(full.index(slot), phase)
    acc = warpgroup_mma(weights, v_s.index(slot).reshape([BN, D]), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, S)), top


@gluon.jit
def _write(
    acc, total, top, rows, out, lse, term, anchor, keep, M, s_om, s_lm,
    ACC: gl.constexpr, D: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Divide by the row sums and store; out, lse and term point at this head's first row."""
    empty = total == 0  # not "total > 0": NaN must stay NaN
    inverse = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, total))
    o = acc * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, ACC)), 1)
    m = gl.expand_dims(gl.convert_layout(rows, gl.SliceLayout(1, ACC)), 1)
    d = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, ACC)), 0)
    gl.store(out + m.to(gl.int64) * s_om + d, o.to(out.dtype.element_ty), mask=(m < M) & (d < HEAD_DIM))
    if HAS_LSE:
        value = (top + gl.log2(gl.where(empty, 1.0, total))) * 0.6931471805599453
        value += gl.load(term + rows, mask=rows < M, other=0.0) * keep + anchor
        gl.store(lse + rows.to(gl.int64) * s_lm, gl.where(empty, float("-inf"), value), mask=rows < M)


@gluon.jit
def _bound(q, q_scale, rows, K_NORM, M, k_tiles, BM: gl.constexpr, D: gl.constexpr):
    """Largest |score| (log2) that this warpgroup's rows can have: |q| times the largest |k| of the head."""
    L: gl.constexpr = gl.BlockedLayout([1, 16], [32 // (D // 16), D // 16], [4, 1], [1, 0])
    x = q.load(L).to(gl.float32)
    r = gl.convert_layout(rows, gl.SliceLayout(1, L))
    norm = gl.sqrt(gl.sum(x * x, 1)) * gl.load(q_scale + r, mask=r < M, other=0.0)
    T: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    t = gl.arange(0, 512, layout=T)
    largest = gl.zeros([512], gl.float32, layout=T)
    for start in range(0, k_tiles, 512):
        largest = gl.maximum(largest, gl.load(K_NORM + start + t, mask=start + t < k_tiles, other=0.0))
    return gl.max(norm, 0) * gl.max(largest, 0)


@gluon.jit
def _consumer(
    Q_SCALE, K_NORM, ANCHOR, LSE_TERM, OUT, LSE, q_s, k_s, v_s, scale_s, bias_s, q_full, full, empty,
    block, first, kv_head, k_tiles, M, N, tiles, masked, s_om, s_lm, limit,
    GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, HEAD_DIM: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_LSE: gl.constexpr, CAUSAL: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """One warpgroup: BM query rows of one head."""
    S: gl.constexpr = _accumulator(BN, 8)
    ACC: gl.constexpr = _accumulator(D, 16)
    rows = (block * 2 + GROUP) * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, S))
    q_scale = gl.load(Q_SCALE + first + rows, mask=rows < M, other=0.0)
    anchor = 0.0
    keep = 1.0
    if HAS_BIAS:
        anchor = gl.load(ANCHOR)
        keep = gl.load(ANCHOR + 1)
        q_scale *= keep
    mbarrier.wait(q_full.index(GROUP), 0)
    q8 = q_s.index(GROUP).reshape([BM, D])
    q = q8
    if D <= 128:  # the registers have room for it beside the accumulator
        q = q8.load(gl.DotOperandLayout(operand_index=0, parent=S, k_width=4))
    bound = _bound(q8, Q_SCALE + first, rows, K_NORM + kv_head * k_tiles, M, k_tiles, BM, D)
    if bound <= limit:
        acc, total, top = _attend(
            q, q_scale, rows, LSE, M, N, tiles, masked, k_s, v_s, scale_s, bias_s, full, empty,
            S, ACC, BM, BN, D, HAS_BIAS, CAUSAL, TAIL, False,
        )  # fmt: skip
        _write(
            acc, total, top, rows, OUT, LSE, LSE_TERM + first, anchor, keep, M, s_om, s_lm, ACC, D, HEAD_DIM, HAS_LSE
        )
    else:
        acc, total, top = _attend(
            q, q_scale, rows, LSE, M, N, tiles, masked, k_s, v_s, scale_s, bias_s, full, empty,
            S, ACC, BM, BN, D, HAS_BIAS, CAUSAL, TAIL, True,
        )  # fmt: skip
        _write(
            acc, total, top, rows, OUT, LSE, LSE_TERM + first, anchor, keep, M, s_om, s_lm, ACC, D, HEAD_DIM, HAS_LSE
        )


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


# Lengths and head counts are not specialised: no compilation for a length of 1 or of 16 * n.
@gluon.jit(do_not_specialize=["M", "N", "k_tiles", "heads", "group"])
def _attention(
    q_desc, k_desc, v_desc, scale_desc, bias_desc, Q_SCALE, K_NORM, LIVE, ANCHOR, LSE_TERM, OUT, LSE,
    M, N, k_tiles, heads, group, s_ob, s_oh, s_om, s_lb, s_lh, s_lm, s_bias_b, s_bias_h, limit,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_LSE: gl.constexpr, CAUSAL: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """One program 2 * BM query rows of one head: two warpgroups that share the keys and values of one producer warp."""
    block = gl.program_id(0)
    if CAUSAL:
        block = gl.num_programs(0) - 1 - block  # the longest first
    head = gl.program_id(1)
    b = head // heads
    h = head % heads
    h_kv = h // group
    kv_head = b * (heads // group) + h_kv
    bias_row = b * s_bias_b + h * s_bias_h
    tiles = k_tiles
    masked = 1
    if HAS_BIAS:
        LIVE += bias_row * (k_tiles + 1)
        ANCHOR += bias_row * 2
        tiles = gl.load(LIVE)
    if CAUSAL:
        tiles = gl.cdiv(gl.minimum(N, (block + 1) * 2 * BM), BN)
        masked = tiles - gl.minimum(block * 2 * BM, N) // BN
    first = head.to(gl.int64) * M
    OUT += b.to(gl.int64) * s_ob + h.to(gl.int64) * s_oh
    LSE += b.to(gl.int64) * s_lb + h.to(gl.int64) * s_lh
    FLOATS: gl.constexpr = scale_desc.layout
    q_s = gl.allocate_shared_memory(q_desc.dtype, [2] + q_desc.block_type.shape, q_desc.layout)  # noqa: RUF005
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)  # noqa: RUF005
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)  # noqa: RUF005
    scale_s = gl.allocate_shared_memory(gl.float32, [STAGES, 32], FLOATS)
    bias_s = gl.allocate_shared_memory(gl.float32, [STAGES, BN], FLOATS)
    q_full, full, empty = _barriers(STAGES)
    gl.warp_specialize([
        (_consumer, (Q_SCALE, K_NORM, ANCHOR, LSE_TERM, OUT, LSE, q_s, k_s, v_s, scale_s, bias_s, q_full, full, empty,
                     block, first, kv_head, k_tiles, M, N, tiles, masked, s_om, s_lm, limit,
                     0, BM, BN, D, HEAD_DIM, HAS_BIAS, HAS_LSE, CAUSAL, TAIL)),
        (_consumer, (Q_SCALE, K_NORM, ANCHOR, LSE_TERM, OUT, LSE, q_s, k_s, v_s, scale_s, bias_s, q_full, full, empty,
                     block, first, kv_head, k_tiles, M, N, tiles, masked, s_om, s_lm, limit,
                     1, BM, BN, D, HEAD_DIM, HAS_BIAS, HAS_LSE, CAUSAL, TAIL)),
        (_producer, (q_desc, k_desc, v_desc, scale_desc, bias_desc, q_s, k_s, v_s, scale_s, bias_s, q_full, full, empty,
                     LIVE, block, head, b, h_kv, kv_head, k_tiles, bias_row, tiles, BM, BN, HAS_BIAS)),
    ], [4, 1], [240, 24])  # fmt: skip


def _shared(shape: list[int], bits: int) -> gl.NVMMASharedLayout:
    """The layout that a TMA load of a block leaves in shared memory."""
    width = shape[-1] * bits // 8
    swizzle = 0 if len(shape) == 1 else min(128, width)
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=len(shape))


def _describe(tensor: torch.Tensor, block: list[int]) -> TensorDescriptor:
    layout = _shared(block, 8 * tensor.element_size())
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)


def attention(
    quantized: Quantized,
    value: torch.Tensor,
    config: Config,
    *,
    is_causal: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Run the kernel on `quantized` and value [B, Hkv, Lk, D] into `out` [B, H, Lq, D] and `lse` [B, H, Lq] (float32).

    `config` is the one that `quantized` was made with, `value` describable (see configs).  No checks here.
    """
    batch, heads, q_len, head_dim = out.shape
    kv_heads, kv_len = value.shape[1:3]
    padded, block_n = padded_head_dim(head_dim), config.block_n
    bias, scale = quantized.bias, quantized.key_scale.view(-1)
    unused = quantized.query_scale
    _attention[(triton.cdiv(q_len, config.block_m), batch * heads)](
        _describe(quantized.query.view(-1, q_len, padded), [1, _ROWS, padded]),
        _describe(quantized.key.view(-1, quantized.key.shape[2], padded), [1, block_n, padded]),
        _describe(value, [1, 1, block_n, padded]),
        _describe(scale, [_SCALES]),
        _describe(bias.view(-1) if bias is not None else scale, [block_n]),
        quantized.query_scale, quantized.key_norm,
        quantized.live if quantized.live is not None else unused,
        quantized.anchor if quantized.anchor is not None else unused,
        quantized.lse_term if quantized.lse_term is not None else unused,
        out, lse if lse is not None else unused,
        q_len, kv_len, quantized.key.shape[2] // block_n, heads, heads // kv_heads,
        *out.stride()[:3], *(lse.stride() if lse is not None else (0, 0, 0)),
        *(row_strides(bias) if bias is not None else (0, 0)), BOUND[value.dtype],
        BM=_ROWS, BN=block_n, D=padded, HEAD_DIM=head_dim, STAGES=config.num_stages, HAS_BIAS=bias is not None,
        HAS_LSE=lse is not None, CAUSAL=is_causal, TAIL=bias is None and kv_len % block_n != 0,
        num_warps=config.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
