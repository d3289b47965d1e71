"""One call on its way: decide or recall the decision, record it, run it; in eager mode and under torch.compile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from . import run
from .decide import Call, decide, needs_mask_cast, reasons_against
from .decision import Decision, UnsupportedError
from .record import Sighting, known, plain_number, sight
from .settings import settings_of, skipping

if TYPE_CHECKING:
    from torch._dynamo.comptime import ComptimeContext, ComptimeVar

# Bound here because the way of every call leads past them.
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_NUMBERS = (float, int)
_INFINITY = float("inf")
_recall = known.get
_compiling = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_functorch_level = torch._C._functorch.peek_interpreter_stack


def dispatch(
    name: str,
    attention: run.Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """Answer a call under the settings `name`; None where `attention` is to be called with the arguments as they are.

    A decision is recalled by everything that it depends on. That key is spelt out here, because a function call or an
    indirection costs a tenth of a microsecond on the way of every attention call.
    """
    if _compiling():
        return _traced(Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa), name, attention)
    sighting, skipped = None, False
    if name in skipping:
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        skipped = bool(settings_of(name).skip(call))  # type: ignore[misc]
    signature: Hashable = None
    if (
        type(query) in _TENSORS and type(key) in _TENSORS and type(value) in _TENSORS
        and (attn_mask is None or type(attn_mask) in _TENSORS)
        and type(dropout_p) in _NUMBERS and type(is_causal) is bool and type(enable_gqa) is bool
        and (scale is None or (type(scale) in _NUMBERS and -_INFINITY < scale < _INFINITY))
        and _functorch_level() is None and forward_ad._current_level < 0
    ):  # fmt: skip
        try:
            signature = (
                query.shape, query.stride(), query.dtype, query.device,
                key.shape, key.stride(), key.dtype, key.device,
                value.shape, value.stride(), value.dtype, value.device,
                attn_mask is None or (attn_mask.shape, attn_mask.stride(), attn_mask.dtype, attn_mask.device),
                dropout_p == 0, is_causal, enable_gqa, name, skipped,
                _grad_enabled() and _require_grad(query, key, value, attn_mask),
                _any_autocast() and _autocast(query.device.type),
            )  # fmt: skip
            sighting = _recall(signature)
        except RuntimeError:
            pass  # a sparse tensor has no strides, a nested one no shape either
    if sighting is None:
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        sighting = _judge(call, name, skipped, signature)
    sighting.tick()
    if sighting.as_given:
        return None
    if sighting.decision.reasons:
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return _refuse_or_cast(sighting, call, attention)
    return run.int8(query, key, value, attn_mask, is_causal, scale, sighting.settings.pv)[0]


def _judge(call: Call, name: str, skipped: bool, signature: Hashable) -> Sighting:
    """Decide about a call that was not seen before, or that is so unusual that it must be judged each time."""
    settings = settings_of(name)
    if settings.skip is not None:
        settings = dataclasses.replace(settings, skip=lambda _: skipped)  # asked once a call
    decision = decide(call, settings)
    return sight(signature or (name, str(decision)), call, decision, settings)


def _refuse_or_cast(sighting: Sighting, call: Call, attention: run.Attention) -> torch.Tensor:
    if sighting.settings.on_unsupported == "raise":
        raise UnsupportedError(sighting.decision)
    return run.native(call, attention, cast_mask=True)


def _require_grad(*tensors: torch.Tensor | None) -> tuple[bool, ...]:
    return tuple(tensor is not None and tensor.requires_grad for tensor in tensors)


def _autocast(device_type: str) -> tuple[bool, torch.dtype] | None:
    if device_type not in ("cuda", "cpu"):
        return None
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def _traced(call: Call, name: str, attention: run.Attention) -> torch.Tensor:
    """Answer a call that torch.compile traces: no counter, dict, lock or log line may be touched here."""
    from torch._dynamo.comptime import comptime

    settings = settings_of(name)
    # All of these are local variables because _record_trace reads them.
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = call  # noqa: RUF059
    codes = [reason.code.value for reason in reasons_against(call, settings)]
    comptime(_record_trace)
    if not codes:
        return run.int8(query, key, value, attn_mask, is_causal, scale, settings.pv)[0]
    if settings.on_unsupported == "raise":
        refuse(codes, decide, call, settings)
    return run.native(call, attention, cast_mask=needs_mask_cast(call))


def _record_trace(context: ComptimeContext) -> None:
    """Record the call in whose _traced() torch.compile is: `context` gives its local variables."""
    name, *arguments = (_example(context.get_local(local)) for local in ("name", *Call._fields))
    call, settings = Call(*arguments), settings_of(name)
    decision = decide(call, settings)
    sight(("trace", name, str(decision), str(arguments)), call, decision, settings, "trace").tick()


def _example(variable: ComptimeVar) -> Any:
    """Return what a traced variable stands for: tensors as fake ones with the sizes of this trace, in plain numbers.

    Judging symbolic sizes here would tie the graph to them.
    """
    if variable.is_python_constant():
        return variable.as_python_constant()
    if not variable.is_proxy():
        return None
    fake = variable.as_fake()
    if not isinstance(fake, FakeTensor):
        return plain_number(fake)
    sizes, strides = ([plain_number(n) for n in numbers] for numbers in (fake.shape, fake.stride()))
    with fake.fake_mode:
        example = torch.empty_strided(sizes, strides, dtype=fake.dtype, device=fake.device)
    return example.requires_grad_(fake.requires_grad)


def refuse(codes: list[str], decide_again: Callable[..., Decision], *arguments: object) -> None:
    """Raise UnsupportedError, from Python as a graph can't; under fullgraph=True torch raises its own with the codes."""
    if _compiling():
        torch._dynamo.graph_break(f"sdpa_router.UnsupportedError: {', '.join(codes)}")
        torch.compiler.disable(_raise)(decide_again, *arguments)
    _raise(decide_again, *arguments)


def _raise(decide_again: Callable[..., Decision], *arguments: object) -> NoReturn:
    raise UnsupportedError(decide_again(*arguments))
