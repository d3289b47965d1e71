"""int8 attention forward kernel for Hopper (sm_90) in Gluon: softmax(scale * Q K^T + bias) V over quantised Q and K.

FlashAttention-3's schedule (Shah et al., 2024): one warp loads tiles by TMA; warpgroups of 64 query rows each start the
scores of tile i before P @ V of tile i-1, and do the exponentials of tile i under it.

No running maximum where none is needed: |scores| <= |q| * max|k| (Cauchy-Schwarz) is known from the quantised operands,
and where that is at most BOUND (log2) exp2(score) can neither overflow nor vanish in float32 or bfloat16. Such a
warpgroup (nearly all of them) skips the maximum, the shuffles and the rescaling; the others run the online softmax.
With P in e4m3, whose range is small, such a warpgroup lowers its rows when what a thread sums up leaves that range.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .configs import Config, padded_head_dim
from .hopper_parts import (
    _E4M3_MAX,
    _barriers,
    _bound,
    _by_group,
    _largest,
    _lowered,
    _packed,
    _pause,
    _producer,
    _product,
    _scores,
    _softmax,
    _write_columns,
    accumulator,
    first_columns,
)
from .quantize import Quantized, row_strides
from .quantize_value import QuantizedValue

# exp2 of +-60 summed over 2^17 keys leaves a float32 room for values up to 2^50; float16 P ends at 2^16 and 2^-14.
# e4m3 P starts from at least 2^-60, so that no weight that has yet to be lowered overflows a float32.
BOUND = {torch.bfloat16: 60.0, torch.float16: 12.0, torch.float8_e4m3fn: 60.0}
PAUSE = gl.constexpr(600)
_LOWEST = gl.constexpr(-60.0)
_SCALES = 32  # floats that one TMA load of key scales brings (its unit is 128 bytes); the first 4 are the tile's
_ROWS = 64  # query rows of a warpgroup


@gluon.jit
def _step(
    j, slot, ahead, phase, s, acc, rest, packed, total, top, q, q_scale, rows, SINK, M, N, tiles, masked, ring,
    S: gl.constexpr, P: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    HAS_BIAS: gl.constexpr, CAUSAL: gl.constexpr, ONLINE: gl.constexpr, HIGH: gl.constexpr, SPLIT: gl.constexpr,
    ROWS: gl.constexpr, AHEAD: gl.constexpr, GROUP: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Scores of tile j + AHEAD, then P @ V of tile j - 1, with the softmax of tile j under it.

    slot: of tile j; ahead, phase: of tile j + AHEAD; s: scores of tile j if AHEAD.
    """
    k_s, v_s, rest_s, scale_s, bias_s, full, empty, turn = ring
    FP8: gl.constexpr = v_s.dtype == gl.float8e4nv
    mbarrier.wait(full.index(ahead), phase)
    started = _scores(q, k_s.index(ahead), S, BM, BN, D)
    acc = _product(packed, v_s.index(ahead), acc, P, BM, BN)
    if SPLIT:
        rest = _product(packed, rest_s.index(ahead), rest, P, BM, BN)
    if not AHEAD:
        s = warpgroup_mma_wait(1 + SPLIT, deps=[started])
    if TURNS == 2:
        mbarrier.wait(turn.index(GROUP), j & 1)
    col = (tiles - 1 - j) * BN
    # Where BN is a program's ROWS query rows, the diagonal crosses the first tile only; _attend has done that one.
    if CAUSAL and ROWS != BN:
        if j < masked:
            p, part, top, decay = _softmax(
                s, q_scale, scale_s.index(slot), bias_s.index(slot), rows, col, N, top,
                S, BM, BN, HAS_BIAS, True, CAUSAL, ONLINE, HIGH, FP8,
            )  # fmt: skip
        else:
            p, part, top, decay = _softmax(
                s, q_scale, scale_s.index(slot), bias_s.index(slot), rows, col, N, top,
                S, BM, BN, HAS_BIAS, False, CAUSAL, ONLINE, HIGH, FP8,
            )  # fmt: skip
    else:
        p, part, top, decay = _softmax(
            s, q_scale, scale_s.index(slot), bias_s.index(slot), rows, col, N, top,
            S, BM, BN, HAS_BIAS, False, CAUSAL, ONLINE, HIGH, FP8,
        )  # fmt: skip
    E: gl.constexpr = p.type.layout
    if ONLINE:
        total *= _by_group(decay, E)
    elif FP8:  # noqa: SIM102
        largest = _largest(part, BM)
    if M < 0:
        # Never taken, but ptxas can't know: it would hoist the wait for P @ V above the exponentials.
        gl.store(SINK + gl.arange(0, BM, layout=gl.SliceLayout(1, part.type.layout)), gl.max(part, 1))
    if TURNS == 2:
        mbarrier.arrive(turn.index((GROUP + 1) % (ROWS // BM)), count=1)
    # The weights pass through the wait, so that their packing can't overwrite the operand of the product in flight.
    if SPLIT and AHEAD:
        acc, rest, p, s = warpgroup_mma_wait(0, deps=[acc, rest, p, started])
    elif SPLIT:
        acc, rest, p = warpgroup_mma_wait(0, deps=[acc, rest, p])
    elif AHEAD:
        acc, p, s = warpgroup_mma_wait(0, deps=[acc, p, started])
    else:
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    mbarrier.arrive(empty.index(slot), count=1)
    if ONLINE:
        acc, rest = _decayed(acc, rest, decay, SPLIT)
    elif FP8:  # noqa: SIM102
        if largest > _E4M3_MAX:
            p, part, top, decay = _lowered(p, part, top, 0.0)
            total *= _by_group(decay, E)
            acc, rest = _decayed(acc, rest, decay, SPLIT)
    packed = _packed(p, v_s.dtype, S, P, BM, BN)
    if not AHEAD:
        s = 0
    return s, acc, rest, packed, total + part, top


@gluon.jit
def _decayed(acc, rest, decay, SPLIT: gl.constexpr):
    acc *= gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout)), 1)
    if SPLIT:
        rest *= gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, rest.type.layout)), 1)
    return acc, rest


