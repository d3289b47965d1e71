"""Who answers a call on shards, and what it sends: a Decision, made before anything moves, and its record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from ..decide import Call, kernel_against
from ..decision import Code, Decision, MaskKind, Reason, Route, UnsupportedError
from ..mask import classify_mask
from ..recent import answered_before, remember_answered
from ..record import known, sight
from ..settings import active_name, settings_of
from .group import Facts, Group, host
from .inputs import mask_facts
from .tile import config_for_shards
from .wire import VALUE_BITS


class Asked(NamedTuple):
    """What a rank is asked for: its own tensors, and settings that all ranks share."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    scale: float | None
    return_lse: bool
    value_bits: int
    quantize: bool | None = None

    def as_call(self) -> Call:
        """As a call of attention to this rank's keys alone, for judging and for the record."""
        tensors = (self.query, self.key)
        grouped = all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in tensors) and (
            self.query.shape[1] != self.key.shape[1]
        )
        return Call(self.query, self.key, self.value, self.mask, 0.0, self.causal, self.scale, grouped)


Pair = tuple[torch.Tensor, torch.Tensor]


class Way(NamedTuple):
    """A way to share a sequence.

    function: its public name.  code: of the note in a decision.  run: attends, once the ranks agreed; returns out and
    lse.  sends: the bytes of tensors that a rank sends to others, from what the ranks agreed on.
    """

    function: str
    code: Code
    run: Callable[[Asked, Group, list[Facts]], Pair]
    sends: Callable[[Asked, list[Facts], int], int]


def require(asked: Asked) -> None:
    """Raise UnsupportedError if the kernel does not attend to shards of these tensors; a call seen before is quick."""
    call = asked.as_call()
    if answered_before(call, "auto", "auto"):
        return
    decision = judge(asked)
    if decision.reasons:
        raise UnsupportedError(decision)
    if not any(True for _ in kernel_against(call, "auto", "auto")):  # neither empty nor with a mask over all keys
        remember_answered(call, "auto", "auto")


def judge(asked: Asked) -> Decision:
    """Say whether the kernel attends to shards of these tensors; lengths of 0 and a mask over other keys are fine."""
    query, mask = asked.query, asked.mask
    call = asked.as_call()._replace(attn_mask=None)
    reasons = [reason for reason in kernel_against(call, "auto", "auto") if not _only_lengths(reason)]
    info = classify_mask(None, 1, 1, 1, 1)
    if mask is not None and not reasons:
        keys = mask.shape[-1] if isinstance(mask, torch.Tensor) and mask.dim() else 1
        info = classify_mask(mask, query.shape[0], query.shape[1], query.shape[2], keys)
        rowless = 0 in mask.shape[:-1] if isinstance(mask, torch.Tensor) else False  # expanded over a rank's no queries
        if info.kind is not MaskKind.PER_KEY or rowless:
            code = Code.FULL_MASK if info.kind is MaskKind.FULL else Code.INVALID_MASK
            given = getattr(mask, "shape", type(mask).__name__)
            reasons.append(Reason(code, given, "one row for all queries, [1 or B, 1 or H, 1, keys]"))
        elif mask.dtype not in (torch.bool, torch.float32, query.dtype):
            reasons.append(Reason(Code.MASK_DTYPE, mask.dtype, (torch.bool, torch.float32, query.dtype)))
        elif mask.device != query.device:
            reasons.append(Reason(Code.MIXED_DEVICE, (query.device, mask.device), "one device"))
        elif mask.requires_grad and torch.is_grad_enabled():
            reasons.append(Reason(Code.REQUIRES_GRAD, "attn_mask", "tensors without, or no_grad()"))
        elif asked.causal:
            reasons.append(Reason(Code.CAUSAL_WITH_MASK, "causal and attn_mask", "one of them"))
    return Decision(Route.SDPA if reasons else Route.INT8, info, tuple(reasons))


def _only_lengths(reason: Reason) -> bool:
    """Whether a call is called empty for its lengths alone: a rank may hold no query or no key."""
    if reason.code is not Code.EMPTY:
        return False
    shapes: Any = reason.given
    return all(size > 0 for shape in shapes for size in (*shape[:2], shape[3]))


def wrong_setting(asked: Asked) -> str:
    """Say which setting no call takes, or nothing."""
    bits, quantize = asked.value_bits, asked.quantize
    if type(bits) is not int or bits not in VALUE_BITS:
        return f"gives value_bits {bits!r}, expected one of {', '.join(map(str, VALUE_BITS))}"
    if not isinstance(asked.return_lse, bool):
        return f"gives return_lse {asked.return_lse!r}, expected True or False"
    if quantize is not None and not isinstance(quantize, bool):
        return f"gives quantize {quantize!r}, expected True, False or None"
    if quantize and asked.causal:
        return "gives quantize=True with causal, expected one of them: quantised shards know no diagonal"
    return ""


def facts_of(way: Way, asked: Asked) -> Facts:
    """Return what a rank tells the others of a call that was judged."""
    query, key = asked.query, asked.key
    return Facts(
        way.function,
        batch=query.shape[0],
        heads=query.shape[1],
        kv_heads=key.shape[1],
        head_dim=query.shape[3],
        q_len=query.shape[2],
        kv_len=key.shape[2],
        dtype=str(query.dtype),
        causal=asked.causal,
        scale=None if asked.scale is None else float(asked.scale),
        return_lse=asked.return_lse,
        value_bits=asked.value_bits,
        quantize=str(asked.quantize),
        kernel=config_for_shards(query)[1],
        host=host(),
        **mask_facts(asked.mask),
    )


def noted(decision: Decision, way: Way, asked: Asked, everyone: list[Facts], rank: int) -> Decision:
    """Return the decision on a call that the ranks agreed on with a note of what is shared, and sent by this rank."""
    queries, keys = (sum(getattr(facts, name) for facts in everyone) for name in ("q_len", "kv_len"))
    what = f"rank {rank} of {len(everyone)} with its part of {queries} queries and {keys} keys"
    sent = way.sends(asked, everyone, rank) if len(everyone) > 1 else 0
    return dataclasses.replace(decision, notes=(Reason(way.code, what, sent),))


def count(way: Way, asked: Asked, everyone: list[Facts], rank: int) -> None:
    """Count a call that is about to be answered, in stats() and the record; its first sight is logged."""
    _tick(("sharded", active_name(), asked.quantize, rank, *everyone), way, asked, lambda: everyone, rank)


def count_alone(way: Way, asked: Asked) -> None:
    """Do the same on a group of one rank, at a tenth of the time that Facts take: they are gathered at first sight."""
    tensors = [None if x is None else (x.shape, x.dtype) for x in asked[:4]]
    _tick(("alone", way.function, active_name(), *tensors, *asked[4:]), way, asked, lambda: [facts_of(way, asked)], 0)


def _tick(key: Hashable, way: Way, asked: Asked, everyone: Callable[[], list[Facts]], rank: int) -> None:
    sighting = known.get(key)
    if sighting is None:
        decision = noted(judge(asked), way, asked, everyone(), rank)
        sighting = sight(key, asked.as_call(), decision, settings_of(active_name()))
    sighting.tick()
