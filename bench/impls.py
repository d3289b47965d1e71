"""The rivals as data: how each is called, what it takes, and the error it may have.

`prepare(problem, variant)` imports its package late and returns a Run, or raises UnavailableError with the reason.
What a rival needs in another form (a mask in q's dtype, a copy of K) is made there, outside the timed call, unless its
own users would pay for it in every call. Variants: `call` is the whole call, with quantisation; `kernel` is the
attention alone on inputs that are quantised already; `graph` is `call` captured in a CUDA graph.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from cases import MASKS, Problem
from timing import Run, captured
from torch.nn import attention
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

Prepare = Callable[[Problem, str], Run]

VARIANTS = ("call", "kernel", "graph")
PER_KEY = ("none", "fade", "half", "gap")
# Shorter calls than this (about 0.2 ms on an H200) are captured ten to a graph: one replay costs some microseconds.
_GRAPH_FLOPS = 1e11


class UnavailableError(Exception):
    """This rival can't do this here; the text says why."""


@dataclass(frozen=True)
class Impl:
    """One rival.

    impl, pv: what is recorded.  budget: largest error by kind of input; no timing is kept over it.  package: what to
    install.  The rest says what it takes; what is not listed becomes a skipped row with a reason.
    """

    name: str
    impl: str
    prepare: Prepare
    budget: dict[str, float]
    pv: str = "16bit"
    package: str = "torch"
    variants: tuple[str, ...] = ("call", "graph")
    masks: tuple[str, ...] = tuple(MASKS)
    causal: bool = True
    lse: bool = False
    head_dims: tuple[int, ...] | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    cpu: bool = False

    def reason_against(self, problem: Problem, variant: str) -> str | None:
        """Why this rival is not tried on this call, or None."""
        query = problem.query
        if not (self.cpu or query.is_cuda):
            return "runs on a GPU only"
        if variant not in self.variants:
            return f"has no variant {variant!r}"
        if variant == "graph" and not query.is_cuda:
            return "a CUDA graph needs a GPU"
        if problem.mask_name not in self.masks:
            return "takes no mask" if self.masks == ("none",) else f"takes no mask of the kind {problem.mask_name!r}"
        if problem.is_causal and not self.causal:
            return "has no causal mode"
        if problem.lse and not self.lse:
            return "returns no log-sum-exp"
        if query.dtype not in self.dtypes:
            return f"does not take {query.dtype}"
        if self.head_dims and query.shape[3] not in self.head_dims:
            return f"takes head_dim {', '.join(map(str, self.head_dims))}"
        return None

    def ready(self, problem: Problem, variant: str) -> Run:
        """The run for a call; raises UnavailableError with the reason, or whatever the rival raises."""
        reason = self.reason_against(problem, variant)
        if reason is not None:
            raise UnavailableError(reason)
        if variant != "graph":
            return self.prepare(problem, variant)
        return captured(self.prepare(problem, "call"), 10 if problem.case.flops < _GRAPH_FLOPS else 1)


def _module(name: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise UnavailableError(f"package {package} can't be imported: {str(error).splitlines()[0]}") from error


def _int8(pv: str) -> Prepare:
    """Ours: the public function, so decision and operator dispatch are counted too."""

    def prepare(problem: Problem, variant: str) -> Run:
        if variant == "kernel":
            return int8_kernel_only(problem, pv)
        attend = _module("sdpa_router", "sdpa-router").int8_attention
        q, k, v, mask = problem.query, problem.key, problem.value, problem.mask
        return Run(lambda: attend(q, k, v, mask, is_causal=problem.is_causal, return_lse=problem.lse, pv=pv))

    return prepare


def int8_kernel_only(problem: Problem, pv: str) -> Run:
    """The attention kernel alone, as our operator launches it, on a query and key quantised before the clock starts."""
    if pv != "16bit":
        raise UnavailableError(f"no kernel for pv {pv!r} that can be called alone")
    package = "sdpa_router.kernels.int8_attention"
    refusal = _module(f"{package}.limits", "sdpa-router").unavailable(problem.query.device)
    if refusal is not None:
        raise UnavailableError(f"{refusal[1]}; needs {refusal[2]}")
    configs = _module(f"{package}.configs", "sdpa-router")
    quantize = _module(f"{package}.quantize", "triton").quantize
    attend = _module(f"{package}.forward", "triton").attention
    query, value = problem.query, problem.value
    head_dim = problem.case.head_dim
    config = configs.config_of(query, value)
    quantized = quantize(query, problem.key, problem.mask, head_dim**-0.5, config, lse=problem.lse)
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32) if problem.lse else None

    def call() -> object:
        attend(quantized, value, config, is_causal=problem.is_causal, out=out, lse=lse)
        return out if lse is None else (out, lse)

    return Run(call)


_sdpa_kernel: Any = attention.sdpa_kernel


