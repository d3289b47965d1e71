"""One invocation of bench_attention.py: check and time the contenders of a case, write what passed, name the rest."""

from __future__ import annotations

import argparse
import gc
import importlib
import secrets
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from accuracy import Check, check, choose_sample, reference
from cases import MASKS, Case, Problem, draw
from impls import Impl, UnavailableError, names_to_impls
from records import Invocation, table
from timing import QUICK, Effort, Run, Timing, interleaved

from sdpa_router import testing

COLUMNS = ("case", "mask", "lse", "impl", "pv", "variant", "ms", "+-", "TFLOPS", "error", "lse error", "host us", "MB")


class ContextLostError(Exception):
    """A rival broke the CUDA context: nothing that follows in this process can be measured."""


@dataclass(frozen=True, eq=False)
class Contender:
    """One row to be: a rival, in a variant, on a problem."""

    impl: Impl
    variant: str
    problem: Problem

    @property
    def name(self) -> str:
        return f"{self.impl.name} {self.variant}"

    @property
    def short(self) -> str:
        return f"{self.name}{' +lse' if self.problem.lse else ''}"

    @property
    def where(self) -> str:
        return f"{self.problem.case.name}:{self.problem.mask_name}{'+lse' if self.problem.lse else ''}"


class Bench:
    """The run of one invocation: rows that were written, rows that were skipped and why."""

    def __init__(self, options: argparse.Namespace, invocation: Invocation) -> None:
        self.options = options
        self.invocation = invocation
        self.device = invocation.device
        self.dtype = getattr(torch, options.dtype)
        self.rows: list[dict[str, Any]] = []
        self.skipped: dict[tuple[str, str], list[str]] = {}
        self.over_budget: list[str] = []
        self.ends: float = time.monotonic() + options.deadline

    def expired(self) -> bool:
        return time.monotonic() > self.ends

    def run_case(self, case: Case) -> None:
        """Draw inputs, check every contender, time those that passed, write their lines."""
        seed = secrets.randbits(31) if self.options.seed is None else self.options.seed
        shape = "x".join(map(str, case.shape))
        print(f"\n{case.name} {shape} {self.options.dtype} ({case.source}), seed {seed}", flush=True)
        query, key, value = draw(case, self.options.inputs, self.dtype, self.device, seed)
        names = case.masks if self.options.masks == "own" else self.options.masks.split(",")
        passed: dict[Contender, tuple[Run, Check]] = {}
        for name in names:
            try:
                problem = Problem(case, query, key, value, name, MASKS[name](case, self.dtype, self.device))
            except (ValueError, torch.OutOfMemoryError) as error:
                self.skip("all", f"{case.name} {name}", error)
                continue
            passed |= self.check_all(problem, seed)
        if not self.options.check_only:
            self.time_all(passed, seed)

    def check_all(self, problem: Problem, seed: int) -> dict[Contender, tuple[Run, Check]]:
        """Check every contender of a problem; what raises or is over its budget is left out."""
        sample = choose_sample(problem.case, self.device, seed)
        truth = reference(problem, sample)
        passed = {}
        print(f"  {problem.mask_name} error:", end="", flush=True)
        for contender in progress(self.contenders(problem)):
            began = time.monotonic()
            result: Check | None = None
            try:
                if self.expired():
                    raise UnavailableError("the deadline passed")
                run = contender.impl.ready(contender.problem, contender.variant)
                result = check(run, contender.problem, sample, truth)
                refuse(result, contender.impl.budget[self.options.inputs])
                passed[contender] = run, result
            except Exception as error:  # a rival may raise anything: its row says what
                self.skip(contender.name, contender.where, error)
                if result is not None:
                    self.over_budget.append(contender.impl.impl)
                if not isinstance(error, UnavailableError):
                    self.survive()
            seconds = time.monotonic() - began
            if result is not None or seconds > 1:
                error_text = "failed" if result is None else f"{result.error:.4f}"
                print(f" {contender.short} {error_text} ({seconds:.1f} s);", end="", flush=True)
        print(flush=True)
        return passed

    def contenders(self, problem: Problem) -> list[Contender]:
        """Everyone who was asked for, in the variants and with the LSE where they know them."""
        lses = (False, True) if self.options.lse else (False,)
        return [
            Contender(impl, variant, replace(problem, lse=lse))
            for impl in names_to_impls(self.options.impls)
            for variant in self.options.variants.split(",")
            if variant in impl.variants
            for lse in lses
            if impl.lse or not lse
        ]

    def time_all(self, passed: dict[Contender, tuple[Run, Check]], seed: int) -> None:
        """Time everyone who passed, interleaved; write and print their lines."""
        effort = QUICK if self.options.quick else Effort()
        try:
            results = interleaved({contender: run for contender, (run, _) in passed.items()}, self.device, effort)
        except RuntimeError as error:
            self.survive()
            self.skip("timing", "all", error)
            return
        rows = []
        for contender, (_, checked) in passed.items():
            timing = results[contender]
            if isinstance(timing, Exception):
                self.skip(contender.name, contender.where, timing)
            else:
                rows.append(self.invocation.write(measurement(contender, checked, timing, self.options, seed)))
        if rows:
            print(table(COLUMNS, [cells(row) for row in rows]), flush=True)
        self.rows += rows
        self.survive()

    def skip(self, who: str, where: str, error: Exception) -> None:
        """Keep the reason why something has no row; what is not simply unavailable is printed at once."""
        text = str(error).strip().splitlines()
        reason = text[0][:160] if text else type(error).__name__
        if not isinstance(error, UnavailableError):
            reason = f"{type(error).__name__}: {reason}"
        self.skipped.setdefault((who, reason), []).append(where)

    def survive(self) -> None:
        """Free what a rival left behind; raise ContextLostError if it broke the device."""
        gc.collect()
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()
            except RuntimeError as error:
                raise ContextLostError(str(error).splitlines()[0]) from error


