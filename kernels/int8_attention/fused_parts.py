"""Steps of the fused quantisation: rows through RMSNorm, RoPE, a rotation and rounding, in registers.

A pair of RoPE lies in one thread: (2j, 2j + 1) where pairs are interleaved, (j, j + R/2) where they are halves.
A tile to be turned is [4, W, R, C, 4], one to be written [4, W, R, J, E]. Four threads share a row, W rows lie in the
threads of a warp and in the warps, R in a thread. That is how a matrix product takes and leaves its rows, so that none of
them changes its thread on the way from one load to the store, if every thread has four neighbouring pairs C times, takes
them for those channels that the product wants of it, and writes side by side what the product leaves to it. The order of
channels is another one then, the same for query and key; their products don't notice.
Axes are in the order in which Triton deals what it loads and stores to threads, warps and registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .quantize_kernels import _inverse, _largest


@triton.jit
def _row_numbers(W: tl.constexpr, R: tl.constexpr):
    """[1, W, R, 1, 1]: the row of the tile that a thread has; in a product it has rows i and i + 8 of 16."""
    TWICE: tl.constexpr = 2 if R > 1 else 1
    w = tl.arange(0, W)[None, :, None, None, None]
    r = tl.arange(0, R)[None, None, :, None, None]
    return ((r // TWICE * (W // 8) + w // 8) * TWICE + r % TWICE) * 8 + w % 8


@triton.jit
def _numbers(HALF: tl.constexpr, N: tl.constexpr):
    """[4, 1, 1, C, N]: what is N in a thread side by side, for N = 4 the numbers of the pairs."""
    t = tl.arange(0, 4)[:, None, None, None, None]
    c = tl.arange(0, HALF // 16)[None, None, None, :, None]
    return c * (4 * N) + t * N + tl.arange(0, N)[None, None, None, None, :]


@triton.jit
def _columns(HALF: tl.constexpr, R: tl.constexpr):
    """Channels of the first and the second of each pair of halves; those that RoPE leaves alone as they come."""
    j = _numbers(HALF, 4)
    if R == 2 * HALF:
        return j, j + HALF
    return tl.where(j < R // 2, j, j + R // 2), tl.where(j < R // 2, j + R // 2, j + HALF)


@triton.jit
def _load_channels(start, channel, keep, D: tl.constexpr, DP: tl.constexpr):
    """Those channels of rows; 0 where not kept. keep: None for all, which needs no mask where D is a power of 2."""
    if keep is not None:
        return tl.load(start + channel, mask=keep & (channel < D) if D < DP else keep, other=0)
    if D < DP:
        return tl.load(start + channel, mask=channel < D, other=0)
    return tl.load(start + channel)


@triton.jit
def _load_pairs(
    start, keep, D: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr, HALVES: tl.constexpr, WORDS: tl.constexpr
):
    """[4, ..., C, 4] of the first and of the second channels of the pairs, in float32; 0 where not kept.

    start: pointers [1, W, R, 1, 1] to the first channel; keep: the same, or None for all.  WORDS: whether two bf16 may be
    read as one word, which is all that a float32 of either needs; Triton takes each of them apart first.
    """
    if WORDS:
        start = start.to(tl.pointer_type(tl.int32), bitcast=True)
        if HALVES:
            at = _numbers(HALF, 2)
            a, b = _load_channels(start, at, keep, 1, 1), _load_channels(start + HALF // 2, at, keep, 1, 1)
            a = tl.join(_low(a), _high(a)).reshape([4, a.shape[1], a.shape[2], a.shape[3], 4])
            b = tl.join(_low(b), _high(b)).reshape([4, b.shape[1], b.shape[2], b.shape[3], 4])
        else:
            word = _load_channels(start, _numbers(HALF, 4), keep, D // 2, HALF)
            a, b = _low(word), _high(word)
    elif HALVES:
        first, second = _columns(HALF, R)
        a = _load_channels(start, first, keep, D, 2 * HALF)
        b = _load_channels(start, second, keep, D, 2 * HALF)
    else:
        x = _load_channels(start, _numbers(HALF, 8), keep, D, 2 * HALF)
        a, b = x.reshape([4, x.shape[1], x.shape[2], x.shape[3], 4, 2]).split()
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _low(word):
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(word):
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _rows_of(X, X2, row, split, s_h, s_l, s_h2, s_l2, TWO: tl.constexpr):
    """Pointers to rows of the first head, and the step to the next head; rows from `split` on are in X2."""
    row = row.to(tl.int64)
    start = X + row * s_l
    step = row * 0 + s_h
    if TWO:
        front = row < split
        start = tl.where(front, start, X2 + (row - split) * s_l2)
        step = tl.where(front, step, row * 0 + s_h2)
    return start, step


@triton.jit
def _weights(
    W, W2, h, row, split, D: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr, HALVES: tl.constexpr,
    ACROSS: tl.constexpr, TWO: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """[4, W or 1, R or 1, C, 4] weights of the first and of the second channels of the pairs.

    h, row: [1, W, R, 1, 1]; rows may belong to two segments with weights of their own.
    """
    at = h * D if ACROSS else tl.zeros([1, 1, 1, 1, 1], tl.int32)
    start = tl.where(row < split, W + at, W2 + at) if TWO else W + at
    return _load_pairs(start, None, D, HALF, R, HALVES, WORDS)


@triton.jit
def _angles(COS, SIN, h, row, s_h, s_l, s_j, HALF: tl.constexpr, R: tl.constexpr):
    """[4, W, R, C, 4] cosines and sines; 1 and 0 for channels that RoPE leaves alone."""
    j = _numbers(HALF, 4)
    at = (h.to(tl.int64) * s_h + row.to(tl.int64) * s_l) + j * s_j
    if R == 2 * HALF:
        return tl.load(COS + at).to(tl.float32), tl.load(SIN + at).to(tl.float32)
    turned = j < R // 2
    cos = tl.load(COS + at, mask=turned, other=1.0).to(tl.float32)
    return cos, tl.load(SIN + at, mask=turned, other=0.0).to(tl.float32)


@triton.jit
def _summed(x):
    """Sum over the channels of a tile [4, W, R, C, ...]: [1, W, R, 1, 1]."""
    return tl.sum(tl.sum(tl.sum(x, 4), 3), 0)[None, :, :, None, None]


@triton.jit
def _squares(a, b):
    """Sum of squares over the channels of pairs. Side by side, so that they are added as they are multiplied."""
    x = tl.join(a, b).reshape([4, a.shape[1], a.shape[2], a.shape[3], 8])
    return _summed(x * x)


@triton.jit
def _turned(a, b, turn):
    """RoPE of pairs. turn: what the first gives to the first, the second to it, the first to the second, it to itself.

    (cos, sin, sin, cos), or with the weights in them.
    """
    return a * turn[0] - b * turn[1], a * turn[2] + b * turn[3]


@triton.jit
def _as_rows(a, b, DP: tl.constexpr):
    """A tile of pairs as the rows [W * R, DP] of a matrix product, which asks each of four threads for two of eight."""
    W: tl.constexpr = a.shape[1]
    R: tl.constexpr = a.shape[2]
    TWICE: tl.constexpr = 2 if R > 1 else 1
    x = tl.join(a, b).reshape([4, W // 8, 8, R // TWICE, TWICE, DP // 32, 4, 2])
    return x.permute(3, 1, 4, 2, 5, 6, 0, 7).reshape([W * R, DP])


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
    """[4, 1, 1, J, E]: where the channels of a tile of _as_written() go."""
    t = tl.arange(0, 4)[:, None, None, None, None]
    j = tl.arange(0, J)[None, None, None, :, None]
    return j * (4 * E) + t * E + tl.arange(0, E)[None, None, None, None, :]


@triton.jit
def _peaks(z, B: tl.constexpr):
    """[W, R]: largest magnitude of each row of a rotated tile [4, W, R, J, E]; NaN where one was NaN or infinite.

    The rotation gives every channel of a block what any of them holds, so such a block is NaN or infinite throughout;
    the maximum over blocks would drop the NaN.
    """
    peak = tl.max(tl.abs(z), 4)
    bad = tl.sum(tl.sum(peak * 0.0, 3), 0) if 4 * z.shape[3] * z.shape[4] > B else 0.0
    peak = tl.max(tl.max(peak, 3), 0)
    return peak + peak * 0.0 + bad


@triton.jit
def _round_scaled(x, inverse):
    """quantize_kernels._round(x * inverse) in one instruction, which the compiler does not always find by itself."""
    return tl.fma(x, inverse, 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _write_rows(Y, at, z, inverse, mask, DP: tl.constexpr):
    """Round a tile [4, W, R, J, E] with a factor a row [W, R] to the rows `at` of Y."""
    y = _round_scaled(z, inverse[None, :, :, None, None])
    where = at[None, :, :, None, None] * DP + _written_channels(z.shape[3], z.shape[4])
    if mask is None:
        tl.store(Y + where, y)
    else:
        tl.store(Y + where, y, mask=mask[None, :, :, None, None])


@triton.jit
def _write_queries(z, peak, Y, SCALE, at, mask, factor, DP: tl.constexpr):
    """Round queries with a scale each; `factor` [W, R] or a scalar holds the softmax scale and its sign."""
    tl.store(SCALE + at, peak / 127.0 * tl.abs(factor), mask=mask)
    sign = tl.where(factor < 0, -1.0, 1.0)  # so that scores times their scale keep the order of the int8 scores
    _write_rows(Y, at, z, _inverse(peak) * sign, mask, DP)


@triton.jit
def _write_keys(
    z, peak, keep, Y, SCALE, NORMS, tile, ROWS: tl.constexpr, DP: tl.constexpr, SCALES: tl.constexpr,
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
        square = tl.sum(tl.sum(tl.sum(z * z, 4), 3), 0)
        square = tl.where(square == square, square, float("inf"))
        if keep is not None:
            square = tl.where(keep, square, 0.0)
    if SCALES == ROWS:
        tl.store(SCALE + tile * ROWS + row, peak / 127.0)
        group = peak
    elif SCALES == 4:
        # Peaks and norms in one reduction, because each makes the warps wait for one another.
        both = tl.join(peak, square).reshape([W // 8, 4, 2, R, 2])
        both = _largest(_largest(_largest(both, 3), 2), 0)
        of_group, square = both.split()
        tl.store(SCALE + tile * 4 + tl.arange(0, 4), of_group / 127.0)
        group = tl.broadcast_to(of_group[None, :, None, None], [W // 8, 4, 2, R]).reshape([W, R])
        square = square[:, None]
    else:
        most = _largest(_largest(peak, 1), 0)
        tl.store(SCALE + tile, most / 127.0)
        group = tl.broadcast_to(most[None, None], [W, R])
    if HAS_NORM:
        tl.store(NORMS + tile, tl.sqrt(_largest(_largest(square, 1), 0)))
    inverse = _inverse(group)
    if keep is not None:
        inverse = tl.where(keep, inverse, 0.0)
    _write_rows(Y, tile * ROWS + row, z, inverse, None, DP)
