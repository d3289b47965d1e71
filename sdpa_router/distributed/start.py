"""The first step of a call on every rank: judge what it was given, and say it as Facts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .. import run
from ..decision import UnsupportedError
from .group import Facts, Group, host
from .inputs import judge, mask_facts
from .tile import Answer, config_for_shards
from .wire import VALUE_BITS

_Function = TypeVar("_Function", bound=Callable[..., Any])


def eagerly(function: _Function) -> _Function:
    """Return a function that torch.compile does not look into: it breaks its graph there."""
    if not torch.compiler.is_compiling():
        return function
    disabled: _Function = torch.compiler.disable(function)
    return disabled


def answer_alone(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    return_lse: bool,
    value_bits: int,
    quantize: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Answer on a group of one rank: what one process does, nothing more; lse is empty unless asked for.

    Raises UnsupportedError if the kernel doesn't take the call, ValueError for a mask over other keys or a setting that
    more ranks would refuse.
    """
    decision = judge(query, key, value, mask, causal, scale)
    if decision.reasons:
        raise UnsupportedError(decision)
    refusal = _wrong_setting(causal, return_lse, value_bits, quantize)
    if mask is not None and mask.shape[-1] not in (1, key.shape[2]):
        refusal = f"gives a mask over {mask.shape[-1]} keys, expected {key.shape[2]} (all keys) or 1"
    if refusal:
        raise ValueError(f"rank 0 {refusal}")
    if 0 in (query.shape[2], key.shape[2]):
        answer = Answer(query, 0)
        return answer.out, answer.lse
    return run.int8(query, key, value, mask, causal, scale, "auto", "auto", return_lse=return_lse)


def _wrong_setting(causal: bool, return_lse: bool, value_bits: int, quantize: bool | None) -> str:
    """Say which setting no call takes, or nothing."""
    if type(value_bits) is not int or value_bits not in VALUE_BITS:
        return f"gives value_bits {value_bits!r}, expected one of {', '.join(map(str, VALUE_BITS))}"
    if not isinstance(return_lse, bool):
        return f"gives return_lse {return_lse!r}, expected True or False"
    if quantize is not None and not isinstance(quantize, bool):
        return f"gives quantize {quantize!r}, expected True, False or None"
    if quantize and causal:
        return "gives quantize=True with causal, expected one of them: quantised shards know no diagonal"
    return ""


def facts_of(
    function: str,
    ranks: Group,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    return_lse: bool,
    value_bits: int,
    quantize: bool | None = None,
    cause: Exception | None = None,
) -> tuple[Facts, Exception | None]:
    """Return what this rank tells the others, and what it raises if it refuses the call; the others then raise too.

    cause: why it refuses already.
    """
    if cause is None:
        try:
            return _facts(function, ranks, query, key, value, mask, causal, scale, return_lse, value_bits, quantize)
        except Exception as error:  # whatever it is: to raise alone is to leave the others waiting
            cause = error
    return Facts(function, refusal=str(cause) or type(cause).__name__), cause


def _facts(
    function: str,
    ranks: Group,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    return_lse: bool,
    value_bits: int,
    quantize: bool | None,
) -> tuple[Facts, Exception | None]:
    decision = judge(query, key, value, mask, causal, scale)
    if decision.reasons:
        raise UnsupportedError(decision)
    refusal = _wrong_setting(causal, return_lse, value_bits, quantize) or ranks.refusal(query.device)
    if refusal:
        return Facts(function, refusal=refusal), None
    shapes: dict[str, Any] = {"batch": query.shape[0], "heads": query.shape[1], "kv_heads": key.shape[1]}
    shapes |= {"head_dim": query.shape[3], "q_len": query.shape[2], "kv_len": key.shape[2]}
    facts = Facts(
        function,
        dtype=str(query.dtype),
        causal=causal,
        scale=None if scale is None else float(scale),
        return_lse=return_lse,
        value_bits=value_bits,
        quantize=str(quantize),
        kernel=config_for_shards(query)[1],
        host=host(),
        **shapes,
        **mask_facts(mask),
    )
    return facts, None
