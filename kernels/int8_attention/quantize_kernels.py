"""The kernels of quantize.py: mean key, rotation, scales and rounding."""

from __future__ import annotations

import triton
import triton.language as tl

from .bias import _kept


@triton.jit
def _hadamard(B: tl.constexpr):
    """[B, B] of +-1, rows with random signs; entry (i, j) is s(i) * (-1)^popcount(i & j)."""
    i = tl.arange(0, B)[:, None]
    bits = i & tl.arange(0, B)[None, :]
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= (bits >> 1) ^ ((i * 40503) >> 9)
    return 1.0 - 2.0 * (bits & 1).to(tl.float32)


@triton.jit
def _rotate(x, rotation, ROWS: tl.constexpr, DP: tl.constexpr, B: tl.constexpr):
    """[ROWS, DP] 16-bit times the +-1 rotation, B channels at a time: products are exact, sums are float32."""
    return tl.dot(x.reshape([ROWS * (DP // B), B]), rotation).reshape([ROWS, DP])


@triton.jit
def _inverse(peak):
    some = peak > 1e-30
    return tl.where(some, 127.0 / tl.where(some, peak, 1.0), 0.0)


@triton.jit
def _round(y):
    """Nearest int8, ties to even: adding 1.5 * 2^23 leaves the integer in the low bits, cheaper than a cast."""
    return (y + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit(do_not_specialize=["N", "NP", "step", "heads", "bias_rows"])
def _key_shift(
    K, BIAS, SHIFT, ROTATION, N, NP, step, heads, bias_rows, s_b, s_h, s_n, s_bias_b, s_bias_h,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, SAMPLES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """SHIFT[B, Hkv, DP] = rotated mean over the kept ones of every step-th key, or of all keys where those are few.

    ROTATION[B, B] is written for _quantize, where making it would cost more than the rest of the work.
    """
    head = tl.program_id(0)
    rotation = _hadamard(B)
    if head == 0:
        i = tl.arange(0, B)
        tl.store(ROTATION + i[:, None] * B + i[None, :], rotation.to(ROTATION.dtype.element_ty))
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    K += b * s_b + h * s_h
    BIAS += (b * s_bias_b + h * bias_rows * s_bias_h) * NP
    total = tl.zeros([ROWS, DP], tl.float32)
    count = tl.zeros([ROWS], tl.float32)
    for start in range(0, SAMPLES, ROWS):
        n = (start + tl.arange(0, ROWS)) * step
        total, count = _add_kept(total, count, K, BIAS, n, N, NP, bias_rows, s_n, s_bias_h, D, DP, HAS_BIAS)
    if HAS_BIAS:
        # Few of the sample are kept: all keys, and those of the sample twice.
        end = tl.where(tl.sum(count, 0) < 16, N, 0)
        for start in range(0, end, ROWS):
            n = start + tl.arange(0, ROWS)
            total, count = _add_kept(total, count, K, BIAS, n, N, NP, bias_rows, s_n, s_bias_h, D, DP, HAS_BIAS)
    mean = tl.sum(total, 0) / tl.maximum(tl.sum(count, 0), 1.0)
    parts = mean.reshape([DP // B, B])
    shift = tl.sum(parts[:, :, None] * rotation[None, :, :], 1)
    tl.store(SHIFT + head * DP + tl.arange(0, DP), shift.reshape([DP]))


@triton.jit
def _add_kept(
    total, count, K, BIAS, n, N, NP, bias_rows, s_n, s_bias_h, D: tl.constexpr, DP: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Sums [ROWS, DP] and numbers [ROWS] of keys with the kept ones of the keys n added."""
    keep = _kept(BIAS, bias_rows, s_bias_h * NP, n, N, HAS_BIAS)
    cols = tl.arange(0, DP)
    inside = keep[:, None] & (cols < D)[None, :]
    x = tl.load(K + n[:, None].to(tl.int64) * s_n + cols[None, :], mask=inside, other=0)
    return total + x.to(tl.float32), count + keep.to(tl.float32)


@triton.jit
def _rotated(X, rows, keep, s_l, rotation, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, UPCAST: tl.constexpr):
    """Rows of X, rotated: float32 [ROWS, DP], 0 where they are not kept."""
    cols = tl.arange(0, DP)
    inside = keep[:, None] & (cols < D)[None, :]
    x = tl.load(X + rows[:, None].to(tl.int64) * s_l + cols[None, :], mask=inside, other=0)
    return _rotate(x.to(tl.float32) if UPCAST else x, rotation, rows.shape[0], DP, B)


@triton.jit
def _store(Y, rows, keep, y, DP: tl.constexpr):
    """Rows of int8 values, 8 bytes a thread: with 16 Triton would have each thread load 32 bytes of X in two halves."""
    cols = tl.max_contiguous(tl.arange(0, DP), 8)
    tl.store(Y + rows[:, None] * DP + cols[None, :], y, mask=keep[:, None])


@triton.jit
def _quantize_keys(
    K, SHIFT, rotation, BIAS, Y, SCALE, NORM, block, head, N, NP, bias_rows, s_n, s_bias,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr, SCALES: tl.constexpr, HAS_NORM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One block of ROWS keys with SCALES (1, 4, ROWS) scales; `K` and `BIAS` are those of this head."""
    rows = block * ROWS + tl.arange(0, ROWS)
    keep = _kept(BIAS, bias_rows, s_bias, rows, N, HAS_BIAS)
    x = _rotated(K, rows, keep, s_n, rotation, D, DP, B, UPCAST)
    cols = tl.arange(0, DP)
    x = x - tl.load(SHIFT + head * DP + cols)[None, :] * keep.to(tl.float32)[:, None]
    # x * 0 is NaN where x is NaN or infinite: such a row or block must answer NaN, as SDPA does.
    tile = head * (NP // ROWS) + block
    bad = tl.sum(x * 0.0, 1)
    if HAS_NORM:
        tl.store(NORM + tile, tl.sqrt(tl.max(tl.sum(x * x, 1), 0)))
    peak = tl.max(tl.abs(x), 1) + bad
    if SCALES == 1:
        peak = tl.max(peak, 0) + tl.sum(bad, 0)
        tl.store(SCALE + tile, peak / 127.0)
    elif SCALES == 4:
        peak = tl.max(tl.max(peak.reshape([ROWS // 8, 4, 2]), 2), 0) + tl.sum(bad, 0)
        tl.store(SCALE + tile * 4 + tl.arange(0, 4), peak / 127.0)
        peak = tl.broadcast_to(peak[None, :, None], [ROWS // 8, 4, 2]).reshape([ROWS])[:, None]
    else:
        tl.store(SCALE + head * NP + rows, peak / 127.0)
        peak = peak[:, None]
    _store(Y, (head * NP + rows), rows >= 0, _round(x * _inverse(peak)), DP)


@triton.jit
def _quantize_queries(
    Q, shift, rotation, Y, SCALE, LSE_TERM, block, head, M, s_m, factor, lse_factor,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr,
    HAS_LSE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One block of ROWS queries with a scale each; `Q` and `shift` are those of this head."""
    rows = block * ROWS + tl.arange(0, ROWS)
    keep = rows < M
    x = _rotated(Q, rows, keep, s_m, rotation, D, DP, B, UPCAST)
    peak = tl.max(tl.abs(x), 1) + tl.sum(x * 0.0, 1)
    tl.store(SCALE + head * M + rows, peak / 127.0 * tl.abs(factor), mask=keep)
    sign = tl.where(factor < 0, -1.0, 1.0)  # so that scores times their scale keep the order of the int8 scores
    y = _round(x * (_inverse(peak) * sign)[:, None])
    _store(Y, head * M + rows, keep, y, DP)
    if HAS_LSE:
        tl.store(LSE_TERM + head * M + rows, tl.sum(x * shift[None, :], 1) * lse_factor, mask=keep)


@triton.jit(
    do_not_specialize=["N", "NP", "M", "kv_heads", "heads", "key_programs", "k_chunks", "q_chunks", "bias_rows"]
)
def _quantize(
    K, Q, SHIFT, ROTATION, BIAS, K8, K_SCALE, NORM, Q8, Q_SCALE, LSE_TERM, factor, lse_factor,
    N, NP, M, kv_heads, heads, key_programs, k_chunks, q_chunks, bias_rows,
    s_kb, s_kh, s_kn, s_qb, s_qh, s_qm, s_bias_b, s_bias_h,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, K_ROWS: tl.constexpr, Q_ROWS: tl.constexpr,
    STEPS: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, SCALES: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_LSE: tl.constexpr, HAS_ROTATION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Query [B, H, M, D] and key [B, Hkv, N, D] to int8: one program STEPS blocks of one head of either.

    The first `key_programs` programs do keys, k_chunks a head, the others queries, q_chunks a head.
    """
    program = tl.program_id(0)
    if HAS_ROTATION:
        i = tl.arange(0, B)
        rotation = tl.load(ROTATION + i[:, None] * B + i[None, :])
    else:
        rotation = _hadamard(B)
    rotation = rotation.to(tl.float32 if UPCAST else Q.dtype.element_ty)
    if program < key_programs:
        head = (program // k_chunks).to(tl.int64)
        b = head // kv_heads
        h = head % kv_heads
        K += b * s_kb + h * s_kh
        BIAS += (b * s_bias_b + h * bias_rows * s_bias_h) * NP
        first = program % k_chunks * STEPS
        for block in tl.range(first, tl.minimum(first + STEPS, NP // K_ROWS), num_stages=STAGES):
            _quantize_keys(
                K, SHIFT, rotation, BIAS, K8, K_SCALE, NORM, block, head, N, NP, bias_rows, s_kn, s_bias_h * NP,
                D, DP, B, K_ROWS, HAS_BIAS, SCALES, HAS_NORM, UPCAST,
            )  # fmt: skip
    else:
        program -= key_programs
        head = (program // q_chunks).to(tl.int64)
        b = head // heads
        h = head % heads
        Q += b * s_qb + h * s_qh
        first = program % q_chunks * STEPS
        shift = tl.zeros([DP], tl.float32)
        if HAS_LSE:
            shift = tl.load(SHIFT + (b * kv_heads + h // (heads // kv_heads)) * DP + tl.arange(0, DP))
        for block in tl.range(first, tl.minimum(first + STEPS, tl.cdiv(M, Q_ROWS)), num_stages=STAGES):
            _quantize_queries(
                Q, shift, rotation, Q8, Q_SCALE, LSE_TERM, block, head, M, s_qm, factor, lse_factor,
                D, DP, B, Q_ROWS, HAS_LSE, UPCAST,
            )  # fmt: skip
