"""What the router does in diffusers models: which calls it takes, what that changes, and what a step costs.

    TRITON_INTERPRET=1 python bench/bench_models.py --table      # small random pipelines, as a markdown table
    python bench/bench_models.py --gpu                           # full-width Wan 1.3B and Flux transformers
    python bench/bench_models.py --overhead [--larger 4]         # the small ones, enabled and not, in turns

--table: a pipeline of each family runs one step and its VAE, natively and with the transformer enabled; audit() gives
the errors of the first step. --gpu: step times are medians of interleaved steps (timing.py), eager and with
compile_repeated_blocks(); the PSNR is that of the latents after --steps Euler steps from the same noise. --overhead:
the models of the table with the default settings, whose forward must not be slower by more than 1 %.
Each measurement is appended to bench/results/models.jsonl as one line.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import full_models
import model_steps
import pipelines
import torch
import torch.nn.functional as functional
from bench_overhead import Compared, interleave
from records import RESULTS, Invocation, commit_here, table

import sdpa_router
from sdpa_router.testing import BUDGET, relative_error

tqdm: Any = importlib.import_module("tqdm").tqdm
diffusers = pipelines.diffusers

HEADER = ("model", "routed calls", "native calls", "masks", "worst call", "output", "VAE calls")


class Counted:
    """Counts what reaches torch's attention, from the model and from the VAE, while it stands in torch's place."""

    def __init__(self, vae: Any) -> None:
        self.vae = vae
        self.in_vae = False
        self.calls: Counter[bool] = Counter()
        self.routed_in_vae = 0

    def __enter__(self) -> Counted:
        self.torch = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = self._attention
        self.vae.decode = self._decode
        return self

    def __exit__(self, *error: object) -> None:
        functional.scaled_dot_product_attention = self.torch
        del self.vae.decode

    def _attention(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls[self.in_vae] += 1
        return self.torch(*args, **kwargs)

    def _decode(self, *args: Any, **kwargs: Any) -> Any:
        self.in_vae = True
        with sdpa_router.record() as seen:
            out = type(self.vae).decode(self.vae, *args, **kwargs)
        self.in_vae = False
        self.routed_in_vae += sum(record["count"] for record in seen.records)
        return out


def inspect_model(name: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Run a small pipeline natively and enabled; return what the table shows of it."""
    small = pipelines.build(name, device=device, dtype=dtype)
    args, kwargs = pipelines.first_inputs(small)
    found = sdpa_router.audit(small.model, *args, kwargs=kwargs, settings=sdpa_router.Settings(min_kv=0), show=False)
    with Counted(small.pipe.vae) as counted:
        sdpa_router.enable(small.model, min_kv=0, log=False)
        with sdpa_router.record() as seen:
            pipelines.images(small)
        sdpa_router.disable(small.model)
    routes: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    masks: dict[str, None] = {}
    for record in seen.records:
        routes[record["backend"]] += record["count"]
        reasons.update({", ".join(record["reasons"]): record["count"]} if record["reasons"] else {})
        masks[_mask(record["mask"])] = None
    assert counted.calls[False] == routes["sdpa"], "a call of the model passed the router by"
    errors = [row.error for row in found.rows if row.error is not None]
    return {
        "model": name,
        "routed": routes["int8"],
        "native": routes["sdpa"],
        "reasons": dict(reasons),
        "masks": list(masks),
        "worst_call": max(errors, default=None),
        "output_error": found.output_error,
        "vae_calls": counted.calls[True],
        "vae_routed": counted.routed_in_vae,
    }


def _mask(mask: dict[str, Any]) -> str:
    if mask["kind"] == "none":
        return "none"
    return f"{mask['kind'].replace('_', ' ')} {mask['dtype']} {mask['shape']}"


def _within_budget(row: dict[str, Any]) -> bool:
    figures = (row["worst_call"], row["output_error"])
    return row["vae_routed"] == 0 and all(figure is None or figure <= BUDGET.gaussian for figure in figures)


def show_table(rows: list[dict[str, Any]]) -> str:
    """The README's table."""
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    for row in rows:
        native = ", ".join(f"{count} ({codes})" for codes, count in row["reasons"].items()) or "0"
        errors = ["-" if row[name] is None else f"{row[name]:.4f}" for name in ("worst_call", "output_error")]
        vae = f"{row['vae_calls']} native, {row['vae_routed']} routed"
        cells = (row["model"], str(row["routed"]), native, "; ".join(row["masks"]), *errors, vae)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run_table(options: argparse.Namespace, invocation: Invocation) -> int:
    rows = [
        # In bfloat16 rounding elsewhere in a network changes its output more than int8 attention does.
        invocation.write({"kind": "table", **inspect_model(name, invocation.device, torch.float16)})
        for name in tqdm(options.models or pipelines.BUILDS, desc="models", disable=None)
    ]
    print(show_table(rows))
    over = [row["model"] for row in rows if not _within_budget(row)]
    if over:
        print(f"over the error budget of {BUDGET.gaussian}, or with a routed VAE: {', '.join(over)}", file=sys.stderr)
    return 1 if over else 0


