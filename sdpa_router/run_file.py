"""Read what SDPA_ROUTER_JSONL wrote: a row for each kind of call, with counts, times and what stood in the way."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from .cost_files import shipped_table, table_for
from .costs import Table
from .decision import Code, Route
from .run_events import Event, read_events
from .tune import size_of_record


@dataclass(frozen=True)
class Row:
    """Calls alike. record: what was written at the first of them.  ms: milliseconds a call by backend, if known."""

    record: Event
    count: int
    ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def backend(self) -> str:
        """Who answered: "torch", "int8" or another backend."""
        name = str(self.record["backend"])
        return "torch" if name == Route.SDPA.value else name

    @property
    def routed(self) -> bool:
        """Whether somebody else than torch's own choice answered."""
        return self.backend != "torch"

    @property
    def reasons(self) -> tuple[str, ...]:
        """Codes of what spoke against those that did not answer."""
        return tuple(self.record["reasons"])

    @property
    def total_ms(self) -> float | None:
        """Milliseconds of all of these calls, None if unknown."""
        return self.count * self.ms[self.backend] if self.backend in self.ms else None

    @property
    def operations(self) -> float:
        """Operations of all of these calls; 0 for those of unusual tensors."""
        size = size_of_record(self.record)
        return 0.0 if size is None else self.count * size.operations


@dataclass(frozen=True)
class Advice:
    """What a reason code cost, and its cure. weight: share of attention, by time or operations; saved_ms: if known."""

    code: str
    cure: str
    calls: int
    weight: float
    saved_ms: float


@dataclass(frozen=True)
class RunFile:
    """A recorded run. complete: whether every process wrote its counts at exit; else counts are of first sights."""

    path: Path
    rows: tuple[Row, ...]
    devices: tuple[str, ...]
    complete: bool

    @property
    def calls(self) -> int:
        """Number of attention calls."""
        return sum(row.count for row in self.rows)

    @functools.cached_property
    def by_time(self) -> bool:
        """Whether the time of every usual call is known; else shares are of operations."""
        return any(row.ms for row in self.rows) and all(row.total_ms is not None for row in self.rows if row.operations)

    def weight(self, row: Row) -> float:
        """Share of a row in all attention, 0 to 1, by time where that is known and else by operations."""
        return self._weight(row) / self._total if self._total else 0.0

    @functools.cached_property
    def _total(self) -> float:
        return sum(map(self._weight, self.rows))

    def _weight(self, row: Row) -> float:
        return (row.total_ms or 0.0) if self.by_time else row.operations

    def heaviest(self, most: int) -> tuple[list[Row], str]:
        """Return the rows with the largest shares, at most `most`, and a sentence on the others, "" if there are none.

        Each length of a text is a kind of its own: a language model makes thousands.
        """
        rows = sorted(self.rows, key=self.weight, reverse=True)
        others = rows[most:]
        calls, share = sum(row.count for row in others), sum(map(self.weight, others))
        told = f"and {len(others):,} lighter kinds of calls: {calls:,} calls, {100 * share:.1f} % of attention"
        return rows[:most], told if others else ""

    @property
    def routed_share(self) -> float:
        """Share of attention that others than torch answered, 0 to 1."""
        return sum(self.weight(row) for row in self.rows if row.routed)

    @property
    def routed_calls(self) -> int:
        """Number of calls that others than torch answered."""
        return sum(row.count for row in self.rows if row.routed)

    def advice(self) -> list[Advice]:
        """Return what kept calls with torch, the heaviest first."""
        calls: Counter[str] = Counter()
        weights: Counter[str] = Counter()
        saved: Counter[str] = Counter()
        for row in self.rows:
            if row.routed:
                continue
            best = min(row.ms.values(), default=0.0)
            for code in row.reasons:
                calls[code] += row.count
                weights[code] += self.weight(row)  # type: ignore[assignment]
                saved[code] += row.count * max(0.0, row.ms.get("torch", 0.0) - best)  # type: ignore[assignment]
        order = sorted(calls, key=lambda code: (-weights[code], -calls[code], code))
        return [Advice(code, cure_of(code), calls[code], weights[code], saved[code]) for code in order]


def cure_of(code: str) -> str:
    """Return what a user can do about a reason, also for codes that this version doesn't know."""
    try:
        return Code(code).cure
    except ValueError:
        return "Written by another version of sdpa_router."


def read_run(path: Path) -> RunFile:
    """Read a recorded run; raises OSError, and ValueError for a file that is none."""
    events = list(read_events(path))
    firsts = [event for event in events if event["event"] == "first"]
    if not firsts:
        raise ValueError(f"{path} holds no call: record with SDPA_ROUTER_JSONL={path} in the environment")
    counts: Counter[tuple[Hashable, str]] = Counter()
    for event in events:
        for number, count in event.get("counts", {}).items():
            counts[_process(event), str(number)] += count
    ended = {_process(event) for event in events if event["event"] == "totals"}
    named = [name for event in events for name in event.get("devices", ())]
    devices = tuple(dict.fromkeys(named))
    table = _table_of(devices)
    rows: dict[str, Row] = {}
    for number, event in enumerate(firsts):
        count = counts.get((_process(event), str(event.get("number", number))), 1)
        kind = ("signature", "mask", "backend", "reasons", "phase")
        key = json.dumps([event[name] for name in kind], sort_keys=True)
        found = rows.get(key)
        rows[key] = _row(event, count, table) if found is None else replace(found, count=found.count + count)
    complete = all(_process(event) in ended and "number" in event for event in firsts)
    return RunFile(path, tuple(rows.values()), devices, complete)


def _process(event: Event) -> Hashable:
    """Return what tells processes apart: a pid comes again, soon where each container has pids of its own."""
    return event.get("pid"), event.get("began")


def _row(event: Event, count: int, table: Table | None) -> Row:
    size = size_of_record(event)
    known = {} if table is None or size is None else table.estimate(size)
    return Row(event, count, {**known, **event.get("estimates", {})})


def _table_of(devices: tuple[str, ...]) -> Table | None:
    """Return the costs on the first recorded GPU: this machine's, if it has such a one, or the shipped ones."""
    if not devices:
        return None
    if torch.cuda.is_available() and torch.cuda.get_device_name() == devices[0]:
        return table_for(torch.device("cuda"))
    return shipped_table(devices[0])
