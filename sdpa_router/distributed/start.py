"""The steps that all ways share: unwrap the tensors, judge them, agree, count, attend, wrap the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .. import run
from .decide import Asked, Pair, Way, count, count_alone, facts_of, require, wrong_setting
from .group import Facts, Group, agree, open_group
from .inputs import unwrap, wrap
from .tile import Answer

_Function = TypeVar("_Function", bound=Callable[..., Any])


def eagerly(function: _Function) -> _Function:
    """Return a function that torch.compile does not look into: it breaks its graph there."""
    if not torch.compiler.is_compiling():
        return function
    disabled: _Function = torch.compiler.disable(function)
    return disabled


def attend(way: Way, asked: Asked, group: dist.ProcessGroup | None) -> torch.Tensor | Pair:
    """Answer a call on every rank of `group`, or raise on every one; its tensors may be DTensors."""
    local, told, mesh, cause = unwrap(*asked[:4], group)
    ranks = open_group(told, way.function)
    query, key, value, mask = local
    mine = asked._replace(query=query, key=key, value=value, mask=mask)
    if ranks.size == 1:
        if cause is not None:
            raise cause
        out, lse = _answer_alone(way, mine)
    else:
        facts, refused = _told(way, mine, ranks, cause)
        everyone = agree(ranks, facts, mine.query, refused)
        count(way, mine, everyone, ranks.rank)
        with torch.cuda.device_of(mine.query):  # NCCL and Triton work on the current device
            out, lse = way.run(_as_they_lie(mine), ranks, everyone)
    if mesh:
        out = wrap(out, asked.query, mesh)
        lse = wrap(lse, asked.query, mesh) if asked.return_lse else lse
    return (out, lse) if asked.return_lse else out


def _as_they_lie(asked: Asked) -> Asked:
    """Return the tensors without negation by view, of which kernels that no operator launches know nothing."""
    query, key, value = (tensor.resolve_neg() for tensor in asked[:3])
    return asked._replace(query=query, key=key, value=value)


def _told(way: Way, asked: Asked, ranks: Group, cause: Exception | None) -> tuple[Facts, Exception | None]:
    """Return what this rank tells the others, and what it raises if it refuses; then so do the others.

    cause: why it refuses already.
    """
    if cause is None:
        try:
            require(asked)
            refusal = wrong_setting(asked) or ranks.refusal(asked.query.device)
            return Facts(way.function, refusal=refusal) if refusal else facts_of(way, asked), None
        except Exception as error:  # whatever it is: to raise alone is to leave the others waiting
            cause = error
    return Facts(way.function, refusal=str(cause) or type(cause).__name__), cause


def _answer_alone(way: Way, asked: Asked) -> Pair:
    """Answer on a group of one rank: what one process does, nothing more; lse is empty unless asked for.

    Raises UnsupportedError if the kernel doesn't take the call, ValueError for a mask over other keys or a setting that
    more ranks would refuse.
    """
    require(asked)
    query, key, value, mask, causal, scale, return_lse, *_ = asked
    refusal = wrong_setting(asked)
    if mask is not None and mask.shape[-1] not in (1, key.shape[2]):
        refusal = f"gives a mask over {mask.shape[-1]} keys, expected {key.shape[2]} (all keys) or 1"
    if refusal:
        raise ValueError(f"rank 0 {refusal}")
    count_alone(way, asked)
    if 0 in (query.shape[2], key.shape[2]):
        answer = Answer(query, 0)
        return answer.out, answer.lse
    return run.int8(query, key, value, mask, causal, scale, "auto", "auto", return_lse=return_lse)
