"""What a shard of keys and values is on its way: one run of bytes, read in place where it arrives.

K in int8 | its scales, norms, bias, shift | V in 8, 9 or 16 bits. Against 16-bit keys and values that is 0.51, 0.54 or
0.75 of the bytes at head_dim 128.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from ..kernels.int8_attention.configs import Config, padded_head_dim

VALUE_BITS = (8, 9, 16)
_ALIGNMENT = 128  # bytes; TMA asks for 16


@dataclass(frozen=True)
class Spec:
    """What all shards of a call have in common.

    batch, kv_heads, head_dim, dtype: of the values.  config: the kernel's.  mask_rows: sizes of the bias along batch
    and heads, or None without a mask.  value_bits: 8, 9 or 16.
    """

    batch: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    config: Config
    mask_rows: tuple[int, int] | None
    value_bits: int


@dataclass(frozen=True)
class Part:
    """A tensor of the shard: where its bytes start."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a shard of kv_len keys lie in its bytes, by name, and how many bytes it is."""

    parts: dict[str, Part]
    size: int
    kv_len: int

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the shard's tensors as views of a buffer, uint8 [size or more]."""
        return {name: _view(buffer, part) for name, part in self.parts.items()}


@functools.lru_cache(maxsize=1024)  # the GPU may wait for the host while it is laid out
def layout(spec: Spec, kv_len: int) -> Layout:
    """Lay out a shard of kv_len keys; no keys are no bytes."""
    if kv_len == 0 or spec.kv_heads == 0:
        return Layout({}, 0, kv_len)
    parts, size = {}, 0
    for name, (dtype, shape) in _shapes(spec, kv_len).items():
        parts[name] = Part(dtype, shape, size)
        size += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return Layout(parts, size, kv_len)


def _shapes(spec: Spec, kv_len: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape by name: the fields of a QuantizedKey, and of the values."""
    head = (spec.batch, spec.kv_heads)
    padded, block_n, gluon = padded_head_dim(spec.head_dim), spec.config.block_n, spec.config.gluon
    blocks = -(-kv_len // block_n)
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "key": (torch.int8, (*head, blocks * block_n, padded)),
        "key_scale": (torch.float32, (*head, blocks, 4) if gluon else (*head, blocks)),
        "shift": (torch.float32, (*head, padded)),
    }
    if gluon:
        shapes["key_norm"] = (torch.float32, (*head, blocks))
    if spec.mask_rows is not None:
        shapes["bias"] = (torch.float32, (*spec.mask_rows, blocks * block_n))
        shapes["anchor"] = (torch.float32, (*spec.mask_rows, 2))
        if gluon:
            shapes["live"] = (torch.int32, (*spec.mask_rows, 1 + blocks))
    if spec.value_bits == 16:
        shapes["value"] = (spec.dtype, (*head, kv_len, spec.head_dim))
        return shapes
    shapes["code"] = (torch.int8, (*head, kv_len, spec.head_dim))
    if spec.value_bits == 9:
        shapes["low"] = (torch.uint8, (*head, kv_len, -(-spec.head_dim // 8)))
    shapes["value_scale"] = (torch.bfloat16, (*head, kv_len))
    return shapes


def _view(buffer: torch.Tensor, part: Part) -> torch.Tensor:
    size = math.prod(part.shape) * part.dtype.itemsize
    return buffer[part.start : part.start + size].view(part.dtype).view(part.shape)
