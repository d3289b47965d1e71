"""The kernel of fused.py that finds the shift of the keys: their mean after norm and RoPE, of a sample."""

from __future__ import annotations

import triton
import triton.language as tl

from .bias import _kept
from .fused_parts import _columns, _dealt, _largest_weight, _numbers, _rows_of, _turned, _weights
from .quantize_kernels import _finite


@triton.jit(do_not_specialize=["N", "NP", "split", "heads", "bias_rows"])
def _rope_key_shift(
    K, K2, W, W2, COS, SIN, RSTD, BIAS, SHIFT, SHIFT16, eps, N, NP, split, heads, bias_rows,
    s_b, s_h, s_l, s_b2, s_h2, s_l2, s_cb, s_ch, s_cl, s_cj, s_bias_b, s_bias_h,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, SEARCHED: tl.constexpr,
    R: tl.constexpr, HALVES: tl.constexpr, NORM: tl.constexpr, ACROSS: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    TWO: tl.constexpr, HAS_BIAS: tl.constexpr, FP16: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SHIFT[B, Hkv, 2, DP / 2] = mean of the firsts and of the seconds of the pairs over a sample of the kept keys.

    FP16: SHIFT16 [B * Hkv + 2, DP] gets their negatives over the largest weight, and from one program more the weights
    of the segments.  PDL: as for _rms_rope_quantize.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0).to(tl.int64)
    b = (tl.program_id(0) // heads).to(tl.int64)
    h = head - b * heads
    HALF: tl.constexpr = DP // 2
    if FP16 and HAS_WEIGHT:
        is_one_more = head == tl.num_programs(0) - 1
        if is_one_more:
            least = 1.0 / _largest_weight(W, W2, D, DP, TWO)
            n = _numbers(HALF, 4)
            for segment in tl.static_range(2 if TWO else 1):
                zero = tl.zeros([1, 1, 1, 1, 1], tl.int32)
                wa, wb = _weights(W2 if segment else W, W2, zero, zero, split, D, HALF, R, HALVES, False, False, False)
                to = SHIFT16 + (head + segment) * DP + n
                tl.store(to, _dealt(wa * least).to(tl.float16))
                tl.store(to + HALF, _dealt(wb * least).to(tl.float16))
            return
    K += b * s_b
    K2 += b * s_b2
    COS += b * s_cb
    SIN += b * s_cb
    BIAS += (b * s_bias_b + h * bias_rows * s_bias_h) * NP
    if RSTD is not None:
        RSTD += b * N
    i = tl.arange(0, ROWS)
    # One of each ROWS-th of the keys, at another place in each: every 64th token of an image may lie in one column.
    spread = (i * ROWS + i * 37 % ROWS).to(tl.int64) * N // (ROWS * ROWS)
    rows = tl.where(N <= ROWS, i, spread.to(tl.int32))
    keep = _kept(BIAS, bias_rows, s_bias_h * NP, rows, N, HAS_BIAS)
    count = tl.minimum(N, ROWS)
    if HAS_BIAS:
        # Where the sample holds no key that is kept, those from the first one on that is.
        none = tl.sum(keep.to(tl.int32), 0) == 0
        first_kept = tl.where(none, N, 0)
        n = tl.arange(0, SEARCHED)
        for start in range(0, tl.where(none, N, 0), SEARCHED):
            found = _kept(BIAS, bias_rows, s_bias_h * NP, start + n, N, HAS_BIAS)
            first_kept = tl.minimum(first_kept, tl.min(tl.where(found, start + n, N), 0))
        rows = tl.where(none, first_kept + i, rows)
        keep = _kept(BIAS, bias_rows, s_bias_h * NP, rows, N, HAS_BIAS)
        count = tl.sum(keep.to(tl.int32), 0)
    row = tl.minimum(rows, N - 1)[:, None]
    keep = keep[:, None]
    j = tl.arange(0, HALF)[None, :]
    source, step = _rows_of(K, K2, row, split, s_h, s_l, s_h2, s_l2, TWO)
    wa, wb, cos, sin = 1.0, 1.0, 1.0, 0.0
    if HAS_WEIGHT:
        own = h * D if ACROSS else h * 0
        start = tl.where(row < split, W + own, W2 + own) if TWO else W + own + tl.zeros([1, 1], tl.int32)
        wa, wb = _pairs(start, tl.full([1, 1], True, tl.int1), D, HALF, R, HALVES)
    if R > 0:
        at = h * s_ch + row.to(tl.int64) * s_cl + j * s_cj
        turned = j < R // 2
        cos = tl.load(COS + at, mask=turned, other=1.0).to(tl.float32)
        sin = tl.load(SIN + at, mask=turned, other=0.0).to(tl.float32)
    tl.debug_barrier()  # so that the loads above are under way when the first sums wait for those below
    x, y = _pairs(source + h * step, keep, D, HALF, R, HALVES)
    largest = _largest_weight(W, W2, D, DP, TWO) if FP16 and HAS_WEIGHT else 1.0
    rstd = keep.to(tl.float32)
    if NORM:
        if ACROSS:
            if PDL:
                tl.extra.cuda.gdc_wait()
            rstd *= tl.load(RSTD + row)
        else:
            rstd *= tl.math.rsqrt(tl.sum(x * x + y * y, 1)[:, None] * (1.0 / D) + eps)
    x, y = x * wa, y * wb
    if R > 0:
        x, y = _turned(x, y, (cos, sin, sin, cos))
    both = tl.sum(tl.join(_finite(x * rstd), _finite(y * rstd)), 0)  # [HALF, 2]
    mean = both / tl.maximum(count, 1).to(tl.float32)
    to = head * DP + tl.arange(0, HALF)[:, None] + tl.arange(0, 2)[None, :] * HALF
    tl.store(SHIFT + to, mean)
    if FP16:
        tl.store(SHIFT16 + to, (-mean / largest).to(tl.float16))


@triton.jit
def _pairs(start, keep, D: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr, HALVES: tl.constexpr):
    """float32 [n, HALF] of the first and of the second channels of the pairs of rows; start, keep: [n or 1, 1]."""
    if HALVES:
        first, second = _columns(tl.arange(0, HALF)[None, :], HALF, R)
        x = tl.load(start + first, mask=keep & (first < D), other=0)
        y = tl.load(start + second, mask=keep & (second < D), other=0)
    else:
        c = tl.arange(0, 2 * HALF)[None, :]
        z = tl.load(start + c, mask=keep & (c < D), other=0)
        x, y = z.reshape([z.shape[0], HALF, 2]).split()
    return x.to(tl.float32), y.to(tl.float32)
