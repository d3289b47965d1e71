"""The torch operators `sdpa_router::int8_attention` and `..._out`: importing this module registers them.

Registered with torch.library.Library, which costs a third of what custom_op costs a call. Of the two levels of torch's
dispatcher that are left, each takes 5 us on the host of an H200: attend() and attend_into() go past them where nobody
would see the operator. Triton is imported when a kernel first runs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from .configs import config_of, give_up_hopper
from .launch import forget, recall, remember, replay
from .plan import Plan

_LOG = logging.getLogger("sdpa_router.dispatch")

_LIBRARY = torch.library.Library("sdpa_router", "FRAGMENT")
_ARGUMENTS = "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, float? scale"
# Without the tag inductor may hand over other strides than the ones the mask and the fake were judged by.
_LIBRARY.define(
    f"int8_attention({_ARGUMENTS}, bool return_lse, str pv, str precision) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIBRARY.define(
    f"int8_attention_out({_ARGUMENTS}, str pv, str precision, Tensor(a!) out, Tensor(b!)? lse) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_DEVICES = ("CUDA", "CPU")  # of which the CPU is reached with Triton's interpreter only
# What Python raises where a function, an argument or an attribute is no longer what a kernel was written for.
_OF_ANOTHER_API = (
    *(TypeError, AttributeError, ImportError, LookupError, ValueError, AssertionError, NotImplementedError),
)
_NO_LSE = torch.empty(0)  # beside the output of a call that wants none: an allocation takes 6 us


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    return_lse: bool,
    pv: str,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what the operator sdpa_router::int8_attention does; without return_lse lse is empty, on any device."""
    if torch.compiler.is_compiling() or _watched():
        return _by_operator(query, key, value, attn_mask, is_causal, scale, return_lse, pv, precision)
    answer = _again(query, key, value, attn_mask, is_causal, scale, return_lse, pv, precision, True)
    if answer is not None:
        return answer
    tensors = (query, key, value, attn_mask)
    if not _plain(*tensors):
        return _by_operator(query, key, value, attn_mask, is_causal, scale, return_lse, pv, precision)
    out = _empty(query)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device) if return_lse else None
    plan = _int8_attention_out(query, key, value, attn_mask, is_causal, scale, pv, precision, out, lse)
    if plan is not None:
        numbers = (is_causal, scale, return_lse, pv, precision)
        like_query = torch.empty_like(query).stride() == out.stride()
        remember(numbers, tensors, plan, (like_query, query.shape[1] != key.shape[1]))
    return out, _NO_LSE if lse is None else lse