@gluon.jit
def _attend(
    q, q_scale, rows, SINK, M, N, tiles, masked, ring,
    S: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, HAS_BIAS: gl.constexpr,
    CAUSAL: gl.constexpr, TAIL: gl.constexpr, ONLINE: gl.constexpr, HIGH: gl.constexpr, COLUMNS: gl.constexpr,
    REST: gl.constexpr, ROWS: gl.constexpr, AHEAD: gl.constexpr, GROUP: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Walk the ring: P @ V [BM, COLUMNS] and [BM, REST] before division, row sums and tops [BM] of one warpgroup."""
    k_s, v_s, rest_s, scale_s, bias_s, full, empty, turn = ring
    STAGES: gl.constexpr = k_s.type.shape[0]
    FP8: gl.constexpr = v_s.dtype == gl.float8e4nv
    BITS: gl.constexpr = v_s.dtype.primitive_bitwidth
    ACC: gl.constexpr = accumulator(COLUMNS, BITS)
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=32 // BITS)
    top = gl.full([BM], -1.0e30 if ONLINE else 0.0, gl.float32, layout=gl.SliceLayout(1, S))
    acc = gl.zeros([BM, COLUMNS], gl.float32, layout=ACC)
    rest = 0
    if REST > 0:
        rest = gl.zeros([BM, REST], gl.float32, layout=accumulator(REST, BITS))
    mbarrier.wait(full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=[_scores(q, k_s.index(0), S, BM, BN, D)])
    if TURNS == 2:
        mbarrier.wait(turn.index(GROUP), 0)
    if TURNS == 1 and GROUP > 0:
        _pause(tiles, PAUSE * GROUP)
    p, total, top, _decay = _softmax(
        s, q_scale, scale_s.index(0), bias_s.index(0), rows, (tiles - 1) * BN, N, top,
        S, BM, BN, HAS_BIAS, CAUSAL or TAIL, CAUSAL, ONLINE, HIGH, FP8,
    )  # fmt: skip
    if FP8 and not ONLINE:
        p, total, top, _decay = _lowered(p, total, top, _LOWEST)
    if TURNS == 2:
        mbarrier.arrive(turn.index((GROUP + 1) % (ROWS // BM)), count=1)
    mbarrier.arrive(empty.index(0), count=1)
    packed = _packed(p, v_s.dtype, S, P, BM, BN)
    s = 0
    if AHEAD:
        mbarrier.wait(full.index(1), 0)
        s = warpgroup_mma_wait(0, deps=[_scores(q, k_s.index(1), S, BM, BN, D)])
    slot = 1
    ahead = 1 + AHEAD
    phase = 0
    for j in range(1, tiles):
        s, acc, rest, packed, total, top = _step(
            j, slot, ahead, phase, s, acc, rest, packed, total, top, q, q_scale, rows, SINK, M, N, tiles, masked, ring,
            S, P, BM, BN, D, HAS_BIAS, CAUSAL, ONLINE, HIGH, REST > 0, ROWS, AHEAD, GROUP, TURNS,
        )  # fmt: skip
        slot = ahead
        ahead += 1
        if ahead == STAGES:
            ahead = 0
            phase ^= 1
        if not AHEAD:
            slot = ahead
    mbarrier.wait(full.index(ahead), phase)
    acc = _product(packed, v_s.index(ahead), acc, P, BM, BN)
    if REST > 0:
        rest = _product(packed, rest_s.index(ahead), rest, P, BM, BN)
        acc, rest = warpgroup_mma_wait(0, deps=[acc, rest])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, rest, gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, S)), top


@gluon.jit
def _write(
    acc, rest, total, top, rows, out, lse, v_scale, term, anchor, keep, M, s_om, s_lm,
    HEAD_DIM: gl.constexpr, HAS_LSE: gl.constexpr, FP8: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Divide by the row sums and store; out, lse, v_scale and term point at this head's first."""
    empty = total == 0  # not "total > 0": NaN must stay NaN
    inverse = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, total))
    _write_columns(acc, inverse, v_scale, rows, out, M, s_om, 0, HEAD_DIM, FP8)
    if SPLIT:
        _write_columns(rest, inverse, v_scale, rows, out, M, s_om, acc.type.shape[1], HEAD_DIM, FP8)
    if HAS_LSE:
        value = (top + gl.log2(gl.where(empty, 1.0, total))) * 0.6931471805599453
        value += gl.load(term + rows, mask=rows < M, other=0.0) * keep + anchor
        gl.store(lse + rows.to(gl.int64) * s_lm, gl.where(empty, float("-inf"), value), mask=rows < M)


