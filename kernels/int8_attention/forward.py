"""Portable int8 attention forward kernel (plain Triton): softmax(scale * Q K^T + bias) V over quantised Q and K.

FlashAttention's online softmax (Dao et al., 2022) with int8 scores, P @ V in 16 bits or e4m3, a bias per key and a
log-sum-exp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .bias import row_strides
from .configs import Config, padded_head_dim
from .launch import launch
from .limits import interpreting
from .quantize import Quantized
from .quantize_value import QuantizedValue, _e4m3

# e4m3 ends at 448: weights of up to 2^8 use nearly all of its range, and the row sum takes the factor out again.
FP8_PEAK = tl.constexpr(8.0)


@triton.jit
def _scores(q, K8, row, n0, DP: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr):
    """int8 [BM, DP] x [BN, DP] -> float32 [BM, BN], exact; `row` is this head's first row of K8."""
    if TMA:
        k = K8.load([row + n0, 0]).T
    else:
        start = K8 + (row + n0) * DP
        k = tl.load(start + tl.arange(0, BN)[None, :] * DP + tl.arange(0, DP)[:, None])
    return tl.dot(q, k).to(tl.float32)


@triton.jit
def _values(
    V, b, h, n0, N, s_vn,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, TAIL: tl.constexpr, TMA: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """[BN, DP] of V; zeros past head_dim and past the last key.  In e4m3 V is [B, Hkv, DP, NP], zeros included."""
    if FP8:
        if TMA:
            v = V.load([b, h, 0, n0]).reshape([DP, BN]).T
        else:
            v = tl.load(V + tl.arange(0, DP)[None, :].to(tl.int64) * s_vn + (n0 + tl.arange(0, BN))[:, None])
    elif TMA:
        v = V.load([b, h, n0, 0]).reshape([BN, DP])
    else:
        n = tl.arange(0, BN)[:, None]
        d = tl.arange(0, DP)[None, :]
        start = V + (n0 + n).to(tl.int64) * s_vn + d
        if TAIL:
            v = tl.load(start, mask=(n0 + n < N) & (d < D), other=0)
        elif D != DP:
            v = tl.load(start, mask=d < D, other=0)
        else:
            v = tl.load(start)
    return v


@triton.jit
def _step(
    acc, total, top, q, q_scale, rows, K8, K_SCALE, BIAS, V, k_row, b, h, n0, N, s_vn,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, HAS_BIAS: tl.constexpr,
    CAUSAL: tl.constexpr, TMA: tl.constexpr, PER_KEY: tl.constexpr, FP8: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One block of keys of the online softmax, in log2 units; `top` is the row maximum, `total` the row sum."""
    s = _scores(q, K8, k_row, n0, DP, BN, TMA)
    if PER_KEY:
        s *= tl.load(K_SCALE + n0 + tl.arange(0, BN))[None, :]
        scale = q_scale
    else:
        scale = q_scale * tl.load(K_SCALE + n0 // BN)
    if HAS_BIAS or MASKED:
        s = s * scale[:, None]
        n = n0 + tl.arange(0, BN)
        if HAS_BIAS:
            s += tl.load(BIAS + n)[None, :]
        if MASKED:
            keep = (n < N)[None, :]
            if CAUSAL:
                keep = keep & (n[None, :] <= rows[:, None])
            s = tl.where(keep, s, float("-inf"))
        peak = tl.max(s, 1)
    else:
        # The scale is not negative, so it can wait for the exponent, where it costs nothing.
        peak = tl.max(s, 1) * scale
    # In whole numbers a change of it rescales without rounding, and no weight's e4m3 depends on it.
    new_top = tl.maximum(top, tl.math.ceil(peak - FP8_PEAK) if FP8 else peak)
    if HAS_BIAS or MASKED:
        p = tl.math.exp2(s - new_top[:, None])
    else:
        p = tl.math.exp2(s * scale[:, None] - new_top[:, None])
    decay = tl.math.exp2(top - new_top)
    total = total * decay + tl.sum(p, 1)
    v = _values(V, b, h, n0, N, s_vn, D, DP, BN, MASKED, TMA, FP8)
    p = _e4m3(p, UPCAST) if FP8 else p.to(v.dtype)
    if UPCAST:
        # Triton's interpreter computes bf16 products wrongly.
        acc = tl.dot(p.to(tl.float32), v.to(tl.float32), acc * decay[:, None])
    else:
        acc = tl.dot(p, v, acc * decay[:, None])
    return acc, total, new_top


# Lengths and head counts are not specialised: no compilation for a length of 1 (ptxas 12.8 dies there) or of 16 * n.
@triton.jit(do_not_specialize=["M", "N", "NP", "heads", "group"])
def _attention(
    Q8, Q_SCALE, K8, K_SCALE, BIAS, ANCHOR, LSE_TERM, V, V_SCALE, OUT, LSE, M, N, NP, heads, group,
    s_vb, s_vh, s_vn, s_ob, s_oh, s_om, s_lb, s_lh, s_lm, s_bias_b, s_bias_h,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_LSE: tl.constexpr, CAUSAL: tl.constexpr, EVEN_N: tl.constexpr, TMA: tl.constexpr,
    PER_KEY: tl.constexpr, FP8: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program a block of BM query rows of one head.  Q8 [B*H, M, DP], K8 [B*Hkv, NP, DP], V [B, Hkv, N, D]."""
    block = tl.program_id(0)
    if CAUSAL:
        block = tl.num_programs(0) - 1 - block  # the longest first
    head = tl.program_id(1)
    b = head // heads
    h = head % heads
    h_kv = h // group
    kv_head = b * (heads // group) + h_kv
    k_row = kv_head * NP if TMA else kv_head.to(tl.int64) * NP
    K_SCALE += kv_head.to(tl.int64) * (NP if PER_KEY else NP // BN)
    rows = block * BM + tl.arange(0, BM)
    d = tl.arange(0, DP)
    inside = rows < M
    first = head.to(tl.int64) * M
    q = tl.load(Q8 + (first + rows)[:, None] * DP + d[None, :], mask=inside[:, None], other=0)
    q_scale = tl.load(Q_SCALE + first + rows, mask=inside, other=0.0)
    if HAS_BIAS:
        bias_row = b.to(tl.int64) * s_bias_b + h * s_bias_h
        BIAS += bias_row * NP
        ANCHOR += bias_row * 2
        q_scale *= tl.load(ANCHOR + 1)
    if not TMA:
        V += b.to(tl.int64) * s_vb + h_kv.to(tl.int64) * s_vh

    acc = tl.zeros([BM, DP], tl.float32)
    total = tl.zeros([BM], tl.float32)
    top = tl.full([BM], -1.0e30, tl.float32)
    end = N
    unmasked = N // BN * BN
    if CAUSAL:
        end = tl.minimum(N, (block + 1) * BM)
        unmasked = tl.minimum(unmasked, block * BM // BN * BN)
    for n0 in tl.range(0, unmasked, BN):
        acc, total, top = _step(
            acc, total, top, q, q_scale, rows, K8, K_SCALE, BIAS, V, k_row, b, h_kv, n0, N, s_vn,
            D, DP, BN, False, HAS_BIAS, CAUSAL, TMA, PER_KEY, FP8, UPCAST,
        )  # fmt: skip
    if CAUSAL or not EVEN_N:
        for n0 in tl.range(unmasked, end, BN):
            acc, total, top = _step(
                acc, total, top, q, q_scale, rows, K8, K_SCALE, BIAS, V, k_row, b, h_kv, n0, N, s_vn,
                D, DP, BN, True, HAS_BIAS, CAUSAL, TMA, PER_KEY, FP8, UPCAST,
            )  # fmt: skip

    empty = total == 0  # not "total > 0": NaN must stay NaN
    acc = acc * tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))[:, None]
    if FP8:
        acc *= tl.load(V_SCALE + kv_head * DP + d)[None, :]
    o_ptr = OUT + b.to(tl.int64) * s_ob + h.to(tl.int64) * s_oh + rows[:, None].to(tl.int64) * s_om + d[None, :]
    tl.store(o_ptr, acc.to(OUT.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])
    if HAS_LSE:
        lse = (top + tl.math.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453
        term = tl.load(LSE_TERM + first + rows, mask=inside, other=0.0)
        if HAS_BIAS:
            lse += tl.load(ANCHOR)
            term *= tl.load(ANCHOR + 1)
        l_ptr = LSE + b.to(tl.int64) * s_lb + h.to(tl.int64) * s_lh + rows.to(tl.int64) * s_lm
        tl.store(l_ptr, tl.where(empty, float("-inf"), lse + term), mask=inside)


def attention(
    quantized: Quantized,
    value: torch.Tensor | QuantizedValue,
    config: Config,
    *,
    is_causal: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Run the kernel on `quantized` and value [B, Hkv, Lk, D] into `out` [B, H, Lq, D] and `lse` [B, H, Lq] (float32).

    Any strides with a contiguous last axis; `config` is the one that `quantized` and a quantised value were made with.
    No checks here.
    """
    if config.gluon:
        from .hopper import attention as hopper_attention

        return hopper_attention(quantized, value, config, is_causal=is_causal, out=out, lse=lse)
    batch, heads, q_len, head_dim = out.shape
    padded = padded_head_dim(head_dim)
    bias, unused = quantized.bias, quantized.query_scale
    fp8 = isinstance(value, QuantizedValue)
    values = value.value if isinstance(value, QuantizedValue) else value
    kv_heads, kv_len = values.shape[1], quantized.kv_len
    v_strides = values.stride()[:3]
    key = quantized.key
    if config.tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        rows = key.view(-1, padded)
        key = TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [config.block_n, padded])
        block = [1, 1, padded, config.block_n] if fp8 else [1, 1, config.block_n, padded]
        values = TensorDescriptor(values, list(values.shape), list(values.stride()), block)
    launch(
        _attention, (triton.cdiv(q_len, config.block_m), batch * heads),
        quantized.query, quantized.query_scale, key, quantized.key_scale,
        bias if bias is not None else unused,
        quantized.anchor if quantized.anchor is not None else unused,
        quantized.lse_term if quantized.lse_term is not None else unused,
        values, value.scale if isinstance(value, QuantizedValue) else unused, out, lse if lse is not None else unused,
        q_len, kv_len, quantized.key.shape[2], heads, heads // kv_heads,
        *v_strides, *out.stride()[:3], *(lse.stride() if lse is not None else (0, 0, 0)),
        *(row_strides(bias) if bias is not None else (0, 0)),
        D=head_dim, DP=padded, BM=config.block_m, BN=config.block_n,
        HAS_BIAS=bias is not None, HAS_LSE=lse is not None, CAUSAL=is_causal, EVEN_N=kv_len % config.block_n == 0,
        TMA=config.tma, PER_KEY=quantized.key_scale.shape[-1] == quantized.key.shape[2], FP8=fp8, UPCAST=interpreting(),
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