def _torch(backend: SDPBackend | None) -> Prepare:
    """torch's SDPA, its own choice of backend or one of them.

    A float32 mask is cast to q's dtype beforehand (cuDNN answers garbage to float32 ones); the cast is not counted.
    """

    def prepare(problem: Problem, variant: str) -> Run:
        q, k, v, mask = problem.query, problem.key, problem.value, problem.mask_in_query_dtype()
        return Run(
            lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=problem.is_causal),
            nullcontext if backend is None else partial(_sdpa_kernel, backend),
        )

    return prepare


def _flex(problem: Problem, variant: str) -> Run:
    """FlexAttention compiled for this shape, the key bias or dense mask as a score_mod, causal as a block mask."""
    flex: Any = _module("torch.nn.attention.flex_attention", "torch")
    _allow_recompiling()
    q, k, v, mask = problem.query, problem.key, problem.value, problem.mask
    blocks = None
    if problem.is_causal:
        blocks = flex.create_block_mask(_causal_mod, None, None, q.shape[2], k.shape[2], device=q.device)
    options: dict[str, Any] = {"score_mod": None if mask is None else _score_mod(mask), "block_mask": blocks}
    if problem.lse:
        modern = hasattr(flex, "AuxRequest")
        options |= {"return_aux": flex.AuxRequest(lse=True)} if modern else {"return_lse": True}
    compiler: Any = torch.compile
    attend = compiler(flex.flex_attention, dynamic=False)

    def call() -> object:
        answer = attend(q, k, v, **options)
        return (answer[0], getattr(answer[1], "lse", answer[1])) if problem.lse else answer

    return Run(call)


def _allow_recompiling() -> None:
    """Over its limit of shapes torch.compile runs a function uncompiled, and nothing would say so."""
    dynamo: Any = _module("torch._dynamo", "torch")
    dynamo.config.recompile_limit = 256


def _causal_mod(batch: Any, head: Any, row: Any, column: Any) -> Any:
    return row >= column


