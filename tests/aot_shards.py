"""Compile the kernels of sharded attention for one target without a GPU, as aot_compile.py does the others."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import torch
from aot_compile import HEAD_DIMS, compile_variant, facts, integers, target_of

from sdpa_router.kernels.int8_attention import shards
from sdpa_router.kernels.int8_attention.configs import padded_head_dim


def shard_variants() -> Iterator[tuple[str, object, dict, dict, dict]]:
    """Kernels of sharded attention: the values' bits, the LSE term, the merge."""
    numbers = integers("L heads group s_b s_h s_l s_ob s_oh s_ol") | {"factor": "fp32"}
    for head_dim in HEAD_DIMS:
        shape = {"D": head_dim, "DP": padded_head_dim(head_dim), "ROWS": 32}
        wire = {"V": "*bf16", "CODE": "*i8", "LOW": "*u8", "SCALE": "*bf16", **numbers}
        term = {"Q": "*bf16", "SHIFT": "*fp32", "TERM": "*fp32", **numbers}
        merge = dict.fromkeys("A A_LSE X X_LSE LSE".split(), "*fp32") | {"OUT": "*bf16", **numbers}
        for kernel, more in ((shards._encode, {}), (shards._decode, {"LARGEST": torch.finfo(torch.bfloat16).max})):
            yield f"{kernel.__name__} D{head_dim}", kernel, wire, shape | {"NINTH": True} | more, {"num_warps": 4}
        constants = shape | {"B": min(shape["DP"], 128), "STEPS": 32}
        yield f"lse term D{head_dim}", shards._lse_term, term, constants, {"num_warps": 8}
        yield f"merge D{head_dim}", shards._merge, merge, shape, {"num_warps": 4}


def main() -> None:
    target, _ = target_of(sys.argv[1])
    for name, *parts in shard_variants():
        print(json.dumps(facts(name, compile_variant(*parts, target), target)), flush=True)


if __name__ == "__main__":
    main()
