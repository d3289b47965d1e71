"""Exact attention over sequences that are sharded over processes: `ring_attention` and `ulysses_attention`."""

from .explaining import explain
from .ring import ring_attention
from .ulysses import ulysses_attention

__all__ = ["explain", "ring_attention", "ulysses_attention"]
