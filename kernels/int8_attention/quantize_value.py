"""Value to e4m3 for an fp8 P @ V: a scale per channel over the keys that count, transposed so that keys are contiguous.

A masked key counts for nothing: its value changes no scale and becomes 0, whatever it held.

e4m3 is a floating point format, so a scale needs to be near the channel's peak only: a sample of the keys tells it. The
pass that rounds all of them finds where a value is more than 7 times as large, and that head is done again: else value
is read once. Scales are powers of two: what a value is rounded to depends on no other value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .bias import _kept, row_strides
from .configs import Config, padded_head_dim
from .launch import empty, launch
from .limits import interpreting

_ROWS = 64  # keys of a step
_STEPS = 4  # steps of a program
_WARPS = 4
_PARTS = 8  # programs of a head that look for its peaks, in a step of keys each
_AGAIN = 16  # programs of a head that do it again where that is needed, and leave at once where not
_ROOM = tl.constexpr(5)  # a sample's peak becomes 2^5 to 2^6, of 448: values 7 times as large are still right


class QuantizedValue(NamedTuple):
    """What the attention kernel reads instead of value where P @ V is in fp8; both are contiguous.

    value: e4m3 [B, Hkv, DP, N], N = Lk rounded up to a key tile; the value is that times its channel's scale.
    scale: float32 [B, Hkv, DP].
    With config.gluon position 4c + 2h + l of every 16 keys holds key 8h + 2c + l (c < 4, h < 2, l < 2): the thread that
    holds the scores of 2c, 2c + 1, 2c + 8 and 2c + 9 then holds four neighbours of an 8-bit operand.
    """

    value: torch.Tensor
    scale: torch.Tensor


@triton.jit
def _e4m3(x, INTERPRETED: tl.constexpr):
    """float32 [-448, 448] to the nearest e4m3."""
    if INTERPRETED:
        # Triton's interpreter loses the carry into the exponent and truncates below 2^-6: round first.
        far = x * 1048577.0
        x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, far - (far - x))
    return x.to(tl.float8e4nv)


@triton.jit
def _values(V, BIAS, n, end, bias_rows, s_n, s_bias, D: tl.constexpr, DP: tl.constexpr, HAS_BIAS: tl.constexpr):
    """float32 [rows, DP] of the keys n of V, 0 where a key does not count."""
    cols = tl.arange(0, DP)
    keep = _kept(BIAS, bias_rows, s_bias, n, end, HAS_BIAS)
    inside = keep[:, None] & (cols < D)[None, :]
    return tl.load(V + n[:, None].to(tl.int64) * s_n + cols[None, :], mask=inside, other=0).to(tl.float32)


@triton.jit
def _finite(x):
    """|x|, and 0 for NaN and infinity, which count for no scale."""
    x = tl.abs(x)
    return tl.where(x < float("inf"), x, 0.0)


@triton.jit
def _held(x, HALF: tl.constexpr):
    """x, and NaN for infinity, which e4m3 has not.  HALF: of float16 what P @ V in e4m3 can't take past 65504."""
    x += x * 0.0
    if HALF:
        # e4m3 rounds a weight and a value by up to 1/16 each: larger ones would become 2^16, or that by their weight.
        x = tl.where(x > 61440.0, 61440.0, tl.where(x < -61440.0, -61440.0, x))
    return x


@triton.jit
def _scales(peak):
    """Powers of two: a channel's scale and its inverse, 0 for one that is 0."""
    some = peak > 0
    exponent = tl.where(some, tl.maximum((peak.to(tl.int32, bitcast=True) >> 23) - (127 + _ROOM), -126), 0)
    scale = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(some, scale, 0.0), tl.where(some, inverse, 0.0)


@triton.jit
def _sampled(PEAK, head, DP: tl.constexpr, PARTS: tl.constexpr):
    parts = tl.arange(0, PARTS)[:, None]
    return tl.max(tl.load(PEAK + (head * PARTS + parts) * DP + tl.arange(0, DP)[None, :]), 0)


