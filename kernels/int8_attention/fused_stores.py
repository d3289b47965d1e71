"""Steps of the fused quantisation: what a rotation leaves, to int8 with scales; for tiles see fused_parts.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .fused_parts import ASM, _dealt, _multiply_add, _product, _row_numbers
from .quantize_kernels import _inverse, _largest

_LEAST_PEAK = tl.constexpr(127.0 / 65504)


@triton.jit
def _as_written(z, W: tl.constexpr):
    """[M, DP] out of a matrix product to [4, W, R, J, E]."""
    R: tl.constexpr = z.shape[0] // W
    TWICE: tl.constexpr = 2 if R > 1 else 1
    E: tl.constexpr = min(16, z.shape[1] // 4)
    J: tl.constexpr = z.shape[1] // (4 * E)
    z = z.reshape([R // TWICE, W // 8, TWICE, 8, J, E // 2, 4, 2])
    return z.permute(6, 1, 3, 0, 2, 4, 5, 7).reshape([4, W, R, J, E])


@triton.jit
def _written_channels(J: tl.constexpr, E: tl.constexpr):
    """[4, 1, 1, J, E], dealt: where the channels of a tile of _as_written() go."""
    t = _dealt(tl.arange(0, 4)[:, None, None, None, None])
    j = _dealt(tl.arange(0, J)[None, None, None, :, None])
    return j * (4 * E) + t * E + tl.arange(0, E)[None, None, None, None, :]


@triton.jit
def _peaks(z, B: tl.constexpr):
    """[W, R]: largest magnitude of each row of a rotated tile [4, W, R, J, E]; NaN where one was NaN or infinite.

    The rotation gives every channel of a block what any of them holds, so such a block is NaN or infinite throughout;
    the maximum over blocks would drop the NaN.  Of fp16 at least what 127 over it is no infinity of.
    """
    peak = tl.max(tl.abs(z), 4)
    peak = peak.to(tl.float32)
    bad = tl.sum(tl.sum(peak * 0.0, 3), 0) if 4 * z.shape[3] * z.shape[4] > B else 0.0
    peak = tl.max(tl.max(peak, 3), 0)
    if z.dtype == tl.float16:
        peak = tl.where((peak > 0) & (peak < _LEAST_PEAK), _LEAST_PEAK, peak)
    return peak + peak * 0.0 + bad


# Four fp16 times their factors, plus 1.5 * 2^10, whose sum has the integer in its low byte.
_ROUND_FOUR = tl.constexpr("""{
.reg .b32 a, b, c;
mov.b32 c, 0x66006600;
fma.rn.f16x2 a, $1, $3, c;
fma.rn.f16x2 b, $2, $4, c;
prmt.b32 $0, a, b, 0x6420;
}""")


@triton.jit
def _round_scaled(x, inverse):
    """quantize_kernels._round(x * inverse) in one instruction, which the compiler does not always find by itself."""
    if x.dtype == tl.float16:
        y = tl.broadcast_to(inverse.to(tl.float16), x.shape)
        if ASM:
            return tl.inline_asm_elementwise(_ROUND_FOUR, "=r,r,r,r,r", [x, y], dtype=tl.int8, is_pure=True, pack=4)
        else:
            return tl.fma(x, y, tl.full([], 1536.0, tl.float16)).to(tl.int16, bitcast=True).to(tl.int8)
    else:
        return tl.fma(x, inverse, 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _write_rows(Y, at, z, inverse, mask, DP: tl.constexpr):
    """Round a tile [4, W, R, J, E] with a factor a row [W, R] to the rows `at` of Y."""
    y = _dealt(_round_scaled(z, inverse[None, :, :, None, None]))
    where = _dealt(at[None, :, :, None, None]) * DP + _written_channels(z.shape[3], z.shape[4])
    if mask is None:
        tl.store(Y + where, y)
    else:
        tl.store(Y + where, y, mask=_dealt(mask[None, :, :, None, None]))


@triton.jit
def _write_queries(z, peak, Y, SCALE, at, mask, factor, DP: tl.constexpr):
    """Round queries with a scale each; `factor` [W, R] or a scalar holds the softmax scale and its sign."""
    tl.store(SCALE + at, peak / 127.0 * tl.abs(factor), mask=mask)
    sign = tl.where(factor < 0, -1.0, 1.0)  # so that scores times their scale keep the order of the int8 scores
    _write_rows(Y, at, z, _inverse(peak) * sign, mask, DP)


@triton.jit
def _halves(z):
    """The two halves of the last axis."""
    return z.reshape([4, z.shape[1], z.shape[2], 2, z.shape[3] // 2]).permute(0, 1, 2, 4, 3).split()


@triton.jit
def _squares_of(z):
    """[4, W, R]: sums of squares of what a thread has of each row."""
    if z.dtype == tl.float16:
        a, b = _halves(z.reshape([4, z.shape[1], z.shape[2], z.shape[3] * z.shape[4]]))
        squares = _multiply_add(b, b, _product(a, a))
        for _step in tl.static_range(8):
            if squares.shape[3] > 2:
                a, b = _halves(squares)
                squares = _multiply_add(a, tl.full([1, 1, 1, 1], 1.0, tl.float16), b)
        return tl.sum(squares.to(tl.float32), 3)
    else:
        return tl.sum(tl.sum(z * z, 4), 3)


@triton.jit
def _write_keys(
    z, peak, keep, Y, SCALE, NORMS, tile, unit, ROWS: tl.constexpr, DP: tl.constexpr, SCALES: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Round a block of keys with SCALES (1, 4 or ROWS) scales; rows that don't count become 0. keep: [W, R] or None.

    peak: [W, R], the largest magnitude of each row; NaN makes its whole group NaN.
    """
    W: tl.constexpr = z.shape[1]
    R: tl.constexpr = z.shape[2]
    row = _row_numbers(W, R).reshape([W, R])
    if keep is not None:
        peak = tl.where(keep, peak, 0.0)
    square = tl.zeros([W, R], tl.float32)
    if HAS_NORM:
        square = tl.sum(_squares_of(z), 0)
        square = tl.where(square == square, square, float("inf"))
        if keep is not None:
            square = tl.where(keep, square, 0.0)
    if SCALES == ROWS:
        tl.store(SCALE + tile * ROWS + row, peak / 127.0 * unit)
        group = peak
    elif SCALES == 4:
        # Peaks and norms in one reduction, because each makes the warps wait for one another, and broadcast as they
        # come out of it, because to take them apart would make them wait again.
        both = tl.join(peak, square).reshape([W // 8, 4, 2, R, 2])
        both = _largest(_largest(_largest(both, 3), 2), 0)
        is_peak = tl.arange(0, 2) == 0
        of_scale = SCALE + tile * 4 + tl.arange(0, 4)[:, None] + tl.zeros([1, 2], tl.int32)
        tl.store(of_scale, both * (unit / 127.0), mask=is_peak[None, :])
        square = tl.max(tl.where(is_peak[None, :], 0.0, both), 1)[:, None]
        spread = tl.broadcast_to(both[None, :, None, None, :], [W // 8, 4, 2, R, 2])
        group = tl.sum(tl.where(is_peak[None, None, None, None, :], spread, 0.0), 4).reshape([W, R])
    else:
        most = _largest(_largest(peak, 1), 0)
        tl.store(SCALE + tile, most / 127.0 * unit)
        group = tl.broadcast_to(most[None, None], [W, R])
    if HAS_NORM:
        tl.store(NORMS + tile, tl.sqrt(_largest(_largest(square, 1), 0)) * unit)
    inverse = _inverse(group)
    if keep is not None:
        inverse = tl.where(keep, inverse, 0.0)
    _write_rows(Y, tile * ROWS + row, z, inverse, None, DP)
