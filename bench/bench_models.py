"""What the router does in diffusers models: which calls it takes, what that changes, and what a step costs.

    TRITON_INTERPRET=1 python bench/bench_models.py --table      # small random pipelines, as a markdown table
    python bench/bench_models.py --gpu                           # full-width Wan 1.3B and Flux transformers
    python bench/bench_models.py --overhead                      # models that never qualify, enabled and not

--table: a pipeline of each family runs one step and its VAE, natively and with the transformer enabled; audit() gives
the errors of the first step. --gpu: step times are medians of interleaved steps (timing.py), eager and with
compile_repeated_blocks(); the PSNR is that of the latents after --steps Euler steps from the same noise.
Each measurement is appended to bench/results/models.jsonl as one line.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import full_models
import model_steps
import pipelines
import torch
import torch.nn.functional as functional
from records import RESULTS, Invocation, commit_here, table

import sdpa_router
from sdpa_router.testing import BUDGET

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
    """Time one forward of float32 models, which never qualify, enabled and not, in turns."""
    shown = []
    for name in tqdm(options.models or pipelines.BUILDS, desc="models", disable=None):
        small = pipelines.build(name, device=invocation.device, dtype=torch.float32, larger=4)
        args, kwargs = pipelines.first_inputs(small)
        forward = functools.partial(small.model, *args, **kwargs)
        native, ours, ratio = _in_turns(small.model, forward, invocation.device)
        invocation.write({"kind": "overhead", "model": name, "ms": native, "enabled_ms": ours, "ratio": ratio})
        shown.append((name, f"{native:.3f}", f"{ours:.3f}", f"{ratio:.4f}"))
    print(table(("model", "ms", "enabled ms", "ratio"), shown))
    return 0


def _in_turns(model: Any, forward: Callable[[], Any], device: torch.device, rounds: int = 16) -> tuple[float, ...]:
    """Median ms, native and enabled, and the median ratio of neighbouring blocks of calls.

    The first calls after switching don't count: Python must specialise its bytecode anew. On a CPU what counts is the
    processor time of one thread, which a machine that others use too disturbs less than the clock.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    watch = time.process_time if device.type == "cpu" else time.perf_counter
    taken: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        for routed in (False, True) if number % 2 else (True, False):
            sdpa_router.enable(model, log=False) if routed else sdpa_router.disable(model)
            block = []
            for _ in range(_UNCOUNTED + _COUNTED):
                began = watch()
                forward()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                block.append((watch() - began) * 1e3)
            taken[routed].append(statistics.median(block[_UNCOUNTED:]))
    sdpa_router.disable(model)
    torch.set_num_threads(threads)
    ratios = [ours / native for native, ours in zip(taken[False], taken[True], strict=True)]
    return tuple(map(statistics.median, (taken[False], taken[True], ratios)))


_UNCOUNTED, _COUNTED = 6, 10


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
    parser.add_argument("--budget-ms", type=float, default=4000.0, help="of timing, for each of the rivals of --gpu")
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
    invocation = Invocation(torch.device(options.device), options.out, options.commit or commit_here())
    diffusers.utils.logging.set_verbosity_error()
    print(f"run {invocation.run}: {invocation.facts()}, diffusers {diffusers.__version__}", flush=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        done: int = options.run(options, invocation)
    return done


if __name__ == "__main__":
    sys.exit(main())
