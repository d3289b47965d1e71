"""Steps of full-width models: native and routed, eager and compiled, checked and timed beside each other."""

from __future__ import annotations

import argparse
import functools
import importlib
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import full_models
import torch
from records import Invocation, table
from timing import Effort, Run, Timing, interleaved

import sdpa_router
from sdpa_router.testing import BUDGET, relative_error

_STAGES = 9  # of one model, for the progress bar
_COMPILED_STAGES = 3
_COLUMNS = (
    *("model", "tokens", "variant", "impl", "step ms", "+-", "speedup"),
    *("attention ms", "share", "error", "PSNR dB", "calls"),
)


def timed(runs: dict[str, Run], device: torch.device, effort: Effort) -> dict[str, Timing]:
    """Time rivals in turns; what one of them raises is raised."""
    times: dict[str, Timing] = {}
    for name, timing in interleaved(runs, device, effort).items():
        if isinstance(timing, Exception):
            raise timing
        times[name] = timing
    return times


class Steps:
    """One model: built, checked, its eager steps timed, then its compiled ones."""

    def __init__(self, name: str, options: argparse.Namespace, invocation: Invocation, bar: Any) -> None:
        self.options = options
        self.invocation = invocation
        self.device = invocation.device
        self.bar = bar
        build = functools.partial(full_models.build, name, self.device, torch.bfloat16, options.tiny)
        self.full: full_models.Full = self.stage(f"{name}: building", build)
        self.native: torch.Tensor | None = None

    def stage(self, text: str, work: Callable[[], Any]) -> Any:
        self.bar.set_description(text)
        done = work()
        self.bar.update()
        return done

    def context(self, impl: str) -> AbstractContextManager[object]:
        return sdpa_router.route(log=False) if impl == "routed" else nullcontext()

    def step(self) -> torch.Tensor:
        return self.full.velocity(self.full.noise, 1.0)

    def denoised(self, impl: str) -> torch.Tensor:
        with self.context(impl):
            return self.full.denoise(self.options.steps)

    def share(self, impl: str) -> float:
        with self.context(impl):
            return full_models.attention_ms(self.step, self.device)

    def run(self, variant: str) -> list[dict[str, Any]]:
        """Check native and routed steps, eager or compiled, time them in turns and write their lines."""
        name = f"{self.full.name} {variant}"
        rows = {impl: self.check(variant, impl) for impl in ("native", "routed")}
        over = [impl for impl, row in rows.items() if not row["error"] <= BUDGET.outliers]
        if over:
            raise SystemExit(f"{name}: {over[0]} latents are off by {rows[over[0]]['error']:.4f}: nothing was timed")
        if variant == "eager":
            for impl, row in rows.items():
                row["attention_ms"] = self.stage(f"{name} {impl}: attention", functools.partial(self.share, impl))
        runs = {impl: Run(self.step, functools.partial(self.context, impl)) for impl in rows}
        effort = Effort(self.options.budget_ms, 5, 30)
        times = self.stage(f"{name}: timing", functools.partial(timed, runs, self.device, effort))
        for impl, row in rows.items():
            row.update(step_ms=times[impl].ms, spread=times[impl].spread, repeats=times[impl].repeats)
            if "attention_ms" in row:
                row["attention_share"] = row["attention_ms"] / row["step_ms"]
        return [self.invocation.write(row) for row in rows.values()]

    def check(self, variant: str, impl: str) -> dict[str, Any]:
        """Denoise from the same noise; the first answer, native and eager, is what all are compared with."""
        began = time.monotonic()
        work = functools.partial(self.denoised, impl)
        with sdpa_router.record() as seen:
            latents = self.stage(f"{self.full.name} {variant} {impl}: denoising", work)
        first = self.native is None
        self.native = latents if self.native is None else self.native
        calls: Counter[str] = Counter()
        for record in seen.records:
            calls[", ".join((record["backend"], *record["reasons"]))] += record["count"]
        return {
            "kind": "step",
            "model": self.full.name,
            "tokens": self.full.tokens,
            "variant": variant,
            "impl": impl,
            "steps": self.options.steps,
            "error": relative_error(latents, self.native),
            "psnr": None if first else full_models.psnr(latents, self.native),
            "calls": dict(calls),
            "phase": seen.records[0]["phase"] if seen.records else None,
            "first_s": time.monotonic() - began,
        }


def run(options: argparse.Namespace, invocation: Invocation) -> int:
    """Run every model; compiled only if the deadline allows, as compiling is what takes long."""
    ends = time.monotonic() + options.deadline
    rows: list[dict[str, Any]] = []
    names = options.models or list(full_models.FULL)
    with importlib.import_module("tqdm").tqdm(total=len(names) * _STAGES, disable=None) as bar:
        for name in names:
            steps = Steps(name, options, invocation, bar)
            rows += steps.run("eager")
            if time.monotonic() + options.compile_s > ends:
                bar.write(f"{name}: not compiled, the deadline is too near")
                bar.update(_COMPILED_STAGES)
            else:
                steps.full.model.compile_repeated_blocks(fullgraph=True)
                rows += steps.run("compiled")
            del steps
            if invocation.device.type == "cuda":
                torch.cuda.empty_cache()
    print(table(_COLUMNS, [_cells(row, rows) for row in rows]))
    return 0


def _cells(row: dict[str, Any], rows: list[dict[str, Any]]) -> tuple[str, ...]:
    beside = (row["model"], row["variant"], "native")
    native = next(other for other in rows if (other["model"], other["variant"], other["impl"]) == beside)
    attention = row.get("attention_ms")
    return (
        *(row["model"], str(row["tokens"]), row["variant"], row["impl"]),
        f"{row['step_ms']:.2f}",
        f"{row['spread']:.1%}",
        f"{native['step_ms'] / row['step_ms']:.3f}",
        "-" if attention is None else f"{attention:.2f}",
        "-" if attention is None else f"{row['attention_share']:.1%}",
        f"{row['error']:.4f}",
        "-" if row["psnr"] is None else f"{row['psnr']:.1f}",
        "; ".join(f"{count} {codes}" for codes, count in row["calls"].items()) or "-",
    )
