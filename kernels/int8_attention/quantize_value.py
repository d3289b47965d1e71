"""Value to e4m3 for an fp8 P @ V: a scale per channel over the keys that count, transposed so that keys are contiguous.

A masked key counts for nothing: its value changes no scale and becomes 0, whatever it held.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .configs import Config, padded_head_dim
from .limits import interpreting
from .quantize import _kept, row_strides

_ROWS = 128  # keys of a step
_WARPS = 8


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


@triton.jit(do_not_specialize=["N", "steps", "chunk", "chunks", "heads", "bias_rows"])
def _quantize_value(
    V, BIAS, Y, SCALE, PEAK, DONE, N, steps, chunk, chunks, heads, bias_rows, s_b, s_h, s_n, s_bias_b, s_bias_h,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, PERMUTED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """`chunks` programs a head: each finds the peaks of its steps of keys, waits for its head's others, and rounds.

    The second read of a chunk finds it in the L2 cache.  PEAK int32 [B * Hkv, DP] and DONE int32 [1 + B * Hkv] are 0 at
    the start.  Programs take a number when they start, so the ones that a program waits for were started before or
    with it: with no more chunks than the GPU holds programs, all of them run.
    """
    number = tl.atomic_add(DONE, 1)
    head = number // chunks
    first = number % chunks * chunk
    last = tl.minimum(first + chunk, steps)
    NP = steps * ROWS
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    V += b * s_b + h * s_h
    BIAS += (b * s_bias_b + h * bias_rows * s_bias_h) * NP
    PEAK += head * DP
    cols = tl.arange(0, DP)
    peak = tl.zeros([DP], tl.float32)
    for step in range(first, last):
        x = tl.abs(_tile(V, BIAS, step * ROWS, N, bias_rows, s_n, s_bias_h * NP, D, DP, ROWS, HAS_BIAS, False))
        peak = tl.maximum(peak, tl.max(tl.where(x < float("inf"), x, 0.0), 0))  # NaN and infinity count for no scale
    # The bits of floats that are not negative have the order of the floats.
    tl.atomic_max(PEAK + cols, peak.to(tl.int32, bitcast=True))
    tl.debug_barrier()
    arrived = tl.atomic_add(DONE + 1 + head, 1) + 1
    while arrived < chunks:
        arrived = tl.atomic_add(DONE + 1 + head, 0)
    peak = tl.atomic_max(PEAK + cols, 0).to(tl.float32, bitcast=True)
    some = peak > 1e-30
    inverse = tl.where(some, 448.0 / tl.where(some, peak, 1.0), 0.0)
    if first == 0:
        tl.store(SCALE + head * DP + cols, peak / 448.0)
    Y += head.to(tl.int64) * DP * NP
    for back in range(first, last):
        start = (first + last - 1 - back) * ROWS  # the keys read last are the likeliest to be in the cache
        x = _tile(V, BIAS, start, N, bias_rows, s_n, s_bias_h * NP, D, DP, ROWS, HAS_BIAS, PERMUTED)
        y = _e4m3(x * inverse[None, :] + x * 0.0, INTERPRETED)  # infinity becomes NaN, which e4m3 has
        places = cols[:, None].to(tl.int64) * NP + (start + tl.arange(0, ROWS))[None, :]
        tl.store(Y + places, tl.trans(y))


def quantize_value(value: torch.Tensor, bias: torch.Tensor | None, config: Config) -> QuantizedValue:
    """Quantise value [B, Hkv, Lk, D] (fp16 or bf16, contiguous last axis) for the attention kernel of `config`.

    bias: that of Quantized, or None.  A NaN or an infinity in a key that counts becomes NaN.
    """
    batch, heads, kv_len, head_dim = value.shape
    padded = padded_head_dim(head_dim)
    rows = min(_ROWS, config.block_n)
    padded_len = triton.cdiv(kv_len, config.block_n) * config.block_n
    steps = padded_len // rows
    quantized = value.new_empty((batch, heads, padded, padded_len), dtype=torch.float8_e4m3fn)
    scale = value.new_empty((batch, heads, padded), dtype=torch.float32)
    state = value.new_zeros(batch * heads * (padded + 1) + 1, dtype=torch.int32)
    # The interpreter runs one program after the other: none may wait.
    together = 1 if interpreting() else torch.cuda.get_device_properties(value.device).multi_processor_count
    chunk = triton.cdiv(steps, together)
    chunks = triton.cdiv(steps, chunk)
    bias_rows = heads_of(bias, heads)
    _quantize_value[(batch * heads * chunks,)](
        value, bias if bias is not None else scale, quantized, scale, state, state[batch * heads * padded :],
        kv_len, steps, chunk, chunks, heads, bias_rows, *value.stride()[:3],
        *(row_strides(bias) if bias is not None else (0, 0)),
        D=head_dim, DP=padded, ROWS=rows, HAS_BIAS=bias is not None, PERMUTED=config.gluon,
        INTERPRETED=interpreting(), num_warps=_WARPS,
    )  # fmt: skip
    return QuantizedValue(quantized, scale)


def heads_of(bias: torch.Tensor | None, kv_heads: int) -> int:
    """Bias rows that the query heads of one key head have between them."""
    return 1 if bias is None or bias.shape[1] == 1 else bias.shape[1] // kv_heads
