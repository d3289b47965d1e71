"""The command `sdpa-router report`: a recorded run as a page, or as tables in a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .report_page import page
from .run_file import Row, RunFile, read_run

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["as_text", "read_run", "run_report"]

_MOST_ROWS = 200
# Columns of a terminal that the table takes without its times.
_WIDTH = 80


def run_report(run: RunFile, output: Path | None, *, text: bool) -> int:
    """Write the page and print the tables, whichever is asked for; returns 0."""
    from .terminal import show

    if text:
        show(*as_text(run))
    if output is not None:
        output.write_text(page(run), encoding="utf-8", errors="replace")
        show(f"wrote {output}: {summary(run)}")
    return 0


def summary(run: RunFile) -> str:
    """Return the run in one sentence."""
    share = "time (estimated)" if run.by_time else "operations"
    counted = "" if run.complete else "; some process wrote no counts, its calls count once a kind"
    percent = f"{run.routed_share:.0%}".replace("%", " %")
    return f"{run.calls} calls, {run.routed_calls} routed; {percent} of the attention {share} routed{counted}"


def as_text(run: RunFile) -> list[Table | str]:
    """Return the parts of the report for a terminal."""
    from .terminal import console, table

    parts: list[Table | str] = [summary(run)]
    rows, others = run.heaviest(_MOST_ROWS)
    names = list(dict.fromkeys(name for row in rows for name in row.ms))
    wide = console().width >= _WIDTH + sum(max(6, len(name)) + 2 for name in names)
    columns = ("query", "keys", "mask", *names) if wide else ("query, keys", "mask", "ms a call")
    grid = table("calls", "share", "answered by", *columns, "reasons", numbers=("calls", "share", *names))
    for row in rows:
        shapes, times = [_shape(row, name) for name in ("query", "key")], _times(row, names, wide=wide)
        cells = (*shapes, kind_of_mask(row), *times) if wide else ("\n".join(shapes), kind_of_mask(row), *times)
        grid.add_row(str(row.count), f"{run.weight(row):.1%}", row.backend, *cells, ", ".join(row.reasons))
    parts += [grid, *filter(None, (others,))]
    advice = run.advice()
    if advice:
        cures = table("reason", "calls", "share", "what to do", numbers=("calls", "share"))
        for item in advice:
            cures.add_row(item.code, str(item.calls), f"{item.weight:.1%}", item.cure)
        parts += ["to route more", cures]
    return parts


def _times(row: Row, names: list[str], *, wide: bool) -> list[str]:
    """Return milliseconds a call by backend: a cell each, or one of a line each."""
    from .terminal import milliseconds

    known = {name: milliseconds(row.ms[name]) for name in names if name in row.ms}
    if wide:
        return [known.get(name, "-") for name in names]
    return ["\n".join(" ".join(item) for item in known.items()) or "-"]


def _shape(row: Row, name: str) -> str:
    shape = row.record["signature"][name].get("shape")
    return row.record["signature"][name].get("type", "?") if shape is None else "x".join(map(str, shape))


def kind_of_mask(row: Row) -> str:
    """Return the kind of a call's mask as a word; causal is one."""
    causal = row.record["signature"].get("is_causal") is True and row.record["mask"]["kind"] == "none"
    return "causal" if causal else str(row.record["mask"]["kind"])
