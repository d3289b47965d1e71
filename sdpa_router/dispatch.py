"""One call on its way: decide or recall the decision, record it, run it. traced.py does so under torch.compile."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from enum import Enum
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from . import run
from .asking import ask, log_failures
from .choose import attach, choose
from .decide import Call, mask_cast_note, needs_mask_cast
from .decision import Code, Decision, Reason, Route, UnsupportedError
from .kernels.int8_attention.limits import LIMITS
from .recent import latest, remember, with_key_of_size
from .record import known, report, sight
from .settings import settings_of, skipping, skips
from .sighting import Sighting
from .traced import traced

# Bound here because the way of every call leads past them.
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_NUMBERS = (float, int)
_MAX_SCALE = LIMITS.max_scale
_new = tuple.__new__  # a named tuple's own is one more call
_recall = known.get
_compiling = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled
_modes = torch._C._len_torch_function_stack
_any_autocast = torch._C._is_any_autocast_enabled
_functorch_level = torch._C._functorch.peek_interpreter_stack
_jit_tracing = torch._C._get_tracing_state


class Turn(Enum):
    """Torch's turn; UNUSUAL where an argument is no plain tensor or number, and may ask which function was called."""

    TORCH = 0
    UNUSUAL = 1


TORCH = Turn.TORCH  # asking the class for it takes longer


def dispatch(name: str, attention: run.Attention, args: tuple[Any, ...]) -> torch.Tensor | Turn:
    """Answer a call under the settings `name`, or return whose turn it is.

    args: query, key and value, or all eight in the order of a Call.
    A decision is recalled by everything that it depends on: from the call that followed the last one before, or else
    from those with a key of this size (recent.py), or else by a signature.
    """
    if len(args) == 3:
        query, key, value = args
        attn_mask, dropout_p, is_causal, scale, enable_gqa = None, 0.0, False, None, False
    else:
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = args
    if _compiling():
        return traced(Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa), name, attention)
    before = latest.call
    guess, others = before.next, None
    while not (
        guess.name == name and guess.is_causal is is_causal and guess.enable_gqa is enable_gqa
        and (guess.scale is scale or (type(scale) is float and guess.scale == scale))
        and (guess.dropout_p is dropout_p or (type(dropout_p) is float and guess.dropout_p == dropout_p))
        and (
            guess.unmasked and guess.check(query, key, value)
            if attn_mask is None else not guess.unmasked and guess.check(query, key, value, attn_mask)
        )
        and (guess.grad is None or guess.grad is _grad_enabled())
        and (guess.as_given or forward_ad._current_level < 0)
    ):  # fmt: skip
        others = with_key_of_size(key, attn_mask) if others is None else others
        guess = next(others, None)
        if guess is None:
            call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            return _dispatch_by_signature(name, attention, call)
    before.next = latest.call = guess
    if guess.as_given:
        guess.tick()
        return TORCH
    if _jit_tracing() is not None:
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return _dispatch_by_signature(name, attention, call)
    return _answer(guess.sighting, attention, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _dispatch_by_signature(name: str, attention: run.Attention, call: Call) -> torch.Tensor | Turn:
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = call
    sighting, skipped = None, False
    if name in skipping:
        skipped = skips(settings_of(name), call)
    signature: Hashable = None
    if (
        type(query) in _TENSORS and type(key) in _TENSORS and type(value) in _TENSORS
        and (attn_mask is None or type(attn_mask) in _TENSORS)
        and type(dropout_p) in _NUMBERS and type(is_causal) is bool and type(enable_gqa) is bool
        and (scale is None or (type(scale) in _NUMBERS and -_MAX_SCALE <= scale <= _MAX_SCALE))
        and _functorch_level() is None and forward_ad._current_level < 0 and _jit_tracing() is None
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
        sighting = _judge(call, name, skipped, signature)
    if signature is not None and name not in skipping and not _any_autocast():
        remember(name, call, sighting)
    if sighting.as_given:
        sighting.tick()
        return TORCH if signature is not None else Turn.UNUSUAL
    return _answer(sighting, attention, *call)


def _answer(
    sighting: Sighting,
    attention: run.Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    if _modes() and under_foreign_mode() and not torch.compiler.is_compiling():  # export has a mode of its own
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return _answer_under_mode(sighting, attention, call)
    if sighting.direct:
        sighting.tick()
        settings = sighting.settings
        try:
            return run.int8(query, key, value, attn_mask, is_causal, scale, settings.pv, settings.precision)[0]
        except Exception as error:
            attach(error, sighting.decision)
            raise
    call = _new(Call, (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))
    return ask(sighting, attention, call)


def under_foreign_mode() -> bool:
    """Whether a TorchFunctionMode other than torch.device() as a context is on: it may answer in torch's place."""
    depth = _modes()
    if not depth:
        return False
    stack = map(torch._C._get_function_stack_at, range(depth))
    return any(type(mode) is not DeviceContext for mode in stack)


def _answer_under_mode(sighting: Sighting, attention: run.Attention, call: Call) -> torch.Tensor:
    """Let the mode have the call, as a call of torch's function; the int8 operator would bypass it."""
    from .patch import as_if_absent

    decision, settings = sighting.decision, sighting.settings
    if decision.route is not Route.SDPA:
        reasons = (Reason(Code.FUNCTORCH, "a TorchFunctionMode", "plain calls"),)
        refused = Decision(Route.SDPA, decision.mask, reasons, mask_cast_note(call))
        sighting = sight(("mode", sighting), call, refused, settings)
    report(sighting)
    sighting.tick()
    if settings.on_unsupported == "raise" and sighting.decision.reasons:
        raise UnsupportedError(sighting.decision)

    def visibly(*args: Any, **kwargs: Any) -> torch.Tensor:
        return as_if_absent(attention, args, kwargs)

    return run.native(call, visibly, cast_mask=needs_mask_cast(call))


def _judge(call: Call, name: str, skipped: bool, signature: Hashable) -> Sighting:
    """Decide about a call that was not seen before, or that is so unusual that it must be judged each time."""
    settings = settings_of(name)
    if settings.skip is not None:
        settings = dataclasses.replace(settings, skip=lambda _: skipped)  # asked once a call
    decision = choose(call, settings)
    sighting = sight(signature or (name, str(decision)), call, decision, settings)
    if sighting.decision is decision:  # else it is known, or another thread was first
        log_failures(decision)
    return sighting


def _require_grad(*tensors: torch.Tensor | None) -> tuple[bool, ...] | bool:
    flags = tuple(tensor is not None and tensor.requires_grad for tensor in tensors)
    return any(flags) and flags


def _autocast(device_type: str) -> tuple[bool, torch.dtype] | None:
    if device_type not in ("cuda", "cpu"):
        return None
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
