"""Ulysses attention (Jacobs et al., 2023): all-to-all from shards of the sequence to shards of the heads and back."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, overload

import torch
import torch.distributed as dist

from .. import run
from ..decide import Call
from ..decision import Code
from .decide import Asked, Pair, Way
from .exchange import Deal, all_to_all, deal, to_heads, to_sequence
from .group import Facts, Group
from .inputs import anchored, mask_rows, shard_of_mask, softmax_scale
from .start import attend, eagerly
from .tile import Answer, Shard, config_for_shards, filling, pack, quantize_query, quantize_shard, unpack
from .wire import Spec, layout

# Over 25 GB/s the bytes that quantisation saves outweigh a merge for each rank up to here, over 45 GB/s up to 2 (the
# model of bench/scaling.py).
_QUANTISED_RANKS = 4


@overload
def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    causal: bool = False,
    quantize: bool | None = None,
    value_bits: int = 9,
) -> torch.Tensor: ...


@overload
def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
    return_lse: Literal[True],
    causal: bool = False,
    quantize: bool | None = None,
    value_bits: int = 9,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    causal: bool = False,
    quantize: bool | None = None,
    value_bits: int = 9,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend to a sequence that is sharded over the ranks of `group`: each rank attends for a part of the heads.

    The arguments are those of ring_attention(). Key heads are dealt out as evenly as they go, each with its query
    heads; where there are more ranks than key heads, the last ranks only relay.
    quantize: whether keys and values are quantised before the exchange and travel as in ring_attention(), with
    value_bits; queries and out travel in 16 bits. That saves a quarter of the bytes (less where key heads are few)
    and costs a merge for each rank, which pays for few ranks over slow links, not over NVLink (bench/scaling.py).
    None: if at most 4 ranks are on more than one machine. False needs no merge: the answer is that of one process, bit
    for bit.
    Returns and raises what ring_attention() does; besides ValueError for quantize=True with causal.

    >>> out = ulysses_attention(query, key, value)  # on each rank of torchrun, with its part of the sequence
    """
    asked = Asked(query, key, value, attn_mask, causal, scale, return_lse, value_bits, quantize)
    return eagerly(attend)(ULYSSES, asked, group)


def _quantizes(quantize: bool | None, everyone: list[Facts]) -> bool:
    """Whether to quantise before the exchange: as asked, else if it crosses machines and few parts are to be merged."""
    if quantize is not None:
        return quantize
    few = len(everyone) <= _QUANTISED_RANKS
    return few and not everyone[0].causal and len({facts.host for facts in everyone}) > 1


def _ulysses(asked: Asked, ranks: Group, everyone: list[Facts]) -> Pair:
    query, key, value, mask, *_ = asked
    rank, facts = ranks.rank, everyone[ranks.rank]
    dealt = deal(facts.heads, facts.kv_heads, ranks.size)
    q_lens, kv_lens = [other.q_len for other in everyone], [other.kv_len for other in everyone]
    if mask is not None:
        mask = shard_of_mask(mask, everyone, rank)
    q = to_heads(query, dealt.queries, q_lens, ranks)
    mine = q.shape[1]
    out = q.new_empty((q.shape[2], q.shape[0], mine, q.shape[3])).permute(1, 2, 0, 3)
    lse = q.new_empty((q.shape[2], q.shape[0], mine), dtype=torch.float32).permute(1, 2, 0)
    if _quantizes(asked.quantize, everyone):
        part, part_lse = _by_shards(q, key, value, mask, dealt, ranks, everyone)
        out.copy_(part)
        lse.copy_(part_lse)
    else:
        k, v = (to_heads(x, dealt.keys, kv_lens, ranks) for x in (key, value))
        if mask is not None:
            split = dealt.queries if mask.shape[1] > 1 else [slice(0, 1)] * ranks.size
            mask = to_heads(mask.transpose(2, 3), split, kv_lens, ranks).transpose(2, 3)
        if 0 in (mine, q.shape[2], k.shape[2]):
            out.zero_()
            lse.fill_(-math.inf)
        else:
            call = Call(q, k, v, mask, 0.0, facts.causal, facts.scale, facts.heads != facts.kv_heads)
            run.int8_into(call, "auto", "auto", out, lse if facts.return_lse else None)
    answer = run.empty_outputs(query, lse=True)
    to_sequence(out, answer[0], dealt.queries, q_lens, ranks)
    if facts.return_lse:
        to_sequence(lse[..., None], answer[1][..., None], dealt.queries, q_lens, ranks)
    return answer


