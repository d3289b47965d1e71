"""`sdpa-router demo`: ten attention calls of a video model through the router, measured against float64."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sdpa_router import int8_attention, is_available, merge_attention, record, route
from sdpa_router.demo_calls import FIELD, SMALL, DemoCall, Size, demo_calls
from sdpa_router.info import environment
from sdpa_router.terminal import Stdout, console, facts, milliseconds, number, show, table, verdict
from sdpa_router.testing import BUDGET, BandedWindow, banded_window, gaussian, lse_error, relative_error, sdpa_oracle


@dataclass(frozen=True)
class Row:
    """What became of one call; error is relative, `against` names its yardstick, times are medians in ms."""

    name: str
    mask: str
    route: str
    reasons: list[str]
    detail: str
    error: float
    budget: float
    against: str
    ms: float | None = None
    torch_ms: float | None = None

    @property
    def good(self) -> bool:
        """Whether the error is within its budget; NaN is not."""
        return self.error <= self.budget


@dataclass(frozen=True)
class MergedRow:
    """Errors of the whole window, or of its parts merged: out relative, lse absolute."""

    name: str
    error: float
    lse_error: float
    budget: float
    lse_budget: float

    @property
    def good(self) -> bool:
        """Whether both errors are within their budgets."""
        return self.error <= self.budget and self.lse_error <= self.lse_budget


def run_demo(device: str, json_file: Path | Stdout | None = None, plot_file: Path | None = None) -> int:
    """Run the main job on `device` ("cuda" or "cpu"), print it, and return 1 if an error is over its budget."""
    started = time.perf_counter()
    size = FIELD if device == "cuda" else SMALL
    show(_headline(device, size))
    window = banded_window(**size.window, device=device)
    rows = []
    with console().status("measuring") as status:
        for call in demo_calls(size, window):
            status.update(f"measuring: {call.name}")
            rows.append(measure(call, timed=device == "cuda"))
        merged = merge_window(size, window) if is_available(device) else []
    _print_rows(rows)
    _print_merged(merged)
    good = all(row.good for row in rows) and all(row.good for row in merged)
    seconds = time.perf_counter() - started
    routed = sum(row.route == "int8" for row in rows)
    errors = "all errors within budget" if good else "an error is OVER its budget"
    show(f"{routed} of {len(rows)} calls took int8; {errors}; {seconds:.1f} s")
    if json_file:
        sizes = {**asdict(size), "dtype": str(size.dtype), "kv_len": window.kv_len}
        results = {"calls": [asdict(row) for row in rows], "merge": [asdict(row) for row in merged]}
        document = {"environment": environment(), "size": sizes, **results, "good": good, "seconds": round(seconds, 2)}
        json_file.write_text(json.dumps(document, indent=2) + "\n")
        show(f"wrote {json_file}")
    if plot_file:
        from sdpa_router.demo_plot import draw

        draw(plot_file, window, rows, _headline(device, size))
        show(f"wrote {plot_file}")
    return 0 if good else 1


def _headline(device: str, size: Size) -> str:
    """Say on the first line what answers, on the second what is asked."""
    able = is_available(device)
    if device == "cuda":
        where = torch.cuda.get_device_name() + ("" if able else ": int8 can't run here, see `sdpa-router info`")
    elif able:
        where = "No GPU used: Triton's interpreter on the CPU, at a small size and without times"
    else:
        where = "No GPU used, and int8 can't run here, see `sdpa-router info`: torch alone, at a small size"
    kv_len = banded_window(**size.window).kv_len
    dtype = str(size.dtype).removeprefix("torch.")
    return f"{where}\n{size.q_len} queries x {kv_len} keys, {size.heads} heads, head_dim {size.head_dim}, {dtype}"


def attend(call: DemoCall) -> Tensor:
    """Make the call as a model would."""
    return F.scaled_dot_product_attention(call.query, call.key, call.value, **call.options)


def measure(call: DemoCall, *, timed: bool) -> Row:
    """Make the call under route(), note what the router did and compare the answer; times only for a good answer."""
    torch.manual_seed(0)
    with record() as seen, route(log=False):
        out = attend(call).detach()
    taken = seen.records[-1]
    if "dropout_p" in call.options:
        # What dropout drops is torch's choice: the same seed without the router must give the same bits.
        torch.manual_seed(0)
        expected, against, budget = attend(call), "torch, same seed", 0.0
    else:
        expected, _ = sdpa_oracle(call.query, call.key, call.value, **call.options)
        against, budget = "float64", BUDGET.gaussian if taken["backend"] == "int8" else BUDGET.sdpa
    row = Row(
        name=call.name,
        mask=taken["mask"]["kind"].replace("_", " "),
        route=taken["backend"],
        reasons=taken["reasons"],
        detail=taken["detail"],
        error=relative_error(out, expected),
        budget=budget,
        against=against,
    )
    return Row(**{**asdict(row), **median_times(call)}) if timed and row.good else row


def median_times(call: DemoCall, repeats: int = 7) -> dict[str, float]:
    """Time the call under route() and with torch alone, in turns, by CUDA events; medians in ms after a warm-up."""
    alone = call._replace(options={**call.options, **_mask_for_torch(call)})
    times: dict[str, list[float]] = {"ms": [], "torch_ms": []}
    for _ in range(repeats + 2):
        with route(log=False):
            times["ms"].append(_event_time(call))
        times["torch_ms"].append(_event_time(alone))
    return {name: sorted(values[2:])[repeats // 2] for name, values in times.items()}


def _mask_for_torch(call: DemoCall) -> dict[str, Tensor]:
    """Give torch a float32 mask in q's dtype: with float32 its cuDNN backend answers garbage."""
    mask = call.options.get("attn_mask")
    return {} if mask is None or mask.dtype != torch.float32 else {"attn_mask": mask.to(call.query.dtype)}


