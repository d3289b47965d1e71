"""Ring attention (Liu et al., 2023): queries stay, shards of keys and values go round; partial answers merge by LSE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, overload

import torch
import torch.distributed as dist

from ..decision import Code
from .decide import Asked, Pair, Way
from .group import Facts, Group, naming
from .inputs import anchored, mask_rows, shard_of_mask, softmax_scale
from .start import attend, eagerly
from .tile import Answer, Shard, config_for_shards, filling, pack, quantize_query, quantize_shard, unpack
from .wire import Layout, Spec, layout

Wait = Callable[[], None]
Link = Callable[[torch.Tensor, torch.Tensor], Wait]


@overload
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    causal: bool = False,
    value_bits: int = 9,
) -> torch.Tensor: ...


@overload
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
    return_lse: Literal[True],
    causal: bool = False,
    value_bits: int = 9,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    causal: bool = False,
    value_bits: int = 9,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend to a sequence that is sharded over the ranks of `group`, each of which calls this with its own shard.

    query [B, H, Lq, D], key and value [B, Hkv, Lk, D], fp16 or bf16, D up to 256, H a multiple of Hkv: consecutive
    shards by rank, of any lengths, 0 too. Or DTensors placed Shard(2); then so is what is returned.
    attn_mask: a row for all queries, [1 or B, 1 or H, 1, keys], bool (True = keep), float32 or the query's dtype
    (added); over this rank's keys or, the same on every rank, over all keys.
    group: None is the group of all processes; NCCL for GPUs, gloo for CPU tensors under TRITON_INTERPRET=1.
    causal: query i of the whole sequence sees the keys up to i; each rank must hold as many queries as keys. The last
    rank works longest then.
    value_bits: how values travel. 9 (0.54 of the bytes of 16-bit keys and values at head_dim 128) keeps the error at
    1.04 of one process's on N(0, 1); 8 (0.51) at 1.13, 16 (0.75) at 1.01. Keys travel in int8 as the kernel reads them.
    In 8 or 9 bits a value that is not finite makes all values of its key NaN.
    Returns out [B, H, Lq, D] in the query's dtype, or with return_lse (out, lse): float32 [B, H, Lq], natural log.
    A query that sees no key gets out 0 and lse -inf.
    The next shard travels while the current one is attended to; each hop is one message. Ranks first exchange their
    shapes and raise together: ValueError, or UnsupportedError on a rank whose tensors the kernel doesn't take.
    RuntimeError without a process group, or if a rank dies or stays away for the group's timeout.

    >>> out = ring_attention(query, key, value)  # on each rank of torchrun, with its part of the sequence
    """
    asked = Asked(query, key, value, attn_mask, causal, scale, return_lse, value_bits)
    return eagerly(attend)(RING, asked, group)


class Plan(NamedTuple):
    """Who sends what: the layout of each rank's shard, and which shards this rank attends to, causally or in full."""

    spec: Spec
    layouts: list[Layout]
    visible: dict[int, bool]


def plan(query: torch.Tensor, value: torch.Tensor, rank: int, everyone: list[Facts]) -> Plan:
    """Plan the ring from what the ranks agreed on."""
    facts = everyone[rank]
    config = config_for_shards(query)[0]
    rows = mask_rows(everyone) if facts.mask != "no mask" else None
    spec = Spec(facts.batch, facts.kv_heads, facts.head_dim, value.dtype, config, rows, facts.value_bits)
    visible = {}
    for source, other in enumerate(everyone):
        if facts.q_len and other.kv_len and not (facts.causal and source > rank):
            visible[source] = facts.causal and source == rank
    return Plan(spec, [layout(spec, other.kv_len) for other in everyone], visible)


def _ring(asked: Asked, ranks: Group, everyone: list[Facts]) -> Pair:
    query, key, value, mask, *_ = asked
    facts = everyone[ranks.rank]
    planned = plan(query, value, ranks.rank, everyone)
    top = None
    if mask is not None:
        mask = shard_of_mask(mask, everyone, ranks.rank)
        if mask.dtype != torch.bool:
            mask, top = anchored(mask, ranks)
    shard = None
    if facts.kv_len:
        shard = quantize_shard(key, value, mask, top, planned.spec, facts.heads // facts.kv_heads)
    out, lse = turn(query, shard, softmax_scale(facts), planned, ranks.rank, link_of(ranks))
    return out, lse if top is None else lse + top[..., None]


def _sends(asked: Asked, everyone: list[Facts], rank: int) -> int:
    """Count the bytes that leave a rank: every shard but the one that comes last."""
    layouts = plan(asked.query, asked.value, rank, everyone).layouts
    return sum(part.size for source, part in enumerate(layouts) if source != (rank + 1) % len(layouts))


RING = Way("ring_attention", Code.RING, _ring, _sends)


def turn(
    query: torch.Tensor, shard: Shard | None, scale: float, planned: Plan, rank: int, link: Link
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to all shards, one after the other, each while `link` moves the next.

    shard: this rank's own, None if it holds no key.  link: starts to send one buffer to the next rank and to fill
    another from the rank before; what it returns waits for both.
    """
    spec, layouts, visible = planned
    size = len(layouts)
    room = max(part.size for part in layouts)
    buffers = [torch.empty(room, dtype=torch.uint8, device=query.device) for _ in range(2)]
    if shard is not None:
        pack(shard, layouts[rank], buffers[0])
    answer = Answer(query, len(visible))
    # Before the first transfer, so that the GPU has work while the host starts that.
    quantized = quantize_query(query, scale, spec.config) if visible else None
    for hop in range(size):
        source = (rank - hop) % size
        here, there = buffers[hop % 2], buffers[(hop + 1) % 2]
        wait = None
        if hop < size - 1:
            # Before this hop's kernels: the next transfer must get its place on the GPU ahead of attention.
            wait = link(here[: layouts[source].size], there[: layouts[(source - 1) % size].size])
        if quantized is not None and source in visible:
            part = shard if hop == 0 else unpack(here, layouts[source], spec)
            assert part is not None
            answer.add(filling(quantized, part, spec.config, visible[source]))
        if wait is not None:
            wait()
    return answer.out, answer.lse


def link_of(ranks: Group) -> Link:
    """Return the link to the neighbours in a ring of the group: one message each way, on the backend's own stream."""
    after, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size

    def link(sent: torch.Tensor, received: torch.Tensor) -> Wait:
        ends = ((dist.isend, sent, after), (dist.irecv, received, before))
        what = f"a hop of the ring (to rank {after}, from rank {before})"
        with naming(ranks, what):
            # An empty shard is no message: both of its ends know.
            ops = [dist.P2POp(op, data, group=ranks.handle, group_peer=peer) for op, data, peer in ends if len(data)]
            works = dist.batch_isend_irecv(ops) if ops else []

        def wait() -> None:
            with naming(ranks, what):
                for work in works:
                    work.wait()

        return wait

    return link
