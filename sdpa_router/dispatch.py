"""One call on its way: decide or recall the decision, record it, run it; in eager mode and under torch.compile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from . import run
from .by_tile import PATIENCE, counts_of, refine
from .decide import Call, decide, mask_cast_note, needs_mask_cast, reasons_against
from .decision import Code, Decision, Reason, Route, UnsupportedError
from .kernels.int8_attention.limits import LIMITS
from .mask_summary import full_view, summarised
from .record import MAX_SIGHTINGS, Sighting, answered, known, plain_number, recent, sight
from .settings import settings_of, skipping, skips

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # private to torch: without it every call is recognised by its signature
    TensorGuards = None  # type: ignore[assignment, misc]

if TYPE_CHECKING:
    from torch._dynamo.comptime import ComptimeContext, ComptimeVar

# Bound here because the way of every call leads past them.
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_NUMBERS = (float, int)
_MAX_SCALE = LIMITS.max_scale
_GUARDS = 4
_recall = known.get
_recall_recent = recent.get
_compiling = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled
_modes = torch._C._len_torch_function_stack
_any_autocast = torch._C._is_any_autocast_enabled
_functorch_level = torch._C._functorch.peek_interpreter_stack


class Turn(Enum):
    """Torch's turn; UNUSUAL where an argument is no plain tensor or number, and may ask which function was called."""

    TORCH = 0
    UNUSUAL = 1


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
) -> torch.Tensor | Turn:
    """Answer a call under the settings `name`, or return whose turn it is, with the arguments as they are.

    A decision is recalled by everything that it depends on: first from the last call with a key of this size, by the
    guard that torch.compile has for tensors, then by a signature. All is spelt out here, because a function call or an
    indirection costs a tenth of a microsecond on the way of every attention call.
    """
    if _compiling():
        return _traced(Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa), name, attention)
    state = (name, dropout_p, is_causal, scale, enable_gqa, _grad_enabled())
    if (
        type(key) is torch.Tensor and type(is_causal) is bool and type(enable_gqa) is bool
        and type(dropout_p) in _NUMBERS and (scale is None or type(scale) in _NUMBERS)
        and forward_ad._current_level < 0
    ):  # fmt: skip
        for numbers, check, sighting in _recall_recent(key.numel() if attn_mask is None else ~key.numel(), ()):
            if numbers == state and (
                check(query, key, value) if attn_mask is None else check(query, key, value, attn_mask)
            ):
                if sighting.as_given:
                    sighting.tick()
                    return Turn.TORCH
                return _answer(
                    sighting, attention, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
                )
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return _dispatch_by_signature(state, attention, call)


def _dispatch_by_signature(state: tuple[Any, ...], attention: run.Attention, call: Call) -> torch.Tensor | Turn:
    name = state[0]
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
        sighting = _judge(call, name, skipped, signature)
    if signature is not None and name not in skipping and not _any_autocast():
        _guard(state, sighting, (query, key, value) if attn_mask is None else (query, key, value, attn_mask))
    if sighting.as_given:
        sighting.tick()
        return Turn.TORCH if signature is not None else Turn.UNUSUAL
    return _answer(sighting, attention, *call)


def _guard(state: tuple[Any, ...], sighting: Sighting, tensors: tuple[torch.Tensor, ...]) -> None:
    """Remember a call, so that one alike is recognised by a check in C++ of all that its tensors are but their data."""
    size = tensors[1].numel()
    guarded = recent.setdefault(size if len(tensors) == 3 else ~size, [])
    # A model has few kinds of calls with keys of one size.
    check = _check_of(tensors) if len(guarded) < _GUARDS else None
    if check is not None:
        guarded.append((state, check, sighting))


def _check_of(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool] | None:
    """The check of tensors for all that these are but their data; None for a tensor that comes twice.

    It fails in another dispatch state: under autocast, inference mode or a torch.func transform.
    """
    if TensorGuards is None or len({*map(id, tensors)}) != len(tensors):
        return None
    shapes: list[Any] = [list(tensor.shape) for tensor in tensors]
    strides: list[Any] = [list(tensor.stride()) for tensor in tensors]
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
    return check


def answered_before(call: Call, pv: str, precision: str) -> bool:
    """Whether the int8 kernel could answer a call of int8_attention() like this one, so that nothing is against it."""
    if _compiling():
        return False
    key, mask = call.key, call.attn_mask
    if type(key) is not torch.Tensor or forward_ad._current_level >= 0:
        return False
    state = (pv, precision, mask is None, call.is_causal, call.scale, call.enable_gqa, _grad_enabled())
    for known_state, check in answered.get(key.numel(), ()):
        if known_state == state and (check(*call[:3]) if mask is None else check(*call[:4])):
            return True
    return False


