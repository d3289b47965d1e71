"""Time rival calls beside each other: what the device takes for one, and what the host takes.

On a GPU the device is kept busy until the host has launched all calls of a lap, so that CUDA events round them count
the device alone, and the wall clock meanwhile the host alone. On a CPU there is the wall clock.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

Answer = Callable[[], torch.Tensor]

# Milliseconds that a rival is timed, in laps of at least _LAP_MS; the clock of events resolves a microsecond.
_BUDGET_MS = 50.0
_LAP_MS = 0.5
_ROUNDS = (3, 15)
_MOST_LOOPS = 20
# What keeps the device busy is written over this; it empties the L2 cache of all GPUs so far (H200: 60 MB).
_FILL_BYTES = 2**27
_MARGIN = 1.5  # hosts are uneven


class Times(NamedTuple):
    """Median milliseconds a call by rival, on the device and on the host."""

    device: dict[str, float]
    host: dict[str, float]


class _Lap(NamedTuple):
    device: float
    host: float


def interleaved(answers: Mapping[str, Answer], device: torch.device) -> Times:
    """Time all `answers` in turns, one lap each a round, another one first each time."""
    watch = Stopwatch(device)
    plans = {name: _plan(answer, watch) for name, answer in answers.items()}
    laps: dict[str, list[_Lap]] = {name: [] for name in answers}
    names = list(answers)
    for number in range(max(rounds for _, rounds, _ in plans.values())):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            loops, rounds, host = plans[name]
            if number < rounds:
                laps[name].append(watch.lap(answers[name], loops, host))
    medians = {name: _Lap(*map(statistics.median, zip(*taken, strict=True))) for name, taken in laps.items()}
    return Times(
        {name: round(lap.device, 6) for name, lap in medians.items()},
        {name: round(lap.host, 6) for name, lap in medians.items()},
    )


def _plan(answer: Answer, watch: Stopwatch) -> tuple[int, int, float]:
    """Return how many calls a lap has, how many laps there are, and the host's milliseconds a call."""
    warm = [watch.lap(answer, 1, 0.0) for _ in range(3)][1:]
    host = min(lap.host for lap in warm)
    once = max(min(watch.lap(answer, 1, host).device for _ in range(2)), 1e-4)
    loops = max(1, min(_MOST_LOOPS, math.ceil(_LAP_MS / once)))
    return loops, max(_ROUNDS[0], min(_ROUNDS[1], int(_BUDGET_MS / (once * loops)))), host


class Stopwatch:
    """Takes laps on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._fill: torch.Tensor | None = None
        if device.type == "cuda":
            self._fill = torch.empty(_FILL_BYTES, dtype=torch.int8, device=device)
            self._fill_ms = self._ms_of_a_fill(self._fill)

    def lap(self, answer: Answer, loops: int, host_ms: float) -> _Lap:
        """Return milliseconds a call of `loops` calls; host_ms: what the host is expected to take for one."""
        if self._fill is None:
            began = time.perf_counter()
            for _ in range(loops):
                answer()
            passed = (time.perf_counter() - began) / loops * 1e3
            return _Lap(passed, passed)
        start, end = self._event(), self._event()
        torch.cuda.synchronize(self._device)
        for _ in range(1 + math.ceil(_MARGIN * host_ms * loops / self._fill_ms)):
            self._fill.zero_()
        start.record()
        began = time.perf_counter()
        for _ in range(loops):
            answer()
        host = (time.perf_counter() - began) / loops * 1e3
        end.record()
        torch.cuda.synchronize(self._device)
        return _Lap(start.elapsed_time(end) / loops, host)

    def _ms_of_a_fill(self, fill: torch.Tensor) -> float:
        events = [self._event() for _ in range(5)]
        for event in events:
            fill.zero_()
            event.record()
        torch.cuda.synchronize(self._device)
        passed: list[float] = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
        return max(min(passed), 1e-3)

    @staticmethod
    def _event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)
