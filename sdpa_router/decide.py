"""Decide who answers a call: a pure function of metadata and process facts; it reads no values and allocates nothing.

torch.compile traces these functions: no size may be formatted here, or a graph would be made for each length.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch
from torch.autograd import forward_ad

from .backends.base import BackendLimits
from .call import PLAIN_TYPES, Call, is_plain, is_regular, kind_of, mask_info, needs_mask_cast, plain, tensors_of
from .cost_files import tuned_table
from .decision import Code, Decision, MaskKind, Reason, Route
from .kernels.int8_attention.configs import why_portable_by_metadata
from .kernels.int8_attention.limits import LIMITS, Crossover, crossover, fp8_unavailable, unavailable
from .settings import FASTEST, Settings, skips, traced_as_constant

__all__ = [
    "PLAIN_TYPES",
    "Call",
    "Settings",
    "call_against",
    "decide",
    "decide_kernel",
    "kernel_against",
    "needs_mask_cast",
    "reasons_against",
]

INT8_LIMITS = BackendLimits(
    LIMITS.dtypes, LIMITS.max_head_dim, masks=(MaskKind.PER_KEY,), max_scale=LIMITS.max_scale, lse=True, error=0.0125
)
_AUTOCAST_DEVICES = ("cuda", "cpu")


def decide(call: Call, settings: Settings) -> Decision:
    """Say who answers `call`, with every reason against the int8 route; no reason means int8."""
    reasons = tuple(reasons_against(call, settings))
    route = Route.SDPA if reasons else Route.INT8
    return Decision(route, mask_info(call), reasons, notes_of(route, call, settings))


def decide_kernel(call: Call, pv: str, precision: str) -> Decision:
    """Say whether the int8 kernel can answer `call`, whatever the router would make of it."""
    reasons = tuple(kernel_against(call, pv, precision))
    return Decision(Route.SDPA if reasons else Route.INT8, mask_info(call), reasons)


def reasons_against(call: Call, settings: Settings) -> Iterator[Reason]:
    """Yield every reason against the int8 route: what was asked for, then what the kernel can't do."""
    yield from not_wanted(call, settings)
    if settings.backends != FASTEST and "int8" not in settings.backends:
        yield Reason(Code.NOT_NAMED, settings.backends, "int8")
    yield from kernel_against(call, settings.pv, settings.precision)
    yield from short(call, settings)


def not_wanted(call: Call, settings: Settings) -> Iterator[Reason]:
    """Yield the reasons for torch that hold whatever a backend can do."""
    off = switched_off()
    if off is not None:
        yield Reason(Code.DISABLED, off, "anything but 0, off, false or no routes")
    if skips(settings, call):
        yield Reason(Code.SKIPPED, True, "False routes")


def kernel_against(call: Call, pv: str, precision: str) -> Iterator[Reason]:
    """Yield every reason why the int8 kernel can't answer `call` exactly as torch would, int8 rounding aside."""
    yield from _modes(call, pv, precision)
    yield from call_against(call, INT8_LIMITS, _unavailable)
    if is_regular(call) and call.query.shape[0] * call.query.shape[1] > LIMITS.max_heads:
        yield Reason(Code.SHAPE, tuple(call.query.shape[:2]), f"at most {LIMITS.max_heads} heads of all batches")


def call_against(
    call: Call, limits: BackendLimits, unavailable_on: Callable[[torch.device], Reason | None]
) -> Iterator[Reason]:
    """Yield every reason in the call and the process why a backend with these limits can't answer."""
    yield from _arguments(call, limits)
    if not is_plain(call):
        # Nothing else can be asked of such a tensor safely: a nested one has no shape.
        names = [kind_of(tensor) for tensor in tensors_of(call) if not plain(tensor)]
        yield Reason(Code.TENSOR_SUBCLASS, ", ".join(names), "plain dense tensors")
        return
    yield from _state(call, unavailable_on)
    yield from _storage(call, limits)
    if not is_regular(call):
        yield Reason(Code.RANK, (call.query.dim(), call.key.dim(), call.value.dim()), (4, 4, 4))
        return
    yield from _sizes(call, limits)
    yield from _mask(call, limits)


def _modes(call: Call, pv: str, precision: str) -> Iterator[Reason]:
    if pv not in LIMITS.pv:
        yield Reason(Code.PV, pv, LIMITS.pv)
    elif pv == "fp8" and plain(call.query) and call.query.device.type != "meta":
        no_fp8 = _without_fp8(call.query.device)
        if no_fp8 is not None:
            yield no_fp8
    if precision not in LIMITS.precision:
        yield Reason(Code.PRECISION, precision, LIMITS.precision)


