"""The picture of `sdpa-router demo --plot`; the only module here that imports matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sdpa_router.testing import BandedWindow

if TYPE_CHECKING:
    from sdpa_router.demo import Row

_COLOURS = {"int8": "#0072b2", "sdpa": "#e69f00"}
_SHADES = ("#f0f0f0", "#ffffff")


def draw(path: Path, window: BandedWindow, rows: list[Row], title: str) -> None:
    """Write the mask's profile, the errors and (if measured) the times of the calls to `path`."""
    timed = any(row.ms is not None for row in rows)
    # Not through pyplot, which would choose a backend for the whole process.
    figure = Figure(figsize=(12, 8) if timed else (9, 8), layout="constrained")
    panels: Any = [["mask", "mask"], ["errors", "times"]] if timed else [["mask"], ["errors"]]
    axes: dict[str, Any] = figure.subplot_mosaic(panels, height_ratios=(1, 2))
    figure.suptitle(title, fontsize=11)
    _draw_mask(axes["mask"], window)
    _draw_errors(axes["errors"], rows)
    if timed:
        _draw_times(axes["times"], rows)
    handles: list[Any] = [Patch(color=colour, label=f"answered by {route}") for route, colour in _COLOURS.items()]
    handles.append(Line2D([], [], color="black", linewidth=2, label="error budget"))
    if timed:
        handles.append(Line2D([], [], color="black", marker="o", markerfacecolor="white", linewidth=0, label="torch"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=130)


def _draw_mask(axes: Any, window: BandedWindow) -> None:
    bias = window.bias.flatten().cpu()
    keys = range(len(bias))
    axes.plot(keys, bias.tolist(), color="black", linewidth=1.6)
    for index, (name, part) in enumerate(window.parts.items()):
        axes.axvspan(part.start, part.stop, color=_SHADES[index % 2], zorder=0)
        if name == "prefix":  # narrow: its name stands above that of its neighbour
            axes.text(part.start, 1.7, " text, refs, audio", fontsize=9)
        else:
            axes.text((part.start + part.stop) / 2, 0.5, f"video: {name}", ha="center", fontsize=9)
    axes.set(title="fading window: what is added to the scores", xlabel="key", ylabel="bias")
    axes.set(xlim=(0, len(bias)), ylim=(float(bias.min()) - 0.6, 2.9))


def _draw_errors(axes: Any, rows: list[Row]) -> None:
    limit = 1.4 * max(row.budget for row in rows)
    for place, row in enumerate(rows):
        axes.barh(place, min(row.error, limit), color=_COLOURS[row.route])
        if row.budget:
            axes.plot([row.budget] * 2, [place - 0.4, place + 0.4], color="black", linewidth=2)
        label = f"{row.error:.3g}" + ("" if row.against == "float64" else f" (against {row.against})")
        start = min(max(row.error, row.budget), limit) + limit / 80
        axes.text(start, place, label, va="center", fontsize=8)
    axes.set(title="rms error relative to float64", xlim=(0, limit))
    _name_rows(axes, rows)


def _draw_times(axes: Any, rows: list[Row]) -> None:
    for place, row in enumerate(rows):
        if row.ms is None or row.torch_ms is None:
            continue
        axes.plot([row.ms, row.torch_ms], [place, place], color="#999999", zorder=1)
        axes.plot(row.torch_ms, place, "o", color="black", markerfacecolor="white", markersize=11, zorder=2)
        axes.plot(row.ms, place, "o", color=_COLOURS[row.route], markersize=7, zorder=3)
        label = f"    {row.torch_ms / row.ms:.2f}x"
        axes.text(max(row.ms, row.torch_ms), place, label, va="center", fontsize=8)
    axes.set(title="ms a call under the router and with torch alone", xscale="log")
    axes.grid(axis="x", which="both", color="#eeeeee")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.15)
    _name_rows(axes, rows)


def _name_rows(axes: Any, rows: list[Row]) -> None:
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
