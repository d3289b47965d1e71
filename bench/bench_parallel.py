"""Sharded attention and sharded models beside one GPU and beside diffusers' native ring.

    torchrun --nproc_per_node 2 bench/bench_parallel.py            # NCCL on GPUs
    TRITON_INTERPRET=1 torchrun --nproc_per_node 2 bench/bench_parallel.py --tiny   # gloo on a CPU: runs, times nothing

Every rank draws the same whole inputs and takes its part. All ways of a case take turns; a time is the slowest rank's,
and the median over the repeats counts. A way whose answer misses its error budget is not timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import records
import torch
import torch.distributed as dist
from parallel_models import model_steps
from parallel_ranks import Bench, Way, diffusers_part, parallel_config

from sdpa_router import int8_attention, testing
from sdpa_router.distributed import ring, ring_attention, ulysses_attention
from sdpa_router.distributed.group import Facts, open_group

BUDGET = 0.0130  # relative error: 1.05 of what one process has at most
SDPA_BUDGET = 0.005


@dataclass(frozen=True)
class Shape:
    """A call before it is sharded; faded: with the key bias of the window of a long video."""

    name: str
    heads: int
    q_len: int
    kv_len: int
    head_dim: int
    faded: bool = False


SHAPES = (
    Shape("wan-65k", 40, 65520, 65520, 128),
    Shape("h3-window-66k", 56, 66000, 33600, 128, faded=True),
)
WARM = tuple(dataclasses.replace(shape, q_len=16384, kv_len=16384) for shape in SHAPES)  # compiles the same kernels
TINY = (Shape("wan-65k", 2, 120, 120, 32), Shape("h3-window-66k", 2, 70, 140, 32, faded=True))


class Sharded:
    """A shape's inputs, whole and this rank's, and the ways to attend to them."""

    def __init__(self, bench: Bench, shape: Shape) -> None:
        self.bench, self.shape = bench, shape
        dtype = torch.bfloat16 if bench.cuda else torch.float16
        sizes = (1, shape.heads, shape.q_len, shape.kv_len, shape.head_dim)
        self.whole = testing.gaussian(*sizes, dtype=dtype, device=bench.device, seed=11)
        self.bias = None
        if shape.faded:
            self.bias = testing.banded_window(device=bench.device).bias if shape.kv_len == 33600 else None
            self.bias = testing.fade_bias(shape.kv_len, device=bench.device) if self.bias is None else self.bias
            self.bias = self.bias.to(dtype).float()  # what torch is given, too
        self.q_cuts = [shape.q_len * i // bench.size for i in range(bench.size + 1)]
        self.k_cuts = [shape.kv_len * i // bench.size for i in range(bench.size + 1)]
        q, k, v = self.whole
        self.mine = [self.part(q, self.q_cuts), self.part(k, self.k_cuts), self.part(v, self.k_cuts)]
        self.my_bias = None if self.bias is None else self.part(self.bias, self.k_cuts, 3)

    def part(self, x: torch.Tensor, cuts: list[int], axis: int = 2) -> torch.Tensor:
        """This rank's part, in memory of its own."""
        return x.narrow(axis, cuts[self.bench.rank], cuts[self.bench.rank + 1] - cuts[self.bench.rank]).contiguous()

    def error(self, out: torch.Tensor, whole: bool = False) -> float:
        """Relative error against float64 on some heads and rows of this rank, the first and last row among them.

        whole: out holds the rows of all ranks.
        """
        start, end = self.q_cuts[self.bench.rank], self.q_cuts[self.bench.rank + 1]
        out = out[:, :, start:end] if whole else out
        rows = torch.linspace(0, out.shape[2] - 1, 192, device=out.device).long().unique()
        heads = sorted({0, self.shape.heads // 2, self.shape.heads - 1})
        q, k, v = (x[:, heads] for x in self.whole)
        ref = testing.sdpa_oracle(q[:, :, rows + start], k, v, self.bias)[0]
        return testing.relative_error(out[:, heads][:, :, rows], ref) if out.isfinite().all() else math.inf

    def ours(self) -> dict[str, Way]:
        """Our ways to attend to the shards."""
        mine, bias = self.mine, self.my_bias
        return {
            "ring": lambda: ring_attention(*mine, bias),
            "ring, 8-bit values": lambda: ring_attention(*mine, bias, value_bits=8),
            "ring, 16-bit values": lambda: ring_attention(*mine, bias, value_bits=16),
            "ulysses": lambda: ulysses_attention(*mine, bias, quantize=False),
            "ulysses, quantised": lambda: ulysses_attention(*mine, bias, quantize=True),
        }

    def natives(self) -> dict[str, Way]:
        """diffusers' own ring and Ulysses over torch's kernels, where there is no mask: its ring takes none."""
        dispatching = diffusers_part(".models.attention_dispatch")
        if dispatching is None or not self.bench.cuda or self.bias is not None:
            return {}
        mine = [x.transpose(1, 2).contiguous() for x in self.mine]  # as its models have them
        ways: dict[str, Way] = {}
        for name, degrees, backend in (
            ("diffusers ring, cuDNN", (self.bench.size, 1), "_native_cudnn"),
            ("diffusers ring, flash", (self.bench.size, 1), "_native_flash"),
            ("diffusers ulysses, cuDNN", (1, self.bench.size), "_native_cudnn"),
        ):
            config = parallel_config(self.bench, *degrees)
            ways[name] = lambda backend=backend, config=config: dispatching.dispatch_attention_fn(
                *mine, backend=backend, parallel_config=config
            ).transpose(1, 2)
        return ways

    def singles(self) -> dict[str, Way]:
        """One GPU with the whole call: ours, and torch's own."""
        q, k, v = self.whole
        sdpa = torch.nn.functional.scaled_dot_product_attention
        mask = None if self.bias is None else self.bias.to(q.dtype)
        return {
            "one GPU": lambda: int8_attention(q, k, v, self.bias),
            "torch on one GPU": lambda: sdpa(q, k, v, mask),
        }


def calls(bench: Bench, shape: Shape) -> None:
    """One GPU, ours and diffusers' ways on one shape."""
    sharded = Sharded(bench, shape)
    ways: dict[str, tuple[Way | None, bool]] = {}
    errors: dict[str, float] = {}
    groups = ((sharded.singles(), True), (sharded.ours(), False), (sharded.natives(), False))
    for group, single in groups:
        for name, way in group.items():
            if bench.ways and name not in ("one GPU", "ring", *bench.ways):
                continue
            budget = SDPA_BUDGET if "torch" in name or "diffusers" in name else BUDGET
            errors[name] = bench.worst(sharded.error(way(), single))
            if errors[name] <= budget or bench.tiny:
                ways[name] = (way, single)
            else:
                bench.write(case=shape.name, way=name, error=errors[name], ms=None, note="over its error budget")
    times = bench.times(ways)
    one, facts = times["one GPU"][0], facts_of(sharded)
    for name, (ms, spread) in times.items():
        bench.write(
            case=shape.name,
            shape=[1, shape.heads, shape.q_len, shape.kv_len, shape.head_dim],
            mask="window fade" if shape.faded else "none",
            way=name,
            ms=round(ms, 3),
            spread=round(spread, 4),
            speedup=round(one / ms, 3),
            error=round(errors[name], 5),
            hop_bytes=hop_bytes(sharded, name, facts),
        )
    overlap(bench, sharded, facts, times["ring"][0])
    overhead(bench, sharded)


def facts_of(sharded: Sharded) -> list[Facts]:
    """What the ranks would tell each other."""
    shape, size = sharded.shape, sharded.bench.size
    mask: dict[str, Any] = {} if sharded.bias is None else {"mask": "a floating mask", "mask_rows": (1, 1)}
    return [
        Facts(
            *("ring_attention", 1, shape.heads, shape.heads, shape.head_dim),
            value_bits=9,
            q_len=sharded.q_cuts[rank + 1] - sharded.q_cuts[rank],
            kv_len=sharded.k_cuts[rank + 1] - sharded.k_cuts[rank],
            **mask,
        )
        for rank in range(size)
    ]


def hop_bytes(sharded: Sharded, name: str, facts: list[Facts]) -> int | None:
    """Bytes that a rank of the ring sends in a hop; of diffusers' ring, that an all_gather brings from each rank."""
    if "ring" not in name:
        return None
    if "diffusers" in name:
        return 2 * sharded.mine[1].numel() * sharded.mine[1].element_size()
    bits = 8 if "8-bit" in name else 16 if "16-bit" in name else 9
    adjusted = [Facts(**{**one.__dict__, "value_bits": bits}) for one in facts]
    return ring.plan(sharded.mine[0], sharded.mine[2], sharded.bench.rank, adjusted).layouts[0].size


def overlap(bench: Bench, sharded: Sharded, facts: list[Facts], whole_ms: float) -> None:
    """The transfers alone, and how much of them lies under the ring's own kernels."""
    ranks = open_group(None, "ring_attention")
    link = ring.link_of(ranks)
    layouts = ring.plan(sharded.mine[0], sharded.mine[2], bench.rank, facts).layouts
    size, before = layouts[bench.rank].size, layouts[(bench.rank - 1) % bench.size].size
    buffers = torch.zeros(2, max(part.size for part in layouts), dtype=torch.uint8, device=bench.device)

    def transfer() -> torch.Tensor:
        for _ in range(bench.size - 1):
            link(buffers[0, :size], buffers[1, :before])()
        return buffers

    transfer()
    transfer_ms = bench.times({"transfer": (transfer, False)})["transfer"][0]
    spans = under_kernels(lambda: ring_attention(*sharded.mine, sharded.my_bias)) if bench.cuda else None
    hidden, sending_ms = spans or (math.nan, math.nan)
    bench.write(
        case=sharded.shape.name,
        way="ring, in parts",
        ms=round(whole_ms, 3),
        transfer_ms=round(transfer_ms, 3),
        sending_ms=round(bench.worst(sending_ms), 3) if bench.cuda else None,
        hidden=round(1 - bench.worst(1 - hidden), 4) if bench.cuda else None,
        link_gb_s=round((bench.size - 1) * size / transfer_ms / 1e6, 1),
        hop_bytes=size,
        hop_ratio=round(size / (2 * sharded.mine[1].numel() * sharded.mine[1].element_size()), 4),
    )


def under_kernels(call: Way) -> tuple[float, float] | None:
    """Profile three calls: the share of the send-and-receive kernels' time in which others ran, and their ms a call."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in seen.events()
        if event.device_type == DeviceType.CUDA and event.time_range.end > event.time_range.start
    ]
    sending = [(start, end) for name, start, end in spans if "SendRecv" in name]
    working = sorted((start, end) for name, start, end in spans if "nccl" not in name.lower())
    if not sending:
        return None
    covered = sum(_covered(start, end, working) for start, end in sending)
    total = sum(end - start for start, end in sending)
    return covered / total, total / 3 / 1e3


def _covered(start: float, end: float, spans: list[tuple[float, float]]) -> float:
    """How much of start to end lies in sorted spans."""
    covered, at = 0.0, start
    for a, b in spans:
        a, b = max(a, at), min(b, end)
        if b > a:
            covered, at = covered + b - a, b
    return covered


def overhead(bench: Bench, sharded: Sharded) -> None:
    """The ring's code on a group of one rank beside the plain call, on this rank's shard; what the slower rank has.

    One percent is less than the clock of a GPU wanders, so each call of the one is set beside the other's next to it,
    and the median of many such ratios counts. The GPU waits for each call: time on the host before a launch is in it.
    """
    mine, bias = sharded.mine, sharded.my_bias
    ones, ratios = bench.pairs(
        lambda: int8_attention(*mine, bias), lambda: ring_attention(*mine, bias, group=bench.alone), 6 * bench.repeats
    )
    low, median, high = statistics.quantiles(ratios, n=4)
    bench.write(
        case=sharded.shape.name,
        way="ring of one rank",
        ms=round(bench.worst(statistics.median(ones)), 4),
        overhead=round(bench.worst(median) - 1, 5),
        quartiles=round(bench.worst(high - low), 5),
        pairs=len(ratios),
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=records.RESULTS / "parallel.jsonl")
    parser.add_argument("--commit", help="what to record where git can't tell")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU: a dry run whose times mean nothing")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which nothing new begins")
    parser.add_argument("--warm", action="store_true", help="short sequences: fills the compile caches")
    parser.add_argument("--cases", default="", help="only those, separated by commas")
    parser.add_argument("--ways", default="", help="only those, separated by semicolons, and the call on one GPU")
    parser.add_argument("--only-overhead", action="store_true", help="of the group of one rank, nothing else")
    parser.add_argument("--skip-models", action="store_true")
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    bench = Bench(arguments)
    for shape in TINY if bench.tiny else WARM if arguments.warm else SHAPES:
        if not bench.late() and (not arguments.cases or shape.name in arguments.cases.split(",")):
            overhead(bench, Sharded(bench, shape)) if arguments.only_overhead else calls(bench, shape)
        if bench.cuda:
            torch.cuda.empty_cache()
    if not (arguments.skip_models or arguments.only_overhead) and not bench.late():
        model_steps(bench)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