def _arguments(call: Call, limits: BackendLimits) -> Iterator[Reason]:
    if not isinstance(call.is_causal, bool):
        yield Reason(Code.ARGUMENT, f"is_causal of type {type(call.is_causal).__name__}", "a bool")
    if not isinstance(call.enable_gqa, bool):
        yield Reason(Code.ARGUMENT, f"enable_gqa of type {type(call.enable_gqa).__name__}", "a bool")
    if call.scale is not None and not isinstance(call.scale, (int, float)):
        yield Reason(Code.ARGUMENT, f"scale of type {type(call.scale).__name__}", "a number or None")
    elif call.scale is not None and not -limits.max_scale <= call.scale <= limits.max_scale:
        yield Reason(Code.ARGUMENT, "a scale that is not finite or too large", f"one of at most {limits.max_scale:g}")
    elif call.scale is not None and limits.positive_scale and call.scale <= 0:
        yield Reason(Code.SCALE, call.scale, "positive ones")
    if not isinstance(call.dropout_p, (int, float)):
        yield Reason(Code.ARGUMENT, f"dropout_p of type {type(call.dropout_p).__name__}", "a number")
    elif call.dropout_p != 0:
        yield Reason(Code.DROPOUT, call.dropout_p, 0)
    if call.is_causal is True and call.attn_mask is not None:
        yield Reason(Code.CAUSAL_WITH_MASK, "is_causal and attn_mask", "one of them")


def _state(call: Call, unavailable_on: Callable[[torch.device], Reason | None]) -> Iterator[Reason]:
    """Reasons in the state of the process."""
    device = call.query.device
    if device.type != "meta":
        unavailable_there = unavailable_on(device)
        if unavailable_there is not None:
            yield unavailable_there
    if torch.is_grad_enabled():
        names = [Call._fields[i] for i, tensor in enumerate(tensors_of(call)) if tensor.requires_grad]
        if names:
            yield Reason(Code.REQUIRES_GRAD, ", ".join(names), "tensors without, or no_grad()")
    transformed = transform()
    if transformed is not None:
        yield Reason(Code.FUNCTORCH, transformed, "plain calls")
    if device.type in _AUTOCAST_DEVICES and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        if call.query.dtype != dtype or call.key.dtype != dtype or call.value.dtype != dtype:
            yield Reason(Code.AUTOCAST, dtype, "tensors that are in that dtype already")


def _storage(call: Call, limits: BackendLimits) -> Iterator[Reason]:
    """Reasons in devices, dtypes and layout."""
    query, key, value = call.query, call.key, call.value
    devices = [tensor.device for tensor in tensors_of(call)]
    if any(device != query.device for device in devices):
        yield Reason(Code.MIXED_DEVICE, tuple(devices), "one device")
    if key.dtype != query.dtype or value.dtype != query.dtype:
        yield Reason(Code.MIXED_DTYPE, (query.dtype, key.dtype, value.dtype), "one dtype")
    if query.dtype not in limits.dtypes:
        yield Reason(Code.DTYPE, query.dtype, limits.dtypes)
    strides = [tensor.stride(-1) for tensor in (query, key, value) if tensor.dim() > 0 and tensor.shape[-1] > 1]
    if any(stride != 1 for stride in strides):
        yield Reason(Code.LAST_STRIDE, tuple(strides), 1)


def _sizes(call: Call, limits: BackendLimits) -> Iterator[Reason]:
    query, key, value = call.query.shape, call.key.shape, call.value.shape
    if 0 in (*query, *key, *value):
        yield Reason(Code.EMPTY, (query, key, value), "sizes of at least 1")
    if key[0] != query[0] or value[0] != query[0] or key[2] != value[2] or key[3] != query[3]:
        yield Reason(Code.SHAPE, (query, key, value), "one batch, one head_dim, and values for all keys")
    group = call.enable_gqa and limits.gqa and key[1] > 0 and query[1] % key[1] == 0
    if key[1] != value[1] or (query[1] != key[1] and not group):
        yield Reason(Code.HEADS, (query[1], key[1], value[1]), "equal numbers, or a multiple with enable_gqa=True")
    if query[3] > limits.max_head_dim:
        yield Reason(Code.HEAD_DIM, query[3], f"1 to {limits.max_head_dim}")
    elif limits.head_dims and query[3] not in limits.head_dims:
        yield Reason(Code.HEAD_DIM, query[3], limits.head_dims)
    if value[3] != query[3]:
        yield Reason(Code.VALUE_HEAD_DIM, value[3], "the head_dim of query")
    if call.is_causal is True and limits.causal == "none":
        yield Reason(Code.CAUSAL, "any lengths", "no causal mask")
    elif call.is_causal is True and limits.causal == "square" and query[2] != key[2]:
        yield Reason(Code.CAUSAL, (query[2], key[2]), "as many queries as keys")


