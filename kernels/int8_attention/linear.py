"""int8 linear layer whose epilogue rounds the int32 accumulator straight to the attention's int8 query or key.

One rounding in all: accumulator * row scale * channel scale + bias is float32 and goes to int8 at once. There is no
Hadamard rotation here: on tensor cores it takes 16-bit values, which would be a rounding more. The mean key comes by
linearity from the mean of the activations, before any key is computed.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .bias import LOG2E, _kept, prepare, row_strides
from .configs import Config, padded_head_dim
from .fused import _store_keys, _store_queries
from .quantize import QuantizedKey, QuantizedQuery
from .quantize_kernels import _inverse

_SAMPLE = 128  # rows whose mean gives the key shift
_ROWS, _CHANNELS, _STEP = 128, 128, 64  # query rows, output channels and input channels of a step


@triton.jit(do_not_specialize=["L"])
def _quantize_rows(X, Y, SCALE, L, s_b, s_l, C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Symmetric int8 with a scale a row: X [B, L, C] -> Y, SCALE [B, L]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = (rows < L)[:, None] & (cols < C)[None, :]
    x = tl.load(X + b * s_b + rows[:, None].to(tl.int64) * s_l + cols[None, :], mask=inside, other=0).to(tl.float32)
    peak = tl.max(tl.abs(x), 1) + tl.sum(x * 0.0, 1)
    tl.store(SCALE + b * L + rows, peak / 127.0, mask=rows < L)
    y = tl.fma(x, _inverse(peak)[:, None], 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    tl.store(Y + (b * L + rows)[:, None] * C + cols[None, :], y, mask=inside)


@triton.jit(do_not_specialize=["L", "NP", "heads"])
def _mean_row(
    X, X_SCALE, BIAS, MEAN, L, NP, heads, s_b, s_l, s_bias_b, s_bias_h,
    C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """MEAN[B, C]: mean over a sample of the rows that some head keeps, of X [B, L, C] times its row scales."""
    b = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, ROWS)
    rows = tl.where(L <= ROWS, i, (i.to(tl.int64) * L // ROWS).to(tl.int32))
    count = tl.zeros([], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    start = 0
    while (count == 0) & (start < L):
        keep = _kept(BIAS + b * s_bias_b * NP, heads, s_bias_h * NP, rows, L, HAS_BIAS)
        inside = keep[:, None] & (cols < C)[None, :]
        x = tl.load(X + b * s_b + rows[:, None].to(tl.int64) * s_l + cols[None, :], mask=inside, other=0)
        x_scale = tl.load(X_SCALE + b * L + rows, mask=keep, other=0.0)
        total = tl.sum(x.to(tl.float32) * x_scale[:, None], 0)
        count = tl.sum(keep.to(tl.float32), 0)
        rows = start + i
        start += ROWS
    tl.store(MEAN + b * C + cols, total / tl.maximum(count, 1.0), mask=cols < C)


@triton.jit
def _linear_shift(
    MEAN, WEIGHT, W_SCALE, LINEAR_BIAS, SHIFT, heads,
    C: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HAS_LINEAR_BIAS: tl.constexpr,
):  # fmt: skip
    """SHIFT[B, heads, DP]: the linear layer of MEAN [B, C]."""
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    d = tl.arange(0, DP)
    total = tl.zeros([DP], tl.float32)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)
        mean = tl.load(MEAN + b * C + c, mask=c < C, other=0.0)
        inside = (d < D)[:, None] & (c < C)[None, :]
        weight = tl.load(WEIGHT + (h * D + d)[:, None].to(tl.int64) * C + c[None, :], mask=inside, other=0)
        total += tl.sum(weight.to(tl.float32) * mean[None, :], 1)
    total *= tl.load(W_SCALE + h * D + d, mask=d < D, other=0.0)
    if HAS_LINEAR_BIAS:
        total += tl.load(LINEAR_BIAS + h * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(SHIFT + (b * heads + h) * DP + d, total)


@triton.jit(do_not_specialize=["L", "heads", "bias_rows"])
def _linear_qk(
    X, X_SCALE, WEIGHT, W_SCALE, LINEAR_BIAS, SHIFT, BIAS, Y, SCALE, NORMS, factor, L, heads, bias_rows, s_b, s_l,
    s_bias_b, s_bias_h,
    C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, STEP: tl.constexpr,
    HAS_LINEAR_BIAS: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, SCALES: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """One program ROWS rows of HEADS heads of X [B, L, C] @ WEIGHT [heads * D, C]^T.

    KIND: "query" or "key" in int8, or "16bit", the plain layer: Y [B, L, heads * D] in its own dtype.
    """
    block = tl.program_id(0)
    b = tl.program_id(2).to(tl.int64)
    rows = block * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, HEADS * DP)
    h = tl.program_id(1) * HEADS + n // DP
    d = n % DP
    c = tl.arange(0, STEP)
    there = (d < D) & (h < heads)
    x_ptr = X + b * s_b + rows[:, None].to(tl.int64) * s_l + c[None, :]
    w_ptr = WEIGHT + (h * D + d)[None, :].to(tl.int64) * C + c[:, None]
    acc = tl.zeros([ROWS, HEADS * DP], tl.int32)
    for start in range(0, C, STEP):
        if C % STEP == 0:
            x = tl.load(x_ptr, mask=(rows < L)[:, None], other=0)
            w = tl.load(w_ptr, mask=there[None, :], other=0)
        else:
            x = tl.load(x_ptr, mask=(rows < L)[:, None] & (start + c < C)[None, :], other=0)
            w = tl.load(w_ptr, mask=there[None, :] & (start + c < C)[:, None], other=0)
        acc = tl.dot(x, w, acc, out_dtype=tl.int32)
        x_ptr += STEP
        w_ptr += STEP
    x_scale = tl.load(X_SCALE + b * L + rows, mask=rows < L, other=0.0)
    w_scale = tl.load(W_SCALE + h * D + d, mask=there, other=0.0)
    y = acc.to(tl.float32) * x_scale[:, None] * w_scale[None, :]
    if HAS_LINEAR_BIAS:
        y += tl.load(LINEAR_BIAS + h * D + d, mask=there, other=0.0).to(tl.float32)[None, :]
    if KIND == "16bit":
        at = ((b * L + rows) * heads)[:, None] * D + (h * D + d)[None, :]
        tl.store(Y + at, y.to(Y.dtype.element_ty), mask=(rows < L)[:, None] & there[None, :])
    elif KIND == "query":
        i = tl.arange(0, ROWS * HEADS)
        row = block * ROWS + i // HEADS
        head = tl.program_id(1) * HEADS + i % HEADS
        y = y.reshape([ROWS * HEADS, DP])
        _store_queries(
            y, tl.sum(y * 0.0, 1), Y, SCALE, b * heads + head, row, (row < L) & (head < heads), L, factor, DP
        )
    else:
        head = b * heads + tl.program_id(1)
        blocks = tl.num_programs(0)
        NP = blocks * ROWS
        first = (b * s_bias_b + tl.program_id(1) * bias_rows * s_bias_h) * NP
        keep = _kept(BIAS + first, bias_rows, s_bias_h * NP, rows, L, HAS_BIAS)
        y = tl.where(keep[:, None], y - tl.load(SHIFT + head * DP + d)[None, :], 0.0)
        _store_keys(y, tl.sum(y * 0.0, 1), Y, SCALE, NORMS, head, block, blocks, ROWS, DP, SCALES, HAS_NORM)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x [B, L, C], contiguous last axis, to int8 with a scale a row; returns int8 and float32 [B, L]."""
    batch, length, channels = x.shape
    quantized = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty((batch, length), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(channels)
    rows = max(1, 8192 // block)
    _quantize_rows[(triton.cdiv(length, rows), batch)](
        x, quantized, scale, length, *x.stride()[:2], C=channels, BLOCK=block, ROWS=rows, num_warps=8
    )
    return quantized, scale


def linear_query(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    heads: int,
) -> QuantizedQuery:
    """Compute the queries of x int8 [B, L, C] with scales [B, L], weight int8 [heads * D, C] with scales [heads * D].

    bias: of the layer, [heads * D].  scale: the softmax scale.  Nothing is rotated.
    """
    batch, length, _ = x.shape
    head_dim = weight.shape[0] // heads
    padded = padded_head_dim(head_dim)
    query = torch.empty((batch, heads, length, padded), dtype=torch.int8, device=x.device)
    query_scale = torch.empty((batch, heads, length), dtype=torch.float32, device=x.device)
    together = max(1, _CHANNELS // padded)
    rows = _ROWS if padded <= 128 else _ROWS // 2
    _linear_qk[(triton.cdiv(length, rows), triton.cdiv(heads, together), batch)](
        x, x_scale, weight, weight_scale, bias if bias is not None else weight_scale, x_scale, x_scale, query,
        query_scale, x_scale, scale * LOG2E, length, heads, 1, *x.stride()[:2], 0, 0, ROWS=rows, HEADS=together,
        KIND="query", HAS_BIAS=False, SCALES=1, HAS_NORM=False, **_gemm(weight, head_dim, bias),
    )  # fmt: skip
    return QuantizedQuery(query, query_scale, None)


def linear_key(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    heads: int,
    attn_mask: torch.Tensor | None,
    config: Config,
    *,
    group: int,
    per_token: bool,
) -> QuantizedKey:
    """Compute the keys, for `config`, as linear_query() does; attn_mask, group, per_token: as for quantize().

    Its shift is float32 [B, heads, DP], not rotated.
    """
    batch, length, channels = x.shape
    head_dim = weight.shape[0] // heads
    padded, blocks = padded_head_dim(head_dim), triton.cdiv(length, config.block_n)
    empty = functools.partial(torch.empty, device=x.device)
    prepared, anchor, live, strides, bias_rows = None, None, None, (0, 0), 1
    if attn_mask is not None:
        prepared, anchor, live = prepare(attn_mask, length, config)
        strides, bias_rows = row_strides(prepared), group if prepared.shape[1] > 1 else 1
    mean = empty((batch, channels), dtype=torch.float32)
    shift = empty((batch, heads, padded), dtype=torch.float32)
    mask = prepared if prepared is not None else shift
    _mean_row[(batch, triton.cdiv(channels, 128))](
        x, x_scale, mask, mean, length, blocks * config.block_n, prepared.shape[1] if prepared is not None else 1,
        *x.stride()[:2], *strides, C=channels, BLOCK=128, ROWS=_SAMPLE, HAS_BIAS=prepared is not None, num_warps=4,
    )  # fmt: skip
    layer_bias = bias if bias is not None else weight_scale
    _linear_shift[(batch, heads)](
        mean, weight, weight_scale, layer_bias, shift, heads, C=channels, BLOCK=64 if padded <= 128 else 32, D=head_dim,
        DP=padded, HAS_LINEAR_BIAS=bias is not None, num_warps=4,
    )  # fmt: skip
    scales = config.block_n if per_token else 4 if config.gluon else 1
    tail = (blocks * config.block_n,) if per_token else (blocks, 4) if config.gluon else (blocks,)
    key = empty((batch, heads, blocks * config.block_n, padded), dtype=torch.int8)
    key_scale = empty((batch, heads, *tail), dtype=torch.float32)
    key_norm = empty((batch, heads, blocks), dtype=torch.float32) if config.gluon else None
    _linear_qk[(blocks, heads, batch)](
        x, x_scale, weight, weight_scale, layer_bias, shift, mask, key, key_scale,
        key_norm if key_norm is not None else shift, 1.0, length, heads, bias_rows, *x.stride()[:2], *strides,
        ROWS=config.block_n, HEADS=1, KIND="key", HAS_BIAS=prepared is not None, SCALES=scales,
        HAS_NORM=key_norm is not None, **_gemm(weight, head_dim, bias),
    )  # fmt: skip
    return QuantizedKey(key, key_scale, prepared, anchor, key_norm, live, shift, length)


def int8_linear(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    heads: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute the plain layer [B, L, heads * D] in 16 bits by the same kernel: what a quantiser would read."""
    batch, length, _ = x.shape
    head_dim = weight.shape[0] // heads
    padded = padded_head_dim(head_dim)
    out = torch.empty((batch, length, weight.shape[0]), dtype=dtype, device=x.device)
    together = max(1, _CHANNELS // padded)
    rows = _ROWS if padded <= 128 else _ROWS // 2
    _linear_qk[(triton.cdiv(length, rows), triton.cdiv(heads, together), batch)](
        x, x_scale, weight, weight_scale, bias if bias is not None else weight_scale, x_scale, x_scale, out, x_scale,
        x_scale, 1.0, length, heads, 1, *x.stride()[:2], 0, 0, ROWS=rows, HEADS=together, KIND="16bit",
        HAS_BIAS=False, SCALES=1, HAS_NORM=False, **_gemm(weight, head_dim, bias),
    )  # fmt: skip
    return out


def _gemm(weight: torch.Tensor, head_dim: int, bias: torch.Tensor | None) -> dict[str, object]:
    return {
        "C": weight.shape[1], "D": head_dim, "DP": padded_head_dim(head_dim), "STEP": _STEP,
        "HAS_LINEAR_BIAS": bias is not None, "num_warps": 8, "num_stages": 4,
    }  # fmt: skip
