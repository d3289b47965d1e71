"""Write the cost table that is shipped for a GPU: the grid of `sdpa-router tune`, and what the bench measured too.

    python bench/make_costs.py [--tuned costs-nvidia-h200-....json] [--device "NVIDIA H200"]

Of the bench only the lines of one commit count, the last one's unless --commit says another: older kernels were slower.
Of each call the last run counts that timed torch beside others, because times compare within one run only. A time that
the host set says nothing about the device and is left out. Errors are the worst that tune or the bench saw of each kind
of inputs, the host's times the least.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from records import RESULTS

from sdpa_router.cost_files import read_table
from sdpa_router.costs import Point, Size, Table

PACKAGE = Path(__file__).parents[1] / "sdpa_router"
# `half` is no mask that a model has.
MASKS = {"none": "none", "fade": "key", "gap": "padding", "dense": "full"}
BACKENDS = {("int8", "16bit"): "int8", ("torch", "16bit"): "torch", ("fa3", "16bit"): "fa3", ("comfy", "int8"): "comfy",
            ("sage", "16bit"): "sage", ("sage2", "fp8"): "sage"}  # fmt: skip
# The device was timed where a call takes so much longer than the host takes for one, or steadily less, because calls
# of other rivals before it hid the host. Where it takes half as long again the host adds at most 5 % (costs.py).
_LONGER, _LESS, _STEADY = 1.5, 0.9, 0.1


def usual(row: dict[str, Any], device: str) -> str | None:
    """The backend that a row timed as users call it on `device`, None for other rows."""
    name = BACKENDS.get((row["impl"], row["pv"]))
    plain = row["variant"] == "call" and not row["lse"] and row["inputs"] == "gaussian"
    return name if plain and row["device"] == device and row["mask"] in MASKS else None


def size_of(row: dict[str, Any]) -> Size:
    """What the costs of a row's call depend on."""
    return Size(*row["shape"], MASKS[row["mask"]], row["is_causal"])


def measured(rows: list[dict[str, Any]], device: str) -> dict[Size, Point]:
    """Calls by size, in the order of the file: a later run replaces an earlier one."""
    runs: dict[tuple[Size, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if name := usual(row, device):
            runs.setdefault((size_of(row), row["run"]), {})[name] = row
    points: dict[Size, Point] = {}
    for (size, _), by_name in runs.items():
        if len(by_name) > 1 and "torch" in by_name:
            points[size] = Point(size, {name: row["ms"] for name, row in by_name.items() if of_device(row)})
    return {size: point for size, point in points.items() if point.ms}


def of_device(row: dict[str, Any]) -> bool:
    """Whether a row's time is the device's, not the host's."""
    share = row["ms"] * 1e3 / row["host_us"]
    return share > _LONGER or (share < _LESS and row["spread"] < _STEADY)


def host_of(rows: list[dict[str, Any]], device: str) -> dict[str, float]:
    """The least milliseconds that the host took for a call by backend, whatever its size."""
    host: dict[str, float] = {}
    for row in rows:
        if name := usual(row, device):
            host[name] = min(host.get(name, math.inf), round(row["host_us"] / 1e3, 6))
    return host


def errors_of(rows: list[dict[str, Any]], device: str, tuned: Table) -> dict[str, dict[str, float]]:
    """The worst error by backend and kind of inputs."""
    errors = {name: dict(kinds) for name, kinds in tuned.errors.items()}
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
    parser.add_argument("--commit", help="of the bench's lines; the last one by default")
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.attention.read_text().splitlines()]
    commit = options.commit or lines[-1]["commit"]
    rows = [row for row in lines if row["commit"].startswith(commit)]
    tuned = read_table(options.tuned) if options.tuned else Table((), {}, {"device": options.device})
    points = measured(rows, options.device) | {point.size: point for point in tuned.points}
    host = {**host_of(rows, options.device), **tuned.host}
    table = Table(tuple(points.values()), errors_of(rows, options.device, tuned), tuned.facts, host=host)
    out = PACKAGE / f"costs_{options.device.lower().replace(' ', '_')}.json"
    text = json.dumps(table.as_json(), separators=(",", ":"))
    out.write_text(text.replace('{"batch"', '\n{"batch"') + "\n")
    print(f"{len(points)} calls in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
