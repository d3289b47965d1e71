"""Ask the backend that was decided on, and the next one where it can't just now or fails."""

from __future__ import annotations

import math
import time

import torch

from . import run
from .backends.base import find_backend
from .call import Call
from .choose import attach, choose, failure
from .decision import Code, Decision, Reason, UnsupportedError
from .mask_summary import full_view, summarised
from .record import known, logger, sight
from .sighting import Sighting

# What may be otherwise soon, so that a backend is asked again after a pause: each attempt empties torch's cache.
_PASSES = (torch.OutOfMemoryError, MemoryError)
_PAUSE_S = 1.0


def ask(sighting: Sighting, attention: run.Attention, call: Call) -> torch.Tensor:
    """Let the backend that was chosen answer, or the next one where it can't just now or fails."""
    while (name := sighting.asked) is not None:
        instead = sighting.instead
        if instead is not None:
            if time.monotonic() < sighting.asked_again:
                sighting = instead
                continue
            sighting.instead = None
        try:
            backend = find_backend(name)
        except KeyError:  # another thread has unregistered it just now
            gone = Reason(Code.PACKAGE, f"no backend {name!r}", "one that is registered")
            sighting = _without(sighting, call, (gone,))
            continue
        sighting.tick()  # before it runs: when all is judged anew meanwhile, later ticks are lost
        try:
            reasons = tuple(backend.reasons_now(call)) if backend.reasons_now is not None else ()
            if not reasons and sighting.decision.mask.tiles is not None:
                out = _answer_by_tile(call)
            elif not reasons:
                out = run.backend(backend, call, sighting.settings, attention, sighting)
        except Exception as error:
            if sighting.settings.on_error == "raise":
                attach(error, sighting.decision)
                raise
            sighting.untick()
            passes = isinstance(error, _PASSES)
            sighting.asked_again = time.monotonic() + _PAUSE_S if passes else math.inf
            instead = _without(sighting, call, (failure(error),), passes=passes)
            sighting.instead = instead
            sighting = instead
            continue
        if not reasons:
            return out
        sighting.untick()
        sighting = _without(sighting, call, reasons)
    sighting.tick()
    if sighting.settings.on_unsupported == "raise" and sighting.decision.reasons:
        raise UnsupportedError(sighting.decision)
    return run.native(call, attention, cast_mask=bool(sighting.decision.notes))


def _without(sighting: Sighting, call: Call, reasons: tuple[Reason, ...], *, passes: bool = False) -> Sighting:
    """Decide again, with these reasons against the backend that was chosen; passes: whether they may be gone soon."""
    name = sighting.decision.backend
    refused = {**sighting.refused, name: (*sighting.refused.get(name, ()), *reasons)}
    key = ("without", sighting, tuple(reason.code for reason in reasons), passes)
    made = known.get(key)
    if made is None:
        decision = choose(call, sighting.settings, refused)
        made = sight(key, call, decision, sighting.settings)
        made.refused = refused
        if made.decision is decision:  # else another thread was first
            log_failures(decision, sighting.decision)
    return made


def log_failures(decision: Decision, before: Decision | None = None) -> None:
    """Log the errors of backends that `decision` fell back from, but those that fell out in the one `before` it."""
    told = () if before is None else [name for name, reasons in before.passed_over if _failed(reasons)]
    for name, reasons in decision.passed_over:
        if name not in told:
            for reason in _failed(reasons):
                logger.warning("%s failed, another backend answers instead: %s", name, reason.given)


def _failed(reasons: tuple[Reason, ...]) -> list[Reason]:
    return [reason for reason in reasons if reason.code is Code.BACKEND_FAILED]


def _answer_by_tile(call: Call) -> torch.Tensor:
    query, key, value, attn_mask, _, _, scale, _ = call
    assert attn_mask is not None
    mask = full_view(attn_mask, key.shape[2])
    return run.by_tile(query, key, value, mask, summarised(mask).summary, scale, False)[0]
