"""Sweep launch configurations of the portable kernel on this GPU: what kernels/int8_attention/configs.py is set from.

For each head_dim and configuration: check against float64 on some heads and rows, then the median time of the kernel
alone (quantised inputs) without mask, with a fade, and with the LSE, and of quantisation. torch's default SDPA is timed
in the same run. Usage: python bench/bench_configs.py [--head-dims 64 128 256] [--out FILE.jsonl]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys

import torch
import torch.nn.functional as F
import triton
from records import the_gpu

from sdpa_router.kernels.int8_attention.configs import Config
from sdpa_router.kernels.int8_attention.forward import attention
from sdpa_router.kernels.int8_attention.quantize import quantize

SHAPES = {128: (56, 4096, 33600), 64: (24, 8192, 8192), 256: (16, 8192, 8192)}
TILES = {
    64: [(64, 128, 4), (128, 128, 8), (128, 64, 4), (128, 64, 8)],
    128: [(64, 128, 4), (128, 128, 8), (128, 64, 4), (128, 64, 8), (64, 64, 4)],
    256: [(64, 64, 4), (128, 64, 8), (64, 128, 8), (64, 32, 4)],
}


def configs(head_dim: int) -> list[Config]:
    return [
        Config(*tile, stages, tma)
        for tile, (stages, tma) in itertools.product(TILES[head_dim], ((2, True), (3, True), (2, False)))
    ]


def median_ms(run) -> float:
    return triton.testing.do_bench(run, warmup=15, rep=90, return_mode="median")


def relative_error(out, query, key, value, bias) -> float:
    """rms error of two heads and 64 query rows against float64."""
    rows = torch.linspace(0, query.shape[2] - 1, 64, device=query.device).long()
    q, k, v = query[:, :2, rows].double(), key[:, :2].double(), value[:, :2].double()
    s = q @ k.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if bias is not None:
        s = s + bias.double()
    ref = torch.softmax(s, -1) @ v
    return ((out[:, :2, rows].double() - ref).pow(2).mean() / ref.pow(2).mean()).sqrt().item()


def sweep(head_dim: int, out_file) -> None:
    heads, q_len, kv_len = SHAPES[head_dim]
    query, key, value = (
        torch.randn(1, heads, n, head_dim, device="cuda", dtype=torch.bfloat16) for n in (q_len, kv_len, kv_len)
    )
    fade = torch.linspace(0, math.log(1e-4), kv_len, device="cuda").view(1, 1, 1, -1)
    flops = 4 * heads * q_len * kv_len * head_dim
    torch_ms = median_ms(lambda: F.scaled_dot_product_attention(query, key, value))
    print(f"head_dim {head_dim}: torch {torch_ms:.3f} ms, {flops / torch_ms / 1e9:.0f} TFLOPS", flush=True)
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[:3], device="cuda")
    scale = 1 / math.sqrt(head_dim)
    for config in configs(head_dim):
        row = {"head_dim": head_dim, "config": config, "torch_ms": torch_ms, "device": torch.cuda.get_device_name()}
        try:
            for name, bias, wanted in (("none", None, None), ("fade", fade, None), ("lse", None, lse)):
                quantized = quantize(query, key, bias, scale, config, lse=wanted is not None)

                def run(quantized=quantized, wanted=wanted, config=config):
                    attention(quantized, value, config, is_causal=False, out=out, lse=wanted)

                out.fill_(math.nan)
                run()
                row[f"{name}_error"] = relative_error(out, query, key, value, bias)
                if not row[f"{name}_error"] < 0.0125:
                    raise RuntimeError(f"error {row[f'{name}_error']:.4f} without mask kind {name}")
                row[f"{name}_ms"] = median_ms(run)
            row["quantize_ms"] = median_ms(lambda config=config: quantize(query, key, None, scale, config, lse=False))
        except Exception as error:  # a configuration that does not fit the chip is a row, not the end of the sweep
            print(f"{tuple(config)}: {type(error).__name__} {str(error)[:90]}", flush=True)
            continue
        times = " ".join(f"{n} {row[f'{n}_ms']:.3f}" for n in ("none", "fade", "lse", "quantize"))
        print(
            f"{tuple(config)}: {flops / row['none_ms'] / 1e9:.0f} TFLOPS, {times} ms, error {row['none_error']:.4f} "
            f"{row['fade_error']:.4f}",
            flush=True,
        )
        if out_file:
            out_file.write(json.dumps(row) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 64, 256], choices=list(SHAPES))
    parser.add_argument("--out", type=argparse.FileType("a"), help="append lines there")
    arguments = parser.parse_args()
    the_gpu(parser)
    torch.manual_seed(0)
    for head_dim in arguments.head_dims:
        sweep(head_dim, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
