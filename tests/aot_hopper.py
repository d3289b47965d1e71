"""Compile the Hopper kernel without a GPU and print what its machine code holds, as JSON lines.

Run as a program, in a process of its own, with TRITON_INTERPRET off: `python aot_hopper.py`.
"""

from __future__ import annotations

import json
import re

import triton
from aot_compile import cuda_facts, integers
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from sdpa_router.kernels.int8_attention import hopper
from sdpa_router.kernels.int8_attention.configs import Config, hopper_config

POINTERS = "Q_SCALE K_NORM ANCHOR LSE_TERM V_SCALE LSE".split()
FLAGS = ("HAS_BIAS", "HAS_LSE", "CAUSAL", "TAIL", "HIGH")
BITS = {"i8": 8, "fp32": 32, "bf16": 16, "fp16": 16, "fp8e4nv": 8}
# Each head_dim, dtype of the value and flag at least once: a compilation takes up to ten seconds.
VARIANTS = (
    (64, "bf16", ()),
    (64, "bf16", ("HAS_LSE", "CAUSAL")),
    (96, "fp16", ("TAIL",)),
    (128, "bf16", ()),
    (128, "bf16", ("HAS_LSE",)),
    (128, "bf16", ("HAS_BIAS", "HAS_LSE")),
    (128, "bf16", ("HIGH",)),
    (128, "fp8e4nv", ("HAS_BIAS", "TAIL")),
    (128, "fp8e4nv", ()),
    (96, "fp8e4nv", ("HAS_LSE",)),
    (256, "bf16", ("HAS_BIAS",)),
)


def variant(head_dim: int, dtype: str, flags: tuple[str, ...], config: Config) -> tuple[dict, dict]:
    """Types of the kernel's arguments, and its constants."""
    kinds = {"q_desc": "i8", "k_desc": "i8", "v_desc": dtype, "rest_desc": dtype, "scale_desc": "fp32"}
    kinds["bias_desc"] = "fp32"
    blocks = hopper.blocks(config, head_dim, dtype == "fp8e4nv", "HIGH" in flags)
    types = {n: f"tensordesc<{t}{blocks[n]},{hopper._shared(blocks[n], BITS[t])!r}>" for n, t in kinds.items()}
    types |= dict.fromkeys(POINTERS, "*fp32") | {"LIVE": "*i32", "limit": "fp32"}
    types["OUT"] = "*bf16" if dtype == "fp8e4nv" else f"*{dtype}"
    types |= integers("M N k_tiles heads group s_ob s_oh s_om s_lb s_lh s_lm s_bias_b s_bias_h")
    chosen = {name.lower(): name in flags for name in FLAGS}
    constants = {"T": hopper.traits(config, head_dim, fp8=dtype == "fp8e4nv", **chosen)}
    return types, constants


def build(types: dict, constants: dict):
    kernel = hopper._attention
    signature = {n: "constexpr" if n in constants else types[n] for n in kernel.arg_names}
    aligned = [n for n in kernel.arg_names if n in types and (types[n][0] == "*" or n == "s_om")]
    attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = GluonASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def loops(sass: str) -> list[list[str]]:
    """Bodies of the loops over key tiles, shortest first: both kinds of matrix product and exponentials."""
    code = [(int(a, 16), t) for a, t in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?) ;", sass)]
    found = []
    for address, text in code:
        jump = re.search(r"\bBRA\b.* 0x([0-9a-f]+)$", text)
        if jump and int(jump[1], 16) < address:
            body = [t for a, t in code if int(jump[1], 16) <= a <= address]
            if {"IGMMA", "MUFU.EX2"} <= set(re.findall(r"IGMMA|MUFU\.EX2", " ".join(body))):
                found.append(body)
    return sorted(found, key=len)


def under_product(body: list[str]) -> float:
    """Part of the exponentials between the start of P @ V and the wait for it; 0 if ptxas serialises the products.

    It would wait for each of them.
    """
    if 2 * sum("DEPBAR.LE gsb0" in text for text in body) > sum("GMMA" in text for text in body):
        return 0.0
    inside, under, total = False, 0, 0
    for text in body:
        if re.match(r"[HQ]GMMA", text):
            inside = True
        if "DEPBAR.LE gsb0, 0x0" in text:
            inside = False
        if "MUFU.EX2" in text:
            total += 1
            under += inside
    return under / total


def overwritten(body: list[str]) -> list[str]:
    """What writes to a register that a product in flight reads its weights from."""
    weights, found, inside = set(), [], False
    for text in body:
        product = re.match(r"[HQ]GMMA\S* R\d+, R(\d+),", text)
        if product:
            weights |= {int(product[1]) + i for i in range(4)}
            inside = True
        if "DEPBAR.LE gsb0, 0x0" in text:
            inside = False
        target = re.match(r"(?:@!?U?P\d+ )?(?!ST|RED|[IHQ]GMMA)[A-Z]\S* (?:P\w+, )?R(\d+),", text)
        if inside and target and int(target[1]) in weights:
            found.append(text)
    return found


def moves_behind_the_wait(body: list[str]) -> int:
    """Registers that scores start from which are written once keys are there, where the products wait for them."""
    wait = next(i for i, text in enumerate(body) if "TRYWAIT" in text)
    there = next(i for i, text in enumerate(body) if i > wait and re.search(r"\bBRA\b", text))
    start = next(i for i, text in enumerate(body) if text.startswith("IGMMA"))
    return sum("0x4b400000" in text for text in body[there:start])


def facts(compiled, consumers: int) -> dict[str, object]:
    sass, spills = cuda_facts(compiled.asm["cubin"])
    bodies = loops(sass)
    return {
        "triton": triton.__version__,
        "spills": spills,
        "shared": compiled.metadata.shared,
        "instructions": sorted(set(re.findall(r"\b(IGMMA|HGMMA|QGMMA|UTMALDG|USETMAXREG)\b", sass))),
        "under_product": min(under_product(body) for body in bodies[:consumers]),
        "overwritten": [text for body in bodies[: 2 * consumers] for text in overwritten(body)],
        "behind_wait": max(moves_behind_the_wait(body) for body in bodies[: 2 * consumers]),
        "spills_in_loop": max(len(re.findall(r"\b(?:LDL|STL)\b", " ".join(body))) for body in bodies[:consumers]),
        "bounded": len(bodies[0]),
        "online": len(bodies[consumers]),
    }


def main() -> None:
    for head_dim, dtype, flags in VARIANTS:
        config = hopper_config(head_dim, dtype == "fp8e4nv")
        types, constants = variant(head_dim, dtype, flags, config)
        name = " ".join((f"D{head_dim}", dtype, *flags))
        print(json.dumps({"variant": name} | facts(build(types, constants), constants["T"].CONSUMERS)), flush=True)


if __name__ == "__main__":
    main()
