"""The kernels of linear.py: activations to int8, the keys' mean by linearity, the int8 product and its epilogue."""

from __future__ import annotations

import triton
import triton.language as tl

from .bias import _kept
from .fused_stores import _round_scaled
from .quantize_kernels import _finite, _inverse


@triton.jit(do_not_specialize=["L"])
def _quantize_rows(X, Y, SCALE, L, s_b, s_l, C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Symmetric int8 with a scale a row: X [B, L, C] -> Y, SCALE [B, L]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = (rows < L)[:, None] & (cols < C)[None, :]
    x = tl.load(X + b * s_b + rows[:, None].to(tl.int64) * s_l + cols[None, :], mask=inside, other=0).to(tl.float32)
    peak = tl.max(tl.abs(x), 1) + tl.sum(x * 0.0, 1)
    tl.store(SCALE + b * L + rows, peak / 127.0, mask=rows < L)
    y = tl.fma(x, _inverse(peak)[:, None], 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    tl.store(Y + (b * L + rows)[:, None] * C + cols[None, :], y, mask=inside)


@triton.jit(do_not_specialize=["L", "NP", "heads"])
def _mean_row(
    X, X_SCALE, BIAS, MEAN, L, NP, heads, s_b, s_l, s_bias_b, s_bias_h,
    C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """MEAN[B, C]: mean over a sample of the rows that some head keeps, of X [B, L, C] times its row scales."""
    b = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, ROWS)
    rows = tl.where(L <= ROWS, i, (i.to(tl.int64) * L // ROWS).to(tl.int32))
    count = tl.zeros([], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    start = 0
    while (count == 0) & (start < L):
        keep = _kept(BIAS + b * s_bias_b * NP, heads, s_bias_h * NP, rows, L, HAS_BIAS)
        inside = keep[:, None] & (cols < C)[None, :]
        x = tl.load(X + b * s_b + rows[:, None].to(tl.int64) * s_l + cols[None, :], mask=inside, other=0)
        x_scale = tl.load(X_SCALE + b * L + rows, mask=keep, other=0.0)
        total = tl.sum(_finite(x.to(tl.float32) * x_scale[:, None]), 0)
        count = tl.sum(keep.to(tl.float32), 0)
        rows = start + i
        start += ROWS
    tl.store(MEAN + b * C + cols, total / tl.maximum(count, 1.0), mask=cols < C)


@triton.jit
def _linear_shift(
    MEAN, WEIGHT, W_SCALE, LINEAR_BIAS, SHIFT, heads,
    C: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HAS_LINEAR_BIAS: tl.constexpr,
):  # fmt: skip
    """SHIFT[B, heads, DP]: the linear layer of MEAN [B, C]."""
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    d = tl.arange(0, DP)
    total = tl.zeros([DP], tl.float32)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)
        mean = tl.load(MEAN + b * C + c, mask=c < C, other=0.0)
        inside = (d < D)[:, None] & (c < C)[None, :]
        weight = tl.load(WEIGHT + (h * D + d)[:, None].to(tl.int64) * C + c[None, :], mask=inside, other=0)
        total += tl.sum(weight.to(tl.float32) * mean[None, :], 1)
    total *= tl.load(W_SCALE + h * D + d, mask=d < D, other=0.0)
    if HAS_LINEAR_BIAS:
        total += tl.load(LINEAR_BIAS + h * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(SHIFT + (b * heads + h) * DP + d, total)


@triton.jit
def _peaks(y):
    """Largest magnitude of each row; NaN where a value is NaN or infinite."""
    return tl.max(tl.abs(y), 1) + tl.sum(y * 0.0, 1)


@triton.jit(do_not_specialize=["L", "heads", "bias_rows"])
def _linear_qk(
    X, X_SCALE, WEIGHT, W_SCALE, LINEAR_BIAS, SHIFT, BIAS, Y, SCALE, NORMS, factor, L, heads, bias_rows, s_b, s_l,
    s_bias_b, s_bias_h,
    C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, STEP: tl.constexpr,
    HAS_LINEAR_BIAS: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, SCALES: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """One program ROWS rows of HEADS heads of X [B, L, C] @ WEIGHT [heads * D, C]^T.

    KIND: "query" or "key" in int8, or "16bit", the plain layer: Y [B, L, heads * D] in its own dtype.
    """
    block = tl.program_id(0)
    b = tl.program_id(2).to(tl.int64)
    rows = block * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, HEADS * DP)
    h = tl.program_id(1) * HEADS + n // DP
    d = n % DP
    c = tl.arange(0, STEP)
    there = (d < D) & (h < heads)
    x_ptr = X + b * s_b + rows[:, None].to(tl.int64) * s_l + c[None, :]
    w_ptr = WEIGHT + (h * D + d)[None, :].to(tl.int64) * C + c[:, None]
    acc = tl.zeros([ROWS, HEADS * DP], tl.int32)
    for start in range(0, C, STEP):
        if C % STEP == 0:
            x = tl.load(x_ptr, mask=(rows < L)[:, None], other=0)
            w = tl.load(w_ptr, mask=there[None, :], other=0)
        else:
            x = tl.load(x_ptr, mask=(rows < L)[:, None] & (start + c < C)[None, :], other=0)
            w = tl.load(w_ptr, mask=there[None, :] & (start + c < C)[:, None], other=0)
        acc = tl.dot(x, w, acc, out_dtype=tl.int32)
        x_ptr += STEP
        w_ptr += STEP
    x_scale = tl.load(X_SCALE + b * L + rows, mask=rows < L, other=0.0)
    w_scale = tl.load(W_SCALE + h * D + d, mask=there, other=0.0)
    y = acc.to(tl.float32) * x_scale[:, None] * w_scale[None, :]
    if HAS_LINEAR_BIAS:
        y += tl.load(LINEAR_BIAS + h * D + d, mask=there, other=0.0).to(tl.float32)[None, :]
    if KIND == "16bit":
        at = ((b * L + rows) * heads)[:, None] * D + (h * D + d)[None, :]
        tl.store(Y + at, y.to(Y.dtype.element_ty), mask=(rows < L)[:, None] & there[None, :])
    elif KIND == "query":
        i = tl.arange(0, ROWS * HEADS)
        row = block * ROWS + i // HEADS
        head = tl.program_id(1) * HEADS + i % HEADS
        y = y.reshape([ROWS * HEADS, DP])
        _store_queries(y, _peaks(y), Y, SCALE, b * heads + head, row, (row < L) & (head < heads), L, factor, DP)
    else:
        head = b * heads + tl.program_id(1)
        blocks = tl.num_programs(0)
        NP = blocks * ROWS
        first = (b * s_bias_b + tl.program_id(1) * bias_rows * s_bias_h) * NP
        keep = _kept(BIAS + first, bias_rows, s_bias_h * NP, rows, L, HAS_BIAS)
        y = tl.where(keep[:, None], y - tl.load(SHIFT + head * DP + d)[None, :], 0.0)
        _store_keys(y, _peaks(y), Y, SCALE, NORMS, head, block, blocks, ROWS, DP, SCALES, HAS_NORM)


@triton.jit
def _store_queries(x, peak, Y, SCALE, head, rows, keep, L, factor, DP: tl.constexpr):
    """Round rows [ROWS, DP] with a scale each; `factor` [ROWS] or a scalar holds the softmax scale and its sign."""
    stored = head * L + rows
    tl.store(SCALE + stored, peak / 127.0 * tl.abs(factor), mask=keep)
    sign = tl.where(factor < 0, -1.0, 1.0)  # so that scores times their scale keep the order of the int8 scores
    rounded = _round_scaled(x, (_inverse(peak) * sign)[:, None])
    tl.store(Y + stored[:, None] * DP + tl.arange(0, DP)[None, :], rounded, mask=keep[:, None])


@triton.jit
def _store_keys(
    x, peak, Y, SCALE, NORMS, head, block, blocks, ROWS: tl.constexpr, DP: tl.constexpr, SCALES: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Round a block of keys [ROWS, DP] with SCALES (1, 4 or ROWS) scales; rows that don't count are 0.

    peak: [ROWS], the largest magnitude of each; NaN makes its whole group NaN.
    """
    tile = head * blocks + block
    rows = tl.arange(0, ROWS)
    if SCALES == ROWS:
        tl.store(SCALE + tile * ROWS + rows, peak / 127.0)
    elif SCALES == 4:
        bad4 = tl.sum(tl.sum((peak * 0.0).reshape([ROWS // 8, 4, 2]), 2), 0)
        peak4 = tl.max(tl.max(peak.reshape([ROWS // 8, 4, 2]), 2), 0) + bad4
        tl.store(SCALE + tile * 4 + tl.arange(0, 4), peak4 / 127.0)
        peak = tl.broadcast_to(peak4[None, :, None], [ROWS // 8, 4, 2]).reshape([ROWS])
    else:
        most = tl.max(peak, 0) + tl.sum(peak * 0.0, 0)
        tl.store(SCALE + tile, most / 127.0)
        peak = tl.broadcast_to(most[None], [ROWS])
    if HAS_NORM:
        tl.store(NORMS + tile, tl.sqrt(tl.max(tl.sum(x * x, 1), 0)))
    at = (tile * ROWS + rows)[:, None] * DP + tl.arange(0, DP)[None, :]
    tl.store(Y + at, _round_scaled(x, _inverse(peak)[:, None]))