def attend_again(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    pv: str,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Do what attend() does if it has answered a call like this one, else return None: nothing was judged yet."""
    if torch.compiler.is_compiling() or not (
        type(query) is type(key) is type(value) is torch.Tensor
        and type(is_causal) is bool and type(pv) is str and type(precision) is str
        and (scale is None or type(scale) is float)
    ):  # fmt: skip
        return None
    if attn_mask is not None and not (
        type(attn_mask) is torch.Tensor and attn_mask.dim() == 4 and attn_mask.shape[2] == 1
    ):  # fmt: skip
        return None
    if _watched():
        return None
    return _again(query, key, value, attn_mask, is_causal, scale, return_lse, pv, precision, enable_gqa)


def _again(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    return_lse: bool,
    pv: str,
    precision: str,
    enable_gqa: bool,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    known, addresses = recall((is_causal, scale, return_lse, pv, precision), (query, key, value, attn_mask))
    if known is None:
        return None
    like_query, grouped = known.note
    if grouped and not enable_gqa:
        return None
    out = torch.empty_like(query) if like_query else _empty(query)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device) if return_lse else None
    addresses += (out.data_ptr(), 0 if lse is None else lse.data_ptr())
    if query.is_cuda and query.get_device() != torch._C._cuda_getDevice():
        with torch.cuda.device_of(query):  # kernels are launched on the current device
            known.plan.run(addresses)
    else:
        known.plan.run(addresses)
    return out, _NO_LSE if lse is None else lse


def _by_operator(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
    answer: tuple[torch.Tensor, torch.Tensor] = torch.ops.sdpa_router.int8_attention(*arguments)
    return answer


def attend_into(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    pv: str,
    precision: str,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Do what the operator sdpa_router::int8_attention_out does."""
    direct = not torch.compiler.is_compiling() and not _watched() and _plain(query, key, value, attn_mask, out, lse)
    into = _int8_attention_out if direct else torch.ops.sdpa_router.int8_attention_out
    into(query, key, value, attn_mask, is_causal, scale, pv, precision, out, lse)


def _watched() -> bool:
    """Whether something wants to see the operator that is no property of a tensor: a profiler, a mode or a trace."""
    return bool(
        torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()
        or torch._C._autograd._profiler_enabled() or forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None
    )  # fmt: skip


def _plain(*tensors: torch.Tensor | None) -> bool:
    """Whether for these tensors torch's dispatcher would do nothing but call the kernel."""
    grad = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        plain = type(tensor) is torch.Tensor and (tensor.is_cuda or tensor.is_cpu)
        if not plain or tensor.is_neg() or (grad and tensor.requires_grad):
            return False
    return True


def _empty(query: torch.Tensor) -> torch.Tensor:
    """An output like SDPA's: heads lie inside the sequence in memory where the query has them there."""
    batch, heads, q_len, head_dim = query.shape
    if 0 < query.stride(1) < query.stride(2):
        return torch.empty((batch, q_len, heads, head_dim), dtype=query.dtype, device=query.device).transpose(1, 2)
    return torch.empty((batch, heads, q_len, head_dim), dtype=query.dtype, device=query.device)


def _empty_out(query: torch.Tensor, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator's outputs: lse is empty where it is not wanted."""
    lse = torch.empty(query.shape[:3] if return_lse else (0,), dtype=torch.float32, device=query.device)
    return _empty(query), lse


def triton_refuses(error: Exception) -> bool:
    """Whether `error` says that this Triton can't make a kernel: it does not compile it, or its API is another one."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    if type(error) is RuntimeError:  # a pass of the compiler; those of CUDA, and of torch's memory, are no such refusal
        return "PassManager" in str(error)
    return isinstance(error, (CompilationError, OutOfResources, PTXASError, *_OF_ANOTHER_API))


def use_portable(error: Exception) -> None:
    """Answer with the portable kernel from now on, because of `error`, and say so."""
    from ...record import judge_anew

    _LOG.warning("the portable int8 kernel from now on: %s", give_up_hopper(error))
    # What was decided and launched before is of the other kernel: why it answers, when it pays, and its answers.
    judge_anew()
    forget()


def _int8_attention_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    pv: str,
    precision: str,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> Plan | None:
    softmax_scale = 1.0 / math.sqrt(query.shape[3]) if scale is None else scale

    def run() -> None:
        _run(query, key, value, attn_mask, is_causal, softmax_scale, pv, precision, out, lse)

    numbers = (is_causal, softmax_scale, pv, precision)
    tensors = (query, key, value, attn_mask, out, lse)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        try:
            return replay(numbers, tensors, run)
        except Exception as error:
            if not (config_of(query, value, pv, precision).gluon and triton_refuses(error)):
                raise
            use_portable(error)
            return replay(numbers, tensors, run)


def _out_of_operator(*arguments: Any) -> None:
    _int8_attention_out(*arguments)


def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    softmax_scale: float,
    pv: str,
    precision: str,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    from .forward import attention
    from .quantize import quantize
    from .quantize_value import quantize_value

    if is_causal and key.shape[2] > query.shape[2]:  # keys that no query sees: what they hold is to change no scale
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    config = config_of(query, value, pv, precision)
    per_token = precision == "high"
    quantized = quantize(query, key, attn_mask, softmax_scale, config, lse=lse is not None, per_token=per_token)
    values = quantize_value(value, quantized.bias, config) if pv == "fp8" else value
    attention(quantized, values, config, is_causal=is_causal, out=out, lse=lse)


def _int8_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    return_lse: bool,
    pv: str,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _empty_out(query, return_lse)
    wanted = lse if return_lse else None
    _int8_attention_out(query, key, value, attn_mask, is_causal, scale, pv, precision, out, wanted)
    return out, lse


def _fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    return_lse: bool,
    pv: str,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_out(query, return_lse)


def _fake_out(*arguments: object) -> None:
    return None


def _without_gradient(name: str) -> Callable[..., Any]:
    """The op's autograd kernel: raises where a gradient is wanted, else goes on to the device's kernel."""

    def kernel(*arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in arguments):
            raise RuntimeError(
                "sdpa_router's int8 attention has no backward: call it under torch.no_grad() or with tensors that "
                "require no gradient, or use sdpa_router.scaled_dot_product_attention, which leaves such calls to torch"
            )
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.sdpa_router, name)(*arguments)

    return kernel


for _name, _kernel, _fake_kernel in (
    ("int8_attention", _int8_attention, _fake),
    ("int8_attention_out", _out_of_operator, _fake_out),
):
    for _device in _DEVICES:
        _LIBRARY.impl(_name, _kernel, _device)
    _LIBRARY.impl(_name, _without_gradient(_name), "Autograd")
    torch.library.register_fake(f"sdpa_router::{_name}", _fake_kernel, lib=_LIBRARY)
