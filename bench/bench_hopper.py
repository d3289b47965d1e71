"""Compare variants of the Hopper kernel with one another and with rivals: what its configurations are set from.

A variant is a list of settings: `pv=fp8`, `precision=high`, `online=1` (keep a running maximum everywhere),
`lse=1` (all that is asked for at once takes turns, so that variants with and without it can be compared), `mask=NAME`,
`block_m`, `block_n`, `num_stages`, `as_float`, `polynomial`, `turns`. Usage:
python bench/bench_hopper.py --case d64-8k --variants "base;block_m=192,block_n=64,num_stages=4" --impls torch,fa3
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from pathlib import Path

import torch
from accuracy import Check, check, choose_sample, reference
from cases import CASES, MASKS, Problem, draw
from impls import IMPLS
from records import RESULTS, Invocation, commit_here, the_gpu
from timing import Effort, Run, interleaved

from sdpa_router.kernels.int8_attention import hopper
from sdpa_router.kernels.int8_attention.configs import hopper_config
from sdpa_router.kernels.int8_attention.quantize import quantize
from sdpa_router.kernels.int8_attention.quantize_value import quantize_value

# Case, mask, variants, rivals: the figures of the kernel in bench/README.md, in 40 s on an H200 once compiled.
FIGURES = (
    (
        "h3-window",
        "none",
        "base;lse=1;mask=fade;mask=half;as_float=0;pv=fp8;precision=high",
        "int8,int8-fp8,torch,fa3,fa3-fp8",
    ),
    ("d64-8k", "none", "base;as_float=1", "int8,torch,fa3"),
    ("d96-8k", "none", "base", "int8,torch,fa3"),
    ("causal-16k", "none", "base;as_float=0", "int8,torch,fa3"),
    ("d256-8k", "none", "base;pv=fp8", "int8,int8-fp8,fa3"),
    ("wan-14b", "none", "base;pv=fp8", "int8,int8-fp8,fa3"),
)


def asked_for(problem: Problem, settings: dict[str, str]) -> Problem:
    """The problem with the mask and the LSE that a variant asks for, which are taken out of its settings."""
    mask, lse = settings.pop("mask", problem.mask_name), settings.pop("lse", str(int(problem.lse))) == "1"
    made = (
        problem.mask if mask == problem.mask_name else MASKS[mask](problem.case, torch.bfloat16, problem.query.device)
    )
    return dataclasses.replace(problem, mask_name=mask, mask=made, lse=lse)


def variant_runs(problem: Problem, settings: dict[str, str]) -> dict[str, Run]:
    """The kernel alone, the whole call, and what it quantises, of one variant."""
    fp8, high = settings.pop("pv", "") == "fp8", settings.pop("precision", "") == "high"
    online = settings.pop("online", "0") == "1"
    config = hopper_config(problem.case.head_dim, fp8)._replace(
        **{name: int(number) for name, number in settings.items()}
    )
    query, key, value = problem.query, problem.key, problem.value
    out = torch.full_like(query, torch.nan)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32) if problem.lse else None

    def prepare():
        scale = problem.case.head_dim**-0.5
        quantized = quantize(query, key, problem.mask, scale, config, lse=problem.lse, per_token=high)
        return quantized, quantize_value(value, quantized.bias, config) if fp8 else value

    def attend(parts):
        hopper.attention(*parts, config, is_causal=problem.is_causal, out=out, lse=lse, online=online)
        return out if lse is None else (out, lse)

    runs = {"kernel": Run(functools.partial(attend, prepare())), "call": Run(lambda: attend(prepare()))}
    if fp8:
        runs["quantize_value"] = Run(lambda: quantize_value(value, None, config))
    return runs


def compare(options: argparse.Namespace, invocation: Invocation, name: str, mask: str, lse: bool) -> None:
    case, device = CASES[name], invocation.device
    query, key, value = draw(case, "gaussian", torch.bfloat16, device, options.seed)
    problem = Problem(case, query, key, value, mask, MASKS[mask](case, torch.bfloat16, device), lse)
    sample = choose_sample(case, device, options.seed)
    truths: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    runs: dict[tuple[str, str], Run] = {}
    checks: dict[tuple[str, str], Check | None] = {}
    asked: dict[str, Problem] = {}

    def admit(who: str, kind: str, run: Run, budget: float) -> None:
        mine = asked[who]
        if mine.mask_name not in truths:
            truths[mine.mask_name] = reference(mine, sample)
        try:
            result = check(run, mine, sample, truths[mine.mask_name])
        except Exception as error:  # a variant that does not fit the chip is a line, not the end
            print(f"{name} {mask} {who} {kind}: {type(error).__name__} {str(error).strip()[-200:]}", flush=True)
            return
        if result.error <= budget:
            runs[who, kind], checks[who, kind] = run, result
        else:
            print(f"{name} {mask} {who} {kind}: error {result.error:.4f}", flush=True)

    for text in options.variants.split(";"):
        settings = dict(part.split("=") for part in text.split(",") if "=" in part)
        try:
            asked[text] = asked_for(problem, settings)
            parts = variant_runs(asked[text], settings)
        except Exception as error:  # as above
            print(f"{name} {mask} {text}: {type(error).__name__} {str(error).strip()[-200:]}", flush=True)
            continue
        for kind in options.kinds.split(","):
            if kind == "quantize_value" and kind in parts:
                runs[text, kind], checks[text, kind] = parts[kind], None
            elif kind in parts:
                admit(text, kind, parts[kind], 0.045 if "fp8" in text else 0.0125)
    for impl in (IMPLS[i] for i in options.impls.split(",") if i):
        asked[impl.name] = problem
        for kind in impl.variants if impl.impl != "int8" else ("call",):
            if impl.reason_against(problem, kind) is None and kind in ("call", "kernel"):
                admit(impl.name, kind, impl.ready(problem, kind), impl.budget["gaussian"])
    timings = (
        {} if options.check_only else interleaved(runs, device, Effort(10.0 * options.repeats, 3, options.repeats))
    )
    for (who, kind), timing in timings.items():
        if isinstance(timing, Exception):
            print(f"{name} {mask} {who} {kind}: {timing}", flush=True)
            continue
        result, mine = checks[who, kind], asked[who]
        row = {"case": name, "mask": mine.mask_name, "lse": mine.lse, "impl": who, "variant": kind}
        row |= {"ms": round(timing.ms, 4), "tflops": round(case.flops / timing.ms / 1e9, 1)}
        row["spread"] = round(timing.spread, 4)
        row["error"] = None if result is None else round(result.error, 5)
        row["lse_error"] = None if result is None or result.lse_error is None else round(result.lse_error, 5)
        invocation.write(row)
        print(
            *(f"{row[c]}" for c in ("case", "mask", "impl", "variant", "ms", "tflops", "error", "lse_error")),
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="h3-window", help=f"of {', '.join(CASES)}, separated by commas")
    parser.add_argument("--figures", action="store_true", help="the cases, variants and rivals of FIGURES")
    parser.add_argument("--masks", default="none")
    parser.add_argument("--variants", default="base", help="separated by ;")
    parser.add_argument("--kinds", default="kernel,call,quantize_value")
    parser.add_argument("--impls", default="")
    parser.add_argument("--lse", action="store_true")
    parser.add_argument("--repeats", type=int, default=15, help="of a row, fewer where one takes over 10 ms")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default=None)
    parser.add_argument("--out", type=Path, default=RESULTS / "hopper_variants.jsonl")
    options = parser.parse_args()
    invocation = Invocation(the_gpu(parser), options.out, options.commit or commit_here())
    with torch.no_grad():
        if options.figures:
            for name, mask, options.variants, options.impls in FIGURES:
                compare(options, invocation, name, mask, options.lse)
            return 0
        for name in options.case.split(","):
            for mask in options.masks.split(","):
                compare(options, invocation, name, mask, options.lse)
    return 0


if __name__ == "__main__":
    sys.exit(main())
