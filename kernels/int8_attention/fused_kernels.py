"""The kernel of fused.py that quantises either side."""

from __future__ import annotations

import triton
import triton.language as tl

from .bias import _kept
from .fused_norm import _inverse_rms
from .fused_parts import (
    FP16_UNIT,
    _angles,
    _as_rows,
    _dealt,
    _largest_weight,
    _load_channels,
    _load_raw,
    _multiply_add,
    _numbers,
    _pairs_of,
    _product,
    _row_numbers,
    _rows_of,
    _squares,
    _summed,
    _turned,
    _weights,
)
from .fused_stores import _as_written, _peaks, _write_keys, _write_queries
from .quantize_kernels import _rotate, _rotation


@triton.jit(do_not_specialize=["L", "split", "heads", "each", "bias_rows", "group"])
def _rms_rope_quantize(
    X, X2, W, W2, COS, SIN, RSTD, SHIFT, SHIFT16, BIAS, Y, SCALE, NORMS, LSE_TERM, SQUARES,
    eps, factor, lse_factor, L, split, heads, each, group, bias_rows,
    s_b, s_h, s_l, s_b2, s_h2, s_l2, s_cb, s_ch, s_cl, s_cj, s_bias_b, s_bias_h,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr,
    WARPS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, HELD: tl.constexpr,
    WORDS: tl.constexpr, WEIGHT_WORDS: tl.constexpr, R: tl.constexpr, HALVES: tl.constexpr, NORM: tl.constexpr,
    ACROSS: tl.constexpr, HAS_WEIGHT: tl.constexpr, TWO: tl.constexpr, PER_HEAD: tl.constexpr, IS_KEY: tl.constexpr,
    HAS_BIAS: tl.constexpr, SCALES: tl.constexpr, HAS_NORM: tl.constexpr, HAS_LSE: tl.constexpr, EVEN: tl.constexpr,
    UPCAST: tl.constexpr, FP16: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program ROWS rows of `each` heads, TOGETHER at a time (keys: one), which share angles and the rotation.

    Programs of the same rows follow each other: their heads lie side by side in memory.  What lies past the last row or
    head is read as that, and not written.  HELD: angles and weights stay in registers from head to head.
    AHEAD: a head's values are loaded while the one before is worked on, for as many registers.
    PDL: the kernel before this one may still run, see launch.early().
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    WAITS: tl.constexpr = IS_KEY or HAS_LSE  # for the shift; all of the kernels read the call's arguments
    # On one axis of the grid: CUDA counts no further than 65535 on the others, and blocks of queries are small.
    parts = tl.cdiv(heads, each)
    blocks = tl.num_programs(0) // parts
    # From the last to the first: a kernel that read the rows before has left the last ones in the cache.
    block = blocks - 1 - tl.program_id(0) // parts
    b = tl.program_id(1).to(tl.int64)
    HALF: tl.constexpr = DP // 2
    M: tl.constexpr = TOGETHER * ROWS
    W_ROWS: tl.constexpr = 8 * min(WARPS, max(1, M // 16))  # of a tile, see fused_parts.py
    SHARED: tl.constexpr = ROWS <= 8  # a thread has several heads of one row
    X += b * s_b
    X2 += b * s_b2
    COS += b * s_cb
    SIN += b * s_cb
    if RSTD is not None:
        RSTD += b * L
    dtype: tl.constexpr = tl.float32 if UPCAST else X.dtype.element_ty
    R_ROWS: tl.constexpr = M // W_ROWS
    m = _row_numbers(W_ROWS, R_ROWS)
    of = m // ROWS
    at_row = block * ROWS + (_row_numbers(W_ROWS, 1) if SHARED else m) % ROWS
    row = tl.minimum(at_row, L - 1)
    place = _dealt(row)
    source, step = _rows_of(X, X2, place, split, s_h, s_l, s_h2, s_l2, TWO)
    cos, sin, wa, wb = 1.0, 0.0, 1.0, 1.0
    HELD_TURN: tl.constexpr = R > 0 and HELD and not PER_HEAD
    HELD_WEIGHT: tl.constexpr = HAS_WEIGHT and HELD and not ACROSS and not (FP16 and IS_KEY)
    start = tl.program_id(0) % parts * each
    end = tl.minimum(start + each, heads)
    # Loads first, so that all of them wait together.
    if AHEAD:
        h = tl.minimum(start + of, heads - 1)
        raw, raw2 = _load_raw(source + _dealt(h) * step, None, D, HALF, R, HALVES, WORDS, True)
    if HELD_TURN:
        cos, sin = _angles(COS, SIN, place * 0, place, s_ch, s_cl, s_cj, HALF, R)
        if FP16:
            cos, sin = cos.to(tl.float16), sin.to(tl.float16)
    if HELD_WEIGHT:
        wa, wb = _weights(W, W2, place * 0, place, split, D, HALF, R, HALVES, False, TWO, WEIGHT_WORDS)
    unit = 1.0
    entry = tl.full([], 1.0 / FP16_UNIT if FP16 else 1.0, tl.float32)
    rotation = _rotation(B, entry.to(tl.float16 if FP16 or UPCAST else X.dtype.element_ty), Y)
    if FP16:
        largest = _largest_weight(W, W2, D, DP, TWO) if HAS_WEIGHT else 1.0
        unit = FP16_UNIT * largest
        if HELD_WEIGHT:
            wa, wb = tl.cast(wa * (1.0 / largest), tl.float16), tl.cast(wb * (1.0 / largest), tl.float16)
    # A thread that holds several heads of a row keeps their turn with the weights in it: two factors fewer a pair.
    FOLDED: tl.constexpr = HELD_TURN and HELD_WEIGHT and SHARED
    turn = (cos * wa, sin * wb, sin * wa, cos * wb) if FOLDED else (cos, sin, sin, cos)
    # The factor 1 / rms can wait for the scales where no size is too much for the 16 bits before the rotation.
    BEFORE: tl.constexpr = NORM and (IS_KEY or FP16 or X.dtype.element_ty == tl.float16)
    if PDL and WAITS:
        tl.extra.cuda.gdc_wait()
    for first in tl.range(start, end, TOGETHER, num_stages=STAGES):
        head = b * heads + first  # of the first one
        h = tl.minimum(first + of, heads - 1)
        if not AHEAD:
            raw, raw2 = _load_raw(source + _dealt(h) * step, None, D, HALF, R, HALVES, WORDS, True)
        x, y = _pairs_of(raw, raw2, HALVES, WORDS)
        squares = 0.0
        rstd = tl.full([1, 1, 1, 1, 1], 1.0, tl.float32)
        if NORM:
            if ACROSS and IS_KEY:
                rstd = tl.load(RSTD + row)
            else:
                squares = _squares(x, y)
                rstd = _inverse_rms(squares, eps, D, ACROSS)
        if FP16:
            x, y = (x * rstd).to(tl.float16), (y * rstd).to(tl.float16)
        if HAS_WEIGHT and not FOLDED:
            va, vb = wa, wb
            if not HELD_WEIGHT:
                if FP16 and IS_KEY:
                    # Of the two rows behind the shifts; see _rope_key_shift.
                    own = SHIFT16 + tl.num_programs(1).to(tl.int64) * heads * DP
                    if TWO:
                        own += tl.where(place < split, 0, DP)
                    j = _numbers(HALF, 4)
                    va, vb = _load_channels(own, j, None, 1, 1), _load_channels(own + HALF, j, None, 1, 1)
                else:
                    va, vb = _weights(W, W2, _dealt(h), place, split, D, HALF, R, HALVES, ACROSS, TWO, WEIGHT_WORDS)
                if FP16 and not IS_KEY:
                    va, vb = (va * (1.0 / largest)).to(tl.float16), (vb * (1.0 / largest)).to(tl.float16)
            if FP16:
                x, y = _product(x, va), _product(y, vb)
            else:
                x *= va
                y *= vb
        if R > 0:
            turn_h = turn
            if not HELD_TURN:
                cos_h, sin_h = _angles(COS, SIN, _dealt(h) if PER_HEAD else place * 0, place, s_ch, s_cl, s_cj, HALF, R)
                if FP16:
                    cos_h, sin_h = cos_h.to(tl.float16), sin_h.to(tl.float16)
                turn_h = (cos_h, sin_h, sin_h, cos_h)
            x, y = _turned(x, y, turn_h)
        if IS_KEY:
            j = _numbers(HALF, 4)
            if FP16:
                one = tl.full([1, 1, 1, 1, 1], 1.0, tl.float16)
                x = _multiply_add(x, one, _load_channels(SHIFT16 + head * DP, j, None, 1, 1))
                y = _multiply_add(y, one, _load_channels(SHIFT16 + head * DP + HALF, j, None, 1, 1))
            else:
                x = x * rstd - _load_channels(SHIFT + head * DP, j, None, 1, 1)
                y = y * rstd - _load_channels(SHIFT + head * DP + HALF, j, None, 1, 1)
        elif BEFORE and not FP16:
            x *= rstd
            y *= rstd
        if AHEAD:
            # What is known of the loaded values is in x and y by now, so that the next ones can take their registers.
            later = tl.minimum(first + TOGETHER + of, heads - 1)
            more = tl.full([1, 1, 1, 1, 1], first + TOGETHER, tl.int32) < end
            raw, raw2 = _load_raw(source + _dealt(later) * step, more, D, HALF, R, HALVES, WORDS, True)
        if FP16:
            z = tl.dot(_as_rows(x, y, DP).reshape([M * (DP // B), B]), rotation, out_dtype=tl.float16).reshape([M, DP])
        else:
            z = _rotate(_as_rows(x, y, DP).to(X.dtype.element_ty).to(dtype), rotation.to(dtype), M, DP, B)
        z = _as_written(z, W_ROWS)
        peak = _peaks(z, B)
        if IS_KEY:
            if HAS_BIAS:
                keep = _kept(BIAS + (b * s_bias_b + first * bias_rows * s_bias_h) * (blocks * ROWS), bias_rows,
                             s_bias_h * (blocks * ROWS), at_row.reshape([W_ROWS, R_ROWS]), L, HAS_BIAS)  # fmt: skip
                z = tl.where(keep[None, :, :, None, None], z, 0.0)
            else:
                keep = None if EVEN else (at_row < L).reshape([W_ROWS, R_ROWS])
            _write_keys(z, peak, keep, Y, SCALE, NORMS, head * blocks + block, unit, ROWS, DP, SCALES, HAS_NORM)
        else:
            there = (at_row < L) & (first + of < heads)
            at = (b * heads + h) * L + row
            if ACROSS:
                tl.store(SQUARES + at, squares, mask=there)  # 1 / rms is not known without the other heads
            if HAS_LSE:
                shift = SHIFT + (b * (heads // group) + _dealt(h) // group) * DP
                j = _numbers(HALF, 4)
                first_shift = _load_channels(shift, j, None, 1, 1)
                term = _summed(x * first_shift + y * _load_channels(shift + HALF, j, None, 1, 1)) * lse_factor
                tl.store(LSE_TERM + at, term * rstd if NORM and not BEFORE and not ACROSS else term, mask=there)
            scale = factor
            if NORM and not BEFORE and not ACROSS:
                scale = factor * rstd.reshape([W_ROWS, R_ROWS])
            scale *= unit
            at = at.reshape([W_ROWS, R_ROWS])
            inside = None if EVEN else there.reshape([W_ROWS, R_ROWS])
            _write_queries(z, peak, Y, SCALE, at, inside, scale, DP)
    if PDL and not WAITS:
        tl.extra.cuda.gdc_wait()  # what follows this kernel counts on the one before it, too
