"""int8 linear layer whose epilogue rounds the int32 accumulator straight to the attention's int8 query or key.

One rounding in all: accumulator * row scale * channel scale + bias is float32 and goes to int8 at once. There is no
Hadamard rotation here: on tensor cores it takes 16-bit values, which would be a rounding more. The mean key comes by
linearity from the mean of the activations, before any key is computed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from .bias import LOG2E, prepare, row_strides
from .configs import Config, padded_head_dim
from .launch import empty, launch, replay
from .linear_kernels import _linear_qk, _linear_shift, _mean_row, _quantize_rows
from .quantize import QuantizedKey, QuantizedQuery

_SAMPLE = 128  # rows whose mean gives the key shift
_ROWS, _CHANNELS, _STEP = 128, 128, 64  # query rows, output channels and input channels of a step


class Layer(NamedTuple):
    """An int8 linear layer to `heads` queries or keys, and its input; all but x contiguous.

    x: int8 [B, L, C] with a contiguous last axis; x_scale: float32 [B, L].  weight: int8 [heads * D, C]; weight_scale:
    float32 [heads * D].  bias: [heads * D], any float dtype, or None.
    """

    x: torch.Tensor
    x_scale: torch.Tensor
    weight: torch.Tensor
    weight_scale: torch.Tensor
    bias: torch.Tensor | None
    heads: int

    @property
    def head_dim(self) -> int:
        """D."""
        return self.weight.shape[0] // self.heads

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All of them."""
        return self[:5]


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x [B, L, C], contiguous last axis, to int8 with a scale a row; returns int8 and float32 [B, L]."""
    batch, length, channels = x.shape
    quantized = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty((batch, length), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(channels)
    rows = max(1, 8192 // block)

    def run() -> None:
        launch(
            _quantize_rows, (triton.cdiv(length, rows), batch),
            x, quantized, scale, length, *x.stride()[:2], C=channels, BLOCK=block, ROWS=rows, num_warps=8,
        )  # fmt: skip

    replay("int8 rows", (x, quantized, scale), run)
    return quantized, scale


def linear_query(layer: Layer, scale: float) -> QuantizedQuery:
    """Compute the queries; scale: the softmax scale.  Nothing is rotated."""
    batch, length, _ = layer.x.shape
    device, shape = layer.x.device, (batch, layer.heads, length)
    made = QuantizedQuery(
        torch.empty((*shape, padded_head_dim(layer.head_dim)), dtype=torch.int8, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
        None,
    )

    def run() -> None:
        _rows_of_heads(layer, made.query, made.query_scale, scale * LOG2E, "query")

    replay(("linear query", scale, layer.heads), (*layer.tensors, made.query, made.query_scale), run)
    return made


def linear_key(
    layer: Layer, attn_mask: torch.Tensor | None, config: Config, *, group: int, per_token: bool
) -> QuantizedKey:
    """Compute the keys, for `config`; attn_mask, group, per_token: as for quantize().

    Their shift is float32 [B, heads, DP], not rotated.
    """
    batch, length, _ = layer.x.shape
    heads, device = layer.heads, layer.x.device
    padded, blocks = padded_head_dim(layer.head_dim), triton.cdiv(length, config.block_n)
    bias, anchor, live = None, None, None
    if attn_mask is not None:
        bias, anchor, live = prepare(attn_mask, length, config)
    tail = (blocks * config.block_n,) if per_token else (blocks, 4) if config.gluon else (blocks,)
    made = QuantizedKey(
        torch.empty((batch, heads, blocks * config.block_n, padded), dtype=torch.int8, device=device),
        torch.empty((batch, heads, *tail), dtype=torch.float32, device=device),
        bias,
        anchor,
        torch.empty((batch, heads, blocks), dtype=torch.float32, device=device) if config.gluon else None,
        live,
        torch.empty((batch, heads, padded), dtype=torch.float32, device=device),
        length,
    )
    replay(
        ("linear key", config, group, per_token, heads),
        (*layer.tensors, bias, made.key, made.key_scale, made.key_norm, made.shift),
        lambda: _launch_keys(layer, made, config, group, per_token),
    )
    return made


def _launch_keys(layer: Layer, made: QuantizedKey, config: Config, group: int, per_token: bool) -> None:
    """Fill `made`: the shift from the mean of the activations first, then the keys."""
    x, heads, bias, length = layer.x, layer.heads, made.bias, made.kv_len
    batch, _, channels = x.shape
    padded, rows = padded_head_dim(layer.head_dim), made.key.shape[2]
    strides = row_strides(bias) if bias is not None else (0, 0)
    mask, masked = (made.shift, False) if bias is None else (bias, True)
    mean = empty((batch, channels), torch.float32, x.device)
    launch(
        _mean_row, (batch, triton.cdiv(channels, 128)),
        x, layer.x_scale, mask, mean, length, rows, 1 if bias is None else bias.shape[1], *x.stride()[:2], *strides,
        C=channels, BLOCK=128, ROWS=_SAMPLE, HAS_BIAS=masked, num_warps=4,
    )  # fmt: skip
    launch(
        _linear_shift, (batch, heads),
        mean, layer.weight, layer.weight_scale, _layer_bias(layer), made.shift, heads, C=channels,
        BLOCK=64 if padded <= 128 else 32, D=layer.head_dim, DP=padded, HAS_LINEAR_BIAS=layer.bias is not None,
        num_warps=4,
    )  # fmt: skip
    norms = made.key_norm
    launch(
        _linear_qk, (rows // config.block_n, heads, batch),
        x, layer.x_scale, layer.weight, layer.weight_scale, _layer_bias(layer), made.shift, mask, made.key,
        made.key_scale, norms if norms is not None else made.shift, 1.0, length, heads,
        group if bias is not None and bias.shape[1] > 1 else 1, *x.stride()[:2], *strides, ROWS=config.block_n,
        HEADS=1, KIND="key", HAS_BIAS=masked, SCALES=config.block_n if per_token else 4 if config.gluon else 1,
        HAS_NORM=norms is not None, **_gemm(layer),
    )  # fmt: skip


def int8_linear(layer: Layer, dtype: torch.dtype) -> torch.Tensor:
    """Compute the plain layer [B, L, heads * D] in 16 bits by the same kernel: what a quantiser would read."""
    batch, length, _ = layer.x.shape
    out = torch.empty((batch, length, layer.weight.shape[0]), dtype=dtype, device=layer.x.device)

    def run() -> None:
        _rows_of_heads(layer, out, layer.x_scale, 1.0, "16bit")

    replay(("int8 linear", layer.heads), (*layer.tensors, out), run)
    return out


def _rows_of_heads(layer: Layer, out: torch.Tensor, out_scale: torch.Tensor, factor: float, kind: str) -> None:
    """Fill `out` and, for queries, `out_scale`."""
    batch, length, _ = layer.x.shape
    padded, unused = padded_head_dim(layer.head_dim), layer.x_scale
    together, rows = max(1, _CHANNELS // padded), _ROWS if padded <= 128 else _ROWS // 2
    launch(
        _linear_qk, (triton.cdiv(length, rows), triton.cdiv(layer.heads, together), batch),
        layer.x, layer.x_scale, layer.weight, layer.weight_scale, _layer_bias(layer), unused, unused, out, out_scale,
        unused, factor, length, layer.heads, 1, *layer.x.stride()[:2], 0, 0, ROWS=rows, HEADS=together, KIND=kind,
        HAS_BIAS=False, SCALES=1, HAS_NORM=False, **_gemm(layer),
    )  # fmt: skip


def _layer_bias(layer: Layer) -> torch.Tensor:
    return layer.bias if layer.bias is not None else layer.weight_scale


def _gemm(layer: Layer) -> dict[str, object]:
    return {
        "C": layer.weight.shape[1], "D": layer.head_dim, "DP": padded_head_dim(layer.head_dim), "STEP": _STEP,
        "HAS_LINEAR_BIAS": layer.bias is not None, "num_warps": 8, "num_stages": 4,
    }  # fmt: skip
