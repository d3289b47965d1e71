"""Compile the sparse Hopper kernel without a GPU and print what its machine code holds, as JSON lines.

Run as a program, in a process of its own, with TRITON_INTERPRET off: `python aot_sparse_hopper.py`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator

import triton
from aot_compile import cuda_facts, integers
from aot_hopper import loops, under_product
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from sdpa_router.kernels.int8_attention.configs import padded_head_dim
from sdpa_router.kernels.int8_attention.hopper import _shared
from sdpa_router.kernels.sparse_attention import hopper
from sdpa_router.kernels.sparse_attention.configs import HOPPER

POINTERS = "Q_SCALE K_NORM ANCHOR LSE_TERM LSE OFFSETS FLOOR".split()
# Each head_dim, dtype and flag at least once: a compilation takes up to twenty seconds.
VARIANTS = (
    (128, "bf16", ()),
    (64, "bf16", ("HAS_BIAS", "HAS_FLOOR", "HAS_LSE")),
    (128, "bf16", ("HAS_BIAS", "HAS_LSE")),
    (128, "fp16", ("HAS_BIAS", "HAS_TABLE", "HAS_LSE")),
    (96, "bf16", ("HAS_MASK", "HAS_FLOOR")),
    (128, "bf16", ("HAS_MASK", "HAS_FLOOR", "WORDS")),
)


hopper.BROUGHT_MASKS = ("fp16", "bf16")  # which is compiled whether or not the table has it


def variants() -> Iterator[tuple[str, dict, dict]]:
    for head_dim, dtype, flags in VARIANTS:
        padded = padded_head_dim(head_dim)
        blocks = {"q_desc": ("i8", [1, 64, padded]), "k_desc": ("i8", [1, 64, padded])}
        blocks |= {"v_desc": (dtype, [1, 1, 64, 64]), "scale_desc": ("fp32", [32]), "bias_desc": ("fp32", [64])}
        kind = "none" if "HAS_MASK" not in flags else "bool" if "WORDS" in flags else dtype
        blocks["mask_desc"] = (dtype, [1, 1, 64, 64]) if kind in hopper.BROUGHT_MASKS else ("fp32", [64])
        bits = {"i8": 8, "fp32": 32, dtype: 16}
        types = {n: f"tensordesc<{t}{b},{_shared(b, bits[t])!r}>" for n, (t, b) in blocks.items()}
        types |= dict.fromkeys(POINTERS, "*fp32") | {"OUT": f"*{dtype}", "limit": "fp32"}
        types["MASK"] = "*i16" if "WORDS" in flags else "*fp32"
        types |= dict.fromkeys("TILES COUNTS BIAS_ROWS BLOCKS".split(), "*i32")
        types |= integers(
            "M N k_tiles heads group width step_b step_h table_rows anchors s_ob s_oh s_om s_lb s_lh s_lm"
        )
        types |= integers("s_bias_b s_bias_h s_mb s_mh s_mq")
        chosen = {flag.lower(): flag in flags for flag in ("HAS_BIAS", "HAS_TABLE", "HAS_FLOOR", "HAS_LSE")}
        traits = hopper.traits(HOPPER, head_dim, kind, **chosen)
        yield " ".join((f"D{head_dim}", dtype, *flags)), types, {"T": traits}


def main() -> None:
    kernel = hopper._attention
    for name, types, constants in variants():
        if len(sys.argv) > 1 and sys.argv[1] not in name:
            continue
        signature = {n: "constexpr" if n in constants else types[n] for n in kernel.arg_names}
        aligned = [n for n in kernel.arg_names if n in types and (types[n][0] == "*" or n in ("s_om", "s_mq"))]
        attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
        source = GluonASTSource(kernel, signature, constexprs=constants, attrs=attributes)
        options = {"num_warps": 4, "enable_fp_fusion": True}
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        sass, spills = cuda_facts(compiled.asm["cubin"])
        bodies = loops(sass)
        row = {"variant": name, "triton": triton.__version__, "spills": spills, "shared": compiled.metadata.shared}
        row["instructions"] = sorted(set(re.findall(r"\b(IGMMA|HGMMA|UTMALDG|USETMAXREG)\b", sass)))
        row["under_product"] = min(under_product(body) for body in bodies[:2])
        row["spills_in_loop"] = sum(bool(re.search(r"\b(LDL|STL)\b", text)) for text in bodies[1])
        row["loops"] = [len(body) for body in bodies]
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
