"""A call on its way where torch.compile traces it: decided, recorded and put into the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor

from . import run
from .backends.base import BackendLimits
from .choose import choose
from .decide import (
    Call,
    call_against,
    decide,
    decide_kernel,
    kernel_against,
    needs_mask_cast,
    reasons_against,
)
from .decision import Decision, MaskKind, Reason, UnsupportedError
from .recent import answered_before, remember_answered
from .record import sight
from .settings import settings_of
from .sighting import plain_number

if TYPE_CHECKING:
    from torch._dynamo.comptime import ComptimeContext, ComptimeVar

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# What an operator in a graph can leave to some backend or to torch; the rest torch.compile must see as torch's call.
_ANYTHING = BackendLimits(_FLOATS, max_head_dim=2**31, masks=(MaskKind.PER_KEY, MaskKind.FULL))
_compiling = torch.compiler.is_dynamo_compiling


def _everywhere(device: torch.device) -> Reason | None:
    return None


def traced(call: Call, name: str, attention: run.Attention) -> torch.Tensor:
    """Answer a call that torch.compile traces: no counter, dict, lock or log line may be touched here."""
    from torch._dynamo.comptime import comptime

    settings = settings_of(name)
    if not settings.only_int8 and not any(call_against(call, _ANYTHING, _everywhere)):
        # Who answers depends on sizes, and peers can't be traced: the operator decides when it runs.
        return torch.ops.sdpa_router.routed_attention(*call, name)  # type: ignore[no-any-return]
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
    decision = choose(call, settings)
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


def require_kernel(call: Call, pv: str, precision: str) -> None:
    """Raise UnsupportedError as refuse() does for what the int8 kernel can't answer; a call seen before is quick."""
    if answered_before(call, pv, precision):
        return
    codes = [reason.code.value for reason in kernel_against(call, pv, precision)]
    if codes:
        refuse(codes, decide_kernel, call, pv, precision)
    remember_answered(call, pv, precision)


def refuse(codes: list[str], decide_again: Callable[..., Decision], *arguments: object) -> None:
    """Raise UnsupportedError, from Python as graphs can't; under fullgraph=True torch raises its own with the codes."""
    if _compiling():
        torch._dynamo.graph_break(f"sdpa_router.UnsupportedError: {', '.join(codes)}")
        torch.compiler.disable(_raise)(decide_again, *arguments)
    _raise(decide_again, *arguments)


def _raise(decide_again: Callable[..., Decision], *arguments: object) -> NoReturn:
    raise UnsupportedError(decide_again(*arguments))
