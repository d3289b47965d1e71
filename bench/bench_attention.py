"""Time attention calls beside their rivals: check against float64 first, then time, print a table and ratios.

Each measurement is appended to a JSON-lines file as one line. Every rival of a case is interleaved with the others,
over all masks; timing.py says what is counted, impls.py how each rival is called, README.md what the columns mean.

    python bench/bench_attention.py --cases h3-window,flux --impls int8,torch,flex --masks none,fade --lse
    TRITON_INTERPRET=1 python bench/bench_attention.py --cases smoke --impls int8,torch
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch
from cases import INPUTS, MASKS, names_to_cases
from impls import VARIANTS, UnavailableError, names_to_impls
from ratios import ratios
from records import RESULTS, Invocation, commit_here, table
from session import Bench, ContextLostError


def parse(arguments: list[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "h3-window" if cuda else "smoke"
    parser.add_argument("--cases", default=default, help="names or groups: all, short, crossover")
    parser.add_argument("--impls", default="all", help="names, or all")
    parser.add_argument("--masks", default="own", help=f"of {', '.join(MASKS)}; own: those each case lists")
    parser.add_argument("--variants", default="call,kernel", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--lse", action="store_true", help="also with the log-sum-exp, where a rival returns it")
    parser.add_argument("--inputs", default="gaussian", choices=list(INPUTS))
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default=None, choices=("bfloat16", "float16"), help="bfloat16; float16 on the CPU")
    parser.add_argument("--seed", type=int, default=None, help="of the inputs; a fresh one for every case by default")
    parser.add_argument("--quick", action="store_true", help="fewer repeats: about 150 ms a row")
    parser.add_argument("--check-only", action="store_true", help="check, and so compile, but time nothing")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds after which nothing is begun")
    parser.add_argument("--commit", default=None, help="recorded where this is no git checkout")
    parser.add_argument("--out", type=Path, default=RESULTS / "attention.jsonl")
    options = parser.parse_args(arguments)
    options.dtype = options.dtype or ("float16" if options.device == "cpu" else "bfloat16")
    try:
        names_to_cases(options.cases), names_to_impls(options.impls)
        check_names("mask", options.masks, ("own", *MASKS))
        check_names("variant", options.variants, VARIANTS)
    except ValueError as error:
        parser.error(str(error))
    return options


def check_names(kind: str, names: str, accepted: tuple[str, ...]) -> None:
    if unknown := [name for name in names.split(",") if name not in accepted]:
        raise ValueError(f"unknown {kind} {unknown[0]!r}; accepted: {', '.join(accepted)}")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    invocation = Invocation(torch.device(options.device), options.out, options.commit or commit_here())
    bench = Bench(options, invocation)
    print(f"run {invocation.run}: {invocation.facts()}", flush=True)
    lost = False
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says at length why a backend refused: the row says it in short
        for case in names_to_cases(options.cases):
            if bench.expired():
                bench.skip("all", case.name, UnavailableError("the deadline passed"))
                continue
            try:
                bench.run_case(case)
            except ContextLostError as error:
                print(f"The CUDA context is lost ({error}); what follows was not measured.", flush=True)
                lost = True
                break
            except torch.OutOfMemoryError as error:
                bench.skip("all", case.name, error)
            bench.survive()
    report(bench)
    return 1 if lost or "int8" in bench.over_budget else 0


def report(bench: Bench) -> None:
    """What was not measured and why, then the ratios."""
    if bench.skipped:
        rows = [(who, reason, _few(places)) for (who, reason), places in bench.skipped.items()]
        print("\nskipped\n" + table(("who", "why", "where"), rows))
    if bench.rows:
        print("\nratios\n" + "\n".join(ratios(bench.rows)))
        print(f"\n{len(bench.rows)} lines appended to {bench.invocation.out}", flush=True)


def _few(places: list[str]) -> str:
    return " ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")


if __name__ == "__main__":
    sys.exit(main())
