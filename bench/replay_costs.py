"""Replay measured calls through a cost table: what backends="fastest" would have chosen, and what it would have lost.

    python bench/replay_costs.py [--table costs.json] [--attention attention.jsonl] [--leave-out]

Regret is the measured time of the chosen backend over that of the best one: what a wrong decision costs, without what
deciding costs. --leave-out takes each call's own size out of the table first, so that interpolation is judged. Exit 1
where a regret is over the goal. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from make_costs import size_of, usual
from records import RESULTS, table

from sdpa_router.cost_files import read_table, shipped_table
from sdpa_router.costs import Size, Table, fastest

GOAL = 1.03
TORCH = "torch"


class Regret(NamedTuple):
    """A measured call: who was chosen, who was the fastest, and the ratio of their times."""

    case: str
    mask: str
    chosen: str
    best: str
    ratio: float


def regrets(costs: Table, rows: list[dict[str, Any]], device: str, *, leave_out: bool = False) -> Iterator[Regret]:
    """Yield the regret of every call that one run of the bench timed torch and others for."""
    calls: dict[tuple[str, str, str, Size], dict[str, float]] = {}
    for row in rows:
        if name := usual(row, device):
            calls.setdefault((row["run"], row["case"], row["mask"], size_of(row)), {})[name] = row["ms"]
    for (_, case, mask, size), ms in calls.items():
        if TORCH in ms and len(ms) > 1:
            points = tuple(point for point in costs.points if point.size != size) if leave_out else costs.points
            known = Table(points, host=costs.host)
            times = {name: estimate for name, estimate in known.estimate(size).items() if name in ms}
            chosen = fastest(times, TORCH, known.tie(size)) if TORCH in times else TORCH  # by rule
            best = min(ms, key=lambda name: ms[name])
            yield Regret(case, mask, chosen, best, ms[chosen] / ms[best])


def last_run(rows: list[dict[str, Any]]) -> str:
    """The last run that timed several cases with backends="fastest" beside others."""
    cases: dict[str, set[str]] = {}
    for row in rows:
        if row["impl"] == "fastest":
            cases.setdefault(row["run"], set()).add(row["case"])
    several = [run for run, names in cases.items() if len(names) > 1]
    return several[-1] if several else str(rows[-1]["run"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, help="what `sdpa-router tune` wrote; the shipped one by default")
    parser.add_argument("--attention", type=Path, default=RESULTS / "attention.jsonl")
    parser.add_argument("--device", default="NVIDIA H200")
    parser.add_argument("--run", help="of the bench; by default the last one of several cases with fastest")
    parser.add_argument("--leave-out", action="store_true")
    options = parser.parse_args()
    costs = read_table(options.table) if options.table else shipped_table(options.device)
    if costs is None:
        parser.error(f"no table is shipped for {options.device}")
    rows = [json.loads(line) for line in options.attention.read_text().splitlines()]
    run = options.run or last_run(rows)
    found = list(
        regrets(costs, [row for row in rows if row["run"] == run], options.device, leave_out=options.leave_out)
    )
    cells = [[*one[:4], f"{one.ratio:.3f}", f"<= {GOAL}{'' if one.ratio <= GOAL else '  OVER'}"] for one in found]
    print(table(("case", "mask", "chosen", "best", "regret", "goal"), cells))
    return 0 if all(one.ratio <= GOAL for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
