"""Compile the fused quantisation kernels for one target without a GPU and print what the machine code holds.

Run as a program, in a process of its own: `python aot_fused.py sm_90`. TRITON_INTERPRET must be off there.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator

import aot_compile
from aot_compile import HEAD_DIMS, cuda_facts, facts, integers, target_of

from sdpa_router.kernels.int8_attention import fused, fused_kernels, fused_norm, fused_shift, fused_tiles
from sdpa_router.kernels.int8_attention.configs import config_for, hopper_config, padded_head_dim
from sdpa_router.kernels.int8_attention.limits import triton_overlaps

aot_compile.STRIDES += "s_l s_b2 s_h2 s_l2 s_cb s_ch s_cl".split()
POINTERS = dict.fromkeys("W W2 COS SIN RSTD SHIFT SHIFT16 BIAS SCALE NORMS LSE_TERM SQUARES".split(), "*fp32")
POINTERS |= dict.fromkeys("X X2 K K2 W W2".split(), "*bf16") | {"Y": "*i8", "SHIFT16": "*fp16"}
SCALARS = dict.fromkeys("eps factor lse_factor".split(), "fp32") | integers(
    "L N NP split heads each group bias_rows s_b s_h s_l s_b2 s_h2 s_l2 s_cb s_ch s_cl s_cj s_bias_b s_bias_h"
)
Variant = tuple[str, object, dict, dict, dict]


def modes(head_dim: int) -> Iterator[tuple[str, dict]]:
    """What models do: norm a head or across heads, pairs interleaved or halves, one segment or two, a key mask."""
    flags = {
        "R": head_dim, "HALVES": False, "NORM": True, "ACROSS": False, "HAS_WEIGHT": True, "TWO": False,
        "HAS_BIAS": False, "RSTD": None, "s_cj": 1,
    }  # fmt: skip
    yield "head interleaved", flags
    if head_dim == 128:
        yield "across", flags | {"ACROSS": True}
        yield "halves masked", flags | {"HALVES": True, "HAS_BIAS": True}
        yield "two segments", flags | {"TWO": True}
        yield "doubled angles", flags | {"s_cj": 2}
        yield "rope alone", flags | {"NORM": False, "HAS_WEIGHT": False}
        yield "norm alone", flags | {"R": 0}


def variants(arch: int | str) -> Iterator[Variant]:
    types, pdl = POINTERS | SCALARS, {"PDL": arch == 90 and triton_overlaps()}
    for head_dim in HEAD_DIMS:
        padded = padded_head_dim(head_dim)
        shared = {"D": head_dim, "DP": padded, "B": min(padded, 128), "UPCAST": False, "PER_HEAD": False} | pdl
        config = hopper_config(head_dim) if arch == 90 else config_for(arch, head_dim)
        for (mode, flags), is_key in itertools.product(modes(head_dim), (False, True)):
            across = flags["ACROSS"]
            normed = flags["NORM"] and not across
            tile = (
                fused_tiles.key_tile(padded, config, normed=normed)
                if is_key
                else fused_tiles.query_tile(padded, config, lse=False, normed=normed)
            )
            if is_key and flags["TWO"]:
                tile = tile._replace(held=False, ahead=False)
            constants = shared | flags | {
                "ROWS": tile.rows, "TOGETHER": tile.together, 
                "WARPS": tile.num_warps, "HELD": tile.held, "WORDS": True, "WEIGHT_WORDS": True,
                "STAGES": tile.num_stages, "AHEAD": tile.ahead,
                "IS_KEY": is_key,
                "SCALES": 4 if config.gluon and is_key else 1, "HAS_NORM": config.gluon and is_key,
                "HAS_LSE": False, "FP16": tile.fp16, "EVEN": not flags["HAS_BIAS"],
                "HAS_BIAS": flags["HAS_BIAS"] and is_key,
            }  # fmt: skip
            if across and is_key:
                del constants["RSTD"]
            side = "key" if is_key else "query"
            yield (
                f"{side} D{head_dim} {mode}",
                fused_kernels._rms_rope_quantize,
                types,
                constants,
                {"num_warps": tile.num_warps} | ({"maxnreg": tile.max_registers} if tile.max_registers else {}),
            )
        for mode, flags in modes(head_dim):
            tile = fused_tiles.key_tile(padded, config, normed=flags["NORM"] and not flags["ACROSS"])
            constants = shared | flags | {"ROWS": fused.SAMPLE, "SEARCHED": fused.SEARCHED, "FP16": tile.fp16}
            if flags["ACROSS"]:
                del constants["RSTD"]
            yield f"shift D{head_dim} {mode}", fused_shift._rope_key_shift, types, constants, {"num_warps": 8}
        constants = {
            "D": head_dim,
            "DP": padded,
            "ROWS": fused._RMS_ROWS,
            "TOGETHER": fused._RMS_HEADS,
            "TWO": True,
        } | pdl
        yield f"row rms D{head_dim}", fused_norm._row_rms, types, constants, {"num_warps": 4}
    constants = pdl | {"D": 128, "ROWS": fused._FINISHED_ROWS, "TOGETHER": fused._FINISHED_HEADS}
    constants |= {"HAS_LSE": True, "BEFORE": True}
    yield "finish scales", fused_norm._finish_scales, types, constants, {"num_warps": 4}


def traffic(compiled: object) -> dict[str, object]:
    """Of a CUDA binary: barriers, loads and stores of shared memory, and how launches overlap.

    lets_next, waits: how often a program lets the next kernel begin, and waits for the one before.  loads_before: loads
    from memory that are under way when it first waits.
    """
    sass = cuda_facts(compiled.asm["cubin"])[0] if "cubin" in compiled.asm else ""
    found = re.findall(r"\b(BAR|STS|LDS|LDSM|PREEXIT|ACQBULK|LDG)\b", sass)
    before = found[: found.index("ACQBULK")] if "ACQBULK" in found else []
    return {
        "barriers": found.count("BAR"), "exchanges": sum(word in ("STS", "LDS", "LDSM") for word in found),
        "lets_next": found.count("PREEXIT"), "waits": found.count("ACQBULK"), "loads_before": before.count("LDG"),
    }  # fmt: skip


def main() -> None:
    target, arch = target_of(sys.argv[1])
    wanted = sys.argv[2] if len(sys.argv) > 2 else ""
    for name, kernel, types, constants, options in variants(arch):
        if wanted in name:
            known = {k: v for k, v in constants.items() if k in kernel.arg_names}
            compiled = aot_compile.compile_variant(kernel, types, known, options, target)
            print(json.dumps(facts(name, compiled, target) | traffic(compiled)), flush=True)


if __name__ == "__main__":
    main()
