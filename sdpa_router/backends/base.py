"""What a backend is, and which ones there are. Built-in ones are loaded when they are first named."""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from ..decision import MaskKind, Reason

if TYPE_CHECKING:
    from ..decide import Call
    from ..settings import Settings


@dataclass(frozen=True)
class BackendLimits:
    """What a backend takes, as data; every call outside of it is refused with a reason.

    dtypes: of query, key and value.  max_head_dim, head_dims: the largest head_dim, and the only ones if not empty.
    masks: the kinds it takes besides none.  causal: "any" lengths, aligned top left as in torch; "square", as many
    queries as keys; or "none".  gqa: whether grouped heads are taken.  max_scale, positive_scale: of the softmax scale.
    blind: whether what a masked key holds changes the answer.  lse: whether it could return the log-sum-exp.
    error: the largest relative error that it is known to have on N(0, 1) inputs, None if unknown.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    max_head_dim: int = 256
    head_dims: tuple[int, ...] = ()
    masks: tuple[MaskKind, ...] = ()
    causal: Literal["any", "square", "none"] = "any"
    gqa: bool = True
    max_scale: float = 2.0**20
    positive_scale: bool = False
    blind: bool = False
    lse: bool = False
    error: float | None = None


Reasons = Callable[["Call", "Settings"], Iterator[Reason]]
Run = Callable[["Call", "Settings", Callable[..., torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Backend:
    """One who can answer an attention call.

    name: what `route(backends=...)` calls it.  limits: what it takes.  reasons_against(call, settings) yields every
    reason why it can't answer a call exactly as torch would, its own rounding aside; it sees metadata only.
    run(call, settings, attention) answers, into a new tensor [B, H, Q, D] in the query's dtype, and changes neither an
    argument nor the current device; `attention` is torch's function.
    reasons_now(call) yields reasons in what may change from call to call, such as the current stream; it is asked at
    every call.
    """

    name: str
    limits: BackendLimits
    reasons_against: Reasons
    run: Run
    reasons_now: Callable[[Call], Iterator[Reason]] | None = None


# The order is the one in which backends="fastest" considers them.
_BUILT_IN = {
    "int8": "int8",
    "fa3": "fa3",
    "comfy": "comfy",
    "sage": "sage",
    "torch-cudnn": "torch_sdpa",
    "torch-flash": "torch_sdpa",
    "torch-efficient": "torch_sdpa",
    "torch-math": "torch_sdpa",
}
# Answers whatever nobody else does; it is no Backend because it takes every call.
TORCH = "torch"
_RESERVED = ("sdpa", "fastest")
_loaded: dict[str, Backend] = {}
_registered: dict[str, Backend] = {}
_lock = threading.Lock()


def backend_names() -> tuple[str, ...]:
    """Return the names that `route(backends=...)` takes: built-in ones, registered ones, "torch"."""
    return (*_BUILT_IN, *_registered, TORCH)


def candidates() -> tuple[str, ...]:
    """Return the names that backends="fastest" considers besides torch, whose own backends torch chooses from."""
    return (*(name for name, module in _BUILT_IN.items() if module != "torch_sdpa"), *_registered)


def find_backend(name: str) -> Backend:
    """Return the backend of this name; raises KeyError for "torch" and for unknown names."""
    backend = _registered.get(name) or _loaded.get(name)
    if backend is None:
        module = importlib.import_module(f"{__package__}.{_BUILT_IN[name]}")
        _loaded.update({backend.name: backend for backend in module.BACKENDS})
        backend = _loaded[name]
    return backend


def register_backend(backend: Backend) -> None:
    """Let `route(backends=...)` know `backend`; with backends="fastest" it takes part once `tune` has measured it.

    Raises TypeError for what is no Backend, ValueError for a name that is taken or that is no lower-case word.

    >>> register_backend(Backend("mine", BackendLimits(), reasons_against, run))
    """
    if not isinstance(backend, Backend):
        raise TypeError(f"register_backend() takes a Backend; given {type(backend).__name__}")
    if not callable(backend.reasons_against) or not callable(backend.run):
        raise TypeError(f"backend {backend.name!r} needs two functions, reasons_against and run")
    if not isinstance(backend.limits, BackendLimits):
        raise TypeError(f"limits of backend {backend.name!r} is {backend.limits!r}; accepted: BackendLimits")
    if backend.reasons_now is not None and not callable(backend.reasons_now):
        raise TypeError(f"reasons_now of backend {backend.name!r} is {backend.reasons_now!r}; accepted: a function")
    if not isinstance(backend.name, str) or not re.fullmatch(r"[a-z][a-z0-9_-]*", backend.name):
        raise ValueError(f"the name is {backend.name!r}; accepted: lower-case letters, digits, - and _")
    with _lock:
        if backend.name in (*backend_names(), *_RESERVED):
            raise ValueError(f"a backend {backend.name!r} is there already; unregister_backend() removes one of yours")
        _registered[backend.name] = backend
    _judge_anew()  # it may be back, under settings that named it before


def unregister_backend(name: str) -> None:
    """Forget a registered backend; raises KeyError for a name that register_backend() was not given.

    Settings that name it send their calls to the next backend.
    """
    with _lock:
        del _registered[name]
    _judge_anew()


def _judge_anew() -> None:
    from ..record import judge_anew  # record imports the settings, which import this module

    judge_anew()
