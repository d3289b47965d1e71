"""Time the quantisation of query and key in our kernel's call: what kernels/int8_attention/quantize.py is set from.

Every design is checked (its int8 values times their scales against the rotated float32 values) and then timed as the
whole of quantize(), captured in a CUDA graph, so that the host does not count; designs take turns, medians are kept.
`kernels_us` are the parts by torch's profiler. Bytes are those that must be moved: one read of query and key, one write
of their int8 copies. Key and query of the default shape are ten times the L2 cache.
Usage: python bench/bench_quantise_stage.py [--shape 56,4096,33600,128] [--sweep]
[--tilings "128,13,4,2;64,16,4,2"] [--check-only] [--out FILE.jsonl]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from records import RESULTS, Invocation, commit_here, the_gpu

from sdpa_router.kernels.int8_attention import quantize as stage
from sdpa_router.kernels.int8_attention.configs import Config, hopper_config, padded_head_dim
from sdpa_router.kernels.int8_attention.quantize import HOPPER_TILINGS, Tiling, quantize

CALLS, ROUNDS = 5, 7
BUDGET = 0.012  # a step of 127 under a peak of 3.5 is off by 0.8 % of the rms


def tilings(head_dim: int, sweep: bool, others: str) -> list[Tiling]:
    """The design that is used, those of `others`, and with `sweep` its neighbours."""
    padded = padded_head_dim(head_dim)
    kept = HOPPER_TILINGS[(padded > 64) + (padded > 128)]
    if not sweep:
        return [kept, *(Tiling(*map(int, text.split(","))) for text in others.split(";") if text)]
    designs = {kept}
    for rows, steps, warps, stages in (
        (1, 2, 1, 1),
        (1, 1, 2, 1),
        (1, 0.5, 1, 1),
        (1, 1, 1, 0.5),
        (1, 1, 1, 1.5),
        (0.5, 1, 1, 1),
    ):
        factors = (rows, steps, warps, stages)
        designs.add(Tiling(*(max(1, int(number * factor)) for number, factor in zip(kept[:4], factors, strict=True))))
    return sorted(designs)


def graph_of(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def timed(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds a call in one replay."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / CALLS


def rotated(x: torch.Tensor) -> torch.Tensor:
    """float32 [L, D] times the rotation of the kernels; the sign of a row is bit 9 of 40503 times its number."""
    width = padded_head_dim(x.shape[-1])
    block = min(width, 128)
    i = torch.arange(block, device=x.device)
    bits = i[:, None] & i[None, :]
    odd = sum(bits >> n & 1 for n in range(7)) + (i * 40503 >> 9)[:, None]
    matrix = 1.0 - 2.0 * (odd & 1)
    padded = torch.nn.functional.pad(x.float(), (0, width - x.shape[-1]))
    return (padded.unflatten(-1, (-1, block)).double() @ matrix.double()).flatten(-2).float()


def errors(query: torch.Tensor, key: torch.Tensor, config: Config, lse: bool) -> tuple[float, float]:
    """Relative rms error of the last query and key head, dequantised."""
    made = quantize(query, key, None, 1.0, config, lse=lse)
    shift = stage.quantize_key(key, None, config, group=1).shift
    q = rotated(query[0, -1])
    q8 = made.query[0, -1].float() * (made.query_scale[0, -1] * min(q.shape[-1], 128) / stage.LOG2E)[:, None]
    k = rotated(key[0, -1]) - shift[0, -1]
    scale = made.key_scale[0, -1]
    if config.gluon:
        scale = scale[:, None, :, None].expand(-1, config.block_n // 8, -1, 2).flatten()
    else:
        scale = scale.repeat_interleave(config.block_n)
    k8 = (made.key[0, -1].float() * scale[:, None])[: len(k)]
    return ((q8 - q).norm() / q.norm()).item(), ((k8 - k).norm() / k.norm()).item()


def kernel_times(call: Callable[[], object]) -> dict[str, float]:
    """Microseconds of each kernel of a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    return {event.key: round(event.device_time, 2) for event in profile.key_averages()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="56,4096,33600,128", help="heads, queries, keys, head_dim")
    parser.add_argument("--tilings", default="", help="other designs: rows,steps,warps,stages, separated by ;")
    parser.add_argument("--sweep", action="store_true", help="also the neighbours of the design that is used")
    parser.add_argument("--check-only", action="store_true", help="check, and so compile, but time nothing")
    parser.add_argument("--commit", default=None, help="recorded where this is no git checkout")
    parser.add_argument("--out", type=Path, default=RESULTS / "quantise_stage.jsonl")
    options = parser.parse_args()
    heads, q_len, kv_len, head_dim = map(int, options.shape.split(","))
    invocation = Invocation(the_gpu(parser), options.out, options.commit or commit_here())
    torch.manual_seed(0)
    query, key = (torch.randn(1, heads, n, head_dim, device="cuda", dtype=torch.bfloat16) for n in (q_len, kv_len))
    fade = torch.linspace(0, -9, kv_len, device="cuda").view(1, 1, 1, -1)
    masks = (("none", None, False), ("fade", fade, False), ("lse", None, True))
    config = hopper_config(head_dim)
    graphs: dict[tuple[Tiling, str], torch.cuda.CUDAGraph] = {}
    parts: dict[tuple[Tiling, str], dict[str, float]] = {}
    found: dict[tuple[Tiling, str], tuple[float, float]] = {}
    for tiling in tilings(head_dim, options.sweep, options.tilings):
        stage.HOPPER_TILINGS = (tiling, tiling, tiling)
        for name, mask, lse in masks:
            call = lambda mask=mask, lse=lse: quantize(query, key, mask, 0.1, config, lse=lse)  # noqa: E731
            try:
                found[tiling, name] = errors(query, key, config, lse)
                if max(found[tiling, name]) > BUDGET:
                    raise RuntimeError(f"errors {found[tiling, name]} over {BUDGET}")
                call()
                if not options.check_only:
                    graphs[tiling, name] = graph_of(call)
                    parts[tiling, name] = kernel_times(call)
            except Exception as error:  # a design that does not fit the chip is a line, not the end
                print(tuple(tiling), name, type(error).__name__, str(error)[:80], flush=True)
    times: dict[tuple[Tiling, str], list[float]] = {design: [] for design in graphs}
    for _ in range(ROUNDS):
        for design, graph in graphs.items():
            times[design].append(timed(graph))
    for (tiling, name), taken in times.items():
        ms = statistics.median(taken[1:])
        tb_s = (query.numel() + key.numel()) * 3 / ms / 1e9
        print(f"{tuple(tiling)} {name}: {ms:.4f} ms, {tb_s:.2f} TB/s, {parts[tiling, name]}", flush=True)
        invocation.write(
            {
                "case": "quantise",
                "shape": [heads, q_len, kv_len, head_dim],
                "tiling": tiling._asdict(),
                "mask": name,
                "ms": round(ms, 5),
                "tb_s": round(tb_s, 3),
                "errors": [round(error, 5) for error in found[tiling, name]],
                "kernels_us": parts[tiling, name],
            }
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