def refuse(result: Check, budget: float) -> None:
    """Raise UnavailableError if something is over its error budget; NaN is over every budget."""
    if not result.error <= budget:
        raise UnavailableError(f"not timed: error {result.error:.4f} is over its budget {budget}")
    if result.lse_error is not None and not result.lse_error <= testing.BUDGET.lse:
        raise UnavailableError(f"not timed: LSE error {result.lse_error:.4f} is over its budget {testing.BUDGET.lse}")


def measurement(
    contender: Contender, checked: Check, timing: Timing, options: argparse.Namespace, seed: int
) -> dict[str, Any]:
    """One line of the results, less what the invocation adds."""
    case = contender.problem.case
    return {
        "case": case.name,
        "impl": contender.impl.impl,
        "variant": contender.variant,
        "pv": contender.impl.pv,
        "mask": contender.problem.mask_name,
        "lse": contender.problem.lse,
        "ms": round(timing.ms, 6),
        "tflops": round(case.flops / timing.ms / 1e9, 3),
        "error": round(checked.error, 6),
        "lse_error": None if checked.lse_error is None else round(checked.lse_error, 6),
        "lse_max": None if checked.lse_max is None else round(checked.lse_max, 6),
        "spread": round(timing.spread, 4),
        "repeats": timing.repeats,
        "host_us": round(timing.host_us, 2),
        "extra_mb": None if checked.extra_mb is None else round(checked.extra_mb, 2),
        "shape": case.shape,
        "is_causal": case.is_causal,
        "dtype": options.dtype,
        "inputs": options.inputs,
        "seed": seed,
    }


def cells(row: dict[str, Any]) -> list[str]:
    """A measurement as one row of the table."""
    lse_error, extra = row["lse_error"], row["extra_mb"]
    return [
        row["case"],
        row["mask"],
        "lse" if row["lse"] else "-",
        row["impl"],
        row["pv"],
        row["variant"],
        f"{row['ms']:.4f}",
        f"{row['spread']:.1%}",
        f"{row['tflops']:.4g}",
        f"{row['error']:.4f}",
        "-" if lse_error is None else f"{lse_error:.4f}",
        f"{row['host_us']:.0f}",
        "-" if extra is None else f"{extra:.0f}",
    ]


def progress(items: list[Contender]) -> Iterable[Contender]:
    """A progress bar on a terminal only."""
    if not sys.stderr.isatty():
        return items
    try:
        bar: Iterable[Contender] = importlib.import_module("tqdm").tqdm(items, leave=False, desc="checking")
    except ImportError:
        return items
    return bar