def _mask(call: Call, limits: BackendLimits) -> Iterator[Reason]:
    mask, query = call.attn_mask, call.query
    if mask is None:
        return
    info = mask_info(call)
    if info.kind is MaskKind.INVALID:
        yield Reason(Code.INVALID_MASK, mask.shape, (*query.shape[:3], call.key.shape[2]))
    if not limits.masks:
        yield Reason(Code.MASK, mask.shape, "none")
    elif info.kind is MaskKind.FULL and MaskKind.FULL not in limits.masks:
        yield Reason(Code.FULL_MASK, mask.shape, "one row for all queries (size 1 or stride 0)")
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        yield Reason(Code.MASK_DTYPE, mask.dtype, (torch.bool, torch.float32, query.dtype))


def short(call: Call, settings: Settings) -> Iterator[Reason]:
    """Yield the reason that the int8 route is slower than torch for a call as short as this one."""
    if not is_regular(call):
        return
    query, kv_len = call.query, call.key.shape[2]
    if settings.min_kv is not None:
        if kv_len < settings.min_kv:
            yield Reason(Code.SHORT, (query.shape[2], kv_len), (1, settings.min_kv))
        return
    if query.device.type == "cpu":
        return  # the interpreter is for trying and testing: no size pays there
    pays = _crossover(query.device, query.shape[3])
    least = pays.unmasked if call.attn_mask is None else pays.masked
    if least is None:
        yield Reason(Code.SHORT, (query.shape[2], kv_len), "no size on this GPU")
    elif kv_len < least or query.shape[2] < pays.queries:
        yield Reason(Code.SHORT, (query.shape[2], kv_len), (pays.queries, least))


def mask_cast_note(call: Call) -> tuple[Reason, ...]:
    """Return the note of a decision for torch about a mask that must be cast, or none."""
    return (Reason(Code.MASK_CAST, torch.float32, call.query.dtype),) if needs_mask_cast(call) else ()


def notes_of(route: Route, call: Call, settings: Settings) -> tuple[Reason, ...]:
    """Return the notes of a decision: of a mask that is cast for torch, or that not the kernel for Hopper answers.

    Of values that lie at no multiple of 16 bytes, which no metadata tells, the latter does not know.
    """
    if route is not Route.INT8:
        return mask_cast_note(call) if route is Route.SDPA else ()
    if call.query.device.type != "cuda":
        return ()
    why = why_portable_by_metadata(call.query, call.value, settings.pv)
    return () if why is None else (Reason(Code.PORTABLE, why, "the portable kernel"),)


# torch.compile runs these when it traces and keeps what they return. Its guards cover the transforms.
@traced_as_constant
def switched_off() -> str | None:
    """Return the setting in the environment that switches routing off, such as SDPA_ROUTER=0, if it does."""
    value = os.environ.get("SDPA_ROUTER", "")
    return f"SDPA_ROUTER={value}" if value.strip().lower() in ("0", "off", "false", "no") else None


@traced_as_constant
def _unavailable(device: torch.device) -> Reason | None:
    found = unavailable(device)
    return None if found is None else Reason(Code(found[0]), found[1], found[2])


@traced_as_constant
def _without_fp8(device: torch.device) -> Reason | None:
    found = fp8_unavailable(device)
    return None if found is None else Reason(Code.PV, found[0], found[1])


@traced_as_constant
def _crossover(device: torch.device, head_dim: int) -> Crossover:
    tuned = tuned_table(device)
    measured = None if tuned is None else tuned.crossover(head_dim)
    return crossover(device, head_dim) if measured is None else measured


@traced_as_constant
def transform() -> str | None:
    """Return what torch does with calls now that a kernel would not take part in, if anything."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a torch.func transform"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"  # whose sizes are tensors, and whose graph a kernel would not be in
    return "forward-mode AD" if forward_ad._current_level >= 0 else None