def _sends(asked: Asked, everyone: list[Facts], rank: int) -> int:
    """Count the bytes that leave a rank: queries, keys, values and mask by heads, then out and lse by queries."""
    mine, size = everyone[rank], asked.query.element_size()
    dealt = deal(mine.heads, mine.kv_heads, len(everyone))
    row, others = mine.batch * mine.head_dim * size, [other for other in range(len(everyone)) if other != rank]
    sent = sum(_count(dealt.queries[other]) for other in others) * mine.q_len * row
    answer = row + 4 * mine.batch * mine.return_lse
    sent += sum(everyone[other].q_len for other in others) * _count(dealt.queries[rank]) * answer
    if _quantizes(asked.quantize, everyone):
        specs = _specs(asked.query, dealt, everyone, rank)[1]
        return sent + sum(layout(specs[other], mine.kv_len).size for other in others)
    if asked.mask is not None:
        batch, heads = mask_rows(everyone)
        rows = [batch * (1 if heads == 1 else _count(dealt.queries[other])) for other in others]
        sent += sum(rows) * mine.kv_len * asked.mask.element_size()
    return sent + 2 * sum(_count(dealt.keys[other]) for other in others) * mine.kv_len * row


def _count(heads: slice) -> int:
    number: int = heads.stop - heads.start
    return number


ULYSSES = Way("ulysses_attention", Code.ULYSSES, _ulysses, _sends)


def _by_shards(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dealt: Deal,
    ranks: Group,
    everyone: list[Facts],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend for this rank's heads, query [B, h, Lq of all, D], to shards of keys that are quantised where they are."""
    facts = everyone[ranks.rank]
    config = config_for_shards(query)[0]
    top = None
    if mask is not None and mask.dtype != torch.bool:
        mask, top = anchored(mask, ranks)
    shards = _exchange_shards(key, value, mask, top, dealt, ranks, everyone)
    answer = Answer(query, 0 if 0 in query.shape else len(shards))
    if 0 not in query.shape:
        quantized = quantize_query(query, softmax_scale(facts), config)
        for shard in shards:
            answer.add(filling(quantized, shard, config, False))
    if top is not None:
        answer.lse += top[:, dealt.queries[ranks.rank] if top.shape[1] > 1 else slice(None), None]
    return answer.out, answer.lse


def _exchange_shards(
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    top: torch.Tensor | None,
    dealt: Deal,
    ranks: Group,
    everyone: list[Facts],
) -> list[Shard]:
    """Quantise this rank's keys and values, send each rank its heads of them; return what arrived, by rank."""
    facts, mine = everyone[ranks.rank], dealt.keys[ranks.rank]
    rows = None if mask is None else mask_rows(everyone)
    whole, specs = _specs(value, dealt, everyone, ranks.rank)
    leaving = [layout(spec, facts.kv_len) for spec in specs]
    sizes = [part.size for part in leaving]
    sent = torch.empty(sum(sizes), dtype=torch.uint8, device=value.device)
    if facts.kv_len:
        shard = quantize_shard(key, value, mask, top, whole, facts.heads // facts.kv_heads)
        for rank, (part, room) in enumerate(zip(leaving, sent.split(sizes), strict=True)):
            if part.size:
                pack(_heads_of(shard, dealt, rank, rows), part, room)
    arriving = [layout(specs[ranks.rank], other.kv_len) for other in everyone]
    arriving_sizes = [part.size for part in arriving]
    received = all_to_all(sent, sizes, arriving_sizes, ranks)
    return [
        # Values that did not travel are exact.
        unpack(room, part, whole, value[:, mine] if rank == ranks.rank else None)
        for rank, (part, room) in enumerate(zip(arriving, received.split(arriving_sizes), strict=True))
        if part.size
    ]


def _specs(like: torch.Tensor, dealt: Deal, everyone: list[Facts], rank: int) -> tuple[Spec, list[Spec]]:
    """Return the Spec of shards with all heads, of the dtype and on the device of `like`, and that with each rank's."""
    facts = everyone[rank]
    rows = None if facts.mask == "no mask" else mask_rows(everyone)
    config = config_for_shards(like)[0]
    whole = Spec(facts.batch, facts.kv_heads, facts.head_dim, like.dtype, config, rows, facts.value_bits)
    return whole, [
        dataclasses.replace(whole, kv_heads=keys.stop - keys.start, mask_rows=_rows_of(rows, queries))
        for keys, queries in zip(*dealt, strict=True)
    ]


def _rows_of(rows: tuple[int, int] | None, queries: slice) -> tuple[int, int] | None:
    """Return the sizes of a mask's axes that a rank with these query heads needs."""
    return rows if rows is None or rows[1] == 1 else (rows[0], queries.stop - queries.start)


def _heads_of(shard: Shard, dealt: Deal, rank: int, rows: tuple[int, int] | None) -> Shard:
    """Return the heads of a quantised shard that `rank` attends for."""
    by_query = dealt.queries[rank] if rows is not None and rows[1] > 1 else slice(None)
    parts = {}
    for name, tensor in shard.key._asdict().items():  # type: ignore[attr-defined]
        heads = by_query if name in ("bias", "anchor", "live") else dealt.keys[rank]
        parts[name] = tensor[:, heads] if isinstance(tensor, torch.Tensor) else tensor
    return Shard(shard.key._replace(**parts), shard.value[:, dealt.keys[rank]])  # type: ignore[attr-defined]
