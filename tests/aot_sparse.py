"""Compile every sparse kernel variant for one target without a GPU and print what it holds, as JSON lines.

Run as a program, in a process of its own: `python aot_sparse.py sm_90`. TRITON_INTERPRET must be off there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from aot_compile import compile_variant, facts, integers, target_of

from sdpa_router.kernels.int8_attention.configs import padded_head_dim
from sdpa_router.kernels.sparse_attention import forward, key_bias, list_kernels, lists, summary, window_bias
from sdpa_router.kernels.sparse_attention.configs import portable_config

Variant = tuple[str, object, dict, dict, dict]
# Each head_dim, dtype and flag at least once.
ATTENTION = (
    (64, "bf16", ()),
    (128, "bf16", ()),
    (128, "bf16", ("HAS_BIAS", "HAS_LSE", "TAIL")),
    (128, "fp16", ("HAS_BIAS", "HAS_TABLE", "HAS_LSE")),
    (128, "bf16", ("HAS_MASK", "TAIL")),
    (96, "bf16", ("HAS_MASK", "IS_BOOL", "HAS_LSE")),
    (256, "bf16", ("HAS_BIAS", "HAS_LSE", "TAIL")),
)
FLAGS = ("HAS_BIAS", "HAS_TABLE", "HAS_MASK", "IS_BOOL", "HAS_LSE", "TAIL")


def attention_variants(arch: int | str) -> Iterator[Variant]:
    for head_dim, dtype, flags in ATTENTION:
        config = portable_config(arch, head_dim, "HAS_MASK" in flags)
        types = dict.fromkeys("Q_SCALE K_SCALE BIAS ANCHOR LSE_TERM LSE OFFSETS".split(), "*fp32")
        types |= dict.fromkeys("TILES COUNTS BIAS_ROWS BLOCKS".split(), "*i32")
        types |= {"Q8": "*i8", "K8": "*i8", "V": f"*{dtype}", "OUT": f"*{dtype}"}
        types["MASK"] = "*u8" if "IS_BOOL" in flags else f"*{dtype}"
        types |= integers(
            "M N NP heads group width step_b step_h table_rows anchors s_vb s_vh s_vn s_ob s_oh s_om s_lb s_lh"
        )
        types |= integers("s_lm s_bias_b s_bias_h s_mb s_mh s_mq s_mk")
        constants = dict.fromkeys(FLAGS, False) | dict.fromkeys(flags, True)
        constants |= {"D": head_dim, "DP": padded_head_dim(head_dim), "TILE": 64, "UPCAST": False}
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
        yield " ".join(("attention", f"D{head_dim}", dtype, *flags)), forward._attention, types, constants, options


def list_variants(arch: int | str) -> Iterator[Variant]:
    types = dict.fromkeys("LOW HIGH FLOOR TOP OFFSETS LEAST ANCHOR".split(), "*fp32") | {"KEEP": "*u8"}
    types |= dict.fromkeys(("TILES", "COUNTS"), "*i32") | integers("nq nk heads width s_b s_h s_q s_k s_tb s_th")
    pairs = [("pairs", list_kernels._make_pairs)] if arch == 90 else []  # for the Hopper kernel alone
    for name, kernel in [("lists", list_kernels._make_lists), *pairs]:
        for from_mask, has_top in ((False, False), (False, True), (True, False)):
            constants = {"FROM_MASK": from_mask, "HAS_TOP": has_top, "BLOCK": lists.BLOCK}
            yield f"{name} {from_mask} {has_top}", kernel, types, constants, {"num_warps": 4}
    yield from bias_variants()
    for kind in ("*u8", "*bf16", "*fp32"):
        types = dict.fromkeys(("LOW", "HIGH", "PEAK"), "*fp32") | {"MASK": kind, "SEEN": "*u8"}
        types |= integers("M N nk heads chunk s_b s_h s_q s_k")
        constants = {"IS_BOOL": kind == "*u8", "TILE": 64, "WIDE": summary._WIDE}
        yield f"summary {kind}", summary._summarise, types, constants, {"num_warps": 8}


def bias_variants() -> Iterator[Variant]:
    floats = dict.fromkeys("TABLE TOP ANCHOR KEPT NORM FADE".split(), "*fp32")
    types = floats | {"MASK": "*bf16", "KEEP": "*u8", "ROW_OF": "*i32"}
    types |= integers("N nq nk heads kv_heads rows anchors table_rows lists s_b s_h s_n s_q s_k s_tb s_th")
    tiles = {"TILE": 64, "TILES": key_bias._TILES}
    yield "tile bias", key_bias._tile_bias, types, tiles | {"HAS_MASK": True, "IS_BOOL": False}, {"num_warps": 4}
    for has_top in (False, True):
        constants = {"HAS_TOP": has_top, "TILE": 64}
        yield f"kept keys {has_top}", key_bias._kept_keys, types, constants, {"num_warps": 4}
    yield "unseen", key_bias._forget_unseen, types, {"TILE": 64, "BLOCK": 256}, {"num_warps": 2}
    constants = tiles | {"IS_BOOL": False, "PAIRED": True}
    yield "window bias", window_bias._window_bias, types, constants, {"num_warps": 4}
    constants = tiles | {"LOWEST": -11818.0}
    yield "kept in windows", window_bias._kept_in_windows, types, constants, {"num_warps": 4}


def main() -> None:
    target, arch = target_of(sys.argv[1])
    for name, *parts in (*attention_variants(arch), *list_variants(arch)):
        print(json.dumps(facts(name, compile_variant(*parts, target), target)), flush=True)


if __name__ == "__main__":
    main()
