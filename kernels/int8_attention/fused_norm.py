"""Kernels of the norm across heads, for fused.py: what a head alone can't know."""

from __future__ import annotations

import triton
import triton.language as tl

from .fused_parts import _rows_of


@triton.jit
def _inverse_rms(squares, eps, D: tl.constexpr, ACROSS: tl.constexpr):
    """1 / rms of a head. Under a norm across heads, where it goes out again, a head of zeros leaves it finite."""
    rstd = tl.math.rsqrt(squares * (1.0 / D) + eps)
    return tl.minimum(rstd, 1e15) if ACROSS else rstd


@triton.jit(do_not_specialize=["L", "split", "heads"])
def _row_rms(
    X, X2, RSTD, eps, L, split, heads, s_b, s_h, s_l, s_b2, s_h2, s_l2,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr, TWO: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """RSTD[B, L] = 1 / rms over all heads of a token, TOGETHER of them at a time."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1).to(tl.int64)
    m = tl.arange(0, TOGETHER * ROWS)
    row = tl.minimum(tl.program_id(0) * ROWS + m % ROWS, L - 1)
    source, step = _rows_of(X + b * s_b, X2 + b * s_b2, row, split, s_h, s_l, s_h2, s_l2, TWO)
    c = tl.arange(0, DP)
    squares = tl.zeros([TOGETHER * ROWS, DP], tl.float32)
    for first in range(0, heads, TOGETHER):
        h = first + m // ROWS
        at = (source + h * step)[:, None] + c[None, :]
        x = tl.load(at, mask=(h < heads)[:, None] & (c < D)[None, :], other=0).to(tl.float32)
        squares += x * x
    total = tl.sum(tl.sum(squares, 1).reshape([TOGETHER, ROWS]), 0)
    tl.store(RSTD + b * L + rows, tl.math.rsqrt(total / (heads * D) + eps), mask=rows < L)


@triton.jit(do_not_specialize=["L", "heads"])
def _finish_scales(
    SQUARES, SCALE, LSE_TERM, eps, L, heads, D: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr,
    HAS_LSE: tl.constexpr, BEFORE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply the query scales by 1 / rms over all heads, from the sums of squares of each.

    TOGETHER: heads whose loads wait together.  BEFORE: queries were multiplied by 1 / rms of their own head before.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[None, :]
    some = tl.arange(0, TOGETHER)[:, None]
    start = tl.program_id(1).to(tl.int64) * heads * L + rows
    squares = tl.zeros([TOGETHER, ROWS], tl.float32)
    for first in range(0, heads, TOGETHER):
        inside = (first + some < heads) & (rows < L)
        squares += tl.load(SQUARES + start + (first + some) * L, mask=inside, other=0.0)
    rstd = tl.math.rsqrt(tl.sum(squares, 0)[None, :] / (heads * D) + eps)
    for first in range(0, heads, TOGETHER):
        inside = (first + some < heads) & (rows < L)
        at = start + (first + some) * L
        factor = rstd
        if BEFORE:
            own = tl.load(SQUARES + at, mask=inside, other=0.0)
            factor = rstd * ((own * (1.0 / D) + eps) * _inverse_rms(own, eps, D, True))
        tl.store(SCALE + at, tl.load(SCALE + at, mask=inside) * factor, mask=inside)
        if HAS_LSE:
            tl.store(LSE_TERM + at, tl.load(LSE_TERM + at, mask=inside) * factor, mask=inside)
