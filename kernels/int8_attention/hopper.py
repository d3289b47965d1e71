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

from .bias import row_strides
from .configs import Config, padded_head_dim, value_columns
from .hopper_parts import (
    _accumulator,
    _bound,
    _by_group,
    _by_thread,
    _decayed,
    _lowered,
    _packed,
    _product,
    _softmax,
    _started,
    _write_parts,
)
from .hopper_ring import Traits, _barriers, _buffer, _producer, _turns
from .launch import launch
from .quantize import Quantized
from .quantize_value import QuantizedValue

# exp2 of +-60 summed over 2^17 keys leaves a float32 room for values up to 2^50; float16 P ends at 2^16 and 2^-14.
BOUND = {torch.bfloat16: 60.0, torch.float16: 12.0, torch.float8_e4m3fn: 60.0}
_SCALES = 32  # floats that one TMA load of key scales brings (its unit is 128 bytes); the first 4 are the tile's
_ROWS = 64  # query rows of a warpgroup


@gluon.jit
def _step(
    j, own, place, slot, phase, s, acc, rest, packed, total, top, q, q_scale, rows, SINK, M, N, tiles, masked, ring,
    T: gl.constexpr, P: gl.constexpr, ONLINE: gl.constexpr, GROUP: gl.constexpr, OPENS: gl.constexpr,
):  # fmt: skip
    """Scores of tile j, then P @ V of tile j - 1 with the softmax of tile j under it.

    AHEAD: the scores of tile j + 1 are made under the softmax, too; those of tile j are s.
    own: where the scale of tile j lies.  place: where the keys are whose scores are made here, and values j - 1.
    OPENS: whether that is a new slot, and that of `own` is read no more.
    """
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
    slot += 1
    if slot == STAGES:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def _attend(
    q, q_scale, rows, SINK, M, N, tiles, masked, ring, T: gl.constexpr, ONLINE: gl.constexpr, GROUP: gl.constexpr
):
    """Walk the ring: P @ V [BM, COLUMNS] and [BM, REST] before division, row sums and tops [BM] of one warpgroup."""
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
                    j, before * 2 + 1, slot * 2, slot, phase, odd, acc, rest, packed, total, top, q, q_scale, rows,
                    SINK, M, N, tiles, masked, ring, T, P, ONLINE, GROUP, True,
                )  # fmt: skip
            else:
                odd, acc, rest, packed, total, top = _step(
                    j, slot * 2, slot * 2 + 1, slot, phase, even, acc, rest, packed, total, top, q, q_scale, rows,
                    SINK, M, N, tiles, masked, ring, T, P, ONLINE, GROUP, False,
                )  # fmt: skip
                before = slot
                slot, phase = _next(slot, phase, T.STAGES)
        else:
            _none, acc, rest, packed, total, top = _step(
                j, slot, slot, slot, phase, s, acc, rest, packed, total, top, q, q_scale, rows, SINK, M, N, tiles,
                masked, ring, T, P, ONLINE, GROUP, True,
            )  # fmt: skip
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
    if bound <= limit:
        acc, rest, total, top = _attend(q, q_scale, rows, LSE, M, N, tiles, masked, ring, T, False, GROUP)
        _write_parts(acc, rest, total, top, rows, OUT, LSE, V_SCALE, LSE_TERM + first, anchor, keep, M, s_om, s_lm, T)
    else:
        acc, rest, total, top = _attend(q, q_scale, rows, LSE, M, N, tiles, masked, ring, T, True, GROUP)
        _write_parts(acc, rest, total, top, rows, OUT, LSE, V_SCALE, LSE_TERM + first, anchor, keep, M, s_om, s_lm, T)


