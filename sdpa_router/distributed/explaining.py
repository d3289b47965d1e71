"""What a call on shards would do, said without a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..decision import Decision
from .decide import Asked, facts_of, judge, noted, wrong_setting
from .group import disagreement
from .inputs import unwrap
from .ring import RING, ring_attention
from .ulysses import ULYSSES, ulysses_attention


def explain(
    attention: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    ranks: int,
    rank: int = 0,
    scale: float | None = None,
    return_lse: bool = False,
    causal: bool = False,
    quantize: bool | None = None,
    value_bits: int = 9,
) -> Decision:
    """Say what `attention` does with this call on one of `ranks` ranks of one machine that hold shards of these sizes.

    attention: ring_attention or ulysses_attention; the other arguments are theirs (quantize is for the latter). Tensors
    on the meta device will do, and are judged as if they were on a GPU that the kernel supports. Nothing runs, moves or
    is counted; no process group is needed.
    Returns every reason against the kernel, for which the call raises UnsupportedError on all ranks; or none, and a
    note with the bytes that leave this rank. Raises the ValueError of the call for a setting or a mask length that no
    rank takes.

    >>> print(explain(ring_attention, query, key, value, ranks=4))
    int8 (mask: none) (ring: rank 0 of 4 with its part of 8192 queries and 8192 keys; 67415040 bytes leave it)
    """
    ways = {ring_attention: RING, ulysses_attention: ULYSSES}
    if attention not in ways:
        raise ValueError(f"given {attention!r}; accepted: ring_attention and ulysses_attention")
    if not 0 <= rank < ranks:
        raise ValueError(f"given rank {rank} of {ranks} ranks; accepted: 0 to {ranks - 1}")
    way = ways[attention]
    tensors, _, _, cause = unwrap(query, key, value, attn_mask, None)
    if cause is not None:
        raise cause
    asked = Asked(*tensors, causal, scale, return_lse, value_bits, quantize)
    decision = judge(asked)
    if decision.reasons:
        return decision
    everyone = [] if wrong_setting(asked) else [facts_of(way, asked)] * ranks
    trouble = disagreement(everyone) if everyone else f"rank {rank} {wrong_setting(asked)}"
    if trouble:
        raise ValueError(f"{way.function} on rank {rank} of {ranks}: {trouble}")
    return noted(decision, way, asked, everyone, rank)
