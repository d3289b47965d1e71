"""A query and key quantised to int8, and the descriptor that says how their scales lie: data, no kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .entry import let_in

if TYPE_CHECKING:
    from .kernels.int8_attention.configs import Config
    from .kernels.int8_attention.quantize_value import QuantizedValue


@dataclass(frozen=True)
class Groups:
    """Which rows of a sequence share a scale: `scales` of them in each block of `block` rows.

    scales: 1, one for the block; 4, row i of a block has scale (i % 8) // 2, what a thread holds of the columns of a
    tensor-core tile; 8, it has scale i % 8, what a thread holds of its rows.
    """

    block: int
    scales: int = 1

    def count(self, length: int) -> int:
        """Scales of a sequence of `length` rows."""
        return -(-length // self.block) * self.scales

    def index(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """int64 [length]: the scale of each row."""
        row = torch.arange(length, device=device)
        return row // self.block * self.scales + row % 8 * self.scales // 8


@dataclass(frozen=True)
class Layout:
    """How the parts of a QuantizedQK are to be read.

    query, key: which rows share a scale.  folded: whether the query's scales hold softmax_scale * log2(e); otherwise
    the kernel multiplies by it.  rotation: name of the orthogonal transform of head_dim that query and key went through
    ("none" for none); their products don't depend on it, but a query and a key of two transforms can't meet.
    """

    name: str
    query: Groups
    key: Groups
    folded: bool
    rotation: str = "none"


@dataclass(frozen=True)
class Prepared:
    """What our kernel reads besides the int8 values and their scales; see kernels/int8_attention/quantize.py."""

    config: Config
    bias: torch.Tensor | None = None
    anchor: torch.Tensor | None = None
    live: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Those that there are."""
        return tuple(t for t in (self.bias, self.anchor, self.live, self.key_norm) if t is not None)


@dataclass(frozen=True, eq=False)
class QuantizedQK:
    """Query and key of one attention call in int8; made by quantize_qk() and its kin, taken by int8_attention().

    query: int8 [B, H, Q, DP]; key: int8 [B, Hkv, N, DP], N >= kv_len; DP is head_dim padded to a power of two of at
    least 32.  query_scale: float32 [B, H, layout.query.count(Q)], key_scale: float32 [B, Hkv, layout.key.count(N)].
    dtype: of the tensors that were quantised, and so of value and output.  softmax_scale: as a plain number, also where
    the layout has it folded into query_scale.  key_shift: float32, what was taken off every key, None where that is not
    known; lse_term: float32 [B, H, Q], softmax_scale * query . key_shift, where the LSE was asked for. attn_mask,
    mask_version: the mask that was quantised with, which holds in the attention.  heads_inside: whether heads lay
    inside the sequence in memory, which the output's strides follow.  prepared: for our own kernel, None in other
    layouts. value: the value in e4m3 where it was quantised too.

    No tensor that was quantised is referred to.
    """

    query: torch.Tensor
    query_scale: torch.Tensor
    key: torch.Tensor
    key_scale: torch.Tensor
    kv_len: int
    head_dim: int
    dtype: torch.dtype
    softmax_scale: float
    layout: Layout
    attn_mask: torch.Tensor | None = None
    mask_version: int | None = None
    key_shift: torch.Tensor | None = None
    lse_term: torch.Tensor | None = None
    heads_inside: bool = False
    prepared: Prepared | None = None
    value: QuantizedValue | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for parts that don't fit together, naming the part, what was given and what is expected.

        UnsupportedError for parts that hold no values of their own.
        """
        for name in ("query", "query_scale", "key", "key_scale"):
            expect_type(name, getattr(self, name), torch.Tensor, "a tensor")
        expect_type("layout", self.layout, Layout, "a Layout")
        batch, heads, q_len, width = _four("query", self.query)
        if 0 in self.query.shape:
            raise ValueError(f"query is {list(self.query.shape)}; expected sizes of at least 1")
        key_batch, kv_heads, rows, key_width = _four("key", self.key)
        expect("key's batch", key_batch, batch)
        expect("key's width", key_width, width)
        for name in ("key", "attn_mask", "key_shift", "lse_term"):
            part = getattr(self, name)
            if part is not None:
                expect(f"{name}'s device", part.device, self.query.device)
        if kv_heads == 0 or heads % kv_heads:
            raise ValueError(f"query has {heads} heads and key {kv_heads}; expected a multiple of the key's")
        if type(self.kv_len) is not int or not 0 < self.kv_len <= rows:
            raise ValueError(f"kv_len is {self.kv_len!r}; expected 1 to {rows}, the rows of key")
        if type(self.head_dim) is not int or not 0 < self.head_dim <= width:
            raise ValueError(f"head_dim is {self.head_dim!r}; expected 1 to {width}, the width of query")
        _check_scale("query_scale", self.query_scale, (batch, heads, self.layout.query.count(q_len)), self.query)
        _check_scale("key_scale", self.key_scale, (batch, kv_heads, self.layout.key.count(rows)), self.query)
        for name in ("query", "query_scale", "key", "key_scale", "key_shift", "lse_term"):
            object.__setattr__(self, name, let_in(name, getattr(self, name)))

    @property
    def shape(self) -> torch.Size:
        """[B, H, Q, D], the shape of the query that was quantised, and of the output."""
        return torch.Size((*self.query.shape[:3], self.head_dim))


def expect(name: str, given: object, expected: object) -> None:
    """Raise ValueError unless `given` equals `expected`."""
    if given != expected:
        raise ValueError(f"{name} is {given}; expected {expected}")


def expect_type(name: str, given: object, kind: type, expected: str) -> None:
    """Raise ValueError unless `given` is a `kind`, which `expected` says in words."""
    if not isinstance(given, kind):
        raise ValueError(f"{name} is of type {type(given).__name__}; expected {expected}")


def _four(name: str, tensor: torch.Tensor) -> tuple[int, int, int, int]:
    if tensor.dim() != 4 or tensor.dtype != torch.int8:
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}; expected torch.int8 [batch, heads, length, D]"
        )
    batch, heads, length, width = tensor.shape
    return batch, heads, length, width


def _check_scale(name: str, scale: torch.Tensor, shape: tuple[int, ...], query: torch.Tensor) -> None:
    if scale.dtype != torch.float32 or scale.shape != shape or scale.device != query.device:
        raise ValueError(
            f"{name} is {scale.dtype} {list(scale.shape)} on {scale.device}; expected torch.float32 {list(shape)} on "
            f"{query.device}, by the layout"
        )
