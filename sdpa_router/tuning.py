"""The command `sdpa-router tune`: a progress bar, a table of times, the file that `decide` reads from now on."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from sdpa_router.cost_files import write_table
from sdpa_router.costs import Table
from sdpa_router.terminal import number, show, table
from sdpa_router.tune import full_grid, quick_grid, recorded_shapes, tune


def run_tune(shapes_file: Path | None, *, quick: bool) -> int:
    """Tune the current GPU and return 0, or 1 where there is none; raises ValueError for a file without calls."""
    shapes = recorded_shapes(shapes_file) if shapes_file else quick_grid() if quick else full_grid()
    if not torch.cuda.is_available():
        show("nothing to tune: torch sees no GPU here, and on a CPU torch answers every call")
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    began = time.perf_counter()
    tuned = tune(shapes, device, _bar)
    measured = {shape.size for shape in shapes}
    show(as_text(Table(tuple(p for p in tuned.points if p.size in measured), tuned.errors)))
    path = write_table(tuned)  # last: what was measured is shown even where it can't be written
    show(f"{len(shapes)} calls in {time.perf_counter() - began:.1f} s; written to {path}")
    return 0


def _bar(items: list[Any]) -> Iterable[Any]:
    bar: Iterable[Any] = tqdm(items, desc="measuring", unit="call")
    return bar


def as_text(tuned: Table) -> Any:
    """Return the measured milliseconds as a table, a backend a column, and the errors as its last rows."""
    names = list(dict.fromkeys(name for point in tuned.points for name in point.ms))
    grid = table("batch x heads", "queries", "keys", "head_dim", "mask", *names, numbers=("queries", "keys", *names))
    for (batch, heads, q_len, kv_len, head_dim, mask, is_causal), ms in tuned.points:
        times = [number(ms[name]) if name in ms else "-" for name in names]
        kind = "causal" if is_causal else mask
        grid.add_row(f"{batch} x {heads}", str(q_len), str(kv_len), str(head_dim), kind, *times)
    for kind in dict.fromkeys(kind for kinds in tuned.errors.values() for kind in kinds):
        errors = [tuned.errors.get(name, {}).get(kind) for name in names]
        grid.add_row("error", "", "", "", kind, *("-" if error is None else number(error) for error in errors))
    return grid