@gluon.jit
def _consumer(
    work,
    GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, HEAD_DIM: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_LSE: gl.constexpr, CAUSAL: gl.constexpr, TAIL: gl.constexpr, HIGH: gl.constexpr,
    COLUMNS: gl.constexpr, REST: gl.constexpr, AHEAD: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """One warpgroup: BM query rows of one head."""
    Q_SCALE, K_NORM, ANCHOR, LSE_TERM, V_SCALE, OUT, LSE, q_s, q_full, ring = work[:10]
    block, first, kv_head, k_tiles, M, N, tiles, masked, s_om, s_lm, limit = work[10:]
    S: gl.constexpr = accumulator(BN, 8)
    FP8: gl.constexpr = ring[1].dtype == gl.float8e4nv
    ROWS: gl.constexpr = q_s.type.shape[0] * BM
    rows = block * ROWS + GROUP * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, S))
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
    if D <= 128 and not AHEAD and ROWS * BN < 192 * 128 and ROWS < 256:  # the registers have room for it
        q = q8.load(gl.DotOperandLayout(operand_index=0, parent=S, k_width=4))
    bound = _bound(q8, Q_SCALE + first, rows, K_NORM + kv_head * k_tiles, M, k_tiles, BM, D)
    if bound <= limit:
        acc, rest, total, top = _attend(
            q, q_scale, rows, LSE, M, N, tiles, masked, ring,
            S, BM, BN, D, HAS_BIAS, CAUSAL, TAIL, False, HIGH, COLUMNS, REST, ROWS, AHEAD, GROUP, TURNS,
        )  # fmt: skip
        _write(
            acc, rest, total, top, rows, OUT, LSE, V_SCALE, LSE_TERM + first, anchor, keep, M, s_om, s_lm,
            HEAD_DIM, HAS_LSE, FP8, REST > 0,
        )  # fmt: skip
    else:
        acc, rest, total, top = _attend(
            q, q_scale, rows, LSE, M, N, tiles, masked, ring,
            S, BM, BN, D, HAS_BIAS, CAUSAL, TAIL, True, HIGH, COLUMNS, REST, ROWS, AHEAD, GROUP, TURNS,
        )  # fmt: skip
        _write(
            acc, rest, total, top, rows, OUT, LSE, V_SCALE, LSE_TERM + first, anchor, keep, M, s_om, s_lm,
            HEAD_DIM, HAS_LSE, FP8, REST > 0,
        )  # fmt: skip