# Lengths and head counts are not specialised: no compilation for a length of 1 or of 16 * n.
@gluon.jit(do_not_specialize=["M", "N", "k_tiles", "heads", "group"])
def _attention(
    q_desc, k_desc, v_desc, rest_desc, scale_desc, bias_desc,
    Q_SCALE, K_NORM, LIVE, ANCHOR, LSE_TERM, V_SCALE, OUT, LSE,
    M, N, k_tiles, heads, group, s_ob, s_oh, s_om, s_lb, s_lh, s_lm, s_bias_b, s_bias_h, limit,
    T: gl.constexpr,
):  # fmt: skip
    """One program T.CONSUMERS * T.BM query rows of one head: warpgroups that share what a producer warp loads."""
    ROWS: gl.constexpr = T.CONSUMERS * T.BM
    block = gl.program_id(0)
    if T.CAUSAL:
        block = gl.num_programs(0) - 1 - block  # the longest first
    head = gl.program_id(1)
    b = head // heads
    h = head % heads
    h_kv = h // group
    kv_head = b * (heads // group) + h_kv
    bias_row = b * s_bias_b + h * s_bias_h
    tiles = k_tiles
    masked = 1
    if T.HAS_BIAS:
        LIVE += bias_row * (k_tiles + 1)
        ANCHOR += bias_row * 2
        tiles = gl.load(LIVE)
    if T.CAUSAL:
        tiles = gl.cdiv(gl.minimum(N, (block + 1) * ROWS), T.BN)
        masked = tiles - gl.minimum(block * ROWS, N) // T.BN
    first = head.to(gl.int64) * M
    OUT += b.to(gl.int64) * s_ob + h.to(gl.int64) * s_oh
    LSE += b.to(gl.int64) * s_lb + h.to(gl.int64) * s_lh
    if T.FP8:
        V_SCALE += kv_head * T.D
    q_s = _buffer(q_desc, T.CONSUMERS)
    q_full, full, empty = _barriers(T.STAGES, T.CONSUMERS)
    turn = full
    if T.TURNS:
        turn = _turns(T.CONSUMERS)
    TILES: gl.constexpr = T.STAGES * (1 + T.AHEAD)
    k_s = _buffer(k_desc, TILES)
    v_s = _buffer(v_desc, TILES)
    rest_s = v_s
    if T.REST > 0:
        rest_s = _buffer(rest_desc, TILES)
    scale_s = _buffer(scale_desc, TILES)
    bias_s = scale_s
    if T.HAS_BIAS:
        bias_s = _buffer(bias_desc, TILES)
    ring = (k_s, v_s, rest_s, scale_s, bias_s, full, empty, turn)
    work = (Q_SCALE, K_NORM, ANCHOR, LSE_TERM, V_SCALE, OUT, LSE, q_s, q_full, ring,
            block, first, kv_head, k_tiles, M, N, tiles, masked, s_om, s_lm, limit)  # fmt: skip
    loads = (q_desc, k_desc, v_desc, rest_desc, scale_desc, bias_desc, q_s, q_full, ring,
             LIVE, block, head, b, h_kv, kv_head, k_tiles, bias_row, tiles)  # fmt: skip
    # The registers of a thread: what an SM has, shared by the warpgroups; 24 do for the producer.
    if T.CONSUMERS == 1:
        gl.warp_specialize([(_consumer, (work, T, 0)), (_producer, (loads, T))], [1], [24])
    elif T.CONSUMERS == 2:
        gl.warp_specialize(
            [(_consumer, (work, T, 0)), (_consumer, (work, T, 1)), (_producer, (loads, T))], [4, 1], [240, 24]
        )
    elif T.CONSUMERS == 3:
        gl.warp_specialize(
            [(_consumer, (work, T, 0)), (_consumer, (work, T, 1)), (_consumer, (work, T, 2)), (_producer, (loads, T))],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_consumer, (work, T, 0)), (_consumer, (work, T, 1)), (_consumer, (work, T, 2)), (_consumer, (work, T, 3)),
             (_producer, (loads, T))],
            [4, 4, 4, 1], [112, 112, 112, 24],
        )  # fmt: skip


def _shared(shape: list[int], bits: int) -> gl.NVMMASharedLayout:
    """The layout that a TMA load of a block leaves in shared memory."""
    width = shape[-1] * bits // 8
    swizzle = 0 if len(shape) == 1 else min(128, width)
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=len(shape))


def _describe(tensor: torch.Tensor, block: list[int]) -> TensorDescriptor:
    layout = _shared(block, 8 * tensor.element_size())
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)


def parts(head_dim: int) -> tuple[int, int]:
    """Columns of the first part of P @ V, a power of two, and of the second: none but for 96 = 64 + 32."""
    columns = value_columns(head_dim)
    return (64, 32) if columns == 96 else (columns, 0)


def traits(
    config: Config, head_dim: int, *, fp8: bool, high: bool, has_bias: bool, has_lse: bool, causal: bool, tail: bool
) -> Traits:
    """What the kernel is compiled for."""
    padded = padded_head_dim(head_dim)
    columns, rest = parts(head_dim)
    return Traits(
        BM=_ROWS, BN=config.block_n, D=padded, HEAD_DIM=head_dim, COLUMNS=columns, REST=rest,
        STAGES=config.num_stages, CONSUMERS=config.block_m // _ROWS,
        Q_REGISTERS=padded <= 128 and config.block_m * min(config.block_n, 96) < 256 * _ROWS,
        AS_FLOAT=config.as_float > 0 and not (high or has_bias),
        HAS_BIAS=has_bias, HAS_LSE=has_lse, CAUSAL=causal, TAIL=tail, HIGH=high, FP8=fp8,
        # It ends at 2^-126 and loses NaN: that of a key shows in those that share its scale.
        POLYNOMIAL=0 if has_bias or high else config.polynomial, TURNS=config.turns > 0 and config.block_m > _ROWS,
        AHEAD=config.ahead > 0,
    )  # fmt: skip


def blocks(config: Config, head_dim: int, fp8: bool, high: bool) -> dict[str, list[int]]:
    """Shapes of the blocks that TMA loads, by descriptor."""
    padded, keys = padded_head_dim(head_dim), config.block_n
    columns, rest = parts(head_dim)
    rest = rest or columns
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
    launch(
        _attention, (triton.cdiv(q_len, config.block_m), batch * heads),
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
        T=traits(
            config, head_dim, fp8=fp8, high=high, has_bias=bias is not None, has_lse=lse is not None, causal=is_causal,
            tail=bias is None and kv_len % config.block_n != 0,
        ),
        num_warps=config.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
