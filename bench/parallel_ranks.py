"""The processes of a benchmark that torchrun starts: who they are, their clocks, and diffusers' configurations."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import records
import torch
import torch.distributed as dist

Way = Callable[[], torch.Tensor]


class Bench:
    """This process among the others, and where the lines go."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.cuda = torch.cuda.is_available()
        if self.cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if self.cuda else "gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")
        self.alone = [dist.new_group([rank]) for rank in range(self.size)][self.rank]
        self.ways = tuple(filter(None, arguments.ways.split(";")))
        self.repeats, self.tiny, self.end = arguments.repeats, arguments.tiny, time.monotonic() + arguments.deadline
        self.invocation = records.Invocation(self.device, arguments.out, arguments.commit or records.commit_here())

    def write(self, **row: Any) -> None:
        if self.rank == 0:
            line = self.invocation.write({**row, "gpus": self.size if self.cuda else 0, "processes": self.size})
            print({key: value for key, value in line.items() if key not in self.invocation.facts()}, flush=True)

    def late(self) -> bool:
        """Whether the deadline has passed on any rank."""
        passed = torch.tensor(float(time.monotonic() > self.end), device=self.device)
        dist.all_reduce(passed, op=dist.ReduceOp.MAX)
        return bool(passed.item())

    def worst(self, number: float) -> float:
        """The largest over the ranks; NaN and infinity count as the largest."""
        value = torch.tensor(number if math.isfinite(number) else 1e30, device=self.device, dtype=torch.float64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value.item())

    def once(self, way: Way | None) -> float:
        """Milliseconds of one call on this rank; None: this rank waits."""
        if not self.cuda:
            began = time.perf_counter()
            if way:
                way()
            return (time.perf_counter() - began) * 1e3
        cuda: Any = torch.cuda
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        dist.barrier()
        cuda.synchronize()
        start.record()
        if way:
            way()
        end.record()
        cuda.synchronize()
        return float(start.elapsed_time(end))

    def times(self, ways: dict[str, tuple[Way | None, bool]]) -> dict[str, tuple[float, float]]:
        """Median and quartile distance over it of every way, in turns; a way marked True runs on rank 0 alone."""
        laps: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(self.repeats + 1):
            names = list(ways)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                way, single = ways[name]
                ms = self.worst(self.once(None if single and self.rank else way))
                if number:
                    laps[name].append(ms)
        found = {}
        for name, ms in laps.items():
            low, median, high = statistics.quantiles(ms, n=4) if len(ms) > 1 else ms * 3
            found[name] = (median, (high - low) / median)
        return found

    def pairs(self, first: Way, second: Way, count: int) -> tuple[list[float], list[float]]:
        """Milliseconds of `second` on this rank, and how many times those of the `first` next to it, in turns."""
        seconds, ratios = [], []
        for number in range(count + 2):
            order = (first, second) if number % 2 else (second, first)
            ms = {way: self.once(way) for way in order}
            if number > 1:
                seconds.append(ms[second])
                ratios.append(ms[second] / ms[first])
        return seconds, ratios


def diffusers_part(name: str = "") -> Any:
    """Return diffusers or a module of it, None where it is not installed."""
    try:
        return importlib.import_module(f"diffusers{name}")
    except ImportError:
        return None


def parallel_config(bench: Bench, ring_degree: int, ulysses_degree: int) -> Any:
    """diffusers' ParallelConfig over all ranks."""
    diffusers = diffusers_part()
    mesh: Any = importlib.import_module("torch.distributed.device_mesh").init_device_mesh(
        bench.device.type, (ring_degree, ulysses_degree), mesh_dim_names=("ring", "ulysses")
    )
    context = diffusers.ContextParallelConfig(ring_degree=ring_degree, ulysses_degree=ulysses_degree, mesh=mesh)
    config = diffusers.ParallelConfig(context_parallel_config=context)
    config.setup(bench.rank, bench.size, bench.device, mesh=mesh)
    return config