def remember_answered(call: Call, pv: str, precision: str) -> None:
    """Let answered_before() know of a call that nothing was against."""
    if _compiling() or _any_autocast() or not isinstance(call.scale, (float, int, type(None))):
        return
    if len(answered) >= MAX_SIGHTINGS:
        answered.clear()
    kept, mask = answered.setdefault(call.key.numel(), []), call.attn_mask
    check = _check_of(call[:3] if mask is None else (*call[:3], mask)) if len(kept) < _GUARDS else None
    if check is not None:
        state = (pv, precision, mask is None, call.is_causal, call.scale, call.enable_gqa, _grad_enabled())
        kept.append((state, check))


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
    if sighting.summaries is not None and attn_mask is not None:
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        sighting = _by_its_tiles(sighting, call)
        if not sighting.decision.reasons:
            sighting.tick()
            return run.by_tile(query, key, value, full_view(attn_mask), summarised(attn_mask).summary, scale, False)[0]
    sighting.tick()
    if not sighting.decision.reasons:
        settings = sighting.settings
        return run.int8(query, key, value, attn_mask, is_causal, scale, settings.pv, settings.precision)[0]
    if sighting.settings.on_unsupported == "raise":
        raise UnsupportedError(sighting.decision)
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return run.native(call, attention, cast_mask=needs_mask_cast(call))


def _by_its_tiles(sighting: Sighting, call: Call) -> Sighting:
    """Sighting of a call with a dense mask whose tiles decide; the given one if they are not known."""
    patience = sighting.summaries or 0
    counts, met_before = counts_of(call, patience > 0)
    if counts is None:
        return sighting
    # A mask that is met again gives back what a new one took.
    sighting.summaries = min(PATIENCE, patience + 1) if met_before else patience - 1
    key = ("tiles", sighting, counts)
    return _recall(key) or sight(key, call, refine(sighting.decision, call, counts), sighting.settings)


def under_foreign_mode() -> bool:
    """Whether a TorchFunctionMode other than torch.device() as a context is on: it may answer in torch's place."""
    stack = map(torch._C._get_function_stack_at, range(_modes()))
    return any(type(mode) is not DeviceContext for mode in stack)


def _answer_under_mode(sighting: Sighting, attention: run.Attention, call: Call) -> torch.Tensor:
    """Let the mode have the call, as a call of torch's function; the int8 operator would bypass it."""
    from .patch import as_if_absent

    decision, settings = sighting.decision, sighting.settings
    if decision.routed:
        reasons = (Reason(Code.FUNCTORCH, "a TorchFunctionMode", "plain calls"),)
        refused = Decision(Route.SDPA, decision.mask, reasons, mask_cast_note(call))
        sighting = sight(("mode", sighting), call, refused, settings)
    sighting.tick()
    if settings.on_unsupported == "raise":
        raise UnsupportedError(sighting.decision)

    def visibly(*args: Any, **kwargs: Any) -> torch.Tensor:
        return as_if_absent(attention, args, kwargs)

    return run.native(call, visibly, cast_mask=needs_mask_cast(call))


def _judge(call: Call, name: str, skipped: bool, signature: Hashable) -> Sighting:
    """Decide about a call that was not seen before, or that is so unusual that it must be judged each time."""
    settings = settings_of(name)
    if settings.skip is not None:
        settings = dataclasses.replace(settings, skip=lambda _: skipped)  # asked once a call
    decision = decide(call, settings)
    return sight(signature or (name, str(decision)), call, decision, settings)


def _require_grad(*tensors: torch.Tensor | None) -> tuple[bool, ...] | bool:
    flags = tuple(tensor is not None and tensor.requires_grad for tensor in tensors)
    return any(flags) and flags


def _autocast(device_type: str) -> tuple[bool, torch.dtype] | None:
    if device_type not in ("cuda", "cpu"):
        return None
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def _traced(call: Call, name: str, attention: run.Attention) -> torch.Tensor:
    """Answer a call that torch.compile traces: no counter, dict, lock or log line may be touched here."""
    from torch._dynamo.comptime import comptime

    settings = settings_of(name)
    # All of these are local variables because record_trace reads them.
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = call  # noqa: RUF059
    codes = [reason.code.value for reason in reasons_against(call, settings)]
    comptime(record_trace)
    if not codes:
        return run.int8(query, key, value, attn_mask, is_causal, scale, settings.pv, settings.precision)[0]
    if settings.on_unsupported == "raise":
        refuse(codes, decide, call, settings)
    return run.native(call, attention, cast_mask=needs_mask_cast(call))


def record_trace(context: ComptimeContext) -> None:
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
    """Raise UnsupportedError, from Python as graphs can't; under fullgraph=True torch raises its own with the codes."""
    if _compiling():
        torch._dynamo.graph_break(f"sdpa_router.UnsupportedError: {', '.join(codes)}")
        torch.compiler.disable(_raise)(decide_again, *arguments)
    _raise(decide_again, *arguments)


def _raise(decide_again: Callable[..., Decision], *arguments: object) -> NoReturn:
    raise UnsupportedError(decide_again(*arguments))
