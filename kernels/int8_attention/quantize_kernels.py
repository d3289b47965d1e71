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
def _rotation(B: tl.constexpr, one, nowhere):
    """The same times `one`, a scalar of 16 bits whose type it gets, two entries at a time and without a read of memory.

    nowhere: any pointer to 16 bytes.
    """
    i = tl.arange(0, B)[:, None]
    word = tl.arange(0, B // 2)[None, :]  # entries (i, 2 * word) and (i, 2 * word + 1)
    # Bit n of 0x6996 is popcount(n) & 1. Of eight entries side by side the sign is one, and of eights rows the order.
    eight = (0x6996 >> (i >> 3 & word >> 2)) ^ (i * 40503 >> 9)
    low = i & 7
    within = 0x6996 >> (low >> 1 & (word & 3))
    bits = one.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    # Nothing is loaded, as the compiler knows: a load is what makes Triton give a thread 16 bytes of a row.
    at = nowhere.to(tl.pointer_type(tl.int32), bitcast=True) + i * (B // 2) + word
    pairs = tl.load(at, mask=i * 0 + tl.num_programs(0) < 1, other=0)
    pairs ^= _both_signs(eight) ^ (_both_signs(within) ^ (low << 31) ^ bits ^ bits << 16)
    entries = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
    return entries.reshape([B, B]).to(one.dtype, bitcast=True)


@triton.jit
def _both_signs(odd):
    """The signs of two 16-bit floats in a word, of the lowest bit."""
    return odd << 31 | (odd << 15 & 0x8000)


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
    K, BIAS, SHIFT, N, NP, step, heads, bias_rows, s_b, s_h, s_n, s_bias_b, s_bias_h,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, SAMPLES: tl.constexpr,
    UNROLL: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SHIFT[B, Hkv, DP] = rotated mean over the kept ones of every step-th key, or of all keys where those are few."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    K += b * s_b + h * s_h
    BIAS += (b * s_bias_b + h * bias_rows * s_bias_h) * NP
    total = tl.zeros([ROWS, DP], tl.float32)
    count = tl.zeros([ROWS], tl.float32)
    for start in tl.range(0, SAMPLES, ROWS, loop_unroll_factor=UNROLL):  # their loads wait together
        n = (start + tl.arange(0, ROWS)) * step
        total, count = _add_kept(total, count, K, BIAS, n, N, NP, bias_rows, s_n, s_bias_h, D, DP, HAS_BIAS)
    if HAS_BIAS:
        # Few of the sample are kept: all keys, and those of the sample twice.
        end = tl.where(tl.sum(count, 0) < 16, N, 0)
        for start in range(0, end, ROWS):
            n = start + tl.arange(0, ROWS)
            total, count = _add_kept(total, count, K, BIAS, n, N, NP, bias_rows, s_n, s_bias_h, D, DP, HAS_BIAS)
    rotation = _hadamard(B)  # under the loads
    mean = tl.sum(total, 0) / tl.maximum(tl.sum(count, 0), 1.0)
    parts = mean.reshape([DP // B, B])
    shift = tl.sum(parts[:, :, None] * rotation[None, :, :], 1)
    tl.store(SHIFT + head * DP + tl.arange(0, DP), shift.reshape([DP]))


@triton.jit
def _finite(x):
    """x, and 0 for NaN and infinity: a mean with them would give them to rows that don't see their key."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _add_kept(
    total, count, K, BIAS, n, N, NP, bias_rows, s_n, s_bias_h, D: tl.constexpr, DP: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Sums [ROWS, DP] and numbers [ROWS] of keys with the kept ones of the keys n added."""
    cols = tl.arange(0, DP)
    inside = (n < N)[:, None] & (cols < D)[None, :]
    x = tl.load(K + n[:, None].to(tl.int64) * s_n + cols[None, :], mask=inside, other=0).to(tl.float32)
    x = _finite(x)
    keep = _kept(BIAS, bias_rows, s_bias_h * NP, n, N, HAS_BIAS)
    if HAS_BIAS:
        x = tl.where(keep[:, None], x, 0.0)  # only now, so that the load does not wait for the bias
    return total + x, count + keep.to(tl.float32)


@triton.jit
def _rotated(
    X, row, end, s_l, rotation,
    ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """ROWS rows of X from `row` on, rotated: float32 [ROWS, DP], 0 from the row `end` on."""
    rows, cols = tl.arange(0, ROWS), tl.arange(0, DP)
    inside = (rows < end - row)[:, None] & (cols < D)[None, :]
    # Eights apart, so that a thread needs no register for each of its rows.
    X += row.to(tl.int64) * s_l + (rows % 8)[:, None].to(tl.int64) * s_l + cols[None, :]
    eighth = tl.full([], 8, tl.int64) * s_l  # a stride of 1 is a plain number to Triton
    x = tl.load(X + (rows // 8)[:, None] * eighth, mask=inside, other=0)
    return _rotate(x.to(tl.float32) if UPCAST else x, rotation, ROWS, DP, B)


@triton.jit
def _checked(peak, total):
    """The largest |x| of rows; NaN where something is NaN or infinite, as SDPA answers. total: NaN where an x is."""
    return tl.where((total == total) & (peak < float("inf")), peak, float("nan"))


@triton.jit
def _largest(x, AXIS: tl.constexpr):
    """Largest along an axis of what is not negative: floats come in the order of their bits, NaN last."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS).to(tl.float32, bitcast=True)


@triton.jit
def _write(Y, y, rows_left, ROWS: tl.constexpr, DP: tl.constexpr):
    """Rows of int8 values, 8 bytes a thread: with 16 Triton would have each thread load 32 bytes of X in two halves."""
    rows, cols = tl.arange(0, ROWS), tl.max_contiguous(tl.arange(0, DP), 8)
    mask = None if rows_left is None else (rows < rows_left)[:, None]
    tl.store(Y + rows[:, None] * DP + cols[None, :], y, mask=mask)


@triton.jit
def _write_keys(
    x, Y, SCALE, NORM, row, tile, ROWS: tl.constexpr, DP: tl.constexpr, SCALES: tl.constexpr, HAS_NORM: tl.constexpr
):
    """A block of rotated keys, less their mean, as int8 with SCALES (1, 4, ROWS) scales."""
    square = tl.sum(x * x, 1)
    peak = _checked(tl.max(tl.abs(x), 1), square)
    square = tl.where(square == square, square, float("inf"))
    if SCALES == 4:
        # Peaks and norms in one reduction, because each makes the warps wait for one another.
        both = tl.join(peak, square).reshape([ROWS // 8, 4, 2, 2])
        peak, square = tl.split(_largest(_largest(both, 2), 0))
        tl.store(SCALE + tile * 4 + tl.arange(0, 4), peak / 127.0)
        tl.store(NORM + tile, tl.sqrt(_largest(square, 0)))
        peak = tl.broadcast_to(peak[None, :, None], [ROWS // 8, 4, 2]).reshape([ROWS])[:, None]
    else:
        if HAS_NORM:
            tl.store(NORM + tile, tl.sqrt(_largest(square, 0)))
        if SCALES == 1:
            peak = _largest(peak, 0)
            tl.store(SCALE + tile, peak / 127.0)
        else:
            tl.store(SCALE + row + tl.arange(0, ROWS), peak / 127.0)
            peak = peak[:, None]
    _write(Y + row * DP, _round(x * _inverse(peak)), None, ROWS, DP)


@triton.jit
def _write_queries(
    x, shift, Y, SCALE, LSE_TERM, row, rows_left, factor, lse_factor,
    ROWS: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """A block of rotated queries, the first `rows_left` of them, as int8 with a scale each."""
    rows = tl.arange(0, ROWS)
    part = x.reshape([ROWS * (DP // B), B])
    for halving in tl.static_range(2):
        if B >> halving > 32:
            part, _rest = tl.split(part.reshape([ROWS * (DP // B), 2, B >> (halving + 1)]).permute(0, 2, 1))
    # What is not finite is after the rotation in every channel of its block of B: a few of them tell.
    total = tl.sum((part * 0.0).reshape([ROWS, DP // B * 32]), 1)
    peak = _checked(tl.max(tl.abs(x), 1), total)
    tl.store(SCALE + row + rows, peak / 127.0 * factor, mask=rows < rows_left)
    _write(Y + row * DP, _round(x * _inverse(peak)[:, None]), rows_left, ROWS, DP)
    if HAS_LSE:
        tl.store(LSE_TERM + row + rows, tl.sum(x * shift[None, :], 1) * lse_factor, mask=rows < rows_left)


@triton.jit(do_not_specialize=["N", "NP", "M", "kv_heads", "heads", "query_programs", "k_chunks", "q_chunks", "steps"])
def _quantize(
    K, Q, SHIFT, BIAS, K8, K_SCALE, NORM, Q8, Q_SCALE, LSE_TERM, factor, lse_factor,
    N, NP, M, kv_heads, heads, query_programs, k_chunks, q_chunks, steps,
    s_kb, s_kh, s_kn, s_qb, s_qh, s_qm, s_bias_b, s_bias_h,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, K_ROWS: tl.constexpr, Q_ROWS: tl.constexpr,
    STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, BIAS_ROWS: tl.constexpr, SCALES: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_LSE: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Query [B, H, M, D] and key [B, Hkv, N, D] to int8: one program `steps` blocks of one head of either.

    The first `query_programs` programs do queries, q_chunks a head, the others keys, k_chunks a head; the shift that
    keys need may come late.  PDL: the kernel of the shift may still run, see launch.early().
    Triton puts a branch in a loop behind the loads of the next block, but what reads the rotation's result before them.
    """
    program = tl.program_id(0)
    dtype: tl.constexpr = tl.float16 if UPCAST else Q.dtype.element_ty
    rotation = _rotation(B, tl.full([], 1.0, tl.float32).to(dtype), Q8)
    if UPCAST:
        rotation = rotation.to(tl.float32)
    cols = tl.arange(0, DP)
    if program < query_programs:
        head = (program // q_chunks).to(tl.int64)
        b = head // heads
        h = head % heads
        Q += b * s_qb + h * s_qh
        first = program % q_chunks * steps
        sign = tl.where(factor < 0, -1.0, 1.0)  # so that scores times their scale keep the order of the int8 scores
        shift = tl.zeros([DP], tl.float32)
        if HAS_LSE:
            if PDL:
                tl.extra.cuda.gdc_wait()
            shift = tl.load(SHIFT + (b * kv_heads + h // (heads // kv_heads)) * DP + cols) * sign
        for block in tl.range(first, tl.minimum(first + steps, tl.cdiv(M, Q_ROWS)), num_stages=STAGES):
            row = block * Q_ROWS
            x = _rotated(Q, row, M, s_qm, rotation, Q_ROWS, D, DP, B, UPCAST) * sign
            if M > 0:
                _write_queries(
                    x, shift, Q8, Q_SCALE, LSE_TERM, head * M + row, M - row, tl.abs(factor), lse_factor,
                    Q_ROWS, DP, B, HAS_LSE,
                )  # fmt: skip
        if PDL and not HAS_LSE:
            tl.extra.cuda.gdc_wait()  # what follows this kernel counts on the one before it, too
    else:
        program -= query_programs
        head = (program // k_chunks).to(tl.int64)
        b = head // kv_heads
        h = head % kv_heads
        K += b * s_kb + h * s_kh
        BIAS += (b * s_bias_b + h * BIAS_ROWS * s_bias_h) * NP
        first = program % k_chunks * steps
        if PDL:
            tl.extra.cuda.gdc_wait()  # not in the loop, of which Triton moves loads to before it
        for block in tl.range(first, tl.minimum(first + steps, NP // K_ROWS), num_stages=STAGES):
            row = block * K_ROWS
            keep = _kept(BIAS, BIAS_ROWS, s_bias_h * NP, row + tl.arange(0, K_ROWS), N, HAS_BIAS)
            x = _rotated(K, row, N, s_kn, rotation, K_ROWS, D, DP, B, UPCAST)
            shift = tl.load(SHIFT + head * DP + cols)
            if HAS_BIAS:
                x = tl.where(keep[:, None], x - shift[None, :], 0.0)
            else:
                x = x - shift[None, :] * keep.to(tl.float32)[:, None]
            if NP > 0:
                tile = head * (NP // K_ROWS) + block
                _write_keys(x, K8, K_SCALE, NORM, head * NP + row, tile, K_ROWS, DP, SCALES, HAS_NORM)
