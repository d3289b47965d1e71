"""Steps of the fused quantisation: a tile of heads and rows through RMSNorm, RoPE and rounding, in registers.

A tile is [HEADS, ROWS, channels]: a thread holds the same row and channels of several heads, and so needs their angles
once. It is loaded as [HEADS * ROWS, channels], which puts the heads into a thread in every Triton. A pair of RoPE lies
in one thread: (2j, 2j + 1) where pairs are interleaved, (j, j + R/2) where they are halves; the order of channels that
this leaves is the same for query and key, and their products don't notice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .quantize_kernels import _inverse


@triton.jit
def _columns(HALF: tl.constexpr, R: tl.constexpr):
    """Channels of the first and the second of each pair of halves; those that RoPE leaves alone as they come."""
    j = tl.arange(0, HALF)
    return tl.where(j < R // 2, j, j + R // 2), tl.where(j < R // 2, j + R // 2, j + HALF)


@triton.jit
def _tile(
    X, h, rows, keep, s_h, s_l, HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """[HEADS, ROWS, HALF] of the first and of the second channels of the pairs, in float32; 0 where not kept.

    h, rows, keep: [HEADS * ROWS].
    """
    ROWS: tl.constexpr = h.shape[0] // HEADS
    start = X + (h.to(tl.int64) * s_h + rows.to(tl.int64) * s_l)[:, None]
    there = keep[:, None]
    if HALVES:
        first, second = _columns(HALF, R)
        a = tl.load(start + first[None, :], mask=there & (first < D)[None, :], other=0).reshape([HEADS, ROWS, HALF])
        b = tl.load(start + second[None, :], mask=there & (second < D)[None, :], other=0).reshape([HEADS, ROWS, HALF])
    else:
        c = tl.arange(0, 2 * HALF)
        x = tl.load(start + c[None, :], mask=there & (c < D)[None, :], other=0)
        a, b = x.reshape([HEADS, ROWS, HALF, 2]).split()
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _weights(
    W, h, heads, D: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr, HALVES: tl.constexpr, ACROSS: tl.constexpr
):
    """[HEADS or 1, 1, HALF] weights of the first and of the second channels of the pairs; 0 past the last head."""
    start = (h * D)[:, None] if ACROSS else tl.zeros([1, 1], tl.int32)
    there = (h < heads)[:, None] if ACROSS else start == 0
    if HALVES:
        first, second = _columns(HALF, R)
        a = tl.load(W + start + first[None, :], mask=there & (first < D)[None, :], other=0)
        b = tl.load(W + start + second[None, :], mask=there & (second < D)[None, :], other=0)
    else:
        c = tl.arange(0, 2 * HALF)
        w = tl.load(W + start + c[None, :], mask=there & (c < D)[None, :], other=0)
        a, b = w.reshape([w.shape[0], HALF, 2]).split()
    return a.to(tl.float32)[:, None, :], b.to(tl.float32)[:, None, :]


@triton.jit
def _weights_of_rows(
    W, W2, h, heads, rows, split, D: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr, HALVES: tl.constexpr,
    ACROSS: tl.constexpr, HAS_WEIGHT: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """The same, [HEADS or 1, ROWS or 1, HALF], where the rows may belong to two segments with weights of their own.

    h: [HEADS]; rows: [ROWS].
    """
    if HAS_WEIGHT:
        a, b = _weights(W, h, heads, D, HALF, R, HALVES, ACROSS)
        if TWO:
            a2, b2 = _weights(W2, h, heads, D, HALF, R, HALVES, ACROSS)
            front = (rows < split)[None, :, None]
            a = tl.where(front, a, a2)
            b = tl.where(front, b, b2)
    else:
        a, b = 1.0, 1.0
    return a, b


@triton.jit
def _angles(COS, SIN, h, rows, keep, s_h, s_l, s_j, HEADS: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr):
    """[HEADS, ROWS, HALF] cosines and sines; 1 and 0 for channels that RoPE leaves alone.

    h, rows, keep: [HEADS * ROWS].
    """
    ROWS: tl.constexpr = rows.shape[0] // HEADS
    j = tl.arange(0, HALF)
    at = (h.to(tl.int64) * s_h + rows.to(tl.int64) * s_l)[:, None] + (j * s_j)[None, :]
    inside = keep[:, None] & (j < R // 2)[None, :]
    cos = tl.load(COS + at, mask=inside, other=1.0).to(tl.float32)
    sin = tl.load(SIN + at, mask=inside, other=0.0).to(tl.float32)
    return cos.reshape([HEADS, ROWS, HALF]), sin.reshape([HEADS, ROWS, HALF])


@triton.jit
def _normed_and_rotated(
    X, X2, weights, turn, RSTD, h, rows, keep, split, eps, s_h, s_l, s_h2, s_l2,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr, HALVES: tl.constexpr,
    NORM: tl.constexpr, ACROSS: tl.constexpr, HAS_WEIGHT: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Heads h of some rows: pairs [HEADS, ROWS, HALF] after weight and RoPE but before 1 / rms; squares' sum; 1 / rms.

    h, rows, keep: [HEADS * ROWS].  weights: a pair; turn: four, what the first channel of a pair gives to the first,
    the second to the first, the first to the second and the second to the second (cos, sin, sin, cos, or with the
    weights in them).  The last two answers are [HEADS, ROWS]; 1 / rms is that of the head alone where NORM is across
    heads and RSTD does not hold the whole one.
    """
    if TWO:
        a, b = _tile(X, h, rows, keep & (rows < split), s_h, s_l, HEADS, D, HALF, R, HALVES)
        a2, b2 = _tile(X2, h, rows - split, keep & (rows >= split), s_h2, s_l2, HEADS, D, HALF, R, HALVES)
        a += a2
        b += b2
    else:
        a, b = _tile(X, h, rows, keep, s_h, s_l, HEADS, D, HALF, R, HALVES)
    squares = tl.zeros([a.shape[0], a.shape[1]], tl.float32)
    rstd = squares + 1.0
    if NORM:
        if ACROSS and RSTD is not None:
            rstd = tl.load(RSTD + rows, mask=keep, other=0.0).reshape([a.shape[0], a.shape[1]])
        else:
            squares = tl.sum(a * a + b * b, 2)
            rstd = tl.math.rsqrt(squares * (1.0 / D) + eps)
            if ACROSS:
                # Goes out again with the whole one: a head that is zero must not make it infinite where eps is 0.
                rstd = tl.minimum(rstd, 1e15)
    if HAS_WEIGHT:
        a *= weights[0]
        b *= weights[1]
    if R > 0:
        turned = a * turn[0] - b * turn[1]
        b = a * turn[2] + b * turn[3]
        a = turned
    return a, b, squares, rstd


@triton.jit
def _row_peaks(z, DP: tl.constexpr, B: tl.constexpr):
    """Largest magnitude of each row of rotated z [M, DP]; NaN where a value was NaN or infinite.

    The rotation gives every channel of a block what any of them holds, so such a block is NaN or infinite throughout;
    the maximum over rows or blocks would drop the NaN.
    """
    if DP == B:
        peak = tl.max(tl.abs(z), 1)
        return peak + peak * 0.0
    peaks = tl.max(tl.abs(z).reshape([z.shape[0], DP // B, B]), 2)
    return tl.max(peaks, 1) + tl.sum(peaks * 0.0, 1)


@triton.jit
def _round_scaled(x, inverse):
    """quantize_kernels._round(x * inverse) in one instruction, which the compiler does not always find by itself."""
    return tl.fma(x, inverse, 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


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
