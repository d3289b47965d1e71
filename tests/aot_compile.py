"""Compile every kernel variant for one target without a GPU and print what the machine code holds, as JSON lines.

Run as a program, in a process of its own: `python aot_compile.py sm_90`. TRITON_INTERPRET must be off there.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sdpa_router.kernels.int8_attention import forward, quantize
from sdpa_router.kernels.int8_attention.configs import HOPPER_GLUON, config_for, padded_head_dim

TOOLS = os.path.join(os.path.dirname(triton.backends.nvidia.__file__), "bin")
STRIDES = "s_vb s_vh s_vn s_ob s_oh s_om s_b s_h s_l s_n".split()
HEAD_DIMS = (64, 96, 128, 256)  # 96 is padded to 128


def target_of(name: str) -> tuple[GPUTarget, int | str]:
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name[3:]), 32), int(name[3:])
    return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32), name


def integers(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), "i32")


def attention_variants(arch: int | str) -> Iterator[tuple[str, object, dict, dict, dict]]:
    plain, tail = ("plain", False, False, False, True), ("bias lse tail", True, True, False, False)
    single = [("bias", True, False, False, True), ("lse", False, True, False, True)]
    causal = ("causal lse", False, True, True, True)
    for head_dim, dtype in [*((d, "bf16") for d in HEAD_DIMS), (128, "fp16")]:
        padded = padded_head_dim(head_dim)
        flags = [plain, tail, causal, *(single if head_dim == 128 else [])] if dtype == "bf16" else [plain]
        configs = {config_for(arch, head_dim), config_for(arch, head_dim, describable=False)}
        for (name, bias, lse, causal_, even), config in itertools.product(flags, configs):
            tma = config.tma
            types = dict.fromkeys("Q_SCALE K_SCALE BIAS ANCHOR LSE_TERM LSE".split(), "*fp32") | {
                "Q8": "*i8",
                "K8": f"tensordesc<i8[{config.block_n}, {padded}]>" if tma else "*i8",
                "V": f"tensordesc<{dtype}[1, 1, {config.block_n}, {padded}]>" if tma else f"*{dtype}",
                "OUT": f"*{dtype}",
                **integers("M N NP heads group s_vb s_vh s_vn s_ob s_oh s_om s_lb s_lh s_lm s_bias_b s_bias_h"),
            }
            constants = {
                "D": head_dim, "DP": padded, "BM": config.block_m, "BN": config.block_n, "HAS_BIAS": bias,
                "HAS_LSE": lse, "CAUSAL": causal_, "EVEN_N": even, "TMA": tma, "UPCAST": False,
            }  # fmt: skip
            options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
            label = f"attention D{head_dim} {dtype} {name}{' tma' if tma else ''}"
            yield label, forward._attention, types, constants, options


def quantize_variants(arch: int | str) -> Iterator[tuple[str, object, dict, dict, dict]]:
    for head_dim in HEAD_DIMS:
        padded = padded_head_dim(head_dim)
        shared = {"D": head_dim, "DP": padded, "B": min(padded, 128)}
        rows, q_rows = config_for(arch, head_dim).block_n, 64 if padded <= 128 else 32
        types = dict.fromkeys("SHIFT BIAS SCALE NORM LSE_TERM".split(), "*fp32") | {
            "X": "*bf16", "K": "*bf16", "ROTATION": "*bf16", "Y": "*i8", "factor": "fp32", "lse_factor": "fp32",
            **integers("L N NP step heads group bias_rows s_b s_h s_l s_n s_bias_b s_bias_h"),
        }  # fmt: skip
        for name, constants, warps in (
            ("key", {"ROWS": rows, "IS_KEY": True, "HAS_BIAS": False, "HAS_LSE": False}, 8),
            ("masked key", {"ROWS": rows, "IS_KEY": True, "HAS_BIAS": True, "HAS_LSE": False}, 8),
            ("query", {"ROWS": q_rows, "IS_KEY": False, "HAS_BIAS": False, "HAS_LSE": False}, 8),
            ("query lse", {"ROWS": q_rows, "IS_KEY": False, "HAS_BIAS": False, "HAS_LSE": True}, 8),
        ):
            constants = shared | constants | {"SCALES": 1, "HAS_NORM": False, "HAS_ROTATION": True, "UPCAST": False}
            yield f"quantize D{head_dim} {name}", quantize._quantize, types, constants, {"num_warps": warps}
        for bias in (False, True):
            yield (
                f"key shift D{head_dim}{' bias' if bias else ''}",
                quantize._key_shift,
                types,
                shared | {"ROWS": quantize.shift_rows(padded, bias), "HAS_BIAS": bias},
                {"num_warps": 8},
            )
    for kind in ("*fp16", "*u8"):
        types = {"MASK": kind, "BIAS": "*fp32", "ANCHOR": "*fp32", "LIVE": "*i32", **integers("N NP heads s_b s_h s_n")}
        constants = {"IS_BOOL": kind == "*u8", "BLOCK": 4096, "TILE": 128, "HAS_LIVE": arch == 90}
        yield f"prepare bias {kind}", quantize._prepare_bias, types, constants, {"num_warps": 8}
    if arch == 90:
        yield from grouped_variants()


def grouped_variants() -> Iterator[tuple[str, object, dict, dict, dict]]:
    """Keys as the Hopper kernel takes them: four scales a tile."""
    types = dict.fromkeys("SHIFT BIAS SCALE NORM LSE_TERM".split(), "*fp32") | {
        "X": "*bf16", "ROTATION": "*bf16", "Y": "*i8", "factor": "fp32", "lse_factor": "fp32",
        **integers("L heads group bias_rows s_b s_h s_l s_bias_b s_bias_h"),
    }  # fmt: skip
    for head_dim, config in HOPPER_GLUON.items():
        constants = {
            "D": head_dim, "DP": head_dim, "B": min(head_dim, 128), "ROWS": config.block_n, "IS_KEY": True,
            "HAS_BIAS": True, "SCALES": 4, "HAS_NORM": True, "HAS_LSE": False, "HAS_ROTATION": True, "UPCAST": False,
        }  # fmt: skip
        yield f"quantize D{head_dim} grouped key", quantize._quantize, types, constants, {"num_warps": 8}


def compile_variant(kernel, types: dict, constants: dict, options: dict, target: GPUTarget):
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    # Strides of query, key, value and out are multiples of 16 in every model.
    aligned = [n for n in kernel.arg_names if n in types and (types[n].startswith("*") or n in STRIDES)]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=options)


def cuda_facts(binary: bytes) -> tuple[str, int]:
    """The disassembly and the bytes of local memory (spills) of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        tool = os.path.join(TOOLS, "cuobjdump")
        sass, usage = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-sass", "--dump-resource-usage")
        )
    local = sum(int(n) for n in re.findall(r"(?:LOCAL|STACK):(\d+)", usage))
    return sass, local + len(re.findall(r"\b(?:LDL|STL)\b", sass))


def facts(name: str, compiled, target: GPUTarget) -> dict[str, object]:
    if target.backend == "cuda":
        text, spills = cuda_facts(compiled.asm["cubin"])
        products = sorted(set(re.findall(r"\b([IHQ]G?MMA)\.", text)))
    else:
        text = compiled.asm["amdgcn"]
        spills = sum(int(n) for n in re.findall(r"\.vgpr_spill_count:\s+(\d+)", text))
        products = sorted(set(re.findall(r"v_(mfma_i32|mfma_f32|wmma_i32|wmma_f32)", text)))
    return {"variant": name, "products": products, "spills": spills, "shared": compiled.metadata.shared}


def main() -> None:
    target, arch = target_of(sys.argv[1])
    for name, *parts in itertools.chain(attention_variants(arch), quantize_variants(arch)):
        print(json.dumps(facts(name, compile_variant(*parts, target), target)), flush=True)


if __name__ == "__main__":
    main()
