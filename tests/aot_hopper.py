"""Compile the Hopper kernel without a GPU and print what its machine code holds, as JSON lines.

Run as a program, in a process of its own, with TRITON_INTERPRET off: `python aot_hopper.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import triton
from aot_compile import cuda_facts, integers
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from sdpa_router.kernels.int8_attention import hopper
from sdpa_router.kernels.int8_attention.configs import HOPPER_GLUON, padded_head_dim

POINTERS = "Q_SCALE K_NORM ANCHOR LSE_TERM LSE".split()
# Each head_dim, dtype and flag at least once: a compilation takes up to ten seconds.
VARIANTS = (
    (64, "bf16", ("HAS_LSE", "CAUSAL")),
    (96, "fp16", ("TAIL",)),
    (128, "bf16", ("HAS_BIAS", "HAS_LSE")),
    (256, "bf16", ("HAS_BIAS",)),
)


def variants() -> Iterator[tuple[str, dict, dict]]:
    for head_dim, dtype, flags in VARIANTS:
        padded = padded_head_dim(head_dim)
        config = HOPPER_GLUON[padded]
        q, k, v = [1, 64, padded], [1, config.block_n, padded], [1, 1, config.block_n, padded]
        blocks = {"q_desc": ("i8", q), "k_desc": ("i8", k), "v_desc": (dtype, v), "scale_desc": ("fp32", [32])}
        blocks["bias_desc"] = ("fp32", [config.block_n])
        bits = {"i8": 8, "fp32": 32, dtype: 16}
        types = {n: f"tensordesc<{t}{b},{hopper._shared(b, bits[t])!r}>" for n, (t, b) in blocks.items()}
        types |= dict.fromkeys(POINTERS, "*fp32") | {"LIVE": "*i32", "OUT": f"*{dtype}", "limit": "fp32"}
        types |= integers("M N k_tiles heads group s_ob s_oh s_om s_lb s_lh s_lm s_bias_b s_bias_h")
        constants = dict.fromkeys(("HAS_BIAS", "HAS_LSE", "CAUSAL", "TAIL"), False) | dict.fromkeys(flags, True)
        constants |= {"BM": 64, "BN": config.block_n, "D": padded, "HEAD_DIM": head_dim, "STAGES": config.num_stages}
        yield " ".join((f"D{head_dim}", dtype, *flags)), types, constants


def loops(sass: str) -> list[list[str]]:
    """Bodies of the loops over key tiles, shortest first: both kinds of matrix product and exponentials."""
    code = [(int(a, 16), t) for a, t in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?) ;", sass)]
    found = []
    for address, text in code:
        jump = re.search(r"\bBRA\b.* 0x([0-9a-f]+)$", text)
        if jump and int(jump[1], 16) < address:
            body = [t for a, t in code if int(jump[1], 16) <= a <= address]
            if {"IGMMA", "HGMMA", "MUFU.EX2"} <= set(re.findall(r"IGMMA|HGMMA|MUFU\.EX2", " ".join(body))):
                found.append(body)
    return sorted(found, key=len)


def under_product(body: list[str]) -> float:
    """Part of the exponentials between the wait for the scores and the wait for P @ V; 0 if ptxas serialises them."""
    inside, under, total = False, 0, 0
    for text in body:
        if "DEPBAR.LE gsb0" in text:
            inside = text.endswith("0x1")
        if "MUFU.EX2" in text:
            total += 1
            under += inside
    return under / total


def main() -> None:
    kernel = hopper._attention
    for name, types, constants in variants():
        signature = {n: "constexpr" if n in constants else types[n] for n in kernel.arg_names}
        aligned = [n for n in kernel.arg_names if n in types and (types[n][0] == "*" or n == "s_om")]
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
        row["bounded"], row["online"] = len(bodies[0]), len(bodies[2])
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
