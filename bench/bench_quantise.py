"""What quantising query and key costs of an attention call, and what fusing norm, RoPE and quantisation saves.

For each shape, interleaved in one process and captured in CUDA graphs: a copy of the bytes that the fused kernels move;
RMSNorm and RoPE by torch.compile, then our quantiser ("apart"); the fused kernels; the attention alone; and norm to
output both ways. The inputs of a graph change from call to call, so that they come from memory and not from the cache.
Bytes are counted from the shapes: 16-bit reads and writes of query and key, and the int8 ones. Each shape is checked
against float64 first, and nothing is timed that misses its budget. bench_linear_qk.py has the linear layers. A first
run with --check-only compiles everything, so that no time limit of the timed one goes to compilers.

Usage: python bench/bench_quantise.py [--cases all] [--tiles all] [--check-only] [--out FILE.jsonl]
On a CPU, with TRITON_INTERPRET=1: --cases smoke
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_quantise_stage import kernel_times
from records import RESULTS, Invocation, chosen, commit_here, table
from timing import Effort, Run, captured, interleaved

from sdpa_router.kernels.int8_attention import fused_tiles as launcher
from sdpa_router.kernels.int8_attention.configs import Config, config_of
from sdpa_router.kernels.int8_attention.forward import attention
from sdpa_router.kernels.int8_attention.fused import (
    Norm,
    Rope,
    Rows,
    rms_rope_quantize_key,
    rms_rope_quantize_query,
)
from sdpa_router.kernels.int8_attention.fused_reference import rms_rope_reference
from sdpa_router.kernels.int8_attention.fused_tiles import Tile
from sdpa_router.kernels.int8_attention.launch import forget
from sdpa_router.kernels.int8_attention.quantize import Quantized, join, quantize, quantize_pair
from sdpa_router.testing import relative_error, sdpa_oracle

BUDGET = 0.0135
_L2 = 50 * 2**20  # bytes; graphs go round at least three times as many
EFFORT = Effort(60.0, 5, 15)


@dataclass(frozen=True)
class Case:
    """One self-attention before norm and RoPE; across: one norm over all heads of a token."""

    name: str
    batch: int
    heads: int
    q_len: int
    kv_len: int
    head_dim: int
    source: str
    across: bool = False
    rope: bool = True

    @property
    def elements(self) -> int:
        """Of query and key together."""
        return self.batch * self.heads * (self.q_len + self.kv_len) * self.head_dim

    @property
    def keys(self) -> int:
        return self.batch * self.heads * self.kv_len * self.head_dim

    def bytes_apart(self) -> dict[str, int]:
        """Norm and RoPE read and write 16 bits, the quantiser reads them, and 512 keys a head for its shift."""
        return {"16bit": (6 if self.rope else 2) * self.elements + self._sample(512), "int8": self.elements}

    def bytes_fused(self) -> dict[str, int]:
        """One read of 16 bits, of keys a second one under a norm across heads; 64 keys a head are sampled."""
        again = 2 * self.keys if self.across else 0
        return {"16bit": 2 * self.elements + again + self._sample(64 if self.rope else 512), "int8": self.elements}

    def _sample(self, keys: int) -> int:
        return 2 * self.batch * self.heads * min(keys, self.kv_len) * self.head_dim


CASES = {
    case.name: case
    for case in (
        *(Case(f"anima-{n}", 1, 16, n, n, 128, "Anima, 16 heads x 128") for n in (4096, 6144, 9216)),
        *(Case(f"sdxl-{n}", 2, 10, n, n, 64, "SDXL, no norm or RoPE", rope=False) for n in (4096, 6144, 9216)),
        Case("flux", 1, 24, 4608, 4608, 128, "FLUX.1, 1024x1024"),
        Case("wan-14b", 1, 40, 32760, 32760, 128, "Wan 2.1 14B, 480p, norm across heads", across=True),
        Case("h3-window", 1, 56, 4096, 33600, 128, "one window of a long video"),
        Case("smoke", 1, 2, 70, 96, 64, "a tiny call for Triton's interpreter"),
    )
}  # fmt: skip


# Launches of the fused kernels to be measured beside the one that is used: changes of the tables in fused_tiles.py.
TILES: dict[str, dict[str, Any]] = {
    "default": {},
    "float32": {"_QUERIES_FP16": None, "_KEYS_FP16": None},
    "keys not ahead": {"_KEYS_FP16": Tile(128, 1, 8, 128, beside=2)},
    "queries not ahead": {"_QUERIES_FP16": Tile(8, 8, 4, 128, beside=4)},
    "start 0": {"_START": 0},
    "start 8": {"_START": 8},
}
PER_TILE = ("copy", "fused")


@contextmanager
def tiled(name: str) -> Iterator[None]:
    """Run with a changed table of launches."""
    changes = TILES[name]
    kept = {attribute: getattr(launcher, attribute) for attribute in changes}
    for attributes in (changes, kept):
        forget()
        for attribute, value in attributes.items():
            setattr(launcher, attribute, value)
        if attributes is changes:
            yield


@dataclass
class Problem:
    """One call: query, key and value [B, H, L, D] with heads inside the sequence, as projections give them."""

    case: Case
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    weights: tuple[torch.Tensor, torch.Tensor] | None
    tables: tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None

    @property
    def norm(self) -> Norm:
        return Norm(1e-6 if self.weights else None, self.case.across)

    def rows(self) -> tuple[Rows, Rows]:
        """Both sides for the kernels."""
        sides = []
        for index, x in enumerate((self.query, self.key)):
            weight = self.weights[index] if self.weights else None
            cos, sin = self.tables[index] if self.tables else (None, None)
            sides.append(Rows(x, weight, cos, sin))
        return sides[0], sides[1]


def make(case: Case, device: torch.device, dtype: torch.dtype) -> Problem:
    shapes = (case.q_len, case.kv_len, case.kv_len)
    tensors = [
        torch.randn(case.batch, n, case.heads, case.head_dim, device=device).to(dtype).transpose(1, 2) for n in shapes
    ]
    weights = tables = None
    if case.rope:
        size = case.heads * case.head_dim if case.across else case.head_dim
        weights = tuple((torch.rand(size, device=device) + 0.5).to(dtype) for _ in range(2))
        turns = [6.3 * torch.rand(1, 1, n, case.head_dim // 2, device=device) for n in shapes[:2]]
        tables = tuple((turn.cos(), turn.sin()) for turn in turns)
    return Problem(case, *tensors, weights, tables)  # type: ignore[arg-type]


def norm_and_rope(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, across: bool
) -> torch.Tensor:
    """What models do, for torch.compile: both steps in float32, rounded after each."""
    y = x.float()
    y = y * (y.pow(2).mean((1, 3) if across else 3, keepdim=True) + 1e-6).rsqrt()
    scaled = y * (weight.float().view(1, x.shape[1], 1, -1) if across else weight.float())
    a, b = scaled.to(x.dtype).float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return turned.to(x.dtype)


def fused(problem: Problem, config: Config) -> Quantized:
    """The fused kernels, both sides; without norm and RoPE what rms_rope_quantize() does then."""
    query, key = problem.rows()
    if problem.weights is None:
        return join(*quantize_pair(query.x, key.x, None, problem.case.head_dim**-0.5, config, lse=False))
    rope = Rope(problem.case.head_dim, interleaved=True)
    k, rotation = rms_rope_quantize_key(key, None, config, problem.norm, rope, group=1)
    q = rms_rope_quantize_query(query, problem.case.head_dim**-0.5, config, problem.norm, rope, rotation)
    return Quantized(q.query, q.query_scale, k.key, k.key_scale, k.bias, k.anchor, None, k.key_norm, k.live, k.kv_len)


def check(problem: Problem, config: Config) -> float:
    """Error of some heads and rows of the fused quantisation and attention against float64."""
    out = attend(fused(problem, config), problem, config)
    rows = torch.linspace(0, problem.case.q_len - 1, 48, device=out.device).long()
    normed = []
    for side, pick in zip(problem.rows(), (rows, slice(None)), strict=True):
        cos, sin = (None, None) if side.cos is None or side.sin is None else (side.cos, side.sin)
        x = side.x if problem.case.across else side.x[:, :2]
        eps = problem.norm.eps
        if problem.case.across and eps is not None:
            x = (side.x.float() * (side.x.float().pow(2).mean((1, 3), keepdim=True) + eps).rsqrt())[:, :2]
            eps = None
        weight = (
            None if side.weight is None else side.weight[: 2 * problem.case.head_dim].view(-1, problem.case.head_dim)
        )
        y = rms_rope_reference(x, None, None, None, interleaved=True, eps=eps)
        if weight is not None:
            y = y * (weight.double()[None, :, None] if problem.case.across else weight[0].double())
        y = rms_rope_reference(y, None, cos, sin, interleaved=True, eps=None)
        normed.append(y[:, :, pick])
    exact = sdpa_oracle(*normed, problem.value[:, :2].double())[0]
    return relative_error(out[:, :2, rows], exact)


def attend(quantized: Quantized, problem: Problem, config: Config) -> torch.Tensor:
    out = torch.empty_like(problem.query)
    attention(quantized, problem.value, config, is_causal=False, out=out, lse=None)
    return out


def in_turn(function: Callable[[Any], object], problems: list[Any]) -> Run:
    """A graph of one call for each of the problems, so that no call finds its inputs in the cache."""
    turns = itertools.cycle(problems)
    run = Run(lambda: function(next(turns)))
    return captured(run, len(problems)) if torch.cuda.is_available() else run


def runs_of(problems: list[Problem], config: Config) -> dict[str, Callable[[], Run]]:
    """What is timed, each made ready by calling it."""
    first = problems[0]
    scale = first.case.head_dim**-0.5
    compiler: Any = torch.compile
    on_gpu = first.query.is_cuda
    prepare = compiler(norm_and_rope, dynamic=False) if on_gpu else norm_and_rope

    def normed(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
        if problem.weights is None or problem.tables is None:
            return problem.query, problem.key
        sides = (problem.query, problem.key)
        query, key = (
            prepare(x, w, *t, first.case.across) for x, w, t in zip(sides, problem.weights, problem.tables, strict=True)
        )
        return query, key

    def apart(problem: Problem) -> Quantized:
        return quantize(*normed(problem), None, scale, config, lse=False)

    ready = fused(first, config)
    half = sum(first.case.bytes_fused().values()) // 2
    buffers = [torch.empty(2, half, dtype=torch.int8, device=first.query.device) for _ in problems]
    return {
        "copy": lambda: in_turn(lambda b: b[0].copy_(b[1]), buffers),
        "norm_rope": lambda: in_turn(normed, problems),
        "quantize": lambda: in_turn(lambda p: quantize(p.query, p.key, None, scale, config, lse=False), problems),
        "apart": lambda: in_turn(apart, problems),
        "fused": lambda: in_turn(lambda p: fused(p, config), problems),
        "attention": lambda: in_turn(lambda p: attend(ready, p, config), problems),
        "whole_apart": lambda: in_turn(lambda p: attend(apart(p), p, config), problems),
        "whole_fused": lambda: in_turn(lambda p: attend(fused(p, config), p, config), problems),
    }


def measure(case: Case, invocation: Invocation, tiles: str, check_only: bool) -> dict[str, Any]:
    """The row of a case; with check_only everything is checked, compiled and run once, and nothing is timed."""
    device = invocation.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    copies = max(1, -(-3 * _L2 // (2 * case.elements))) if device.type == "cuda" and not check_only else 1
    problems = [make(case, device, dtype) for _ in range(copies)]
    config = config_of(problems[0].query, problems[0].value)
    row: dict[str, Any] = {"case": case.name, "source": case.source, "tiles": tiles}
    row |= {"shape": [case.batch, case.heads, case.q_len, case.kv_len, case.head_dim]}
    row |= {"bytes_apart": case.bytes_apart(), "bytes_fused": case.bytes_fused(), "error": check(problems[0], config)}
    if not row["error"] < BUDGET:
        raise RuntimeError(f"{case.name}: error {row['error']:.4f} over {BUDGET}")
    runs = {
        name: ready() for name, ready in runs_of(problems, config).items() if tiles == "default" or name in PER_TILE
    }
    if check_only:
        return row
    if device.type == "cuda":
        turns = itertools.cycle(problems)
        row["kernels_us"] = kernel_times(lambda: fused(next(turns), config))
    for name, timing in interleaved(runs, device, EFFORT).items():
        if isinstance(timing, Exception):
            raise timing
        row[f"{name}_us"] = round(timing.ms * 1e3, 2)
        row[f"{name}_spread"] = round(timing.spread, 4)
    row["of_copy"] = row["copy_us"] / row["fused_us"]
    if tiles == "default":
        row["share"] = row["quantize_us"] / (row["quantize_us"] + row["attention_us"])
        row["faster"] = row["apart_us"] / row["fused_us"]
        row["whole_faster"] = row["whole_apart_us"] / row["whole_fused_us"]
    return invocation.write(row)


def _moved(counted: dict[str, int]) -> tuple[float, float]:
    """MiB of 16-bit query and key, read and written, and of their int8 copies."""
    return round(counted["16bit"] / 2**20, 1), round(counted["int8"] / 2**20, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="all", help=f"of {', '.join(CASES)}; all: all but smoke")
    parser.add_argument(
        "--tiles", default="default", help=f"of {'; '.join(TILES)}, with semicolons between; all: all of them"
    )
    parser.add_argument("--check-only", action="store_true", help="check, and so compile, but time nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "quantise.jsonl")
    parser.add_argument("--commit", default=None)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    invocation = Invocation(device, arguments.out, arguments.commit or commit_here())
    names = [n for n in CASES if n != "smoke"] if arguments.cases == "all" else chosen(parser, arguments.cases, CASES)
    tiles = list(TILES) if arguments.tiles == "all" else chosen(parser, arguments.tiles, TILES, ";")
    rows, failed = [], 0
    for name, tile in itertools.product(names, tiles):
        try:
            with tiled(tile):
                row = measure(CASES[name], invocation, tile, arguments.check_only)
        except (RuntimeError, KeyError) as error:  # a case that fails is named, and the others go on
            print(f"{name} {tile}: {type(error).__name__}: {error}", flush=True)
            failed += 1
            continue
        rows.append(row)
        keys = ("of_copy", "faster", "whole_faster", "share", "error")
        facts = [f"{key} {value}" for key, value in row.items() if key.endswith("_us")]
        print(name, tile, *facts, *(f"{key} {row[key]:.3f}" for key in keys if key in row), flush=True)
    shown = [(r["case"], r["tiles"], *(r.get(f"{n}_us", "-") for n in ("copy", "apart", "fused"))) for r in rows]
    print(table(("case", "tiles", "copy us", "apart us", "fused us"), shown))
    moved = [(r["case"], *_moved(r["bytes_apart"]), *_moved(r["bytes_fused"])) for r in rows if r["tiles"] == tiles[0]]
    titles = ("case", "apart: 16-bit MiB", "int8 MiB", "fused: 16-bit MiB", "int8 MiB")
    print(table(titles, moved))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
