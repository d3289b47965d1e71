"""What quantising query and key costs of an attention call, and what fusing norm, RoPE and quantisation saves.

For each shape, interleaved in one process and captured in CUDA graphs: a copy of the bytes that the fused kernels move;
RMSNorm and RoPE by torch.compile, then our quantiser ("apart"); the fused kernels; the attention alone; and norm to
output both ways. The inputs of a graph change from call to call, so that they come from memory and not from the cache.
Bytes are counted from the shapes: 16-bit reads and writes of query and key, and the int8 ones. The linear cases compare
a linear layer in bf16 or in int8 with a 16-bit output, then our quantiser, with int8_linear_qk(). Each shape is checked
against float64 first, and nothing is timed that misses its budget.

Usage: python bench/bench_quantise.py [--cases all] [--out FILE.jsonl]; on a CPU, with TRITON_INTERPRET=1: --cases smoke
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from records import RESULTS, Invocation, commit_here, table
from timing import Effort, Run, captured, interleaved

from sdpa_router.kernels.int8_attention import linear
from sdpa_router.kernels.int8_attention.configs import Config, config_of
from sdpa_router.kernels.int8_attention.forward import attention
from sdpa_router.kernels.int8_attention.fused import Norm, Rows, rms_rope_quantize_key, rms_rope_quantize_query
from sdpa_router.kernels.int8_attention.fused_reference import rms_rope_reference
from sdpa_router.kernels.int8_attention.quantize import Quantized, quantize, quantize_query
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
        sample = 2 * self.batch * self.heads * min(512, self.kv_len) * self.head_dim
        return {"16bit": 6 * self.elements + sample, "int8": self.elements}

    def bytes_fused(self) -> dict[str, int]:
        """One read of 16 bits, of keys a second one under a norm across heads; 128 keys a head are sampled."""
        again = 2 * self.keys if self.across else 0
        sample = 2 * self.batch * self.heads * min(128, self.kv_len) * self.head_dim
        return {"16bit": 2 * self.elements + again + sample, "int8": self.elements}


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
    """The fused kernels, both sides."""
    query, key = problem.rows()
    shape = {"rotary_dim": problem.case.head_dim, "interleaved": True}
    k, rotation = rms_rope_quantize_key(key, None, config, problem.norm, group=1, **shape)
    q = rms_rope_quantize_query(query, problem.case.head_dim**-0.5, config, problem.norm, rotation, **shape)
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


def measure(case: Case, invocation: Invocation) -> dict[str, Any]:
    device = invocation.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    copies = max(1, -(-3 * _L2 // (2 * case.elements))) if device.type == "cuda" else 1
    problems = [make(case, device, dtype) for _ in range(copies)]
    first = problems[0]
    config = config_of(first.query, first.value)
    error = check(first, config)
    row: dict[str, Any] = {"case": case.name, "source": case.source, "error": error, "bytes_apart": case.bytes_apart()}
    row |= {
        "shape": [case.batch, case.heads, case.q_len, case.kv_len, case.head_dim],
        "bytes_fused": case.bytes_fused(),
    }
    if not error < BUDGET:
        raise RuntimeError(f"{case.name}: error {error:.4f} over {BUDGET}")
    compiler: Any = torch.compile
    prepare = compiler(norm_and_rope, dynamic=False) if device.type == "cuda" else norm_and_rope
    scale = case.head_dim**-0.5

    def normed(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
        if problem.weights is None or problem.tables is None:
            return problem.query, problem.key
        sides = (problem.query, problem.key)
        query, key = (
            prepare(x, w, *t, case.across) for x, w, t in zip(sides, problem.weights, problem.tables, strict=True)
        )
        return query, key

    def apart(problem: Problem) -> Quantized:
        return quantize(*normed(problem), None, scale, config, lse=False)

    ready = fused(first, config)
    moved = sum(case.bytes_fused().values())
    buffers = [torch.empty(2, moved // 2, dtype=torch.int8, device=device) for _ in range(copies)]
    runs = {
        "copy": in_turn(lambda b: b[0].copy_(b[1]), buffers),
        "norm_rope": in_turn(normed, problems),
        "quantize": in_turn(lambda p: quantize(p.query, p.key, None, scale, config, lse=False), problems),
        "apart": in_turn(apart, problems),
        "fused": in_turn(lambda p: fused(p, config), problems),
        "attention": in_turn(lambda p: attend(ready, p, config), problems),
        "whole_apart": in_turn(lambda p: attend(apart(p), p, config), problems),
        "whole_fused": in_turn(lambda p: attend(fused(p, config), p, config), problems),
    }
    for name, timing in interleaved(runs, device, EFFORT).items():
        if isinstance(timing, Exception):
            raise timing
        row[f"{name}_us"] = round(timing.ms * 1e3, 2)
        row[f"{name}_spread"] = round(timing.spread, 4)
    row["share"] = row["quantize_us"] / (row["quantize_us"] + row["attention_us"])
    row["of_copy"] = row["copy_us"] / row["fused_us"]
    row["faster"] = row["apart_us"] / row["fused_us"]
    row["whole_faster"] = row["whole_apart_us"] / row["whole_fused_us"]
    return invocation.write(row)


@dataclass(frozen=True)
class Layer:
    """A linear layer to a query or a key: [batch, length, channels] -> heads x head_dim."""

    name: str
    batch: int
    length: int
    channels: int
    heads: int
    head_dim: int
    source: str


LAYERS = {
    layer.name: layer
    for layer in (
        Layer("linear-sdxl-640", 2, 4096, 640, 10, 64, "SDXL cross-attention query, 64x64 latents"),
        Layer("linear-sdxl-1280", 2, 1024, 1280, 20, 64, "SDXL cross-attention query, 32x32 latents"),
        Layer("linear-2048", 1, 4096, 2048, 16, 128, "16 heads x 128 at 4096 tokens"),
        Layer("linear-5120", 1, 8192, 5120, 40, 128, "40 heads x 128 at 8192 tokens"),
        Layer("linear-smoke", 1, 70, 96, 2, 64, "a tiny layer for Triton's interpreter"),
    )
}


def measure_layer(layer: Layer, invocation: Invocation) -> dict[str, Any]:
    """A query by int8_linear_qk()'s kernel, against a 16-bit layer and our quantiser; int8 rows are given to both."""
    device = invocation.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    out_channels = layer.heads * layer.head_dim
    weight = torch.randn(out_channels, layer.channels, device=device) / layer.channels**0.5
    w_scale = weight.abs().amax(1) / 127
    w8, w16 = (weight / w_scale[:, None]).round().to(torch.int8), weight.to(dtype)
    copies = max(2, -(-3 * _L2 // (3 * layer.batch * layer.length * layer.channels))) if device.type == "cuda" else 1
    inputs = []
    for _ in range(copies):
        x = torch.randn(layer.batch, layer.length, layer.channels, device=device).to(dtype)
        inputs.append((x, *linear.quantize_rows(x)))
    scale = layer.head_dim**-0.5
    x, x8, x_scale = inputs[0]
    config = config_of(*[x.new_empty((1, 1, 1, layer.head_dim))] * 2)

    def direct(given: Any) -> object:
        return linear.linear_query(given[1], given[2], w8, w_scale, None, scale, layer.heads)

    def then_quantise(y: torch.Tensor) -> object:
        return quantize_query(y.unflatten(2, (layer.heads, -1)).transpose(1, 2), scale, config)

    made = linear.linear_query(x8, x_scale, w8, w_scale, None, scale, layer.heads)
    some = slice(0, 64)
    exact = (x8[:, some].double() @ w8.double().T) * x_scale[:, some, None].double() * w_scale.double()
    exact = exact.unflatten(2, (layer.heads, -1)).transpose(1, 2)
    step = made.query_scale[:, :, some, None].double() / (scale * 1.4426950408889634)
    steps = (
        ((made.query[:, :, some, : layer.head_dim].double() * step - exact).abs() / step.clamp(min=1e-30)).max().item()
    )
    if not steps < 0.51:
        raise RuntimeError(f"{layer.name}: {steps:.3f} steps from the exact result")
    runs = {
        "bf16": in_turn(lambda g: then_quantise(torch.nn.functional.linear(g[0], w16)), inputs),
        "int8_16bit": in_turn(
            lambda g: then_quantise(linear.int8_linear(g[1], g[2], w8, w_scale, None, layer.heads, dtype)), inputs
        ),
        "direct": in_turn(direct, inputs),
        "rows": in_turn(lambda g: linear.quantize_rows(g[0]), inputs),
        "gemm_bf16": in_turn(lambda g: torch.nn.functional.linear(g[0], w16), inputs),
    }
    row: dict[str, Any] = {"case": layer.name, "source": layer.source, "steps": steps}
    row["shape"] = [layer.batch, layer.length, layer.channels, layer.heads, layer.head_dim]
    for name, timing in interleaved(runs, device, EFFORT).items():
        if isinstance(timing, Exception):
            raise timing
        row[f"{name}_us"] = round(timing.ms * 1e3, 2)
    return invocation.write(row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", default="all", help=f"of {', '.join([*CASES, *LAYERS])}; all: all but the smoke ones"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "quantise.jsonl")
    parser.add_argument("--commit", default=None)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    invocation = Invocation(device, arguments.out, arguments.commit or commit_here())
    known = {**CASES, **LAYERS}
    names = [n for n in known if "smoke" not in n] if arguments.cases == "all" else arguments.cases.split(",")
    rows, failed = [], 0
    for name in names:
        try:
            case = known[name]
            row = measure(case, invocation) if isinstance(case, Case) else measure_layer(case, invocation)
        except (RuntimeError, KeyError) as error:  # a case that fails is named, and the others go on
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            failed += 1
            continue
        rows.append(row)
        keys = ("of_copy", "faster", "whole_faster", "share", "error", "steps")
        facts = [f"{key} {value}" for key, value in row.items() if key.endswith("_us")]
        print(name, *facts, *(f"{key} {row[key]:.3f}" for key in keys if key in row), flush=True)
    shown = [
        (r["case"], *(r.get(f"{n}_us", "-") for n in ("copy", "apart", "fused", "bf16", "int8_16bit", "direct")))
        for r in rows
    ]
    print(table(("case", "copy us", "apart us", "fused us", "bf16 us", "int8 us", "direct us"), shown))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