def run_overhead(options: argparse.Namespace, invocation: Invocation) -> int:
    """Time one forward of each model, enabled with the default settings and native, in turns."""
    shown = []
    for name in tqdm(options.models or pipelines.BUILDS, desc="models", disable=None):
        row, found = time_enabled(name, invocation.device, options.larger, options.budget_ms / 1e3)
        invocation.write(row)
        shown.append((name, *(str(row["calls"].get(route, 0)) for route in ("int8", "sdpa")), *found.cells()))
        shown[-1] += (found.verdict(),)
    print(table(("model", "int8", "sdpa", "native ms", "enabled ms", "ratio", "+-", "goal"), shown))
    return int(any("OVER" in cells[-1] for cells in shown))


def time_enabled(name: str, device: torch.device, larger: int, budget_s: float) -> tuple[dict[str, Any], Compared]:
    """Check and time a model: float16 on a GPU, float32, of which nothing qualifies, on a CPU."""
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    small = pipelines.build(name, device=device, dtype=dtype, larger=larger)
    args, kwargs = pipelines.first_inputs(small)
    enabled = copy.copy(small.model)  # over the same weights, so that nothing is switched between two forwards
    sdpa_router.enable(enabled, log=False)

    def forward(model: Any) -> torch.Tensor:
        out: torch.Tensor = model(*args, **kwargs)[0]
        return out

    expected = forward(small.model)
    with sdpa_router.record() as seen:
        error = relative_error(forward(enabled), expected)
    calls: Counter[str] = Counter()
    for record in seen.records:
        calls[record["backend"]] += record["count"]
    if not error <= (BUDGET.gaussian if calls["int8"] else 0.0):
        raise SystemExit(f"{name}: enabled, the output is off by {error:.4f}: nothing was timed")
    found = Compared(interleave(enabled, small.model, forward, functools.partial(_clock, device), budget_s))
    row = {"kind": "overhead", "model": name, "dtype": str(dtype).removeprefix("torch."), "larger": larger}
    row |= {"calls": dict(calls), "ms": found.native_ms, "enabled_ms": found.enabled_ms}
    return row | {"ratio": found.ratio, "ratio_error": found.error, "error": error}, found


def _clock(device: torch.device) -> float:
    """Seconds: when the GPU is done, or of one thread's computing, which other processes disturb little."""
    if device.type == "cpu":
        return time.thread_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--table", dest="run", action="store_const", const=run_table, help="routed and native calls")
    what.add_argument(
        "--gpu", dest="run", action="store_const", const=model_steps.run, help="steps of full-width models"
    )
    what.add_argument("--overhead", dest="run", action="store_const", const=run_overhead, help="what enabling costs")
    parser.add_argument("--models", default=None, help="names, separated by commas; all by default")
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=4, help="of the denoising loop of --gpu")
    parser.add_argument("--budget-ms", type=float, default=4000.0, help="of timing, for each rival or model")
    parser.add_argument("--larger", type=int, default=4, help="--overhead: images that are so many times larger")
    parser.add_argument("--tiny", action="store_true", help="--gpu with toy widths, to try it without a GPU")
    parser.add_argument("--deadline", type=float, default=170.0, help="seconds of --gpu")
    parser.add_argument("--compile-s", type=float, default=70.0, help="seconds that compiling is expected to take")
    parser.add_argument("--commit", default=None, help="recorded where this is no git checkout")
    parser.add_argument("--out", type=Path, default=RESULTS / "models.jsonl")
    options = parser.parse_args(arguments)
    known = list(full_models.FULL if options.run is model_steps.run else pipelines.BUILDS)
    options.models = options.models.split(",") if options.models else None
    if unknown := [name for name in options.models or [] if name not in known]:
        parser.error(f"unknown model {unknown[0]!r}; accepted: {', '.join(known)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.run is run_overhead:
        torch.set_num_threads(1)
    invocation = Invocation(torch.device(options.device), options.out, options.commit or commit_here())
    diffusers.utils.logging.set_verbosity_error()
    print(f"run {invocation.run}: {invocation.facts()}, diffusers {diffusers.__version__}", flush=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        done: int = options.run(options, invocation)
    return done


if __name__ == "__main__":
    sys.exit(main())
