"""Record decisions: counters always, one log line and one JSON line at a signature's first sight, tables on request.

Under torch.compile and CUDA graphs the counts are traces and captures, not replays: `phase` says which.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import itertools
import json
import logging
import math
import os
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch

from . import recent
from .by_tile import PATIENCE, worth_a_look
from .decide import PLAIN_TYPES, Call
from .decision import Decision, Reason, Route, show
from .settings import Settings

logger = logging.getLogger("sdpa_router.dispatch")

# Signatures kept apart; when there are more, they are folded into the totals and the next ones are kept.
MAX_SIGHTINGS = 4096
_TOP_REASONS = 3
_LIBRARIES = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (__file__, torch.__file__))


class Sighting:
    """A decision, the call that it was made for (as metadata, in no tensor), and how often it was needed."""

    __slots__ = (
        *("as_given", "decision", "direct", "instead", "number", "phase", "refused", "reported", "settings"),
        *("summaries", "tick"),
        *("_call", "_caller", "_reads", "_ticks", "_time"),
    )

    def __init__(
        self, call: Call, decision: Decision, settings: Settings, phase: str, caller: tuple[str, int, str]
    ) -> None:
        self.decision = decision
        self.settings = settings
        refuses = settings.on_unsupported == "raise" and decision.reasons
        self.direct = decision.routed and settings.on_error == "raise"
        # Where a backend failed or can't answer just now: who answers instead, and the reasons so far by backend.
        self.instead: Sighting | None = None
        self.refused: dict[str, tuple[Reason, ...]] = {}
        self.number = next(_numbers)
        self.phase = "capture" if phase == "eager" and _capturing() else phase
        # How many masks may still be summarised for calls like this one; None where their tiles don't matter.
        looks = phase == "eager" and settings.by_tile
        self.summaries = PATIENCE if looks and worth_a_look(decision, call) else None
        self.reported = False
        self.as_given = decision.route is Route.SDPA and not (decision.notes or refuses) and self.summaries is None
        self._time = time.time()
        self._caller = caller
        self._call = {name: _metadata(getattr(call, name)) for name in call._fields}
        # next() of a count is atomic where "+= 1" is not; a reading takes a tick too, which _reads makes up for.
        self._ticks = itertools.count()
        self._reads = 0
        self.tick = self._ticks.__next__

    @property
    def count(self) -> int:
        """Calls in eager mode; traces or captures in those phases."""
        with _lock:
            count = next(self._ticks) - self._reads
            self._reads += 1
        return count

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


known: dict[Hashable, Sighting] = {}
_folded: Counter[tuple[str, tuple[str, ...]]] = Counter()
_open: weakref.WeakSet[Recording] = weakref.WeakSet()
_lock = threading.RLock()
_json_broken = False
_numbers = itertools.count()


def sight(key: Hashable, call: Call, decision: Decision, settings: Settings, phase: str = "eager") -> Sighting:
    """Return the Sighting of `key`; the first time make it, log it and write it down."""
    sighting = known.get(key)
    if sighting is not None:
        return sighting
    _, caller = _caller()
    made = Sighting(call, decision, settings, phase, caller)
    with _lock:
        if len(known) >= MAX_SIGHTINGS:
            judge_anew()
        sighting = known.setdefault(key, made)
    if sighting is made and made.summaries is None:
        report(made)
    return sighting


def report(sighting: Sighting) -> None:
    """Log a first sight, write it down and warn of it, once; where tiles decide, that is known after sight() only."""
    with _lock:
        if sighting.reported:
            return
        sighting.reported = True
    level, caller = _caller()
    decision, settings = sighting.decision, sighting.settings
    # A call must not fail because it can't be reported, whatever handlers and arguments do.
    with contextlib.suppress(Exception):
        if settings.log and logger.isEnabledFor(logging.INFO):
            logger.info("%s at %s:%s %s (%s)", decision, *caller, sighting.phase)
    _write_json({"event": "first"}, sighting, level + 1)
    if settings.on_unsupported == "warn" and decision.route is Route.SDPA and decision.reasons:
        warnings.warn(str(decision), stacklevel=level)


def judge_anew() -> None:
    """Forget the decisions and keep their counts in the totals."""
    with _lock:
        for sighting in known.values():
            _folded[sighting.outcome] += sighting.count
        _forget()


def reset_stats() -> None:
    """Forget all counts and decisions, so that signatures are judged anew."""
    with _lock:
        _forget()
        _folded.clear()


def _forget() -> None:
    for recording in _open:
        recording.keep()
    if counts := _counts([(sighting, sighting.count) for sighting in known.values()]):
        _write_json({"event": "counts", "pid": os.getpid(), "counts": counts})
    known.clear()
    recent.forget()


def stats() -> dict[str, Any]:
    """Return what was decided since the start or the last reset_stats().

    calls: their number.  routes: calls by who answered, "int8", "sdpa" (torch) or another backend.  reasons: calls by
    reason code; a call may count under several.  signatures: one dict for each signature, as in `Recording.records`.
    """
    with _lock:
        counted = [(sighting, sighting.count) for sighting in known.values()]
        totals = _totals(counted)
    return {**totals, "signatures": [{**sighting.record(), "count": count} for sighting, count in counted if count]}


class Recording:
    """What is decided, in all threads, while the context is open; made by record()."""

    def __init__(self) -> None:
        self._before: dict[Sighting, int] = {}
        self._forgotten: list[tuple[Hashable, Sighting]] = []
        self._after: list[tuple[Sighting, int]] | None = []

    def __enter__(self) -> Recording:
        with _lock:
            self._before = {sighting: sighting.count for sighting in known.values()}
            self._forgotten = []
            self._after = None
            _open.add(self)
        return self

    def __exit__(self, *error: object) -> None:
        with _lock:
            self._after = self._counted()
            _open.discard(self)
            self._before, self._forgotten = {}, []

    def keep(self) -> None:
        """Hold on to what was called since the context was entered: all decisions are about to be forgotten."""
        called = [(key, made) for key, made in known.items() if made.count > self._before.get(made, 0)]
        self._forgotten += called

    @property
    def records(self) -> list[dict[str, Any]]:
        """One dict for each signature that was called, in the order of first sight; `count` is of this context alone.

        time, pid, phase ("eager", "trace", "capture"), number (of the first sight), backend, reasons (codes), notes
        (codes), passed_over (codes by backend), estimates (ms by backend), detail, signature, mask, caller, count.
        """
        counted = self._counted() if self._after is None else self._after
        return [{**sighting.record(), "count": count} for sighting, count in counted]

    def table(self) -> str:
        """Return the records as a table in plain text, whatever terminal there is."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table("calls", "backend", "query", "key", "dtype", "mask", "reasons", "phase", "caller")
        for record in self.records:
            query, key = (record["signature"][name] for name in ("query", "key"))
            shapes = (query.get("shape", query.get("type")), key.get("shape", key.get("type")))
            reasons = ", ".join(record["reasons"] + record["notes"])
            cells = (
                record["count"],
                record["backend"],
                *shapes,
                query.get("dtype", ""),
                record["mask"]["kind"],
                reasons,
            )
            table.add_row(*(Text(str(cell)) for cell in (*cells, record["phase"], record["caller"])))
        text = io.StringIO()
        screen = Console(
            file=text, width=200, color_system=None, highlight=False, force_terminal=False, force_jupyter=False
        )
        screen.print(table)
        return text.getvalue()

    def _counted(self) -> list[tuple[Sighting, int]]:
        # A decision that was forgotten and made again is one record.
        counted: dict[Hashable, tuple[Sighting, int]] = {}
        with _lock:
            for key, sighting in (*self._forgotten, *known.items()):
                count = sighting.count - self._before.get(sighting, 0)
                if count > 0:
                    first, before = counted.get((key, sighting.outcome), (sighting, 0))
                    counted[key, sighting.outcome] = first, before + count
        return list(counted.values())


