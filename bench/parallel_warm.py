"""Compile what bench_parallel.py and the tests on several GPUs run, side by side, so that neither waits for it.

python bench/parallel_warm.py            # one process a variant, spread over the GPUs; times nothing
"""

from __future__ import annotations

import itertools
import subprocess
import sys

import torch

from sdpa_router import int8_attention, testing
from sdpa_router.distributed import tile, wire

# dtype and keys (whole key tiles, or not; long ones as in the benchmark), way, mask
VARIANTS = [
    *itertools.product((("float16", 360), ("float16", 384)), ("one", "one lse", "shards"), ("none", "causal")),
    *itertools.product((("float16", 360), ("bfloat16", 8200)), ("one", "one lse", "shards"), ("bias",)),
    *itertools.product((("bfloat16", 8200),), ("one", "shards"), ("none",)),
]


def compile_variant(kind: tuple[str, int], way: str, mask: str) -> None:
    """Make one small call of the kind."""
    dtype, keys = getattr(torch, kind[0]), kind[1]
    q, k, v = testing.gaussian(1, 4, keys, keys, 128, kv_heads=2, dtype=dtype, device="cuda")
    bias = torch.randn(1, 1, 1, keys, device="cuda") if mask == "bias" else None
    causal = mask == "causal"
    if way != "shards":
        lse = torch.empty(1, 4, keys, device="cuda") if "lse" in way else None
        int8_attention(q, k, v, bias, is_causal=causal, enable_gqa=True, lse=lse)
        return
    config = tile.config_for_shards(q)[0]
    for bits in wire.VALUE_BITS:
        spec = wire.Spec(1, 2, 128, dtype, config, None if bias is None else (1, 1), bits)
        shard = tile.quantize_shard(k, v, bias, None, spec, 2)
        layout = wire.layout(spec, keys)
        buffer = torch.empty(layout.size, dtype=torch.uint8, device="cuda")
        tile.pack(shard, layout, buffer)
        answer = tile.Answer(q, 2)
        for part in (shard, tile.unpack(buffer, layout, spec)):
            answer.add(tile.filling(tile.quantize_query(q, 0.1, config), part, config, causal))


def main() -> None:
    if len(sys.argv) > 1:
        number = int(sys.argv[1])
        torch.cuda.set_device(number % torch.cuda.device_count())
        compile_variant(*VARIANTS[number])
        torch.cuda.synchronize()
        return
    processes = [subprocess.Popen([sys.executable, __file__, str(number)]) for number in range(len(VARIANTS))]
    failed = [VARIANTS[number] for number, process in enumerate(processes) if process.wait()]
    print(
        f"compiled {len(VARIANTS) - len(failed)} of {len(VARIANTS)} variants"
        + (f"; failed: {failed}" if failed else "")
    )


if __name__ == "__main__":
    main()
