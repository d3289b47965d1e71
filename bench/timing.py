"""Time rival calls beside each other.

What is counted. On a GPU: CUDA events round one repeat. A call of a millisecond or more is a repeat by itself, after
the L2 cache was overwritten, several times over, so that the device comes to the call when the host has launched all of
it: so it is in a model whose calls take that long, and else a rival would be charged for its host time in those rounds
that it begins. Shorter calls are repeated back to back until they fill a millisecond, so that what is counted is what a
model in eager mode waits for, the slower of the host and the device, with inputs warm in the cache.
Such a repeat begins on an idle GPU with a call that is not counted: nothing hides the host but the calls themselves,
and no first launch is waited for. A captured graph (`captured`) leaves the host out. On a CPU: time.perf_counter round
the same repeats.

Rivals are interleaved: every round runs each rival once, in an order drawn anew, so that the clock, the heat, the
neighbours of the chip and who came before are the same for all. The first round is not counted. Medians are reported,
with the distance of the quartiles over the median as `spread`: a difference smaller than that is noise.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)

_REPEAT_MS = 1.0
_MOST_CALLS = 100
# Calls that take the host's time vary most: they are repeated so many times as often.
_SHORT_MS, _MORE_REPEATS = 0.05, 4
# Over four times the 60 MB of L2 of an H200, the largest of the chips in mind.
_FLUSH_BYTES = 256 * 2**20
# Times that this is written before a call of its own: 0.6 ms of an H200, over what its host takes to launch a call.
_LEAD = 8


@dataclass(frozen=True)
class Run:
    """A rival ready to go: `call` makes `calls` calls; `context` is entered before the clock starts."""

    call: Callable[[], object]
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    calls: int = 1


@dataclass(frozen=True)
class Effort:
    """How long a rival is timed: `budget_ms` in all, but at least and at most so many repeats; short calls more."""

    budget_ms: float = 500.0
    min_repeats: int = 5
    max_repeats: int = 50


QUICK = Effort(150.0, 3, 15)


@dataclass(frozen=True)
class Timing:
    """Median ms a call, quartile distance over median, repeats counted, median host microseconds a call."""

    ms: float
    spread: float
    repeats: int
    host_us: float


@dataclass
class _Rival:
    run: Run
    loops: int
    repeats: int
    ms: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)

    def timing(self) -> Timing:
        low, median, high = statistics.quantiles(self.ms, n=4) if len(self.ms) > 1 else self.ms * 3
        return Timing(median, (high - low) / median, len(self.ms), statistics.median(self.host_us))


class Stopwatch:
    """Runs one repeat of a rival; `lap` returns a function that gives (ms a call, host us a call) once all is done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device) if self.cuda else None

    def lap(self, run: Run, loops: int, *, queued: bool = False) -> Callable[[], tuple[float, float]]:
        """One repeat of `loops` calls; queued: behind other work even if they are several."""
        calls = loops * run.calls
        with run.context():
            if loops > 1 and not queued:
                self.wait()
                run.call()
            if self._flush is None:
                began = time.perf_counter()
                for _ in range(loops):
                    run.call()
                seconds = time.perf_counter() - began
                return lambda: (seconds / calls * 1e3, seconds / calls * 1e6)
            cuda: Any = torch.cuda
            start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            for _ in range(_LEAD if loops == 1 else queued):
                self._flush.zero_()
            start.record()
            began = time.perf_counter()
            for _ in range(loops):
                run.call()
            seconds = time.perf_counter() - began
            end.record()
        return lambda: (start.elapsed_time(end) / calls, seconds / calls * 1e6)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)


def interleaved(runs: Mapping[Key, Run], device: torch.device, effort: Effort) -> dict[Key, Timing | Exception]:
    """Time every run beside the others; a run that raises gives its exception and leaves the others alone."""
    watch = Stopwatch(device)
    results: dict[Key, Timing | Exception] = {}
    rivals: dict[Key, _Rival] = {}
    for key, run in runs.items():
        try:
            rivals[key] = _plan(run, watch, effort)
        except Exception as error:  # a rival may raise anything: it becomes its result
            results[key] = error
    for number in range(max((rival.repeats for rival in rivals.values()), default=-1) + 1):
        _round(rivals, results, watch, number)
    return results | {key: rival.timing() for key, rival in rivals.items()}


def _plan(run: Run, watch: Stopwatch, effort: Effort) -> _Rival:
    """Warm up and choose the number of calls a repeat and of repeats."""
    watch.lap(run, 1)
    watch.wait()
    first = watch.lap(run, 1)
    watch.wait()
    if first()[0] * run.calls < _REPEAT_MS:
        first = watch.lap(run, 3)  # of which one that was interrupted is a part only
        watch.wait()
    ms = max(first()[0] * run.calls, 1e-4)
    loops = 1 if ms >= _REPEAT_MS else min(_MOST_CALLS, math.ceil(_REPEAT_MS / ms))
    repeats = int(effort.budget_ms / (ms * loops))
    most = effort.max_repeats * (_MORE_REPEATS if ms < _SHORT_MS else 1)
    return _Rival(run, loops, max(effort.min_repeats, min(most, repeats)))


def _round(rivals: dict[Key, _Rival], results: dict[Key, Timing | Exception], watch: Stopwatch, number: int) -> None:
    """One repeat of every rival that has repeats left; round 0 only warms up."""
    keys = list(rivals)
    random.Random(number).shuffle(keys)
    laps = []
    for key in keys:
        if number > rivals[key].repeats:
            continue
        try:
            laps.append((rivals[key], watch.lap(rivals[key].run, rivals[key].loops)))
        except Exception as error:  # a rival may raise anything: it becomes its result
            results[key] = error
            del rivals[key]
    watch.wait()
    for rival, lap in laps if number else []:
        ms, host_us = lap()
        rival.ms.append(ms)
        rival.host_us.append(host_us)


def captured(run: Run, calls: int) -> Run:
    """`calls` calls of a run in a CUDA graph: its replay costs the device's time and hardly any of the host's."""
    cuda: Any = torch.cuda
    graph, stream = cuda.CUDAGraph(), cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    with run.context(), cuda.stream(stream):
        for _ in range(3):
            run.call()
    cuda.current_stream().wait_stream(stream)
    cuda.synchronize()
    answer: list[object] = []
    with run.context(), cuda.graph(graph):
        for _ in range(calls):
            answer[:] = [run.call()]

    def replay() -> object:
        graph.replay()
        return answer[0]

    return Run(replay, calls=calls * run.calls)
