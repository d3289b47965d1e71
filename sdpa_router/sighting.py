"""One decision as it is kept: what it was made for, as metadata alone, and how often it was needed."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch

from .by_tile import PATIENCE, worth_a_look
from .decide import PLAIN_TYPES, Call
from .decision import Decision, Reason, Route, show
from .forks import free_after_fork
from .settings import Settings

if TYPE_CHECKING:
    from torch.multiprocessing.reductions import StorageWeakRef

lock = free_after_fork(threading.RLock())  # of all counts and decisions
_numbers = itertools.count()


class Sighting:
    """A decision, the call that it was made for (as metadata, in no tensor), and how often it was needed."""

    __slots__ = (
        *("as_given", "asked", "asked_again", "decision", "direct", "fits", "instead", "last_mask", "number", "phase"),
        *("refused", "reported", "settings", "summaries", "tick"),
        *("_call", "_caller", "_reads", "_ticks", "_time"),
    )

    def __init__(
        self, call: Call, decision: Decision, settings: Settings, phase: str, caller: tuple[str, int, str]
    ) -> None:
        self.decision = decision
        self.settings = settings
        refuses = settings.on_unsupported == "raise" and decision.reasons
        self.direct = decision.routed and settings.on_error == "raise"
        self.asked = None if decision.route is Route.SDPA else decision.backend  # who is, if not torch
        # Whether to such a query such an answer of the backend needs no closer look; None before the first one.
        self.fits: Callable[[torch.Tensor, Any], bool] | None = None
        # Where a backend failed or can't answer just now: who answers instead, until when on the monotonic clock, and
        # the reasons so far by backend.
        self.instead: Sighting | None = None
        self.asked_again = math.inf
        self.refused: dict[str, tuple[Reason, ...]] = {}
        self.number = next(_numbers)
        self.phase = "capture" if phase == "eager" and _capturing() else phase
        # How many masks may still be summarised for calls like this one; None where their tiles don't matter.
        looks = phase == "eager" and settings.by_tile
        self.summaries = PATIENCE if looks and worth_a_look(decision, call) else None
        self.last_mask: tuple[Hashable, StorageWeakRef] | None = None  # once no more are summarised at first sight
        self.reported = False
        self.as_given = decision.route is Route.SDPA and not (decision.notes or refuses) and self.summaries is None
        self._time = time.time()
        self._caller = caller
        self._call = {name: _metadata(getattr(call, name)) for name in call._fields}
        # next() of a count is atomic where "+= 1" is not; a reading takes a tick too, which _reads takes off.
        self._ticks = itertools.count()
        self._reads = 0
        self.tick = self._ticks.__next__

    @property
    def count(self) -> int:
        """Calls in eager mode; traces or captures in those phases."""
        with lock:
            count = next(self._ticks) - self._reads
            self._reads += 1
        return count

    def untick(self) -> None:
        """Take back a tick: somebody else answers."""
        with lock:
            self._reads += 1

    @property
    def outcome(self) -> tuple[str, tuple[str, ...]]:
        """Who answers and the distinct reason codes."""
        return self.decision.backend, tuple({reason.code.value: None for reason in self.decision.reasons})

    def record(self) -> dict[str, Any]:
        """Return everything but the count, as types of strict JSON."""
        shown = {name: _show(value) for name, value in self._call.items()}
        mask = shown.pop("attn_mask")
        if not isinstance(mask, dict):
            mask = {} if mask is None else {"value": mask}
        file, line, function = self._caller
        return {
            "time": self._time,
            "pid": os.getpid(),
            "phase": self.phase,
            "number": self.number,
            "backend": self.decision.backend,
            "reasons": list(self.outcome[1]),
            "notes": [note.code.value for note in self.decision.notes],
            "passed_over": {name: [r.code.value for r in reasons] for name, reasons in self.decision.passed_over},
            "estimates": dict(self.decision.estimates),
            "detail": str(self.decision),
            "signature": shown,
            "mask": {"kind": self.decision.mask.kind.value, **mask},
            "caller": f"{file}:{line} {function}",
        }


def _metadata(value: object) -> object:
    """Return what a record keeps of an argument: a tensor's (shape, strides, dtype, device), else a plain value."""
    if isinstance(value, (bool, int, float, type(None))):
        return value
    if type(value) not in PLAIN_TYPES or value.is_nested or value.layout != torch.strided:  # type: ignore[attr-defined]
        return type(value).__name__
    return value.shape, value.stride(), value.dtype, value.device  # type: ignore[attr-defined]


def _show(metadata: Any) -> Any:
    if isinstance(metadata, str):
        return {"type": metadata}
    if not isinstance(metadata, tuple):
        return _json_number(plain_number(metadata))
    shape, strides, dtype, device = metadata
    shape, strides = ([plain_number(n) for n in numbers] for numbers in (shape, strides))
    return {"shape": shape, "strides": strides, "dtype": show(dtype), "device": str(device)}


def plain_number(value: Any) -> Any:
    """Return the example value of a symbolic number without making the graph depend on it; other things as they are."""
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat)) else value


def _json_number(value: Any) -> Any:
    """Return a number that strict JSON has no form for as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    huge = isinstance(value, int) and value.bit_length() > 64
    return f"an int of {value.bit_length()} bits" if huge else value


def _capturing() -> bool:
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
