"""Write the cost table that is shipped for a GPU: the grid of `sdpa-router tune`, then the measured calls of the bench.

    python bench/make_costs.py [--tuned costs-nvidia-h200-....json] [--device "NVIDIA H200"]

Of each call the last run counts that timed torch beside others, because times compare within one run only. Errors are
those of tune, or without it the worst that the bench saw of each kind of inputs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from records import RESULTS

from sdpa_router.costs import Point, Size, Table, read_table

PACKAGE = Path(__file__).parents[1] / "sdpa_router"
# A key mask is taken to hide nothing that a kernel could skip; `half` is left out for that.
MASKS = {"none": "none", "fade": "key", "gap": "key", "dense": "full"}
BACKENDS = {("int8", "16bit"): "int8", ("torch", "16bit"): "torch", ("fa3", "16bit"): "fa3", ("comfy", "int8"): "comfy",
            ("sage", "16bit"): "sage"}  # fmt: skip


def measured(rows: list[dict[str, Any]], device: str) -> dict[Size, Point]:
    """Calls by size, in the order of the file: a later run replaces an earlier one, fade comes before gap."""
    runs: dict[tuple[Size, str, str], dict[str, float]] = {}
    for row in rows:
        name = BACKENDS.get((row["impl"], row["pv"]))
        usual = row["variant"] == "call" and not row["lse"] and row["inputs"] == "gaussian"
        if row["device"] == device and name and usual and row["mask"] in MASKS:
            size = Size(*row["shape"], MASKS[row["mask"]], row["is_causal"])
            runs.setdefault((size, row["run"], row["mask"]), {})[name] = row["ms"]
    points: dict[Size, tuple[str, Point]] = {}
    for (size, _, mask), ms in runs.items():
        if len(ms) > 1 and "torch" in ms and not (mask == "gap" and points.get(size, ("", None))[0] == "fade"):
            points[size] = mask, Point(size, ms)
    return {size: point for size, (_, point) in points.items()}


def errors_of(rows: list[dict[str, Any]], device: str) -> dict[str, dict[str, float]]:
    """The worst error by backend and kind of inputs."""
    errors: dict[str, dict[str, float]] = {}
    for row in rows:
        name = BACKENDS.get((row["impl"], row["pv"]))
        if name and row["device"] == device and row["error"] is not None:
            kinds = errors.setdefault(name, {})
            kinds[row["inputs"]] = max(kinds.get(row["inputs"], 0.0), row["error"])
    return errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuned", type=Path, help="the file that `sdpa-router tune` wrote")
    parser.add_argument("--device", default="NVIDIA H200")
    parser.add_argument("--attention", type=Path, default=RESULTS / "attention.jsonl")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.attention.read_text().splitlines()]
    tuned = Table((), errors_of(rows, options.device), {"device": options.device})
    if options.tuned:
        tuned = read_table(options.tuned)
    points = {point.size: point for point in tuned.points} | measured(rows, options.device)
    table = Table(tuple(points.values()), tuned.errors, tuned.facts)
    out = PACKAGE / f"costs_{options.device.lower().replace(' ', '_')}.json"
    text = json.dumps(table.as_json(), separators=(",", ":"))
    out.write_text(text.replace('{"batch"', '\n{"batch"') + "\n")
    print(f"{len(points)} calls in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