# Lengths and head counts are not specialised: no compilation for a length of 1 or of 16 * n.
@gluon.jit(do_not_specialize=["M", "N", "k_tiles", "heads", "group"])
def _attention(
    q_desc, k_desc, v_desc, rest_desc, scale_desc, bias_desc,
    Q_SCALE, K_NORM, LIVE, ANCHOR, LSE_TERM, V_SCALE, OUT, LSE,
    M, N, k_tiles, heads, group, s_ob, s_oh, s_om, s_lb, s_lh, s_lm, s_bias_b, s_bias_h, limit,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_LSE: gl.constexpr, CAUSAL: gl.constexpr, TAIL: gl.constexpr,
    HIGH: gl.constexpr, AHEAD: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """One program CONSUMERS * BM query rows of one head: warpgroups that share what a producer warp loads."""
    ROWS: gl.constexpr = CONSUMERS * BM
    FP8: gl.constexpr = v_desc.dtype == gl.float8e4nv
    COLUMNS: gl.constexpr = first_columns(HEAD_DIM)
    REST: gl.constexpr = 32 if COLUMNS < HEAD_DIM else 0
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
        tiles = gl.cdiv(gl.minimum(N, (block + 1) * ROWS), BN)
        masked = tiles - gl.minimum(block * ROWS, N) // BN
    first = head.to(gl.int64) * M
    OUT += b.to(gl.int64) * s_ob + h.to(gl.int64) * s_oh
    LSE += b.to(gl.int64) * s_lb + h.to(gl.int64) * s_lh
    if FP8:
        V_SCALE += kv_head * D
    FLOATS: gl.constexpr = scale_desc.layout
    q_s = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS] + q_desc.block_type.shape, q_desc.layout)  # noqa: RUF005
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)  # noqa: RUF005
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)  # noqa: RUF005
    rest_s = v_s
    if REST > 0:
        rest_s = gl.allocate_shared_memory(
            rest_desc.dtype, [STAGES] + rest_desc.block_type.shape, rest_desc.layout  # noqa: RUF005
        )  # fmt: skip
    scale_s = gl.allocate_shared_memory(gl.float32, [STAGES] + scale_desc.block_type.shape, FLOATS)  # noqa: RUF005
    bias_s = gl.allocate_shared_memory(gl.float32, [STAGES, BN], FLOATS)
    q_full, full, empty, turn = _barriers(STAGES, CONSUMERS)
    ring = (k_s, v_s, rest_s, scale_s, bias_s, full, empty, turn)
    # One tuple for what differs at run time: a name for constants would make values of them.
    work = (Q_SCALE, K_NORM, ANCHOR, LSE_TERM, V_SCALE, OUT, LSE, q_s, q_full, ring,
            block, first, kv_head, k_tiles, M, N, tiles, masked, s_om, s_lm, limit)  # fmt: skip
    producer = (q_desc, k_desc, v_desc, rest_desc, scale_desc, bias_desc, q_s, q_full, ring,
                LIVE, block, head, b, h_kv, kv_head, k_tiles, bias_row, tiles)  # fmt: skip
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_consumer, (work, 0, BM, BN, D, HEAD_DIM, HAS_BIAS, HAS_LSE, CAUSAL, TAIL, HIGH, COLUMNS, REST, AHEAD, TURNS)),
            (_producer, (producer, BM, BN, HAS_BIAS, HIGH, FP8, REST > 0, AHEAD)),
        ], [1], [24])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (work, 0, BM, BN, D, HEAD_DIM, HAS_BIAS, HAS_LSE, CAUSAL, TAIL, HIGH, COLUMNS, REST, AHEAD, TURNS)),
            (_consumer, (work, 1, BM, BN, D, HEAD_DIM, HAS_BIAS, HAS_LSE, CAUSAL, TAIL, HIGH, COLUMNS, REST, AHEAD, TURNS)),
            (_producer, (producer, BM, BN, HAS_BIAS, HIGH, FP8, REST > 0, AHEAD)),
        ], [4, 1], [240, 24])  # fmt: skip
    elif CONSUMERS == 4:
        gl.warp_specialize([
            (_consumer, (work, 0, BM, BN, D, HEAD_DIM, HAS_BIAS, HAS_LSE, CAUSAL, TAIL, HIGH, COLUMNS, REST, AHEAD, TURNS)),
            (_consumer, (work, 1, BM, BN, D, HEAD_DIM, HAS_BIAS, HAS_LSE, CAUSAL, TAIL, HIGH, COLUMNS, REST, AHEAD, TURNS)),
            (_consumer, (work, 2, BM, BN, D, HEAD_DIM, HAS_BIAS, HAS_LSE, CAUSAL, TAIL, HIGH, COLUMNS, REST, AHEAD, TURNS)),
            (_consumer, (work, 3, BM, BN, D, HEAD_DIM, HAS_BIAS, HAS_LSE, CAUSAL, TAIL, HIGH, COLUMNS, REST, AHEAD, TURNS)),
            (_producer, (producer, BM, BN, HAS_BIAS, HIGH, FP8, REST > 0, AHEAD)),
        ], [4, 4, 4, 1], [112, 112, 112, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (work, 0, BM, BN, D, HEAD_DIM, HAS_BIAS, HAS_LSE, CAUSAL, TAIL, HIGH, COLUMNS, REST, AHEAD, TURNS)),
            (_consumer, (work, 1, BM, BN, D, HEAD_DIM, HAS_BIAS, HAS_LSE, CAUSAL, TAIL, HIGH, COLUMNS, REST, AHEAD, TURNS)),
            (_consumer, (work, 2, BM, BN, D, HEAD_DIM, HAS_BIAS, HAS_LSE, CAUSAL, TAIL, HIGH, COLUMNS, REST, AHEAD, TURNS)),
            (_producer, (producer, BM, BN, HAS_BIAS, HIGH, FP8, REST > 0, AHEAD)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip


def _shared(shape: list[int], bits: int) -> gl.NVMMASharedLayout:
    """The layout that a TMA load of a block leaves in shared memory."""
    width = shape[-1] * bits // 8
    swizzle = 0 if len(shape) == 1 else min(128, width)
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=len(shape))


def _describe(tensor: torch.Tensor, block: list[int]) -> TensorDescriptor:
    layout = _shared(block, 8 * tensor.element_size())
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)


