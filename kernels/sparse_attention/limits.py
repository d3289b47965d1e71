"""What a tile of 64 queries and 64 keys costs, and from which share of tiles on a dense mask is worth it: data."""

from __future__ import annotations

from typing import NamedTuple


class TileCost(NamedTuple):
    """Nanoseconds a tile at head_dim 128 on the whole GPU: kept, read from a dense mask; and torch's with a dense mask.

    fixed_ms: what a call costs besides, of which lists and quantisation are the most.
    """

    kept: float
    read: float
    torch: float
    fixed_ms: float


# NVIDIA H200, 56 heads of 4096 x 33600 and 24 of 32768 x 32768, bfloat16 (bench/results/sparse.jsonl).
H200 = TileCost(kept=3.0, read=3.7, torch=6.2, fixed_ms=0.6)
# Masks that the kernel reads by words (configs.BROUGHT_MASKS): what a 16-bit one took so.
H200_WORDS = H200._replace(read=6.6)
# The portable kernel. Only the proportions are used; read is what it took on an H200, 42.7 ms for the first of these.
ELSEWHERE = TileCost(kept=3.5, read=22.4, torch=6.2, fixed_ms=0.6)


def estimate_ms(cost: TileCost, kept: int, read: int, head_dim: int) -> float:
    """Milliseconds of a call that visits so many tiles over all batches and heads."""
    return cost.fixed_ms + (cost.kept * kept + cost.read * read) * 1e-6 * max(head_dim, 32) / 128


def torch_ms(cost: TileCost, tiles: int, head_dim: int) -> float:
    """Milliseconds of torch's SDPA with a dense mask of so many tiles over all batches and heads."""
    return cost.torch * tiles * 1e-6 * max(head_dim, 32) / 128
