"""Time the quantisation of query and key in our kernel's call: what kernels/int8_attention/quantize.py is set from.

Every design is checked (its int8 values times their scales against the rotated float32 values) and then timed as the
whole of quantize(), captured in a CUDA graph, so that the host does not count; designs take turns. Bytes are those that
must be moved: one read of query and key, one write of their int8 copies and scales. Key and query of the default shape
are ten times the L2 cache. Usage: python bench/bench_quantise_stage.py [--shape 56,4096,33600,128] [--out FILE.jsonl]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable

import torch

from sdpa_router.kernels.int8_attention import quantize as stage
from sdpa_router.kernels.int8_attention.configs import HOPPER_GLUON, Config, padded_head_dim
from sdpa_router.kernels.int8_attention.quantize import Tiling, quantize

CALLS, ROUNDS = 5, 7


def tilings() -> list[Tiling]:
    """The designs to compare."""
    designs = [(128, steps, 4, stages, {}) for steps, stages in itertools.product((4, 8, 16), (1, 2, 3))]
    capped = [(128, steps, 4, stages, {"maxnreg": 168}) for steps, stages in itertools.product((1, 4, 16), (1, 2))]
    capped += [(128, steps, 8, stages, {"maxnreg": 128}) for steps, stages in itertools.product((4, 16), (1, 2))]
    return [Tiling(*design) for design in (*designs, *capped)]


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
        scale = scale[:, None, :, None].expand(-1, config.block_n // 8, -1, 2)
    scale = scale.reshape(-1, 1, *([] if config.gluon else [1])).flatten().repeat_interleave(1)
    per_key = scale if config.gluon else scale.repeat_interleave(config.block_n)
    k8 = made.key[0, -1].float() * per_key.reshape(-1, 1)
    k8 = k8[: len(k)]
    return ((q8 - q).norm() / q.norm()).item(), ((k8 - k).norm() / k.norm()).item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="56,4096,33600,128", help="heads, queries, keys, head_dim")
    parser.add_argument("--part", default="0/1", help="a part of the designs, as 1/4")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--out", type=argparse.FileType("a"))
    arguments = parser.parse_args()
    heads, q_len, kv_len, head_dim = map(int, arguments.shape.split(","))
    torch.manual_seed(0)
    query, key = (torch.randn(1, heads, n, head_dim, device="cuda", dtype=torch.bfloat16) for n in (q_len, kv_len))
    fade = torch.linspace(0, -9, kv_len, device="cuda").view(1, 1, 1, -1)
    config = HOPPER_GLUON[padded_head_dim(head_dim)]
    least = (query.numel() + key.numel()) * 3
    graphs: dict[tuple[str, str], torch.cuda.CUDAGraph] = {}
    part, parts = map(int, arguments.part.split("/"))
    for tiling in tilings()[part::parts]:
        stage.TILINGS = (tiling, tiling)
        try:
            q_error, k_error = errors(query, key, config, False)
        except Exception as error:  # a design that does not fit the chip is a line, not the end
            print(tuple(tiling), type(error).__name__, str(error)[:80], flush=True)
            continue
        if not (q_error < 0.012 and k_error < 0.012):
            print(tuple(tiling), f"wrong: {q_error:.4f} {k_error:.4f}", flush=True)
            continue
        for name, mask, lse in (("none", None, False), ("fade", fade, False), ("lse", None, True)):
            if name != "none" and tiling[1:4] != (8, 4, 2):
                continue
            call = lambda mask=mask, lse=lse: quantize(query, key, mask, 0.1, config, lse=lse)  # noqa: E731
            if arguments.compile_only:
                call()
            else:
                graphs[repr(tuple(tiling)), name] = graph_of(call)
    times: dict[tuple[str, str], list[float]] = {design: [] for design in graphs}
    for _ in range(ROUNDS):
        for design, graph in graphs.items():
            times[design].append(timed(graph))
    for (tiling, name), found in sorted(times.items(), key=lambda item: statistics.median(item[1])):
        ms = statistics.median(found[1:])
        row = {"tiling": tiling, "mask": name, "ms": ms, "tb_s": least / ms / 1e9, "shape": arguments.shape}
        print(f"{tiling} {name}: {ms:.4f} ms, {row['tb_s']:.2f} TB/s of the bytes that must move", flush=True)
        if arguments.out:
            arguments.out.write(json.dumps({**row, "device": torch.cuda.get_device_name()}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
