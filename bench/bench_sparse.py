"""Time sparse attention beside its rivals: tile masks, banded windows, dense masks; checked first, then interleaved.

Each measurement is one line in results/sparse.jsonl. `density` is the part of the tiles that are visited (of a dense
mask: that are not masked), `ratio` the time over that of the row named in `against`, `on_top` the memory that a call
takes besides its answer, over that of query, key, value and answer. timing.py says what is counted. Rivals on the same
inputs have the same number of repeats: one that has more would be timed without the other's heat at the end.

    python bench/bench_sparse.py --parts tiles,banded,dense
    TRITON_INTERPRET=1 python bench/bench_sparse.py --small
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from records import RESULTS, Invocation, commit_here, table
from timing import Effort, Run, Timing, interleaved

import sdpa_router
from sdpa_router.banded import bias_of
from sdpa_router.mask_summary import forget, summarised
from sdpa_router.testing import relative_error, sdpa_oracle

ERROR = {"int8": 0.0125, "torch": 0.005}  # as in impls.py
DENSITIES = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Rival:
    """A call, and how its output is checked: the mask of (heads, rows) as [1, n, m, K], or None where it has none."""

    name: str
    call: Callable[[], Any]
    family: str = "int8"
    mask: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None] | None = None


@dataclass
class Group:
    """Rivals on the same inputs, and what the lines of their results say."""

    name: str
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    rivals: list[Rival]
    facts: dict[str, Any]
    against: str
    effort: Effort
    memory: bool = False


def random(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


def check(group: Group, rival: Rival) -> float:
    """Error against float64 on a few heads and rows, the first and the last among them."""
    query, key, value = group.inputs
    heads = torch.tensor(sorted({0, query.shape[1] // 2, query.shape[1] - 1}), device=query.device)
    rows = torch.linspace(0, query.shape[2] - 1, 67, device=query.device).long().unique()
    out = rival.call()
    out = out[0] if isinstance(out, tuple) else out
    assert rival.mask is not None
    exact = sdpa_oracle(query[:, heads][:, :, rows], key[:, heads], value[:, heads], rival.mask(heads, rows))[0]
    return relative_error(out[:, heads][:, :, rows], exact)


def repeats(number: int) -> Effort:
    return Effort(min_repeats=number, max_repeats=number)


def tile_groups(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Iterator[Group]:
    """Random masks of 64x64 tiles beside our dense kernel; of 128x128 tiles beside FlexAttention."""
    heads, length = (2, 256) if options.small else (24, 32768)
    inputs = tuple(random((1, heads, length, 128), device, dtype) for _ in range(3))
    query, key, value = inputs

    def dense() -> torch.Tensor:
        return sdpa_router.int8_attention(query, key, value)

    for density in options.densities:
        tiles = torch.rand(1, heads, length // 64, length // 64, device=device) < density

        def expanded(which: torch.Tensor, rows: torch.Tensor, tiles: torch.Tensor = tiles) -> torch.Tensor:
            return tiles[:, which][:, :, rows // 64].repeat_interleave(64, 3)

        rivals = [
            Rival("dense int8", dense, mask=lambda which, rows: None),
            Rival("int8", lambda tiles=tiles: sdpa_router.block_sparse_attention(query, key, value, tiles), "int8",
                  expanded),
        ]  # fmt: skip
        facts = {"density": density, "tile": 64}
        yield Group("tiles-64", inputs, rivals, facts, "dense int8", repeats(options.repeats))
        if options.flex and density in (0.1, 0.25, 0.5, 1.0):
            yield flex_group(options, inputs, density)


def flex_group(options: argparse.Namespace, inputs: tuple[torch.Tensor, ...], density: float) -> Group:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    query, key, value = inputs
    blocks = -(-query.shape[2] // 128)
    tiles = torch.rand(1, query.shape[1], blocks, blocks, device=query.device) < density
    counts = tiles.sum(-1, dtype=torch.int32)
    indices = torch.argsort(~tiles, dim=-1, stable=True).to(torch.int32)
    made = BlockMask.from_kv_blocks(torch.zeros_like(counts), torch.zeros_like(indices), counts, indices)
    compiled = torch.compile(flex_attention)

    def expanded(which: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return tiles[:, which][:, :, rows // 128].repeat_interleave(128, 3)

    rivals = [
        Rival("flex", lambda: compiled(query, key, value, block_mask=made), "torch", expanded),
        Rival("int8", lambda: sdpa_router.block_sparse_attention(query, key, value, made), "int8", expanded),
    ]
    return Group("tiles-128", inputs, rivals, {"density": density, "tile": 128}, "flex", repeats(options.repeats))


def banded_groups(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Iterator[Group]:
    """The packed layout [text, refs, audio | video] of a long video: windows in one launch, or one by one."""
    frames, rows, length, skirt, prefix = (5, 40, 2, 1, 30) if options.small else (170, 1560, 13, 4, 840)
    heads = 2 if options.small else 56
    windows = sdpa_router.video_windows(frames, rows, length, skirt, prefix=prefix)[1:]
    total = prefix + frames * rows
    inputs = tuple(random((1, heads, total, 128), device, dtype) for _ in range(3))
    query, key, value = inputs
    out = torch.zeros_like(query)
    biases = [bias_of(window, total, device=device) for window in windows]
    biases = [bias[..., bias[0, 0, 0] != -torch.inf] for bias in biases]

    def one_by_one(attend: Callable[..., None]) -> torch.Tensor:
        for window, bias in zip(windows, biases, strict=True):
            keys, values = (torch.cat([t[:, :, r.start : r.stop] for r in window.keys], 2) for t in (key, value))
            attend(query[:, :, window.start : window.stop], keys, values, bias, out[:, :, window.start : window.stop])
        return out

    def by_torch(q: Any, k: Any, v: Any, bias: Any, o: Any) -> None:
        o.copy_(F.scaled_dot_product_attention(q, k, v, bias.to(dtype).expand(1, 1, q.shape[2], -1)))

    def by_kernel(q: Any, k: Any, v: Any, bias: Any, o: Any) -> None:
        sdpa_router.int8_attention(q, k, v, bias, out=o)

    def expanded(which: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        mask = torch.full((1, 1, len(at), total), -torch.inf, device=device)
        for window in windows:
            mask[:, :, (at >= window.start) & (at < window.stop)] = bias_of(window, total, device=device)
        return mask

    rivals = [
        Rival("int8", lambda: sdpa_router.banded_attention(query, key, value, windows), "int8", expanded),
        Rival("per-key int8, window by window", lambda: one_by_one(by_kernel), "int8", expanded),
        Rival("torch, window by window", lambda: one_by_one(by_torch), "torch", expanded),
    ]
    facts = {"windows": len(windows), "rows": total}
    effort = repeats(min(3, options.repeats))
    yield Group("banded", inputs, rivals, facts, "torch, window by window", effort, memory=True)


def memory_facts(group: Group, rival: Rival, device: torch.device) -> dict[str, float | None]:
    """Megabytes that a call allocates at its peak; and those besides its answer, over all of query to answer."""
    if device.type != "cuda":
        return {"memory_mb": None, "on_top": None}
    query, key, value = group.inputs
    rival.call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    answer = rival.call()
    peak = torch.cuda.max_memory_allocated() - before
    besides = peak - (torch.cuda.memory_allocated() - before)  # an answer that was there before counts nowhere
    del answer
    return {"memory_mb": round(peak / 2**20, 1), "on_top": besides / (2 * query.nbytes + key.nbytes + value.nbytes)}


def dense_groups(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Iterator[Group]:
    """A dense additive mask of rank one, nothing to skip; the same with half of the tiles masked; a bool mask."""
    heads, q_len, kv_len = (2, 128, 320) if options.small else (56, 4096, 33600)
    query, key, value = inputs = tuple(random((1, heads, n, 128), device, dtype) for n in (q_len, kv_len, kv_len))
    additive = (torch.randn(q_len, 1, device=device) * torch.randn(kv_len, device=device)).to(dtype)[None, None]
    tiles = torch.rand(-(-q_len // 64), -(-kv_len // 64), device=device) < 0.5
    kept = tiles.repeat_interleave(64, 0)[:q_len].repeat_interleave(64, 1)[None, None, :, :kv_len]
    for name, mask in (
        ("additive", additive),
        ("half", torch.where(kept, additive, -torch.inf)),
        ("half-bool", kept.contiguous()),
    ):
        counts = summarised(mask).counts()

        def expanded(which: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor = mask) -> torch.Tensor:
            return mask[:, :, rows]

        def summarise(mask: torch.Tensor = mask) -> None:
            forget()
            summarised(mask).counts()

        def ours(mask: torch.Tensor = mask) -> torch.Tensor:
            return sdpa_router.dense_mask_attention(query, key, value, mask)

        def native(mask: torch.Tensor = mask) -> torch.Tensor:
            return F.scaled_dot_product_attention(query, key, value, mask)

        rivals = [
            Rival("int8", ours, "int8", expanded),
            Rival("torch", native, "torch", expanded),
            Rival("summary", summarise),
        ]
        facts = {"density": round(1 - counts.skipped / counts.total, 3), "tiles": str(counts)}
        yield Group(f"dense-{name}", inputs, rivals, facts, "torch", repeats(options.repeats))


PARTS = {"tiles": tile_groups, "banded": banded_groups, "dense": dense_groups}


def run_group(group: Group, invocation: Invocation, check_only: bool) -> list[tuple[object, ...]]:
    """Check and time the rivals of a group and write their lines; rows for the table."""
    errors: dict[str, float | None] = {}
    for rival in group.rivals:
        errors[rival.name] = None if rival.mask is None else check(group, rival)
        error = errors[rival.name]
        if error is not None and not error < ERROR[rival.family]:
            print(f"{group.name} {group.facts}: {rival.name} errs by {error:.4f}: not timed", flush=True)
            del errors[rival.name]
    if check_only:
        return [(group.name, group.facts.get("density", ""), n, "-", "-", e or "", "") for n, e in errors.items()]
    runs = {rival.name: Run(rival.call) for rival in group.rivals if rival.name in errors}
    timed = interleaved(runs, invocation.device, group.effort)
    base = timed.get(group.against)
    # The time is of whole calls; so is the memory that they take at their peak.
    measured = [r for r in group.rivals if isinstance(timed.get(r.name), Timing) and group.memory]
    memory = {rival.name: memory_facts(group, rival, invocation.device) for rival in measured}
    rows: list[tuple[object, ...]] = []
    for name, timing in timed.items():
        if not isinstance(timing, Timing):
            print(f"{group.name}: {name} failed: {timing!r}"[:300], flush=True)
            continue
        ratio = timing.ms / base.ms if isinstance(base, Timing) else None
        shape = [*group.inputs[0].shape[:3], group.inputs[1].shape[2], group.inputs[0].shape[3]]
        line = {"case": group.name, "shape": shape, "impl": name, **group.facts, "ms": timing.ms}
        line |= memory.get(name, {}) | {"host_us": round(timing.host_us, 1), "spread": timing.spread}
        line |= {"against": group.against, "ratio": ratio, "error": errors[name]}
        invocation.write(line)
        error = errors[name]
        rows.append((
            group.name, group.facts.get("density", ""), name, f"{timing.ms:.3f}", f"{ratio:.3f}" if ratio else "-",
            f"{error:.4f}" if error is not None else "", f"{line['on_top']:.1%}" if line.get("on_top") else "",
        ))  # fmt: skip
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--densities", type=float, nargs="+", default=DENSITIES)
    parser.add_argument("--small", action="store_true", help="a tiny size, for the CPU and Triton's interpreter")
    parser.add_argument("--no-flex", dest="flex", action="store_false", help="leave FlexAttention out")
    parser.add_argument("--repeats", type=int, default=9, help="of each row; 3 of the banded ones")
    parser.add_argument("--check-only", action="store_true", help="check, and so compile, but time nothing")
    parser.add_argument("--commit", default=None, help="recorded where this is no git checkout")
    parser.add_argument("--out", type=Path, default=RESULTS / "sparse.jsonl")
    options = parser.parse_args(arguments)
    unknown = [part for part in options.parts.split(",") if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; accepted: {', '.join(PARTS)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    invocation = Invocation(device, options.out, options.commit or commit_here())
    print(f"run {invocation.run}: {invocation.facts()}", flush=True)
    rows, began = [], time.monotonic()
    with torch.no_grad():
        for part in options.parts.split(","):
            for group in PARTS[part](options, device, torch.bfloat16 if device.type == "cuda" else torch.float16):
                rows += run_group(group, invocation, options.check_only)
                columns = ("case", "density", "impl", "ms", "ratio", "error", "on top")
                print(table(columns, rows[-len(group.rivals) :]), flush=True)
                print(f"{time.monotonic() - began:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
