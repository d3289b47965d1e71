"""What a backend is, and which ones there are. Built-in ones are loaded when they are first named."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from .. import scalars
from ..decision import Code, MaskKind, Reason
from ..forks import free_after_fork

if TYPE_CHECKING:
    from ..call import Call
    from ..settings import Settings


@dataclass(frozen=True)
class BackendLimits:
    """What a backend takes, as data; every call outside of it is refused with a reason.

    dtypes: of query, key and value.  max_head_dim, head_dims: the largest head_dim, and the only ones if not empty.
    masks: the kinds it takes besides none.  causal: "any" lengths, aligned top left as in torch; "square", as many
    queries as keys; or "none".  gqa: whether grouped heads are taken.  max_scale, positive_scale: of the softmax scale.
    blind: whether what a masked key holds changes the answer.  lse: whether it could return the log-sum-exp.
    error: the largest relative error that it is known to have on N(0, 1) inputs, None if unknown.
    Raises TypeError or ValueError for other values.
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

    def __post_init__(self) -> None:
        for name, kind in (("dtypes", torch.dtype), ("head_dims", int), ("masks", MaskKind)):
            given = getattr(self, name)
            if not isinstance(given, tuple) or not all(isinstance(value, kind) for value in given):
                raise TypeError(f"{name} is {given!r}; accepted: a tuple of {kind.__name__}")
        scalars.flags(self, "gqa", "positive_scale", "blind", "lse")
        scalars.whole(self, "max_head_dim", 1)
        scalars.real(self, "max_scale", positive=True)
        scalars.real(self, "error", or_none=True)
        if self.causal not in ("any", "square", "none"):
            raise ValueError(f"causal is {self.causal!r}; accepted: 'any', 'square' or 'none'")


Reasons = Callable[["Call", "Settings"], Iterator[Reason]]
Run = Callable[["Call", "Settings", Callable[..., torch.Tensor]], torch.Tensor]


# Characters that are shown of what an error says: a C++ symbol that is missing may have thousands.
_MOST_WORDS = 300


def said(error: BaseException) -> str:
    """Return the type of an error and what it says in one line, cut where that is long."""
    words = ""
    with contextlib.suppress(Exception):  # asking it may raise anything
        words = " ".join(str(error).split())
    words = words if len(words) <= _MOST_WORDS else f"{words[:_MOST_WORDS]}..."
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


@dataclass(frozen=True)
class Backend:
    """One who can answer an attention call.

    name: what `route(backends=...)` calls it.  limits: what it takes.  reasons_against(call, settings) yields every
    reason beyond its limits why it can't answer a call exactly as torch would, its own rounding aside; it sees metadata
    only, of query, key and value with four axes.
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
_lock = free_after_fork(threading.Lock())


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
        now = None if backend.reasons_now is None else functools.partial(_all_reasons_now, backend)
        against = functools.partial(_all_reasons_against, backend)
        _registered[backend.name] = dataclasses.replace(backend, reasons_against=against, reasons_now=now)
    _judge_anew()  # it may be back, under settings that named it before


def _all_reasons_against(backend: Backend, call: Call, settings: Settings) -> Iterator[Reason]:
    """Yield the reasons in the limits of a registered backend, then its own ones."""
    from ..call import is_regular
    from ..decide import call_against  # which imports this module

    yield from call_against(call, backend.limits, lambda device: None)
    yield from mask_blind(call, backend.limits, settings)
    if is_regular(call):
        yield from _told_by(backend, backend.reasons_against(call, settings))


def mask_blind(call: Call, limits: BackendLimits, settings: Settings) -> Iterator[Reason]:
    """Yield the reason that what masked keys hold would change the answer, unless the user accepts that."""
    if limits.blind and call.attn_mask is not None and not settings.allow_mask_blind:
        yield Reason(Code.MASK_BLIND, "all keys, masked ones too", "that with allow_mask_blind=True")


def _all_reasons_now(backend: Backend, call: Call) -> Iterator[Reason]:
    assert backend.reasons_now is not None
    yield from _told_by(backend, backend.reasons_now(call))


def _told_by(backend: Backend, reasons: object) -> Iterator[Reason]:
    """Yield what a registered backend gives as reasons; raises TypeError for what nothing could count or show."""
    if not isinstance(reasons, Iterable):
        raise TypeError(f"backend {backend.name!r} gives {reasons!r}; accepted: an iterator over Reasons")
    for reason in reasons:
        if not isinstance(reason, Reason) or not isinstance(reason.code, Code):
            raise TypeError(f"backend {backend.name!r} gives {reason!r}; accepted: Reason(Code, given, accepted)")
        yield reason


def unregister_backend(name: str) -> None:
    """Forget a registered backend; raises KeyError for a name that register_backend() was not given.

    Settings that name it send their calls to the next backend.
    """
    with _lock:
        if name not in _registered:
            raise KeyError(f"given {name!r}, accepted: what was registered ({', '.join(_registered) or 'nothing yet'})")
        del _registered[name]
    _judge_anew()


def _judge_anew() -> None:
    from ..record import judge_anew  # record imports the settings, which import this module

    judge_anew()
