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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .bias import row_strides
from .configs import Config, padded_head_dim, value_columns
from .hopper_ring import Traits, _barriers, _buffer, _producer, _turns
from .hopper_steps import _consumer
from .launch import launch
from .quantize import Quantized
from .quantize_value import QuantizedValue

# exp2 of +-60 summed over 2^17 keys leaves a float32 room for values up to 2^50; float16 P ends at 2^16 and 2^-14.
BOUND = {torch.bfloat16: 60.0, torch.float16: 12.0, torch.float8_e4m3fn: 60.0}
_SCALES = 32  # floats that one TMA load of key scales brings (its unit is 128 bytes); the first 4 are the tile's
_ROWS = 64  # query rows of a warpgroup


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
    k_s = _buffer(k_desc, T.STAGES)
    v_s = _buffer(v_desc, T.STAGES)
    rest_s = v_s
    if T.REST > 0:
        rest_s = _buffer(rest_desc, T.STAGES)
    scale_s = _buffer(scale_desc, T.STAGES)
    bias_s = scale_s
    if T.HAS_BIAS:
        bias_s = _buffer(bias_desc, T.STAGES)
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


def limit_of(dtype: torch.dtype, biased: bool) -> float:
    """The bound up to which rows need no maximum for values of `dtype`; -1 where all need one.

    Under a bias a key with the largest one may score -BOUND, and thousands of others, each too small for float16 then,
    count as much as that key.
    """
    return -1.0 if biased and dtype == torch.float16 else BOUND[dtype]


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
        *(row_strides(bias) if bias is not None else (0, 0)),
        -1.0 if online else limit_of(values.dtype, bias is not None),
        T=traits(
            config, head_dim, fp8=fp8, high=high, has_bias=bias is not None, has_lse=lse is not None, causal=is_causal,
            tail=bias is None and kv_len % config.block_n != 0,
        ),
        num_warps=config.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
