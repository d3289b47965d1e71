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
    from .terminal import milliseconds, table

    parts: list[Table | str] = [summary(run)]
    rows, others = run.heaviest(_MOST_ROWS)
    names = list(dict.fromkeys(name for row in rows for name in row.ms))
    numbers = ("calls", "share", *names)
    grid = table("calls", "share", "answered by", "query", "keys", "mask", *names, "reasons", numbers=numbers)
    for row in rows:
        query, key = (_shape(row, name) for name in ("query", "key"))
        times = [milliseconds(row.ms[name]) if name in row.ms else "-" for name in names]
        share = f"{run.weight(row):.1%}"
        cells = (str(row.count), share, row.backend, query, key, kind_of_mask(row), *times, ", ".join(row.reasons))
        grid.add_row(*cells)
    parts += [grid, *filter(None, (others,))]
    advice = run.advice()
    if advice:
        cures = table("reason", "calls", "share", "what to do", numbers=("calls", "share"))
        for item in advice:
            cures.add_row(item.code, str(item.calls), f"{item.weight:.1%}", item.cure)
        parts += ["to route more", cures]
    return parts


def _shape(row: Row, name: str) -> str:
    shape = row.record["signature"][name].get("shape")
    return row.record["signature"][name].get("type", "?") if shape is None else "x".join(map(str, shape))


def kind_of_mask(row: Row) -> str:
    """Return the kind of a call's mask as a word; causal is one."""
    causal = row.record["signature"].get("is_causal") is True and row.record["mask"]["kind"] == "none"
    return "causal" if causal else str(row.record["mask"]["kind"])