def record() -> Recording:
    """Return a context manager that collects what is decided inside it.

    >>> with record() as seen, route():
    ...     model(x)
    >>> print(seen.table())
    """
    return Recording()


def _counts(counted: list[tuple[Sighting, int]]) -> dict[str, int]:
    """Return the calls of each signature by the number that its first line in the JSON file has."""
    return {str(sighting.number): count for sighting, count in counted if count}


def _totals(counted: list[tuple[Sighting, int]]) -> dict[str, Any]:
    calls = Counter(_folded)
    for sighting, count in counted:
        calls[sighting.outcome] += count
    routes = {Route.INT8.value: 0, Route.SDPA.value: 0}
    reasons: Counter[str] = Counter()
    for (route, codes), count in calls.items():
        if count:
            routes[route] = routes.get(route, 0) + count
            reasons.update(dict.fromkeys(codes, count))
    return {"calls": sum(routes.values()), "routes": routes, "reasons": dict(reasons)}


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


def _caller() -> tuple[int, tuple[str, int, str]]:
    """Return the stack level for warnings.warn() in the caller of this, and file, line and name of the user's call."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    return level, (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _write_json(line: dict[str, Any], sighting: Sighting | None = None, level: int = 2) -> None:
    """Append to the file that SDPA_ROUTER_JSONL names; a call must not fail because its record can't be written."""
    global _json_broken
    path = os.environ.get("SDPA_ROUTER_JSONL")
    if not path or _json_broken:
        return
    try:
        text = json.dumps(line if sighting is None else {**line, **sighting.record()}, allow_nan=False)
        with _lock, open(path, "a", encoding="utf-8") as file:
            file.write(text + "\n")
    except Exception as error:
        _json_broken = True
        complaint = f"SDPA_ROUTER_JSONL={path} can't be written, no more lines follow: {error}"
        try:
            warnings.warn(complaint, stacklevel=level)
        except Warning:  # warnings are errors here
            with contextlib.suppress(Exception):
                logger.warning("%s", complaint)


@atexit.register
def _write_totals() -> None:
    with _lock:
        counted = [(sighting, sighting.count) for sighting in known.values()]
        totals = _totals(counted)
    if not totals["calls"]:
        return
    where = {"time": time.time(), "pid": os.getpid(), "devices": _devices()}
    _write_json({"event": "totals", **where, **totals, "counts": _counts(counted)})
    if os.environ.get("SDPA_ROUTER_LOG", "").strip().lower() == "info":
        print(summary(totals), file=sys.stderr)


def _devices() -> list[str]:
    if not torch.cuda.is_initialized():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def summary(totals: dict[str, Any]) -> str:
    """Return totals as one line: calls, how many of them were routed, and the most frequent reasons.

    >>> summary({"calls": 4, "routes": {"int8": 3, "sdpa": 1}, "reasons": {"short": 1}})
    'sdpa_router: 4 attention calls, 3 routed (75 %): int8 3, torch 1; reasons: short 1'
    """
    calls, routes = totals["calls"], dict(totals["routes"])
    native = routes.pop(Route.SDPA.value)
    routed = calls - native
    share = f" ({routed / calls:.0%})".replace("%", " %") if calls else ""
    who = ", ".join(f"{name} {count}" for name, count in {**routes, "torch": native}.items() if count)
    top = sorted(totals["reasons"].items(), key=lambda item: -item[1])[:_TOP_REASONS]
    why = "; reasons: " + ", ".join(f"{code} {count}" for code, count in top) if top else ""
    return f"sdpa_router: {calls} attention calls, {routed} routed{share}: {who}{why}"