def blocks(config: Config, head_dim: int, fp8: bool, high: bool) -> dict[str, list[int]]:
    """Shapes of the blocks that TMA loads, by descriptor."""
    padded, keys, columns = padded_head_dim(head_dim), config.block_n, first_columns(head_dim)
    rest = 32 if columns < head_dim else columns
    return {
        "q_desc": [1, _ROWS, padded],
        "k_desc": [1, keys, padded],
        "v_desc": [1, 1, columns, keys] if fp8 else [1, 1, keys, columns],
        "rest_desc": [1, 1, rest, keys] if fp8 else [1, 1, keys, rest],
        "scale_desc": [keys if high else _SCALES],
        "bias_desc": [keys],
    }


def attention(
    quantized: Quantized,
    value: torch.Tensor | QuantizedValue,
    config: Config,
    *,
    is_causal: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    online: bool = False,
) -> None:
    """Run the kernel on `quantized` and value [B, Hkv, Lk, D] into `out` [B, H, Lq, D] and `lse` [B, H, Lq] (float32).

    `config` is the one that `quantized` was made with, `value` describable (see configs) or quantised, which makes
    P @ V an fp8 one.  online: keep a running maximum everywhere, to compare with.  No checks here.
    """
    batch, heads, q_len, head_dim = out.shape
    fp8 = isinstance(value, QuantizedValue)
    values = value.value if isinstance(value, QuantizedValue) else value
    kv_heads, padded_len = quantized.key.shape[1:3]
    kv_len = quantized.kv_len
    bias, scale = quantized.bias, quantized.key_scale
    unused = quantized.query_scale
    high = scale.shape[-1] == padded_len
    block = blocks(config, head_dim, fp8, high)
    tensors = {
        "q_desc": quantized.query.view(-1, *quantized.query.shape[2:]),
        "k_desc": quantized.key.view(-1, *quantized.key.shape[2:]),
        "v_desc": values,
        "rest_desc": values,
        "scale_desc": scale.view(-1),
        "bias_desc": bias.view(-1) if bias is not None else scale.view(-1),
    }
    _attention[(triton.cdiv(q_len, config.consumers * _ROWS), batch * heads)](
        *(_describe(tensors[name], block[name]) for name in tensors),
        quantized.query_scale, quantized.key_norm,
        quantized.live if quantized.live is not None else unused,
        quantized.anchor if quantized.anchor is not None else unused,
        quantized.lse_term if quantized.lse_term is not None else unused,
        value.scale if isinstance(value, QuantizedValue) else unused,
        out, lse if lse is not None else unused,
        q_len, kv_len, padded_len // config.block_n, heads, heads // kv_heads,
        *out.stride()[:3], *(lse.stride() if lse is not None else (0, 0, 0)),
        *(row_strides(bias) if bias is not None else (0, 0)), -1.0 if online else BOUND[values.dtype],
        BM=_ROWS, BN=config.block_n, D=padded_head_dim(head_dim), HEAD_DIM=head_dim, STAGES=config.num_stages,
        CONSUMERS=config.consumers, HAS_BIAS=bias is not None, HAS_LSE=lse is not None, CAUSAL=is_causal,
        TAIL=bias is None and kv_len % config.block_n != 0, HIGH=high, AHEAD=config.ahead, TURNS=config.turns,
        num_warps=config.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
