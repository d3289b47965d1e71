"""Draw the results of bench_attention.py: speed by kind of mask, and error against speed.

    python bench/plot.py [--case h3-window] [--device "NVIDIA H200"] [--out bench/results/attention.png]

The last run counts that timed int8 beside at least two others on this case: times compare within one run only.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter
from matplotlib.transforms import Bbox
from records import RESULTS

Row = dict[str, Any]

MASKS = {
    "none": "no mask",
    "fade": "fade per key",
    "gap": "gap (bool)",
    "half": "half masked",
    "dense": "dense",
}
# Colour by who it is; ours stands out, torch is grey.
COLOURS = {"int8": "#1a7f5a", "torch": "#8a939d", "fa3": "#2f6fb3", "comfy": "#c9772b", "flex": "#8a63c9",
           "sage": "#b8428c", "sage2": "#b8428c", "sdnq": "#7a6a2f", "flash-attn": "#4aa3c7",
           "fastest": "#111111"}  # fmt: skip
LABELS = {"int8": "int8 (ours)", "torch": "torch", "fa3": "FlashAttention-3", "comfy": "comfy-kitchen",
          "flex": "FlexAttention", "sage": "SageAttention 1", "sage2": "SageAttention 2",
          "fastest": "backends=\"fastest\""}  # fmt: skip
_RIVALS = 2
_POINT = 7  # half a point's size in pixels


def chosen(rows: list[Row], case: str, device: str) -> list[Row]:
    """Whole calls without LSE on the case, of the last run with rivals; torch's named backends are left out."""
    usual = [row for row in rows if row["case"] == case and row["device"] == device and row["variant"] == "call"]
    usual = [row for row in usual if not row["lse"] and row["inputs"] == "gaussian"]
    usual = [row for row in usual if not row["impl"].startswith("torch-")]
    runs = dict.fromkeys(row["run"] for row in usual)
    for run in reversed(list(runs)):
        of_run = [row for row in usual if row["run"] == run]
        impls = {row["impl"] for row in of_run}
        if "int8" in impls and len(impls) > _RIVALS:
            return of_run
    raise SystemExit(f"no run of {case} on {device} times int8 beside {_RIVALS} others")


def name_of(row: Row) -> str:
    label = LABELS.get(row["impl"], row["impl"])
    return label if row["pv"] in ("16bit", "auto") or row["impl"] in ("comfy", "sage2") else f"{label}, {row['pv']} PV"


def colour_of(row: Row) -> str:
    return COLOURS.get(row["impl"], "#555555")


def draw_masks(axes: Any, rows: list[Row]) -> None:
    """Bars of effective TFLOPS: a group a mask, a bar a rival."""
    masks = [mask for mask in MASKS if any(row["mask"] == mask for row in rows)]
    names = list(dict.fromkeys(name_of(row) for row in rows))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        own = {row["mask"]: row for row in rows if name_of(row) == name}
        places = [masks.index(mask) - 0.4 + (number + 0.5) * width for mask in own]
        first = next(iter(own.values()))
        hatch = "//" if first["pv"] == "fp8" else None
        speeds = [row["tflops"] for row in own.values()]
        bars = axes.bar(
            places, speeds, width * 0.92, color=colour_of(first), hatch=hatch, edgecolor="white", label=name
        )
        axes.bar_label(bars, [f"{speed:.0f}" for speed in speeds], fontsize=6.5, padding=1, rotation=90)
    axes.set_xticks(range(len(masks)), [MASKS[mask] for mask in masks])
    axes.set_ylim(0, 1.1 * max(row["tflops"] for row in rows))
    axes.set_ylabel("effective TFLOPS, whole call")
    legend = axes.legend(fontsize=7.5, frameon=False, ncols=5, loc="lower left", bbox_to_anchor=(0, 1))
    legend.set_in_layout(False)  # it is wider than the axes, beside which there is room


def draw_errors(axes: Any, rows: list[Row]) -> dict[str, Row]:
    """Error against speed: filled without a mask, hollow with the fade. Returns the point to be named by name."""
    shown = sorted((row for row in rows if row["mask"] in ("none", "fade")), key=lambda row: row["tflops"])
    named: dict[str, Row] = {}
    for row in sorted(shown, key=lambda row: row["mask"] == "fade"):
        style = {"facecolors": "none"} if row["mask"] == "fade" else {"color": colour_of(row)}
        axes.scatter(row["tflops"], row["error"], s=60, edgecolors=colour_of(row), linewidths=1.5, zorder=3, **style)
        named.setdefault(name_of(row), row)
    axes.set_yscale("log")
    axes.set_xlim(0, 1.15 * shown[-1]["tflops"])
    low, high = min(row["error"] for row in shown), max(row["error"] for row in shown)
    axes.set_ylim(low / 1.6, high * 1.8)
    axes.yaxis.set_major_locator(FixedLocator([0.002, 0.005, 0.01, 0.02, 0.05, 0.1]))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=1))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("effective TFLOPS, whole call (filled: no mask, hollow: fade)")
    axes.set_ylabel("relative error against float64, N(0, 1)")
    axes.grid(alpha=0.25)
    return named


def put_names(axes: Any, named: dict[str, Row]) -> None:
    """Write each name above its point, or below where that would cover another name or point."""
    canvas = axes.figure.canvas
    places = {name: axes.transData.transform((row["tflops"], row["error"])) for name, row in named.items()}
    taken = [Bbox.from_bounds(x - _POINT, y - _POINT, 2 * _POINT, 2 * _POINT) for x, y in places.values()]
    for name, row in sorted(named.items(), key=lambda item: -item[1]["error"]):
        for shift in ((0, 9), (0, -17), (0, 21), (0, -29)):
            text = axes.annotate(
                name, (row["tflops"], row["error"]), shift, textcoords="offset points", ha="center", fontsize=8
            )
            box = text.get_window_extent(canvas.get_renderer())
            if box.count_overlaps(taken) == 0:
                break
            text.remove()
        else:
            axes.add_artist(text)
        taken.append(box)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="h3-window")
    parser.add_argument("--device", default="NVIDIA H200")
    parser.add_argument("--results", type=Path, default=RESULTS / "attention.jsonl")
    parser.add_argument("--out", type=Path, default=RESULTS / "attention.png")
    options = parser.parse_args(arguments)
    lines = options.results.read_text(encoding="utf-8").splitlines()
    rows = chosen([json.loads(line) for line in lines], options.case, options.device)
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.8), width_ratios=(1.25, 1))
    draw_masks(left, rows)
    named = draw_errors(right, rows)
    first = rows[0]
    shape = "x".join(map(str, first["shape"]))
    versions = f"torch {first['torch']}, Triton {first['triton']}, commit {first['commit'][:7]}"
    figure.suptitle(f"{options.case} {shape}, {first['dtype']}, {first['device']}, {versions}", fontsize=10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    put_names(right, named)  # which takes the layout as it will be
    figure.savefig(options.out, dpi=130)
    print(f"{len(rows)} measurements of run {first['run']} in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
