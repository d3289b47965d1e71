"""Measure backends="fastest" against every single backend: tune first, then the cases, then the decision alone.

    python bench/bench_backends.py [--cases NAMES] [--deadline SECONDS] [--folder DIR]
    python bench/bench_backends.py --warm    # compile what the other command needs, time nothing that counts

1. `sdpa-router tune --quick`, timed as a whole; its table goes to --folder and holds from then on.
2. bench_attention.py on the cases with every backend and fastest, each checked against float64, interleaved.
3. bench_dispatch.py's decisions, with four backends too, and short calls that go to torch, in pairs.

Goals: fastest within 3 % of the best single backend, never slower than torch, tune under 60 s, a decision in 4 us.
Writes attention.jsonl, dispatch.jsonl and backends.jsonl (one line for each case and mask) into --folder.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import bench_attention
import bench_dispatch
import torch
from records import Invocation, commit_here, table

from sdpa_router import cost_files, tune

Row = dict[str, Any]

# Those that a deadline may cut come last.
CASES = "flux,qwen-image,cross-512,causal-16k,d64-8k,short,d256-8k,sdxl,ltx,h3-window,d96-8k,wan-14b"
IMPLS = "int8,torch,fa3,comfy,sage,sage2,fastest"
SHORT = (256, 512, 1024)
GOAL_RATIO, GOAL_TUNE_S = 1.03, 60.0
COLUMNS = ("case", "mask", "fastest ms", "best single", "ms", "ratio", "torch ms", "ratio", "goal")


def run_tune(invocation: Invocation) -> None:
    """Tune over the quick grid and use the table from now on."""
    began = time.perf_counter()
    found = tune.tune(tune.quick_grid(), invocation.device)
    path = cost_files.write_table(found)
    seconds = time.perf_counter() - began
    good = "" if seconds < GOAL_TUNE_S else "  OVER"
    print(f"tune --quick: {len(found.points)} calls in {seconds:.1f} s < {GOAL_TUNE_S} s{good}; {path}")
    for name, kinds in found.errors.items():
        print(f"  error of {name}: " + ", ".join(f"{kind} {error:.4f}" for kind, error in kinds.items()))
    invocation.write({"case": "tune", "calls": len(found.points), "seconds": round(seconds, 2), "errors": found.errors})


def compare(rows: list[Row], invocation: Invocation) -> bool:
    """Write and print how fastest did on each case and mask; whether it reached both goals everywhere."""
    cells, all_good = [], True
    for case, mask in dict.fromkeys((row["case"], row["mask"]) for row in rows):
        of_call = {row["impl"]: row["ms"] for row in rows if (row["case"], row["mask"]) == (case, mask)}
        fastest = of_call.pop("fastest", None)
        if fastest is None or "torch" not in of_call:
            continue
        best = min(of_call, key=lambda name: of_call[name])
        ratio, ratio_torch = fastest / of_call[best], fastest / of_call["torch"]
        good = max(ratio, ratio_torch) <= GOAL_RATIO
        all_good = all_good and good
        invocation.write(
            {
                "case": case,
                "mask": mask,
                "fastest_ms": fastest,
                "best": best,
                "best_ms": of_call[best],
                "ratio": round(ratio, 4),
                "torch_ms": of_call["torch"],
                "ratio_torch": round(ratio_torch, 4),
            }
        )
        figures = [f"{fastest:.4f}", best, f"{of_call[best]:.4f}", f"{ratio:.3f}", f"{of_call['torch']:.4f}"]
        cells.append([case, mask, *figures, f"{ratio_torch:.3f}", f"<= {GOAL_RATIO}{'' if good else '  OVER'}"])
    print("\n" + table(COLUMNS, cells))
    return all_good


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--impls", default=IMPLS)
    parser.add_argument("--deadline", type=float, default=22.0, help="seconds after which no case is begun")
    parser.add_argument("--folder", type=Path, default=Path("bench-backends"), help="for the table and the results")
    parser.add_argument("--commit", default=None, help="recorded where this is no git checkout")
    parser.add_argument("--warm", action="store_true", help="compile, time nothing that counts")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    cost_files.folder = lambda: options.folder
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    commit = options.commit or commit_here()
    invocation = Invocation(device, options.folder / "backends.jsonl", commit)
    shared = ["--variants", "call", "--quick", "--cases", options.cases, "--commit", commit]
    if options.warm:
        if device.type == "cuda":
            tune.tune(tune.quick_grid(), device)
        return bench_attention.main([*shared, "--impls", options.impls.replace(",fastest", ""), "--check-only"])
    if device.type == "cuda":
        run_tune(invocation)
    attention = options.folder / "attention.jsonl"
    before = len(attention.read_text().splitlines()) if attention.exists() else 0
    deadline = ["--deadline", str(options.deadline)]
    code = bench_attention.main([*shared, "--impls", options.impls, *deadline, "--out", str(attention)])
    lines = attention.read_text().splitlines()[before:] if attention.exists() else []
    good = compare([json.loads(line) for line in lines], invocation)
    gc.disable()
    with torch.no_grad():
        bench = bench_dispatch.Dispatch(Invocation(device, options.folder / "dispatch.jsonl", commit), True)
        bench_dispatch.measure_decisions(bench)
        for tokens in SHORT if device.type == "cuda" else ():
            bench.never_slower(tokens, "none", "eager")
    return code or (0 if good else 1)


if __name__ == "__main__":
    sys.exit(main())