@triton.jit
def _step(
    V, BIAS, step, N, bias_rows, s_n, s_bias,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, PERMUTED: tl.constexpr,
):  # fmt: skip
    """_values() of a step, in the order of QuantizedValue."""
    i = tl.arange(0, ROWS)
    if PERMUTED:
        i = (i & -16) + ((i >> 2) & 3) * 2 + (i & 1) + ((i >> 1) & 1) * 8
    return _values(V, BIAS, step * ROWS + i, N, bias_rows, s_n, s_bias, D, DP, HAS_BIAS)


@triton.jit
def _write(x, inverse, Y, NP, step, DP: tl.constexpr, ROWS: tl.constexpr, INTERPRETED: tl.constexpr):
    y = _e4m3(x * inverse[None, :], INTERPRETED)
    place = step * ROWS + tl.arange(0, DP)[:, None].to(tl.int64) * NP
    tl.store(Y + place + tl.arange(0, ROWS)[None, :], tl.trans(y))


@triton.jit(do_not_specialize=["N", "steps", "stride", "heads", "bias_rows"])
def _sample_peaks(
    V, BIAS, PEAK, OVER, N, steps, stride, heads, bias_rows, s_b, s_h, s_n, s_bias_b, s_bias_h,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """PEAK[B * Hkv, parts, DP]: the largest |V| of a channel in part of every stride-th key.  OVER[B * Hkv, DP] = 0."""
    part = tl.program_id(0)
    head = tl.program_id(1)
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    V += b * s_b + h * s_h
    BIAS += (b * s_bias_b + h * bias_rows * s_bias_h) * (steps * ROWS)
    n = (part * ROWS + tl.arange(0, ROWS)) * stride
    x = _values(V, BIAS, n, N, bias_rows, s_n, s_bias_h * (steps * ROWS), D, DP, HAS_BIAS)
    cols = tl.arange(0, DP)
    tl.store(PEAK + (head * tl.num_programs(0) + part) * DP + cols, tl.max(_finite(x), 0))
    if part == 0:
        tl.store(OVER + head * DP + cols, tl.zeros([DP], tl.int32))


@triton.jit(do_not_specialize=["N", "steps", "heads", "bias_rows"])
def _quantize_value(
    V, BIAS, Y, PEAK, OVER, N, steps, heads, bias_rows, s_b, s_h, s_n, s_bias_b, s_bias_h,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    PERMUTED: tl.constexpr, INTERPRETED: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One program STEPS steps of keys of one head.  OVER: bits of the largest |V| that is out of e4m3's range."""
    first = tl.program_id(0) * STEPS
    head = tl.program_id(1)
    NP = steps * ROWS
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    V += b * s_b + h * s_h
    BIAS += (b * s_bias_b + h * bias_rows * s_bias_h) * NP
    Y += head.to(tl.int64) * DP * NP
    scale, inverse = _scales(_sampled(PEAK, head, DP, PARTS))
    OWN: tl.constexpr = max(1024 // DP, 1)  # rows so far apart are a thread's own: 16 bytes each, 128 threads
    largest = tl.zeros([OWN, DP], tl.float32)
    for step in range(first, tl.minimum(first + STEPS, steps)):
        x = _step(V, BIAS, step, N, bias_rows, s_n, s_bias_h * NP, D, DP, ROWS, HAS_BIAS, PERMUTED)
        x = _held(x, V.dtype.element_ty == tl.float16)
        _write(x, inverse, Y, NP, step, DP, ROWS, INTERPRETED)
        # A GPU's maximum is the other number where one is NaN.
        size = _finite(x) if INTERPRETED else tl.abs(x)
        largest = tl.maximum(largest, tl.max(size.reshape([ROWS // OWN, OWN, DP]), 0))
    peak = tl.max(largest, 0)
    over = peak > scale * 448.0
    tl.atomic_max(OVER + head * DP + tl.arange(0, DP), peak.to(tl.int32, bitcast=True), mask=over, sem="relaxed")


@triton.jit(do_not_specialize=["N", "steps", "heads", "bias_rows"])
def _finish_value(
    V, BIAS, Y, SCALE, PEAK, OVER, N, steps, heads, bias_rows, s_b, s_h, s_n, s_bias_b, s_bias_h,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    PERMUTED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The scales; and heads again of which a channel was over what its sample had told."""
    part = tl.program_id(0)
    head = tl.program_id(1)
    cols = tl.arange(0, DP)
    over = tl.load(OVER + head * DP + cols).to(tl.float32, bitcast=True)
    scale, inverse = _scales(tl.maximum(_sampled(PEAK, head, DP, PARTS), over))
    if part == 0:
        tl.store(SCALE + head * DP + cols, scale)
    if tl.max(over, 0) > 0:
        NP = steps * ROWS
        b = (head // heads).to(tl.int64)
        h = (head % heads).to(tl.int64)
        V += b * s_b + h * s_h
        BIAS += (b * s_bias_b + h * bias_rows * s_bias_h) * NP
        Y += head.to(tl.int64) * DP * NP
        for step in range(part, steps, tl.num_programs(0)):
            x = _step(V, BIAS, step, N, bias_rows, s_n, s_bias_h * NP, D, DP, ROWS, HAS_BIAS, PERMUTED)
            _write(_held(x, V.dtype.element_ty == tl.float16), inverse, Y, NP, step, DP, ROWS, INTERPRETED)


def quantize_value(value: torch.Tensor, bias: torch.Tensor | None, config: Config) -> QuantizedValue:
    """Quantise value [B, Hkv, Lk, D] (fp16 or bf16, contiguous last axis) for the attention kernel of `config`.

    bias: that of Quantized, or None.  A NaN or an infinity in a key that counts becomes NaN.
    """
    batch, heads, kv_len, head_dim = value.shape
    padded = padded_head_dim(head_dim)
    padded_len = triton.cdiv(kv_len, config.block_n) * config.block_n
    rows = min(_ROWS, config.block_n)
    steps = padded_len // rows
    parts = min(_PARTS, triton.next_power_of_2(steps))
    device = value.device
    quantized = empty((batch, heads, padded, padded_len), torch.float8_e4m3fn, device)
    scale = empty((batch, heads, padded), torch.float32, device)
    peak = empty((batch * heads, parts, padded), torch.float32, device)
    over = empty((batch * heads, padded), torch.int32, device)
    mask = bias if bias is not None else scale
    sizes = (heads, heads_of(bias, heads), *value.stride()[:3], *(row_strides(bias) if bias is not None else (0, 0)))
    shared = {"D": head_dim, "DP": padded, "ROWS": rows, "HAS_BIAS": bias is not None, "num_warps": _WARPS}
    rounding = shared | {"PARTS": parts, "PERMUTED": config.gluon, "INTERPRETED": interpreting()}
    stride = triton.cdiv(kv_len, parts * rows)
    launch(
        _sample_peaks, (parts, batch * heads), value, mask, peak, over, kv_len, steps, stride, *sizes, **shared
    )  # fmt: skip
    launch(
        _quantize_value, (triton.cdiv(steps, _STEPS), batch * heads),
        value, mask, quantized, peak, over, kv_len, steps, *sizes, STEPS=_STEPS, **rounding,
    )  # fmt: skip
    launch(
        _finish_value, (min(_AGAIN, steps), batch * heads),
        value, mask, quantized, scale, peak, over, kv_len, steps, *sizes, **rounding,
    )  # fmt: skip
    return QuantizedValue(quantized, scale)


def heads_of(bias: torch.Tensor | None, kv_heads: int) -> int:
    """Bias rows that the query heads of one key head have between them."""
    return 1 if bias is None or bias.shape[1] == 1 else bias.shape[1] // kv_heads
