"""Value to e4m3 for an fp8 P @ V: a scale per channel over the keys that count, transposed so that keys are contiguous.

A masked key counts for nothing: its value changes no scale and becomes 0, whatever it held.
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

# Of bench/bench_hopper.py's sweep on an H200: 0.13 ms for the peaks of the H3 window and 0.19 ms for its rounding.
_PEAK_ROWS, _ROWS = 32, 64  # keys of a step
_WARPS = 4
_PROGRAMS = 512  # that look for peaks: several on each SM of a large GPU


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
def _tile(
    V, BIAS, start, end, bias_rows, s_n, s_bias,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, PERMUTED: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS, DP] of V from `start` on, 0 where a key does not count."""
    i = tl.arange(0, ROWS)
    if PERMUTED:
        i = (i & -16) + ((i >> 2) & 3) * 2 + (i & 1) + ((i >> 1) & 1) * 8
    n = start + i
    cols = tl.arange(0, DP)
    keep = _kept(BIAS, bias_rows, s_bias, n, end, HAS_BIAS)
    inside = keep[:, None] & (cols < D)[None, :]
    return tl.load(V + n[:, None].to(tl.int64) * s_n + cols[None, :], mask=inside, other=0).to(tl.float32)


@triton.jit(do_not_specialize=["N", "steps", "heads", "bias_rows"])
def _value_peaks(
    V, BIAS, PEAK, N, steps, heads, bias_rows, s_b, s_h, s_n, s_bias_b, s_bias_h,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """PEAK[B * Hkv, parts, DP]: the largest |V| of a channel in every parts-th step of keys."""
    part = tl.program_id(0)
    head = tl.program_id(1)
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    V += b * s_b + h * s_h
    BIAS += (b * s_bias_b + h * bias_rows * s_bias_h) * (steps * ROWS)
    peak = tl.zeros([ROWS, DP], tl.float32)
    for step in range(part, steps, tl.num_programs(0)):
        x = _tile(V, BIAS, step * ROWS, N, bias_rows, s_n, s_bias_h * (steps * ROWS), D, DP, ROWS, HAS_BIAS, False)
        x = tl.abs(x)
        peak = tl.maximum(peak, tl.where(x < float("inf"), x, 0.0))  # NaN and infinity count for no scale
    tl.store(PEAK + (head * tl.num_programs(0) + part) * DP + tl.arange(0, DP), tl.max(peak, 0))


@triton.jit(do_not_specialize=["N", "steps", "heads", "bias_rows"])
def _quantize_value(
    V, BIAS, Y, SCALE, PEAK, N, steps, heads, bias_rows, s_b, s_h, s_n, s_bias_b, s_bias_h,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    PERMUTED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One program a step of keys of one head."""
    # Backwards: what _value_peaks has read last is the likeliest to be in the cache.
    step = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.num_programs(1) - 1 - tl.program_id(1)
    NP = steps * ROWS
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    V += b * s_b + h * s_h
    BIAS += (b * s_bias_b + h * bias_rows * s_bias_h) * NP
    x = _tile(V, BIAS, step * ROWS, N, bias_rows, s_n, s_bias_h * NP, D, DP, ROWS, HAS_BIAS, PERMUTED)
    cols = tl.arange(0, DP)
    peak = tl.max(tl.load(PEAK + (head * PARTS + tl.arange(0, PARTS)[:, None]) * DP + cols[None, :]), 0)
    some = peak > 1e-30
    inverse = tl.where(some, 448.0 / tl.where(some, peak, 1.0), 0.0)
    if step == 0:
        tl.store(SCALE + head * DP + cols, peak / 448.0)
    y = _e4m3(x * inverse[None, :] + x * 0.0, INTERPRETED)  # infinity becomes NaN, which e4m3 has
    Y += head.to(tl.int64) * DP * NP + step * ROWS
    tl.store(Y + cols[:, None].to(tl.int64) * NP + tl.arange(0, ROWS)[None, :], tl.trans(y))


def quantize_value(value: torch.Tensor, bias: torch.Tensor | None, config: Config) -> QuantizedValue:
    """Quantise value [B, Hkv, Lk, D] (fp16 or bf16, contiguous last axis) for the attention kernel of `config`.

    bias: that of Quantized, or None.  A NaN or an infinity in a key that counts becomes NaN.
    """
    batch, heads, kv_len, head_dim = value.shape
    padded = padded_head_dim(head_dim)
    padded_len = triton.cdiv(kv_len, config.block_n) * config.block_n
    rows, peak_rows = min(_ROWS, config.block_n), min(_PEAK_ROWS, config.block_n)
    parts = triton.next_power_of_2(min(64, padded_len // peak_rows, _PROGRAMS // (batch * heads) + 1))
    quantized = empty((batch, heads, padded, padded_len), torch.float8_e4m3fn, value.device)
    scale = empty((batch, heads, padded), torch.float32, value.device)
    peak = empty((batch * heads, parts, padded), torch.float32, value.device)
    mask = bias if bias is not None else scale
    sizes = (heads, heads_of(bias, heads), *value.stride()[:3], *(row_strides(bias) if bias is not None else (0, 0)))
    shared = {"D": head_dim, "DP": padded, "HAS_BIAS": bias is not None, "num_warps": _WARPS}
    launch(
        _value_peaks, (parts, batch * heads),
        value, mask, peak, kv_len, padded_len // peak_rows, *sizes, ROWS=peak_rows, **shared,
    )  # fmt: skip
    launch(
        _quantize_value, (padded_len // rows, batch * heads),
        value, mask, quantized, scale, peak, kv_len, padded_len // rows, *sizes,
        ROWS=rows, PARTS=parts, PERMUTED=config.gluon, INTERPRETED=interpreting(), **shared,
    )  # fmt: skip
    return QuantizedValue(quantized, scale)


def heads_of(bias: torch.Tensor | None, kv_heads: int) -> int:
    """Bias rows that the query heads of one key head have between them."""
    return 1 if bias is None or bias.shape[1] == 1 else bias.shape[1] // kv_heads
