"""Attention on one shard of keys: quantise, pack, unpack, attend, merge. The only caller of kernels in this package."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..kernels.int8_attention.configs import Config, config_for, config_of, describable, kernel_name
from ..run import empty_outputs
from .wire import Layout, Spec


class Shard(NamedTuple):
    """One shard of keys and values, ready to attend to: a QuantizedKey, and values [B, Hkv, L, D] in 16 bits."""

    key: tuple[torch.Tensor | int | None, ...]
    value: torch.Tensor


class Query(NamedTuple):
    """The query [B, H, Lq, D], what it is quantised to (a QuantizedQuery), and the softmax scale."""

    query: torch.Tensor
    quantized: tuple[torch.Tensor | None, ...]
    scale: float


def config_for_shards(query: torch.Tensor) -> tuple[Config, str]:
    """Return the kernel's configuration for values that came over the wire, and its name for comparing ranks."""
    if query.device.type == "meta":  # as on some GPU
        return config_for(80, query.shape[3]), "portable"
    arriving = query.new_empty((1, 1, 8, query.shape[3]))
    config = config_of(query, arriving)
    return config, f"{kernel_name(query, arriving)} {config.block_m}x{config.block_n}"


def quantize_query(query: torch.Tensor, scale: float, config: Config) -> Query:
    """Quantise the query once for all shards: its int8 values depend on no key."""
    from ..kernels.int8_attention import quantize

    return Query(query, quantize.quantize_query(query, scale, config), scale)


def quantize_shard(
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    top: torch.Tensor | None,
    spec: Spec,
    group: int,
) -> Shard:
    """Quantise a shard's keys; its values stay as they are.

    mask: [*mask_rows, 1, L], or None.  top: float32 [*mask_rows], what was subtracted from a floating mask.
    group: query heads of a key head.
    """
    from ..kernels.int8_attention.bias import ABSORBING
    from ..kernels.int8_attention.quantize import quantize_key

    quantized = quantize_key(key, mask, spec.config, group=group)
    if top is not None and quantized.anchor is not None:
        quantized.anchor[..., 1] *= top.abs() < ABSORBING.value
    return Shard(quantized, _readable(value, spec.config))


def _readable(value: torch.Tensor, config: Config) -> torch.Tensor:
    """Copy values that the kernel's loads can't describe."""
    return value if describable(value) or not config.tma else value.contiguous()


def pack(shard: Shard, layout: Layout, buffer: torch.Tensor) -> None:
    """Write a shard into a buffer of bytes as `layout` says."""
    from ..kernels.int8_attention.shards import encode_value

    views = layout.views(buffer)
    for name, tensor in shard.key._asdict().items():  # type: ignore[attr-defined]
        if isinstance(tensor, torch.Tensor):
            views[name].copy_(tensor)
    if "value" in views:
        views["value"].copy_(shard.value)
    else:
        encode_value(shard.value, views["code"], views.get("low"), views["value_scale"])


def unpack(buffer: torch.Tensor, layout: Layout, spec: Spec, value: torch.Tensor | None = None) -> Shard:
    """Read a shard from a buffer of bytes: keys in place, values decoded to new memory, or `value` if given."""
    from ..kernels.int8_attention.quantize import QuantizedKey
    from ..kernels.int8_attention.shards import decode_value

    views = layout.views(buffer)
    parts: dict[str, Any] = {name: views.get(name) for name in QuantizedKey._fields}
    key = QuantizedKey(**{**parts, "kv_len": layout.kv_len})
    if value is not None:
        return Shard(key, _readable(value, spec.config))
    if "value" in views:
        return Shard(key, views["value"])
    value = torch.empty(layout.parts["code"].shape, dtype=spec.dtype, device=buffer.device)
    decode_value(views["code"], views.get("low"), views["value_scale"], value)
    return Shard(key, value)


def attend(query: Query, shard: Shard, config: Config, causal: bool, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Attend to one shard: fill out [B, H, Lq, D] of any floating dtype and lse float32 [B, H, Lq]."""
    from ..kernels.int8_attention.forward import attention
    from ..kernels.int8_attention.quantize import Quantized
    from ..kernels.int8_attention.shards import lse_term

    parts = {**query.quantized._asdict(), **shard.key._asdict()}  # type: ignore[attr-defined]
    parts["lse_term"] = lse_term(query.query, parts.pop("shift"), query.scale)
    attention(Quantized(**parts), shard.value, config, is_causal=causal, out=out, lse=lse)


def filling(query: Query, shard: Shard, config: Config, causal: bool) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return attend() to this shard as a function of the two buffers."""
    return lambda out, lse: attend(query, shard, config, causal, out, lse)


class Answer:
    """out in the query's dtype and lse float32 [B, H, Lq], growing by one shard at a time; the sums are float32."""

    def __init__(self, query: torch.Tensor, shards: int) -> None:
        self.out, self.lse = empty_outputs(query, lse=True)
        self._left = shards
        self._whole: tuple[torch.Tensor, torch.Tensor] | None = None
        if shards == 0:
            self.out.zero_()
            self.lse.fill_(-math.inf)

    def add(self, fill: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Take in one more shard, whose out and lse `fill` writes into the buffers that it is given."""
        from ..kernels.int8_attention.shards import merge_parts

        self._left -= 1
        if self._left == 0 and self._whole is None:
            fill(self.out, self.lse)
            return
        part = torch.empty(self.out.shape, dtype=torch.float32, device=self.out.device)
        part_lse = torch.empty_like(self.lse)
        fill(part, part_lse)
        if self._whole is None:
            self._whole = part, part_lse
        else:
            target = (self.out, self.lse) if self._left == 0 else self._whole
            merge_parts(*self._whole, part, part_lse, *target)
