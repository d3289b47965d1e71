"""The kernels of fused.py: shift of the keys, quantisation of either side, norm across heads."""

from __future__ import annotations

import triton
import triton.language as tl

from .bias import _kept
from .fused_parts import _angles, _normed_and_rotated, _row_peaks, _store_keys, _store_queries, _tile, _weights_of_rows
from .quantize_kernels import _finite, _hadamard, _rotate


@triton.jit(do_not_specialize=["N", "NP", "split", "heads", "bias_rows"])
def _rope_key_shift(
    K, K2, W, W2, COS, SIN, RSTD, BIAS, SHIFT, ROTATION, eps, N, NP, split, heads, bias_rows,
    s_b, s_h, s_l, s_b2, s_h2, s_l2, s_cb, s_ch, s_cl, s_cj, s_bias_b, s_bias_h,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr, HALVES: tl.constexpr,
    NORM: tl.constexpr, ACROSS: tl.constexpr, HAS_WEIGHT: tl.constexpr, TWO: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """SHIFT[B, Hkv, 2, DP / 2] = mean of the firsts and of the seconds of the pairs over a sample of the kept keys.

    ROTATION[B, B] is written for _rms_rope_quantize.
    """
    head = tl.program_id(0).to(tl.int64)
    b = head // heads
    h = head % heads
    HALF: tl.constexpr = DP // 2
    if head == 0:
        i = tl.arange(0, B)
        tl.store(ROTATION + i[:, None] * B + i[None, :], _hadamard(B).to(ROTATION.dtype.element_ty))
    K += b * s_b
    K2 += b * s_b2
    COS += b * s_cb
    SIN += b * s_cb
    BIAS += (b * s_bias_b + h * bias_rows * s_bias_h) * NP
    if RSTD is not None:
        RSTD += b * N
    i = tl.arange(0, ROWS)
    rows = tl.where(N <= ROWS, i, (i.to(tl.int64) * N // ROWS).to(tl.int32))
    count = tl.zeros([], tl.float32)
    first = tl.zeros([HALF], tl.float32)
    second = tl.zeros([HALF], tl.float32)
    start = 0
    # Where the sample holds no key that is kept, the first block that does.
    while (count == 0) & (start < N):
        keep = _kept(BIAS, bias_rows, s_bias_h * NP, rows, N, HAS_BIAS)
        of = h + tl.zeros([ROWS], tl.int32)
        if R > 0:
            cos, sin = _angles(COS, SIN, of, rows, keep, s_ch, s_cl, s_cj, 1, HALF, R)
        else:
            cos, sin = 1.0, 0.0
        weights = _weights_of_rows(
            W, W2, h + tl.arange(0, 1), heads, rows, split, D, HALF, R, HALVES, ACROSS, HAS_WEIGHT, TWO
        )
        x, y, _, rstd = _normed_and_rotated(
            K, K2, weights, (cos, sin, sin, cos), RSTD, of, rows, keep, split, eps, s_h, s_l, s_h2, s_l2,
            1, D, HALF, R, HALVES, NORM, ACROSS, HAS_WEIGHT, TWO,
        )  # fmt: skip
        rstd = tl.where(keep[None, :], rstd, 0.0)[:, :, None]
        count = tl.sum(keep.to(tl.float32), 0)
        first = tl.sum(_finite(x * rstd).reshape([ROWS, HALF]), 0)
        second = tl.sum(_finite(y * rstd).reshape([ROWS, HALF]), 0)
        rows = start + i
        start += ROWS
    scale = 1.0 / tl.maximum(count, 1.0)
    j = tl.arange(0, HALF)
    tl.store(SHIFT + head * DP + j, first * scale)
    tl.store(SHIFT + head * DP + HALF + j, second * scale)


@triton.jit(do_not_specialize=["L", "split", "heads", "bias_rows", "group"])
def _rms_rope_quantize(
    X, X2, W, W2, COS, SIN, RSTD, SHIFT, ROTATION, BIAS, Y, SCALE, NORMS, LSE_TERM, SQUARES,
    eps, factor, lse_factor, L, split, heads, group, bias_rows,
    s_b, s_h, s_l, s_b2, s_h2, s_l2, s_cb, s_ch, s_cl, s_cj, s_bias_b, s_bias_h,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr,
    HEADS: tl.constexpr, STAGES: tl.constexpr,
    R: tl.constexpr, HALVES: tl.constexpr, NORM: tl.constexpr, ACROSS: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    TWO: tl.constexpr, PER_HEAD: tl.constexpr, IS_KEY: tl.constexpr, HAS_BIAS: tl.constexpr, SCALES: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_LSE: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program ROWS rows of HEADS heads, TOGETHER at a time (keys: one), which share angles and the rotation.

    Programs of the same rows follow each other: their heads lie side by side in memory.
    """
    # On one axis of the grid: CUDA counts no further than 65535 on the others, and blocks of queries are small.
    parts = tl.cdiv(heads, HEADS)
    blocks = tl.num_programs(0) // parts
    # From the last to the first: a kernel that read the rows before has left the last ones in the cache.
    block = blocks - 1 - tl.program_id(0) // parts
    b = tl.program_id(1).to(tl.int64)
    HALF: tl.constexpr = DP // 2
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < L
    X += b * s_b
    X2 += b * s_b2
    COS += b * s_cb
    SIN += b * s_cb
    if RSTD is not None:
        RSTD += b * L
    i = tl.arange(0, B)
    rotation = tl.load(ROTATION + i[:, None] * B + i[None, :])
    dtype: tl.constexpr = tl.float32 if UPCAST else X.dtype.element_ty
    m = tl.arange(0, TOGETHER * ROWS)
    row = block * ROWS + m % ROWS
    if R > 0 and not PER_HEAD:
        cos, sin = _angles(COS, SIN, rows * 0, rows, inside, 0, s_cl, s_cj, 1, HALF, R)
    else:
        cos, sin = 1.0, 0.0
    if not ACROSS:
        wa, wb = _weights_of_rows(
            W, W2, tl.arange(0, 1), heads, rows, split, D, HALF, R, HALVES, False, HAS_WEIGHT, TWO
        )
    # A thread that holds several heads of a row keeps their turn with the weights in it: two factors fewer a pair.
    FOLDED: tl.constexpr = TOGETHER > 1 and HAS_WEIGHT and R > 0 and not ACROSS and not PER_HEAD
    turn = (cos * wa, sin * wb, sin * wa, cos * wb) if FOLDED else (cos, sin, sin, cos)
    j = tl.arange(0, HALF)
    start = tl.program_id(0) % parts * HEADS
    for first in tl.range(start, tl.minimum(start + HEADS, heads), TOGETHER, num_stages=STAGES):
        h = first + tl.arange(0, TOGETHER)
        head = b * heads + first  # of the first one
        of = first + m // ROWS
        keep = (row < L) & (of < heads)
        if HAS_BIAS:
            keep = _kept(BIAS + (b * s_bias_b + first * bias_rows * s_bias_h) * (blocks * ROWS), bias_rows,
                         s_bias_h * (blocks * ROWS), rows, L, HAS_BIAS)  # fmt: skip
        if R > 0 and PER_HEAD:
            cos_h, sin_h = _angles(COS, SIN, of, row, keep, s_ch, s_cl, s_cj, TOGETHER, HALF, R)
            turn_h = (cos_h, sin_h, sin_h, cos_h)
        else:
            turn_h = turn
        if ACROSS:
            weights = _weights_of_rows(W, W2, h, heads, rows, split, D, HALF, R, HALVES, True, HAS_WEIGHT, TWO)
        else:
            weights = (wa, wb)
        x, y, squares, rstd = _normed_and_rotated(
            X, X2, weights, turn_h, RSTD, of, row, keep, split, eps, s_h, s_l, s_h2, s_l2,
            TOGETHER, D, HALF, R, HALVES, NORM, ACROSS, HAS_WEIGHT and not FOLDED, TWO,
        )  # fmt: skip
        if IS_KEY:
            x = tl.fma(x, rstd[:, :, None], -tl.load(SHIFT + head * DP + j)[None, None, :])
            y = tl.fma(y, rstd[:, :, None], -tl.load(SHIFT + head * DP + HALF + j)[None, None, :])
            if HAS_BIAS or not EVEN:
                x = tl.where(keep[None, :, None], x, 0.0)
                y = tl.where(keep[None, :, None], y, 0.0)
        else:
            x *= rstd[:, :, None]
            y *= rstd[:, :, None]
        z = tl.join(x, y).reshape([TOGETHER * ROWS, DP]).to(X.dtype.element_ty)
        z = _rotate(z.to(dtype), rotation.to(dtype), TOGETHER * ROWS, DP, B)
        peak = _row_peaks(z, DP, B)
        if IS_KEY:
            _store_keys(z, peak, Y, SCALE, NORMS, head, block, blocks, ROWS, DP, SCALES, HAS_NORM)
        else:
            there = inside[None, :] & (h < heads)[:, None]
            at = ((head + tl.arange(0, TOGETHER)) * L)[:, None] + rows[None, :]
            if ACROSS and RSTD is None:
                # Without the other heads 1 / rms isn't known yet: _finish_scales puts it in.
                size = (squares * (1.0 / D) + eps) * rstd  # the head's own rms
                tl.store(SQUARES + at, squares, mask=there)
            else:
                size = tl.full([TOGETHER, ROWS], 1.0, tl.float32)
            if HAS_LSE:
                kv = SHIFT + ((b * (heads // group) + h // group) * DP)[:, None, None] + j[None, None, :]
                kept = (h < heads)[:, None, None]
                shift, shift2 = tl.load(kv, mask=kept, other=0.0), tl.load(kv + HALF, mask=kept, other=0.0)
                tl.store(LSE_TERM + at, tl.sum(x * shift + y * shift2, 2) * lse_factor * size, mask=there)
            scale = factor * size.reshape([TOGETHER * ROWS])
            _store_queries(z, peak, Y, SCALE, b * heads + of, row, keep, L, scale, DP)


@triton.jit(do_not_specialize=["L", "split", "heads"])
def _row_rms(
    X, X2, RSTD, eps, L, split, heads, s_b, s_h, s_l, s_b2, s_h2, s_l2,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """RSTD[B, L] = 1 / rms over all heads of a token, TOGETHER of them at a time."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1).to(tl.int64)
    HALF: tl.constexpr = DP // 2
    m = tl.arange(0, TOGETHER * ROWS)
    row = tl.program_id(0) * ROWS + m % ROWS
    squares = tl.zeros([TOGETHER, ROWS, HALF], tl.float32)
    for first in range(0, heads, TOGETHER):
        h = first + m // ROWS
        there = (row < L) & (h < heads)
        x, y = _tile(X + b * s_b, h, row, there & (row < split), s_h, s_l, TOGETHER, D, HALF, 0, False)
        squares += x * x + y * y
        if TWO:
            behind = there & (row >= split)
            x2, y2 = _tile(X2 + b * s_b2, h, row - split, behind, s_h2, s_l2, TOGETHER, D, HALF, 0, False)
            squares += x2 * x2 + y2 * y2
    total = tl.sum(tl.sum(squares, 0), 1)
    tl.store(RSTD + b * L + rows, tl.math.rsqrt(total / (heads * D) + eps), mask=rows < L)


@triton.jit(do_not_specialize=["L", "heads"])
def _finish_scales(SQUARES, SCALE, LSE_TERM, eps, L, heads, D: tl.constexpr, ROWS: tl.constexpr, HAS_LSE: tl.constexpr):
    """Multiply the query scales by 1 / rms over all heads, from the sums of squares of each."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1).to(tl.int64) * heads * L + rows
    inside = rows < L
    squares = tl.zeros([ROWS], tl.float32)
    for h in range(heads):
        squares += tl.load(SQUARES + first + h * L, mask=inside, other=0.0)
    rstd = tl.math.rsqrt(squares / (heads * D) + eps)
    for h in range(heads):
        at = first + h * L
        tl.store(SCALE + at, tl.load(SCALE + at, mask=inside) * rstd, mask=inside)
        if HAS_LSE:
            tl.store(LSE_TERM + at, tl.load(LSE_TERM + at, mask=inside) * rstd, mask=inside)
