"""A query straight from an int8 linear layer, against the layer in 16 bits and then our quantiser.

For each layer, interleaved in one process and captured in CUDA graphs whose inputs change from call to call: the layer
in bf16 and our quantiser; the layer in int8 with a 16-bit output (its rows are given in int8) and our quantiser;
int8_linear_qk()'s kernel, on the same int8 rows; what making these rows costs; the bf16 layer alone. Each layer is
checked first: no value may be further than half an int8 step from the exact integer result. A first run with
--check-only compiles everything, so that no time limit of the timed one goes to the compiler.

Usage: python bench/bench_linear_qk.py [--cases all] [--check-only] [--out FILE.jsonl]
On a CPU, with TRITON_INTERPRET=1: --cases linear-smoke
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_quantise import in_turn
from records import RESULTS, Invocation, chosen, commit_here, table
from timing import Effort, interleaved

from sdpa_router.kernels.int8_attention import linear
from sdpa_router.kernels.int8_attention.bias import LOG2E
from sdpa_router.kernels.int8_attention.configs import config_of
from sdpa_router.kernels.int8_attention.quantize import QuantizedQuery, quantize_query

_L2 = 50 * 2**20  # bytes; graphs go round at least three times as many
EFFORT = Effort(60.0, 5, 15)
MOST_STEPS = 0.51


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


@dataclass(frozen=True)
class Problem:
    """One layer's weights, and inputs enough for a graph: each (16-bit rows, int8 rows with their scales)."""

    layer: Layer
    weight: torch.Tensor
    weight_scale: torch.Tensor
    inputs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    @property
    def scale(self) -> float:
        return float(self.layer.head_dim**-0.5)

    def of(self, given: Any) -> linear.Layer:
        """What the kernels take."""
        return linear.Layer(given[1], given[2], self.weight, self.weight_scale, None, self.layer.heads)


def make(layer: Layer, device: torch.device, copies: int) -> Problem:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    weight = torch.randn(layer.heads * layer.head_dim, layer.channels, device=device) / layer.channels**0.5
    scale = weight.abs().amax(1) / 127
    inputs = []
    for _ in range(copies):
        x = torch.randn(layer.batch, layer.length, layer.channels, device=device).to(dtype)
        inputs.append((x, *linear.quantize_rows(x)))
    return Problem(layer, (weight / scale[:, None]).round().to(torch.int8), scale, inputs)


def steps_off(problem: Problem, made: QuantizedQuery) -> float:
    """Largest distance of the first 64 rows from the exact result, in int8 steps."""
    _, x8, x_scale = problem.inputs[0]
    layer, some = problem.layer, slice(0, 64)
    exact = x8[:, some].double() @ problem.weight.double().T
    exact = exact * x_scale[:, some, None].double() * problem.weight_scale.double()
    exact = exact.unflatten(2, (layer.heads, -1)).transpose(1, 2)
    step = made.query_scale[:, :, some, None].double() / (problem.scale * LOG2E)
    got = made.query[:, :, some, : layer.head_dim].double() * step
    return float(((got - exact).abs() / step.clamp(min=1e-30)).max())


def measure(layer: Layer, invocation: Invocation, check_only: bool) -> dict[str, Any]:
    """The row of a layer; with check_only everything is checked, compiled and run once, and nothing is timed."""
    device = invocation.device
    wanted = -(-3 * _L2 // (3 * layer.batch * layer.length * layer.channels))
    problem = make(layer, device, max(2, wanted) if device.type == "cuda" and not check_only else 1)
    inputs, scale = problem.inputs, problem.scale
    x = inputs[0][0]
    config = config_of(*[x.new_empty((1, 1, 1, layer.head_dim))] * 2)
    weight = (problem.weight * problem.weight_scale[:, None]).to(x.dtype)

    def then_quantise(y: torch.Tensor) -> object:
        return quantize_query(y.unflatten(2, (layer.heads, -1)).transpose(1, 2), scale, config)

    steps = steps_off(problem, linear.linear_query(problem.of(inputs[0]), scale))
    if not steps < MOST_STEPS:
        raise RuntimeError(f"{layer.name}: {steps:.3f} steps from the exact result")
    row: dict[str, Any] = {"case": layer.name, "source": layer.source, "steps": steps}
    row["shape"] = [layer.batch, layer.length, layer.channels, layer.heads, layer.head_dim]
    runs = {
        "bf16": in_turn(lambda g: then_quantise(torch.nn.functional.linear(g[0], weight)), inputs),
        "int8_16bit": in_turn(lambda g: then_quantise(linear.int8_linear(problem.of(g), x.dtype)), inputs),
        "direct": in_turn(lambda g: linear.linear_query(problem.of(g), scale), inputs),
        "rows": in_turn(lambda g: linear.quantize_rows(g[0]), inputs),
        "gemm_bf16": in_turn(lambda g: torch.nn.functional.linear(g[0], weight), inputs),
    }
    if check_only:
        return row
    for name, timing in interleaved(runs, device, EFFORT).items():
        if isinstance(timing, Exception):
            raise timing
        row[f"{name}_us"] = round(timing.ms * 1e3, 2)
    return invocation.write(row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="all", help=f"of {', '.join(LAYERS)}; all: all but the smoke one")
    parser.add_argument("--check-only", action="store_true", help="check, and so compile, but time nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "quantise.jsonl")
    parser.add_argument("--commit", default=None)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    invocation = Invocation(device, arguments.out, arguments.commit or commit_here())
    names = (
        [n for n in LAYERS if "smoke" not in n] if arguments.cases == "all" else chosen(parser, arguments.cases, LAYERS)
    )
    rows, failed = [], 0
    for name in names:
        try:
            rows.append(measure(LAYERS[name], invocation, arguments.check_only))
        except (RuntimeError, KeyError) as error:  # a layer that fails is named, and the others go on
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            failed += 1
            continue
        print(*(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    columns = ("bf16", "int8_16bit", "direct", "rows", "gemm_bf16")
    shown = [(r["case"], f"{r['steps']:.3f}", *(r.get(f"{n}_us", "-") for n in columns)) for r in rows]
    print(table(("layer", "steps", *(f"{n} us" for n in columns)), shown))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