def _score_mod(mask: torch.Tensor) -> Callable[[Any, Any, Any, Any, Any], Any]:
    flat = mask[0, 0] if mask.shape[2] > 1 else mask[0, 0, 0]

    def kept(score: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
        return torch.where(flat[column], score, -float("inf"))

    def by_key(score: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
        return score + flat[column]

    def by_pair(score: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
        return score + flat[row, column]

    return by_pair if flat.dim() == 2 else kept if flat.dtype == torch.bool else by_key


def _fa3(problem: Problem, variant: str) -> Run:
    """FlashAttention-3 on [B, L, H, D] views; its causal mask is aligned bottom right, the same for square calls."""
    attend = _module("fa3_fwd_interface", "fa3-fwd").flash_attn_func
    q, k, v = (tensor.transpose(1, 2) for tensor in (problem.query, problem.key, problem.value))

    def call() -> object:
        answer = attend(q, k, v, causal=problem.is_causal, return_attn_probs=problem.lse)
        return (answer[0].transpose(1, 2), answer[1]) if problem.lse else answer.transpose(1, 2)

    return Run(call)


def _fa3_fp8(problem: Problem, variant: str) -> Run:
    """FlashAttention-3 in e4m3 without scales, right for N(0, 1) inputs; `call` counts the three casts."""
    attend = _module("fa3_fwd_interface", "fa3-fwd").flash_attn_func
    q, k, v = (tensor.transpose(1, 2) for tensor in (problem.query, problem.key, problem.value))
    fp8 = torch.float8_e4m3fn
    if variant == "kernel":
        q, k, v = q.to(fp8), k.to(fp8), v.to(fp8)
    return Run(lambda: attend(q.to(fp8), k.to(fp8), v.to(fp8), causal=problem.is_causal).transpose(1, 2))


def _comfy(problem: Problem, variant: str) -> Run:
    """comfy-kitchen's int8 attention (int8 PV)."""
    comfy = _module("comfy_kitchen", "comfy-kitchen")
    if not comfy.int8_attention_is_available(problem.query.device):
        raise UnavailableError("comfy-kitchen's CUDA extension does not run here")
    q, k, v, mask = problem.query, problem.key, problem.value, problem.mask
    if variant == "kernel":
        quantized = comfy.prequantize_int8_attention(q, k, v, attn_mask=mask)
        return Run(lambda: comfy.int8_attention_from_prequantized(quantized))
    return Run(lambda: comfy.int8_attention(q, k, v, attn_mask=mask))


def _sage(problem: Problem, variant: str) -> Run:
    """SageAttention 1 on its own copy of K, because it subtracts the mean key from its caller's tensor."""
    attend = _module("sageattention", "sageattention").sageattn
    q, k, v = problem.query, problem.key.clone(), problem.value
    return Run(lambda: attend(q, k, v, is_causal=problem.is_causal))


def _sage_2(problem: Problem, variant: str) -> Run:
    """SageAttention 2, which returns a log-sum-exp where 1 doesn't know the parameter; e4m3 PV on sm_89 and newer."""
    attend = _module("sageattention", "sageattention 2").sageattn
    if "return_lse" not in inspect.signature(attend).parameters:
        raise UnavailableError("SageAttention 1 is installed")
    q, k, v = problem.query, problem.key, problem.value
    return Run(lambda: attend(q, k, v, is_causal=problem.is_causal, return_lse=problem.lse))


def _flash_attn(problem: Problem, variant: str) -> Run:
    """FlashAttention-2 of the package flash-attn, on [B, L, H, D] views."""
    attend = _module("flash_attn", "flash-attn").flash_attn_func
    q, k, v = (tensor.transpose(1, 2) for tensor in (problem.query, problem.key, problem.value))
    return Run(lambda: attend(q, k, v, causal=problem.is_causal).transpose(1, 2))


def _fastest(problem: Problem, variant: str) -> Run:
    """The router with backends="fastest": its own choice by the cost table, decision counted."""
    router = _module("sdpa_router", "sdpa-router")
    q, k, v, mask = problem.query, problem.key, problem.value, problem.mask_in_query_dtype()
    return Run(
        lambda: router.scaled_dot_product_attention(q, k, v, mask, 0.0, problem.is_causal),
        partial(router.route, backends="fastest", log=False),
    )


def _sdnq(problem: Problem, variant: str) -> Run:
    """sdnq's Triton attention, int8 QK and 16-bit PV; it autotunes at the first call of a shape."""
    attend = _module("sdnq.kernels.triton_atten", "sdnq").sdnq_triton_atten
    _allow_recompiling()
    q, k, v, mask = problem.query, problem.key, problem.value, problem.mask_in_query_dtype()
    return Run(lambda: attend(q, k, v, attn_mask=mask, is_causal=problem.is_causal))


# Budgets by kind of input. 16-bit attention rounds P and the output (0.0023 measured); the int8 peers' are their
# own measured errors with some room (bench/README.md), so that a wrong answer is refused and a rough one is not.
_EXACT = {"gaussian": 0.005, "outliers": 0.01}
_OURS = {"gaussian": 0.0125, "outliers": 0.02}
_PEER = {"gaussian": 0.02, "outliers": 0.06}
_FP8 = {"gaussian": 0.06, "outliers": 0.5}

IMPLS: dict[str, Impl] = {
    impl.name: impl
    for impl in (
        Impl("int8", "int8", _int8("16bit"), _OURS, package="sdpa-router", variants=VARIANTS, masks=PER_KEY, lse=True,
             cpu=True),
        Impl("int8-fp8", "int8", _int8("fp8"), {"gaussian": 0.04, "outliers": 0.04}, pv="fp8", package="sdpa-router",
             variants=VARIANTS, masks=PER_KEY, lse=True, cpu=True),
        Impl("torch", "torch", _torch(None), _EXACT, cpu=True),
        Impl("torch-cudnn", "torch-cudnn", _torch(SDPBackend.CUDNN_ATTENTION), _EXACT),
        Impl("torch-flash", "torch-flash", _torch(SDPBackend.FLASH_ATTENTION), _EXACT, masks=("none",), cpu=True),
        Impl("torch-efficient", "torch-efficient", _torch(SDPBackend.EFFICIENT_ATTENTION), _EXACT),
        Impl("flex", "flex", _flex, _EXACT, lse=True),
        Impl("fa3", "fa3", _fa3, _EXACT, package="fa3-fwd", masks=("none",), lse=True, dtypes=(torch.bfloat16,)),
        Impl("fa3-fp8", "fa3", _fa3_fp8, _FP8, pv="fp8", package="fa3-fwd", variants=VARIANTS, masks=("none",),
             dtypes=(torch.bfloat16,)),
        Impl("comfy", "comfy", _comfy, _PEER, pv="int8", package="comfy-kitchen", variants=VARIANTS, causal=False),
        Impl("sage", "sage", _sage, _PEER, package="sageattention==1.0.6", masks=("none",), head_dims=(64, 96, 128)),
        Impl("sage2", "sage2", _sage_2, {"gaussian": 0.045, "outliers": 0.2}, pv="fp8", package="sageattention 2",
             masks=("none",)),
        Impl("flash-attn", "flash-attn", _flash_attn, _EXACT, package="flash-attn", masks=("none",)),
        Impl("fastest", "fastest", _fastest, _PEER, pv="auto", package="sdpa-router", cpu=True),
        Impl("sdnq", "sdnq", _sdnq, _PEER, package="sdnq"),
    )
}  # fmt: skip


def names_to_impls(names: str) -> list[Impl]:
    """Rivals of a comma-separated list (`all` for every one); ValueError names what is not known."""
    wanted = list(IMPLS) if names == "all" else names.split(",")
    if unknown := [name for name in wanted if name not in IMPLS]:
        raise ValueError(f"unknown impl {unknown[0]!r}; accepted: all, {', '.join(IMPLS)}")
    return [IMPLS[name] for name in dict.fromkeys(wanted)]
