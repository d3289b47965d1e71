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
from typing import NamedTuple

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sdpa_router.kernels.int8_attention import bias as bias_kernels
from sdpa_router.kernels.int8_attention import forward, quantize, quantize_kernels
from sdpa_router.kernels.int8_attention.configs import Config, config_for, hopper_config, padded_head_dim
from sdpa_router.kernels.int8_attention.limits import LIMITS, triton_overlaps

TOOLS = os.path.join(os.path.dirname(triton.backends.nvidia.__file__), "bin")
STRIDES = "s_vb s_vh s_vn s_ob s_oh s_om s_b s_h s_n s_kb s_kh s_kn s_qb s_qh s_qm".split()
HEAD_DIMS = (64, 96, 128, 256)  # 96 is padded to 128


def target_of(name: str) -> tuple[GPUTarget, int | str]:
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name[3:]), 32), int(name[3:])
    return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32), name


def integers(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), "i32")


class Flags(NamedTuple):
    """What a variant of the attention kernel does besides."""

    bias: bool = False
    lse: bool = False
    causal: bool = False
    tail: bool = False
    per_key: bool = False
    fp8: bool = False


PLAIN, TAIL, CAUSAL = Flags(), Flags(bias=True, lse=True, tail=True), Flags(lse=True, causal=True)
SINGLE = (Flags(bias=True), Flags(lse=True))
HIGH, FP8 = Flags(bias=True, lse=True, tail=True, per_key=True), Flags(bias=True, lse=True, tail=True, fp8=True)


def attention_variants(arch: int | str) -> Iterator[tuple[str, object, dict, dict, dict]]:
    modes = [HIGH, *([FP8, FP8._replace(causal=True, bias=False)] if has_fp8(arch) else [])]
    for head_dim, dtype in [*((d, "bf16") for d in HEAD_DIMS), (128, "fp16")]:
        flags = [PLAIN, TAIL, CAUSAL, *modes, *(SINGLE if head_dim == 128 else [])] if dtype == "bf16" else [PLAIN]
        for chosen in flags:
            for config in {config_for(arch, head_dim, held, chosen.per_key, chosen.fp8) for held in (True, False)}:
                yield attention_variant(head_dim, dtype, chosen, config)


def has_fp8(arch: int | str) -> bool:
    return arch in LIMITS.fp8_hip_archs if isinstance(arch, str) else divmod(arch, 10) >= LIMITS.fp8_min_capability


def attention_variant(head_dim: int, dtype: str, flags: Flags, config: Config) -> tuple[str, object, dict, dict, dict]:
    padded, tma, rows = padded_head_dim(head_dim), config.tma, config.block_n
    held = "fp8e4nv" if flags.fp8 else dtype
    block = f"1, 1, {padded}, {rows}" if flags.fp8 else f"1, 1, {rows}, {padded}"
    types = dict.fromkeys("Q_SCALE K_SCALE BIAS ANCHOR LSE_TERM V_SCALE LSE".split(), "*fp32") | {
        "Q8": "*i8",
        "K8": f"tensordesc<i8[{rows}, {padded}]>" if tma else "*i8",
        "V": f"tensordesc<{held}[{block}]>" if tma else f"*{held}",
        "OUT": f"*{dtype}",
        **integers("M N NP heads group s_vb s_vh s_vn s_ob s_oh s_om s_lb s_lh s_lm s_bias_b s_bias_h"),
    }
    constants = {
        "D": head_dim, "DP": padded, "BM": config.block_m, "BN": rows, "HAS_BIAS": flags.bias, "HAS_LSE": flags.lse,
        "CAUSAL": flags.causal, "EVEN_N": not flags.tail, "TMA": tma, "PER_KEY": flags.per_key, "FP8": flags.fp8,
        "UPCAST": False,
    }  # fmt: skip
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
    words = [name for name, value in flags._asdict().items() if value]
    label = f"attention D{head_dim} {dtype} {' '.join(words) or 'plain'}{' tma' if tma else ''}"
    return label, forward._attention, types, constants, options


def quantize_variants(arch: int | str) -> Iterator[tuple[str, object, dict, dict, dict]]:
    types = dict.fromkeys("SHIFT BIAS K_SCALE NORM Q_SCALE LSE_TERM".split(), "*fp32") | {
        "K": "*bf16", "Q": "*bf16", "K8": "*i8", "Q8": "*i8", "factor": "fp32",
        "lse_factor": "fp32",
        **integers("N NP M step steps heads kv_heads query_programs k_chunks q_chunks bias_rows"),
        **integers("s_kb s_kh s_kn s_qb s_qh s_qm s_b s_h s_n s_bias_b s_bias_h"),
    }  # fmt: skip
    overlaps = arch == 90 and triton_overlaps()
    for head_dim in HEAD_DIMS:
        padded = padded_head_dim(head_dim)
        shared = {"D": head_dim, "DP": padded, "B": min(padded, 128)}
        kinds = {config_for(arch, head_dim): (1,)}
        if arch == 90:
            kinds[hopper_config(head_dim)] = (4, hopper_config(head_dim).block_n)
        for config, scales in kinds.items():
            tiling = quantize.tiling_of(padded, config)
            for per_block, (bias, lse) in itertools.product(scales, ((False, False), (True, True))):
                constants = shared | {
                    "K_ROWS": config.block_n, "Q_ROWS": tiling.q_rows,
                    "STAGES": tiling.num_stages, "HAS_BIAS": bias, "BIAS_ROWS": 1, "SCALES": per_block,
                    "HAS_NORM": config.gluon, "HAS_LSE": lse, "UPCAST": False, "PDL": overlaps,
                }  # fmt: skip
                words = f"{per_block}{' bias' if bias else ''}{' lse' if lse else ''}"
                options = {"num_warps": tiling.num_warps}
                yield f"quantize D{head_dim} scales {words}", quantize_kernels._quantize, types, constants, options
        for bias in (False, True):
            rows = quantize.shift_rows(padded)
            constants = shared | {"ROWS": rows, "SAMPLES": quantize.SHIFT_SAMPLES, "HAS_BIAS": bias, "PDL": overlaps}
            constants["UNROLL"] = quantize.shift_steps(config_for(arch, head_dim))
            label = f"key shift D{head_dim}{' bias' if bias else ''}"
            yield label, quantize_kernels._key_shift, types, constants, {"num_warps": 8}
    for kind in ("*fp16", "*u8"):
        types = {"MASK": kind, "BIAS": "*fp32", "ANCHOR": "*fp32", "LIVE": "*i32", **integers("N NP heads s_b s_h s_n")}
        constants = {
            "IS_BOOL": kind == "*u8", "BLOCK": bias_kernels.BIAS_BLOCK, "PART": bias_kernels.BIAS_PART, "TILE": 128,
            "HAS_LIVE": arch == 90,
        }  # fmt: skip
        yield f"prepare bias {kind}", bias_kernels._prepare_bias, types, constants, {"num_warps": 8}


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
