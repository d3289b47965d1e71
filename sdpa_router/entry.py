"""The door of functions that launch kernels with no operator between: what torch's dispatcher would see to there."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch

from .decide import transform
from .decision import Code, Decision, Reason, Route, UnsupportedError
from .mask import classify_mask

_Function = TypeVar("_Function", bound=Callable[..., Any])
_BUFFERS = ("out", "lse")
_modes = torch._C._TorchDispatchModeKey
_TRACERS = (_modes.FAKE, _modes.PROXY, _modes.FUNCTIONAL)


def kernel_entry(function: _Function) -> _Function:
    """Decorate a function that hands the memory of its tensors to kernels; torch.compile breaks its graph there.

    Tensors come as readable() ones, but for attn_mask: it is recognised by its memory, so key_row() sees to it.
    What holds no values of its own (wrappers such as DTensor, fake and meta tensors) and calls under a transform or a
    trace, which would not see the kernels, raise UnsupportedError.
    """
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def enter(*args: Any, **kwargs: Any) -> Any:
        untold = _unseeing()
        if untold is not None:
            raise _unsupported(Reason(Code.FUNCTORCH, untold, "plain calls"))
        return function(
            *[let_in(name, given) for name, given in zip(names, args, strict=False)],
            *args[len(names) :],
            **{name: let_in(name, given) for name, given in kwargs.items()},
        )

    # torch.compiler.disable as a decorator would import torch._dynamo, and Triton, with this module.
    @functools.wraps(function)
    def plainly(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(enter)(*args, **kwargs)
        return enter(*args, **kwargs)

    return plainly  # type: ignore[return-value]


def unseen_by_kernels(*tensors: torch.Tensor) -> bool:
    """Whether a kernel_entry would raise: for a transform, a trace, or a tensor that holds no values of its own."""
    return _unseeing() is not None or any(_without_memory(tensor) is not None for tensor in tensors)


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where memory doesn't hold its values: a view negates them, or they are known zeros."""
    if tensor._is_zerotensor():
        return tensor.clone()
    return tensor.resolve_conj().resolve_neg()


def let_in(name: str, given: Any) -> Any:
    """The argument `name` as kernels may have it; raises UnsupportedError for a tensor without values of its own."""
    if type(given) is tuple:
        return tuple(let_in(name, part) for part in given)
    if not isinstance(given, torch.Tensor):
        return given
    why = _without_memory(given)
    if why is not None:
        raise _unsupported(Reason(Code.TENSOR_SUBCLASS, f"{name}: {why}", "dense tensors that hold their values"))
    if name in _BUFFERS and readable(given) is not given:
        raise ValueError(f"{name} is a negated view; accepted: a buffer whose memory holds the values themselves")
    return given if name == "attn_mask" else readable(given)


def _without_memory(tensor: torch.Tensor) -> str | None:
    """What `tensor` is, if it has no dense memory that holds its values."""
    if torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python):
        return f"a {type(tensor).__name__}"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor):
        return "a tensor of a torch.func transform"
    if tensor.is_nested or tensor.layout != torch.strided:
        return "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
    return "a meta tensor" if tensor.is_meta else None


def _unseeing() -> str | None:
    """What transforms or traces this call, and would see nothing of a kernel."""
    transformed = transform()
    if transformed is not None:
        return transformed
    if torch._C._len_torch_dispatch_stack() and any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACERS):
        return "a trace or a FakeTensorMode"
    return "a trace" if _len_torch_dispatch_stack_pre_dispatch() else None


def _unsupported(reason: Reason) -> UnsupportedError:
    return UnsupportedError(Decision(Route.SDPA, classify_mask(None, 1, 1, 1, 1), (reason,)))
