"""Ulysses attention (Jacobs et al., 2023): all-to-all from shards of the sequence to shards of the heads and back."""

from __future__ import annotations

import itertools
import math
from typing import Literal, NamedTuple, overload

import torch
import torch.distributed as dist

from .. import run
from ..decide import Call
from .group import Facts, Group, agree, naming, open_group
from .inputs import absorbs, anchored, mask_rows, shard_of_mask, unwrap, wrap
from .start import answer_alone, eagerly, facts_of
from .tile import Answer, Shard, config_for_shards, filling, pack, quantize_query, quantize_shard, unpack
from .wire import Spec, layout

# Over 45 GB/s the bytes that quantisation saves outweigh a merge for each rank up to here (bench/scaling.py).
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
    return eagerly(_attend)(query, key, value, attn_mask, group, scale, return_lse, causal, quantize, value_bits)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    group: dist.ProcessGroup | None,
    scale: float | None,
    return_lse: bool,
    causal: bool,
    quantize: bool | None,
    value_bits: int,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    (query_, key_, value_, mask), mesh = unwrap(query, key, value, attn_mask, group)
    ranks = open_group(mesh.group if mesh else group, "ulysses_attention")
    if ranks.size == 1:
        out, lse = answer_alone(query_, key_, value_, mask, causal, scale, return_lse)
    else:
        given = (query_, key_, value_, mask, causal, scale, return_lse, value_bits)
        facts, cause = facts_of("ulysses_attention", ranks, *given, quantize=str(quantize))
        everyone = agree(ranks, facts, query_, cause)
        with torch.cuda.device_of(query_):
            out, lse = _ulysses(query_, key_, value_, mask, ranks, everyone, _quantizes(quantize, everyone))
    if mesh:
        out = wrap(out, query, mesh)
        lse = wrap(lse, query, mesh) if return_lse else lse
    return (out, lse) if return_lse else out


def _quantizes(quantize: bool | None, everyone: list[Facts]) -> bool:
    """Whether to quantise before the exchange: as asked, else if it crosses machines and few parts are to be merged."""
    if quantize is not None:
        return quantize
    few = len(everyone) <= _QUANTISED_RANKS
    return few and not everyone[0].causal and len({facts.host for facts in everyone}) > 1


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


