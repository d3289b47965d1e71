"""Time the router itself: what a call pays for being looked at, and whether a call that falls back gets slower.

Overheads are host microseconds over the function below. That function is replaced by a stub that returns its query, so
that the difference is not lost in the noise of an attention call; the last section uses torch's real one.

    inactive        route() is active in another thread only: this thread's calls pass through
    known-fallback  route() is active, the signature was seen before, the call goes to torch
    known-own       the same through sdpa_router.scaled_dot_product_attention
    known-routed    the same for a call that goes to the kernel (a stub too), where the kernel runs
    known-four      the same with four backends to choose from, none of which can answer
    known-peer      the same for a call that goes to another backend (a stub too), the first of four
    first-sight     route() is active, the signature is new: decision, first record, log line
    never-slower    calls that fall back, 64 to 4096 tokens, against torch alone. `eager`: back to back, as in a model
                    whose host is the bottleneck; `queued` (GPU): behind other work, as where the GPU is

    python bench/bench_dispatch.py [--device cuda] [--quick] [--out FILE.jsonl]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from records import RESULTS, Invocation, commit_here, table
from timing import Run, Stopwatch
from torch import Tensor

import sdpa_router
from sdpa_router.kernels.int8_attention import op

Attention = Callable[..., Any]

# Goals of the project: microseconds over the bare call, and routed time over bare time.
GOALS_US = {
    "inactive": 1.5,
    "known-fallback": 3.0,
    "known-own": 3.0,
    "known-routed": 3.0,
    "known-four": 4.0,
    "known-peer": 4.0,
}
GOAL_RATIO = 1.05
TOKENS = (64, 128, 256, 512, 1024, 2048, 4096)
COLUMNS = ("case", "tokens", "mask", "count", "us", "bare us", "over us", "ratio", "goal")


def stub(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **named: Any
) -> Tensor:
    """Stands in for torch's function."""
    return query


@contextlib.contextmanager
def stubbed() -> Iterator[None]:
    """Put the stub in the place of torch's function; a route() that begins inside falls back to it."""
    original = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = stub
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


@contextlib.contextmanager
def stubbed_kernel() -> Iterator[None]:
    """Put a stub in the place of the int8 kernel: what is left is the decision and what surrounds the launch."""
    original = op.attend
    op.attend = lambda query, *rest: (query, query)  # type: ignore[assignment]
    try:
        yield
    finally:
        op.attend = original


@contextlib.contextmanager
def stub_backend(answer: Tensor) -> Iterator[str]:
    """Register a backend that takes every call and returns `answer`."""
    backend = sdpa_router.Backend(
        "stub",
        sdpa_router.BackendLimits(dtypes=(torch.float16, torch.bfloat16, torch.float32)),
        lambda call, settings: iter(()),
        lambda call, settings, attention: answer,
    )
    sdpa_router.register_backend(backend)
    try:
        yield backend.name
    finally:
        sdpa_router.unregister_backend(backend.name)


@contextlib.contextmanager
def routed_elsewhere() -> Iterator[None]:
    """route() active in another thread: installed, but not active in this one."""
    begun, done = threading.Event(), threading.Event()

    def hold() -> None:
        with sdpa_router.route():
            begun.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


def loop_us(attention: Attention, tensors: tuple[Tensor, Tensor, Tensor], calls: int) -> float:
    """Microseconds a call of a loop over one call."""
    query, key, value = tensors
    began = time.perf_counter()
    for _ in range(calls):
        attention(query, key, value)
    return (time.perf_counter() - began) / calls * 1e6