def _event_time(call: DemoCall) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    attend(call)
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


def merge_window(size: Size, window: BandedWindow) -> list[MergedRow]:
    """Attend to the window whole, and to its core and its skirt apart, merged by their log-sum-exps."""
    query, key, value = gaussian(
        1, size.heads, size.q_len, window.kv_len, size.head_dim, dtype=size.dtype, device=window.bias.device
    )
    expected, expected_lse = sdpa_oracle(query, key, value, window.bias)
    whole, whole_lse = int8_attention(query, key, value, window.bias, return_lse=True)
    parts = [
        int8_attention(query, key[:, :, part], value[:, :, part], window.bias[..., part], return_lse=True)
        for part in window.parts.values()
    ]
    merged, merged_lse = merge_attention([out for out, _ in parts], [lse for _, lse in parts])

    def compared(name: str, out: Tensor, lse: Tensor, ref: Tensor, ref_lse: Tensor, budgets: int = 1) -> MergedRow:
        errors = relative_error(out, ref), lse_error(lse, ref_lse)
        return MergedRow(name, *errors, budgets * BUDGET.gaussian, budgets * BUDGET.lse)

    return [
        compared("whole, to float64", whole, whole_lse, expected, expected_lse),
        compared("merged, to float64", merged, merged_lse, expected, expected_lse),
        # Both are off by at most one budget, each in its own way: a part has its own key offset and scales.
        compared("merged, to whole", merged, merged_lse, whole, whole_lse, budgets=2),
    ]


def _print_rows(rows: list[Row]) -> None:
    timed = any(row.ms is not None for row in rows)
    times = ("ms", "torch", "gain") if timed else ()
    grid = table("call", "mask", "route", "why not int8", "error", "", *times, numbers=("error", *times))
    for row in rows:
        figures: tuple[str, ...] = ("-",) * len(times)
        if row.ms and row.torch_ms:
            figures = (milliseconds(row.ms), milliseconds(row.torch_ms), f"{row.torch_ms / row.ms:.2f}x")
        why = ", ".join(row.reasons) or "-"
        grid.add_row(row.name, row.mask, row.route, why, number(row.error), verdict(row.good), *figures)
    show(grid)
    show(
        f"error: rms(out - ref) / rms(ref), ref in float64; budget {BUDGET.gaussian} for int8, {BUDGET.sdpa} for sdpa. "
        "dropout: against torch alone with the same seed, where every bit must agree."
    )
    if timed:
        show("ms: the whole call, quantisation included; torch: the ms of its default SDPA; medians, taken in turns.")
    show(facts([("", ""), *((row.name, row.detail) for row in rows if row.reasons), ("", "")]))


def _print_merged(rows: list[MergedRow]) -> None:
    if not rows:
        return
    figures = ("error", "at most", "LSE error", "at most ")
    grid = table("window split into core and skirt", *figures, "", numbers=figures)
    for row in rows:
        values = (row.error, row.budget, row.lse_error, row.lse_budget)
        grid.add_row(row.name, *map(number, values), verdict(row.good))
    show(grid)