def _ulysses(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    ranks: Group,
    everyone: list[Facts],
    quantize: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    facts, rank = everyone[ranks.rank], ranks.rank
    dealt = deal(facts.heads, facts.kv_heads, ranks.size)
    q_lens, kv_lens = [other.q_len for other in everyone], [other.kv_len for other in everyone]
    if mask is not None:
        mask = shard_of_mask(mask, everyone, rank)
    q = _to_heads(query, dealt.queries, q_lens, ranks)
    mine = q.shape[1]
    out = q.new_empty((q.shape[2], q.shape[0], mine, q.shape[3])).permute(1, 2, 0, 3)
    lse = q.new_empty((q.shape[2], q.shape[0], mine), dtype=torch.float32).permute(1, 2, 0)
    if quantize:
        part, part_lse = _by_shards(q, key, value, mask, dealt, ranks, everyone)
        out.copy_(part)
        lse.copy_(part_lse)
    else:
        k, v = (_to_heads(x, dealt.keys, kv_lens, ranks) for x in (key, value))
        if mask is not None:
            split = dealt.queries if mask.shape[1] > 1 else [slice(0, 1)] * ranks.size
            mask = _to_heads(mask.transpose(2, 3), split, kv_lens, ranks).transpose(2, 3)
        if 0 in (mine, q.shape[2], k.shape[2]):
            out.zero_()
            lse.fill_(-math.inf)
        else:
            call = Call(q, k, v, mask, 0.0, facts.causal, facts.scale, facts.heads != facts.kv_heads)
            run.int8_into(call, "auto", "auto", out, lse if facts.return_lse else None)
    answer = run.empty_outputs(query, lse=True)
    _to_sequence(out, answer[0], dealt.queries, q_lens, ranks)
    if facts.return_lse:
        _to_sequence(lse[..., None], answer[1][..., None], dealt.queries, q_lens, ranks)
    return answer


def _to_heads(x: torch.Tensor, heads: list[slice], lengths: list[int], ranks: Group) -> torch.Tensor:
    """[B, H, L of this rank, D] to [B, heads of this rank, L of all, D], which lies as [L, B, H, D] in memory."""
    batch, _, _, width = x.shape
    length = lengths[ranks.rank]
    mine = heads[ranks.rank].stop - heads[ranks.rank].start
    sizes = [length * batch * (one.stop - one.start) * width for one in heads]
    sent = x.new_empty(sum(sizes))
    for one, part in zip(heads, sent.split(sizes), strict=True):
        part.view(length, batch, one.stop - one.start, width).copy_(x[:, one].permute(2, 0, 1, 3))
    arrived = _all_to_all(sent, sizes, [other * batch * mine * width for other in lengths], ranks)
    return arrived.view(sum(lengths), batch, mine, width).permute(1, 2, 0, 3)


def _to_sequence(x: torch.Tensor, out: torch.Tensor, heads: list[slice], lengths: list[int], ranks: Group) -> None:
    """Undo _to_heads(): x [B, heads of this rank, L of all, D], lying as [L, B, H, D], into out [B, H, L, D]."""
    batch, mine, _, width = x.shape
    length = lengths[ranks.rank]
    sizes = [length * batch * (one.stop - one.start) * width for one in heads]
    sent = x.permute(2, 0, 1, 3).reshape(-1)
    arrived = _all_to_all(sent, [other * batch * mine * width for other in lengths], sizes, ranks)
    for one, part in zip(heads, arrived.split(sizes), strict=True):
        out[:, one] = part.view(length, batch, one.stop - one.start, width).permute(1, 2, 0, 3)


def _all_to_all(sent: torch.Tensor, sizes: list[int], arriving: list[int], ranks: Group) -> torch.Tensor:
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
    facts, rank, top = everyone[ranks.rank], ranks.rank, None
    if mask is not None and mask.dtype != torch.bool:
        with naming(ranks, "the exchange of the largest bias"):
            mask, top = anchored(mask, ranks, dist.all_reduce)
    rows = None if mask is None else mask_rows(everyone)
    config = config_for_shards(query)[0]
    specs = [
        Spec(
            facts.batch,
            keys.stop - keys.start,
            facts.head_dim,
            value.dtype,
            config,
            _rows_of(rows, queries),
            facts.value_bits,
        )
        for keys, queries in zip(*dealt, strict=True)
    ]
    parts = [layout(spec, facts.kv_len) for spec in specs]
    buffer = torch.empty(sum(part.size for part in parts), dtype=torch.uint8, device=query.device)
    if facts.kv_len:
        absorbing = None if top is None else absorbs(top)
        whole = Spec(facts.batch, facts.kv_heads, facts.head_dim, value.dtype, config, rows, facts.value_bits)
        shard = quantize_shard(key, value, mask, absorbing, whole, facts.heads // facts.kv_heads)
        for part, room, other in zip(
            parts, buffer.split([part.size for part in parts]), range(ranks.size), strict=True
        ):
            if part.size:
                pack(_heads_of(shard, dealt, other, rows), part, room)
    arriving = [layout(specs[rank], other.kv_len) for other in everyone]
    received = _all_to_all(buffer, [part.size for part in parts], [part.size for part in arriving], ranks)
    answer = Answer(query, sum(part.size > 0 for part in arriving) if query.shape[1] and query.shape[2] else 0)
    scale = 1 / math.sqrt(facts.head_dim) if facts.scale is None else facts.scale
    if 0 not in query.shape:
        quantized = quantize_query(query, scale, config)
        for part, room, other in zip(
            arriving, received.split([p.size for p in arriving]), range(ranks.size), strict=True
        ):
            if part.size:
                own = value[:, dealt.keys[rank]] if other == rank else None  # exact where it did not travel
                answer.add(filling(quantized, unpack(room, part, specs[rank], own), config, False))
    if top is not None:
        answer.lse += top[:, dealt.queries[rank] if top.shape[1] > 1 else slice(None), None]
    return answer.out, answer.lse


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
