"""The torch operators `sdpa_router::int8_attention` and `..._out`: importing this module registers them.

Registered with torch.library.Library, which costs a third of what custom_op costs a call. Triton is imported when a
kernel first runs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from .configs import config_of, give_up_hopper
from .launch import replay

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


def _empty_out(query: torch.Tensor, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs like SDPA's: heads lie inside the sequence in memory where the query has them there."""
    batch, heads, q_len, head_dim = query.shape
    if 0 < query.stride(1) < query.stride(2):
        out = query.new_empty((batch, q_len, heads, head_dim)).transpose(1, 2)
    else:
        out = query.new_empty((batch, heads, q_len, head_dim))
    return out, query.new_empty((batch, heads, q_len) if return_lse else (0,), dtype=torch.float32)


def _compile_errors() -> tuple[type[Exception], ...]:
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return CompilationError, OutOfResources, PTXASError


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
) -> None:
    softmax_scale = 1.0 / math.sqrt(query.shape[3]) if scale is None else scale

    def run() -> None:
        _run(query, key, value, attn_mask, is_causal, softmax_scale, pv, precision, out, lse)

    numbers = (is_causal, softmax_scale, pv, precision)
    tensors = (query, key, value, attn_mask, out, lse)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        try:
            replay(numbers, tensors, run)
        except _compile_errors() as error:
            if not config_of(query, value, pv, precision).gluon:
                raise
            _LOG.warning("the portable int8 kernel from now on: %s", give_up_hopper(error))
            replay(numbers, tensors, run)


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
    ("int8_attention_out", _int8_attention_out, _fake_out),
):
    _LIBRARY.impl(_name, _kernel, "CUDA")
    _LIBRARY.impl(_name, _kernel, "CPU")  # reached with Triton's interpreter only
    _LIBRARY.impl(_name, _without_gradient(_name), "Autograd")
    torch.library.register_fake(f"sdpa_router::{_name}", _fake_kernel, lib=_LIBRARY)
