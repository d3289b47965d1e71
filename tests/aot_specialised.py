"""Trace every kernel as Triton specialises it for a stride of 1 and for strides past 32 bits; print what fails.

Run as a program, in a process of its own: `python aot_specialised.py`. TRITON_INTERPRET must be off there. A stride
that is 1 is a plain number inside of a kernel, and no tensor as every other one. Nothing is compiled: it takes seconds.
"""

from __future__ import annotations

import collections
import inspect
import itertools
import json
from collections.abc import Iterator

import aot_compile
import aot_fused
import aot_shards
import aot_sparse
from aot_compile import integers
from triton.compiler import ASTSource
from triton.compiler.compiler import ir, make_backend

from sdpa_router.kernels.int8_attention import linear_kernels, quantize_value

_EACH = 3  # variants of a kernel: a stride is used alike in most


def linear_variants() -> Iterator[tuple[str, object, dict, dict, dict]]:
    types = dict.fromkeys("X WEIGHT Y".split(), "*i8") | {"factor": "fp32", "LINEAR_BIAS": "*bf16"}
    types |= dict.fromkeys("X_SCALE W_SCALE SCALE SHIFT BIAS NORMS MEAN".split(), "*fp32")
    types |= integers("L NP heads bias_rows s_b s_l s_bias_b s_bias_h")
    shape = {"C": 256, "D": 64, "DP": 64, "HAS_LINEAR_BIAS": True}
    rows = types | {"X": "*bf16"}
    yield "rows", linear_kernels._quantize_rows, rows, {"C": 256, "BLOCK": 256, "ROWS": 32}, {}
    constants = {"C": 256, "BLOCK": 128, "ROWS": 128, "HAS_BIAS": True}
    yield "mean row", linear_kernels._mean_row, types, constants, {}
    yield "linear shift", linear_kernels._linear_shift, types, shape | {"BLOCK": 64}, {}
    for kind in ("query", "key"):
        constants = shape | {"ROWS": 64, "HEADS": 1, "STEP": 64, "KIND": kind, "HAS_BIAS": kind == "key"}
        yield f"linear {kind}", linear_kernels._linear_qk, types, constants | {"SCALES": 1, "HAS_NORM": False}, {}


def value_variants() -> Iterator[tuple[str, object, dict, dict, dict]]:
    types = {"V": "*bf16", "Y": "*fp8e4nv", "OVER": "*i32"} | dict.fromkeys("BIAS PEAK SCALE".split(), "*fp32")
    types |= integers("N steps stride heads bias_rows s_b s_h s_n s_bias_b s_bias_h")
    constants = {"D": 64, "DP": 64, "ROWS": 32, "HAS_BIAS": True}
    yield "value peaks", quantize_value._sample_peaks, types, constants, {}
    constants |= {"PARTS": 4, "PERMUTED": True, "INTERPRETED": False}
    yield "value", quantize_value._quantize_value, types, constants | {"STEPS": 4}, {}
    yield "value again", quantize_value._finish_value, types, constants, {}


def variants(arch: int) -> Iterator[tuple[str, object, dict, dict, dict]]:
    found = itertools.chain(
        aot_compile.attention_variants(arch), aot_compile.quantize_variants(arch), aot_fused.variants(arch),
        aot_sparse.attention_variants(arch), aot_sparse.list_variants(arch), aot_shards.shard_variants(),
        linear_variants(), value_variants(),
    )  # fmt: skip
    seen: collections.Counter[object] = collections.Counter()
    for variant in found:
        seen[variant[1]] += 1
        if seen[variant[1]] <= _EACH:
            yield variant


def trace(kernel, types: dict, constants: dict, options: dict, target) -> None:
    """Do what triton.compile() does first."""
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=constants, attrs={})
    backend = make_backend(target)
    parsed = backend.parse_options(dict(options, **source.parse_options()))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    known = {
        "target": target, "options": parsed, "codegen_fns": backend.get_codegen_implementation(parsed),
        "module_map": backend.get_module_map(), "context": context,
    }  # fmt: skip
    source.make_ir(**{name: known[name] for name in inspect.signature(source.make_ir).parameters})


def main() -> None:
    target, arch = aot_compile.target_of("sm_90")
    for label, kernel, types, constants, options in variants(arch):
        known = {name: value for name, value in constants.items() if name in kernel.arg_names}
        free = [
            p.name for p in kernel.params
            if types.get(p.name) == "i32" and p.name not in known and not p.do_not_specialize
        ]  # fmt: skip
        for how, other, more in (("1", {}, dict.fromkeys(free, 1)), ("64 bits", dict.fromkeys(free, "i64"), {})):
            try:
                trace(kernel, types | other, known | more, options, target)
                failed = ""
            except Exception as error:
                failed = f"{type(error).__name__}: {str(error)[-300:]}"
            print(json.dumps({"variant": f"{label}, strides of {how}", "failed": failed}), flush=True)


if __name__ == "__main__":
    main()
