"""All-to-all between shards of the sequence and shards of the heads."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist

from .group import Group, naming


class Deal(NamedTuple):
    """Which heads each rank attends for: of keys, and of queries."""

    keys: list[slice]
    queries: list[slice]


def deal(heads: int, kv_heads: int, ranks: int) -> Deal:
    """Deal the key heads out, each with its query heads; the first ranks get one more where they don't go evenly.

    >>> deal(6, 3, 2).queries
    [slice(0, 4, None), slice(4, 6, None)]
    """
    edges = [kv_heads // ranks * rank + min(rank, kv_heads % ranks) for rank in range(ranks + 1)]
    group = heads // kv_heads
    pairs = list(itertools.pairwise(edges))
    return Deal([slice(a, b) for a, b in pairs], [slice(a * group, b * group) for a, b in pairs])


def to_heads(x: torch.Tensor, heads: list[slice], lengths: list[int], ranks: Group) -> torch.Tensor:
    """[B, H, L of this rank, D] to [B, heads of this rank, L of all, D], which lies as [L, B, H, D] in memory."""
    batch, _, _, width = x.shape
    length = lengths[ranks.rank]
    mine = heads[ranks.rank].stop - heads[ranks.rank].start
    sizes = [length * batch * (one.stop - one.start) * width for one in heads]
    sent = x.new_empty(sum(sizes))
    for one, part in zip(heads, sent.split(sizes), strict=True):
        part.view(length, batch, one.stop - one.start, width).copy_(x[:, one].permute(2, 0, 1, 3))
    arrived = all_to_all(sent, sizes, [other * batch * mine * width for other in lengths], ranks)
    return arrived.view(sum(lengths), batch, mine, width).permute(1, 2, 0, 3)


def to_sequence(x: torch.Tensor, out: torch.Tensor, heads: list[slice], lengths: list[int], ranks: Group) -> None:
    """Undo to_heads(): x [B, heads of this rank, L of all, D], lying as [L, B, H, D], into out [B, H, L, D]."""
    batch, mine, _, width = x.shape
    length = lengths[ranks.rank]
    sizes = [length * batch * (one.stop - one.start) * width for one in heads]
    sent = x.permute(2, 0, 1, 3).reshape(-1)
    arrived = all_to_all(sent, [other * batch * mine * width for other in lengths], sizes, ranks)
    for one, part in zip(heads, arrived.split(sizes), strict=True):
        out[:, one] = part.view(length, batch, one.stop - one.start, width).permute(1, 2, 0, 3)


def all_to_all(sent: torch.Tensor, sizes: list[int], arriving: list[int], ranks: Group) -> torch.Tensor:
    """Exchange consecutive parts of a flat tensor, one for each rank, by their numbers of elements."""
    received = sent.new_empty(sum(arriving))
    item = sent.element_size()
    with naming(ranks, "an all-to-all"):
        # As bytes, which every backend takes.
        dist.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [size * item for size in arriving],
            [size * item for size in sizes],
            group=ranks.handle,
        )
    return received
