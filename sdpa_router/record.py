"""Record decisions: counters always, one log line and one JSON line at a signature's first sight, tables on request.

Under torch.compile and CUDA graphs the counts are traces and captures, not replays: `phase` says which.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch

from . import recent
from .decide import Call
from .decision import Decision, Route
from .forks import after_fork, at_exit
from .run_writer import append, devices, tell
from .settings import Settings
from .sighting import Sighting, lock

logger = logging.getLogger("sdpa_router.dispatch")

# Signatures kept apart; when there are more, they are folded into the totals and the next ones are kept.
MAX_SIGHTINGS = 4096
_LIBRARIES = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (__file__, torch.__file__))


known: dict[Hashable, Sighting] = {}
_folded: Counter[tuple[str, tuple[str, ...]]] = Counter()
_open: weakref.WeakSet[Recording] = weakref.WeakSet()
_json_broken = False


def sight(key: Hashable, call: Call, decision: Decision, settings: Settings, phase: str = "eager") -> Sighting:
    """Return the Sighting of `key`; the first time make it, log it and write it down."""
    sighting = known.get(key)
    if sighting is not None:
        return sighting
    _, caller = _caller()
    made = Sighting(call, decision, settings, phase, caller)
    with lock:
        if len(known) >= MAX_SIGHTINGS:
            judge_anew()
        sighting = known.setdefault(key, made)
    if sighting is made and made.summaries is None:
        report(made)
    return sighting


def report(sighting: Sighting) -> None:
    """Log a first sight, write it down and warn of it, once; where tiles decide, that is known after sight() only."""
    with lock:
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
    with lock:
        for sighting in known.values():
            _folded[sighting.outcome] += sighting.count
        _forget()


def reset_stats() -> None:
    """Forget all counts and decisions, so that signatures are judged anew."""
    with lock:
        _forget()
        _folded.clear()


def _forget() -> None:
    for recording in _open:
        recording.keep()
    if counts := _counts([(sighting, sighting.count) for sighting in known.values()]):
        _write_json({"event": "counts", "counts": counts})
    known.clear()
    recent.forget()


def _begin_anew() -> None:
    """Leave to the parent, in a forked child, what was counted before: it tells that itself."""
    with lock:
        known.clear()
        _folded.clear()
        recent.forget()
        for recording in _open:
            recording.begin()


def stats() -> dict[str, Any]:
    """Return what was decided in this process since its start, or the last reset_stats().

    calls: their number.  routes: calls by who answered, "int8", "sdpa" (torch) or another backend.  reasons: calls by
    reason code; a call may count under several.  signatures: one dict for each signature, as in `Recording.records`.
    """
    with lock:
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
        with lock:
            self.begin()
            _open.add(self)
        return self

    def begin(self) -> None:
        """Count from now on."""
        self._before = {sighting: sighting.count for sighting in known.values()}
        self._forgotten = []
        self._after = None

    def __exit__(self, *error: object) -> None:
        with lock:
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
        with lock:
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
        with lock:
            append(path, line if sighting is None else {**line, **sighting.record()})
    except Exception as error:
        _json_broken = True
        complaint = f"SDPA_ROUTER_JSONL={path} can't be written, no more lines follow: {error}"
        try:
            warnings.warn(complaint, stacklevel=level)
        except Warning:  # warnings are errors here
            with contextlib.suppress(Exception):
                logger.warning("%s", complaint)


def _write_totals() -> None:
    with lock:
        counted = [(sighting, sighting.count) for sighting in known.values()]
        totals = _totals(counted)
    if totals["calls"]:
        where = {"time": time.time(), "devices": devices()}
        _write_json({"event": "totals", **where, **totals, "counts": _counts(counted)})
    tell(totals)


at_exit(_write_totals)
after_fork(_begin_anew)