class Dispatch:
    """The rows of one invocation."""

    def __init__(self, invocation: Invocation, quick: bool) -> None:
        self.invocation = invocation
        self.device = invocation.device
        self.quick = quick
        self.rows: list[list[str]] = []

    def add(self, case: str, *, us: float, bare_us: float, over_us: float, repeats: int, ratio: float | None = None,
            tokens: int | None = None, mask: str = "none", count: str = "host") -> None:  # fmt: skip
        """Write one line and keep its row."""
        if ratio is None:
            goal = f"{over_us:.2f} <= {GOALS_US[case]}" if case in GOALS_US else "-"
            good = over_us <= GOALS_US.get(case, over_us)
        else:
            goal, good = f"{ratio:.3f} <= {GOAL_RATIO}", ratio <= GOAL_RATIO
        self.invocation.write(
            {
                "case": case,
                "impl": "router",
                "variant": count,
                "pv": "16bit",
                "mask": mask,
                "lse": False,
                "ms": round(us / 1e3, 6),
                "tflops": None,
                "error": None,
                "lse_error": None,
                "tokens": tokens,
                "us": round(us, 3),
                "bare_us": round(bare_us, 3),
                "over_us": round(over_us, 3),
                "ratio": None if ratio is None else round(ratio, 4),
                "repeats": repeats,
            }
        )
        row = [case, str(tokens or "-"), mask, count, f"{us:.2f}", f"{bare_us:.2f}", f"{over_us:.2f}",
               "-" if ratio is None else f"{ratio:.3f}", goal + ("" if good else "  OVER")]  # fmt: skip
        self.rows.append(row)
        print("  " + "  ".join(row), flush=True)

    def overhead(self, case: str, attention: Attention, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
        """Median over interleaved repeats of the difference to the stub."""
        calls, repeats = 100, 300 if self.quick else 2000  # short ones, so that few are interrupted
        pairs = []
        loop_us(attention, tensors, calls)
        for number in range(repeats):
            if number % 2:
                bare, us = loop_us(stub, tensors, calls), loop_us(attention, tensors, calls)
            else:
                us, bare = loop_us(attention, tensors, calls), loop_us(stub, tensors, calls)
            pairs.append((us, bare))
        us, bare = (statistics.median(column) for column in zip(*pairs, strict=True))
        over = statistics.median(us - bare for us, bare in pairs)
        self.add(case, us=us, bare_us=bare, over_us=over, repeats=repeats)

    def first_sight(self) -> None:
        """Median over signatures that were never seen, less the stub."""
        count = 100 if self.quick else 300
        seen = []
        for number in range(count):
            tensors = self.tensors(1, 1, 1 + number, 24)
            seen.append(loop_us(functional.scaled_dot_product_attention, tensors, 1))
        us, bare = statistics.median(seen), loop_us(stub, tensors, 1000)
        self.add("first-sight", us=us, bare_us=bare, over_us=us - bare, repeats=count)

    def tensors(self, batch: int, heads: int, length: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        query, key, value = torch.randn(3, batch, heads, length, head_dim, device=self.device).to(dtype)
        return query, key, value

    def never_slower(self, tokens: int, mask_name: str, count: str) -> None:
        """Routed calls that fall back (min_kv is out of reach) against torch alone, interleaved."""
        heads, head_dim = (24, 128) if self.device.type == "cuda" else (12, 64)
        query, key, value = self.tensors(1, heads, tokens, head_dim)
        mask = torch.randn(1, 1, tokens, tokens, device=self.device).to(query.dtype) if mask_name == "full" else None
        native = functional.scaled_dot_product_attention
        watch = Stopwatch(self.device)
        with sdpa_router.route(min_kv=10**9, log=False):
            routed = functional.scaled_dot_product_attention
            bare = Run(lambda: native(query, key, value, attn_mask=mask))
            ours = Run(lambda: routed(query, key, value, attn_mask=mask))
            pairs = self.interleave(watch, ours, bare, count)
        us, bare_us = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(our / other for our, other in pairs)
        self.add("never-slower", us=us, bare_us=bare_us, over_us=statistics.median(a - b for a, b in pairs),
                 repeats=len(pairs), ratio=ratio, tokens=tokens, mask=mask_name, count=count)  # fmt: skip

    def interleave(self, watch: Stopwatch, ours: Run, bare: Run, count: str) -> list[tuple[float, float]]:
        """Pairs of (ours, bare) in microseconds a call; who goes first alternates."""

        def lap(run: Run, loops: int) -> float:
            finish = watch.lap(run, loops, queued=count == "queued")
            watch.wait()
            return finish()[0] * 1e3

        for _ in range(3):
            lap(ours, 1), lap(bare, 1)
        guess = max(lap(bare, 3), 0.1)
        # On a CPU short laps, of which others interrupt few; on a GPU long ones, of which the queue's start is little.
        lap_us = 2000 if watch.cuda else 200
        loops = 3 if count == "queued" else max(1, min(200, round(lap_us / guess)))
        budget_us = 150_000 if self.quick else 1_000_000
        repeats = max(5, min(500, int(budget_us / (2 * loops * guess))))
        pairs = []
        for number in range(repeats):
            first, second = (ours, bare) if number % 2 else (bare, ours)
            times = {id(run): lap(run, loops) for run in (first, second)}
            pairs.append((times[id(ours)], times[id(bare)]))
        return pairs


def measure(bench: Dispatch) -> None:
    """All sections in order."""
    measure_decisions(bench)
    for count in ("eager", "queued") if bench.device.type == "cuda" else ("eager",):
        for mask in ("none", "full"):
            for tokens in TOKENS:
                bench.never_slower(tokens, mask, count)


def measure_decisions(bench: Dispatch) -> None:
    """What deciding costs, over a stub."""
    small = bench.tensors(1, 2, 16, 64)
    long = bench.tensors(1, 2, 32, 64)
    if bench.device.type == "cpu":
        long = long[0].half(), long[1].half(), long[2].half()
    with stubbed():
        with routed_elsewhere():
            bench.overhead("inactive", functional.scaled_dot_product_attention, small)
        with sdpa_router.route(min_kv=10**9):
            bench.overhead("known-fallback", functional.scaled_dot_product_attention, small)
            bench.overhead("known-own", sdpa_router.scaled_dot_product_attention, small)
            bench.first_sight()
        with stubbed_kernel(), sdpa_router.route(min_kv=0):
            if bool(sdpa_router.is_available(bench.device)):
                bench.overhead("known-routed", functional.scaled_dot_product_attention, long)
            else:
                print("  skipped known-routed: the kernel does not run on this device", flush=True)
        with sdpa_router.route(backends=("int8", "comfy", "sage", "torch"), min_kv=10**9, max_error=0.0):
            bench.overhead("known-four", functional.scaled_dot_product_attention, small)
        with (
            stub_backend(torch.empty_like(small[0])) as name,
            sdpa_router.route(backends=(name, "int8", "comfy", "torch")),
        ):
            bench.overhead("known-peer", functional.scaled_dot_product_attention, small)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument(
        "--threads", type=int, default=None, help="of torch on the CPU: 1 on a machine that others use too"
    )
    parser.add_argument("--commit", default=None, help="recorded where this is no git checkout")
    parser.add_argument("--out", type=Path, default=RESULTS / "dispatch.jsonl")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    invocation = Invocation(torch.device(options.device), options.out, options.commit or commit_here())
    print(f"run {invocation.run}: {invocation.facts()}", flush=True)
    bench = Dispatch(invocation, options.quick)
    gc.disable()
    with torch.no_grad():
        measure(bench)
    print("\n" + table(COLUMNS, bench.rows))
    print(f"\n{len(bench.rows)} lines appended to {options.out}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
