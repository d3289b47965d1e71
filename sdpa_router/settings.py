"""Settings of a routed region, the names that stand for them, and the name that is active in this thread."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from . import scalars
from .backends.base import backend_names
from .forks import free_after_fork
from .kernels.int8_attention.limits import LIMITS

if TYPE_CHECKING:
    from .decide import Call

ON_UNSUPPORTED = ("fallback", "warn", "raise")
ON_ERROR = ("raise", "fallback")
BACKENDS = ("int8", "torch")
FASTEST = "fastest"


@dataclass(frozen=True)
class Settings:
    """How calls are routed; raises ValueError or TypeError for a value that it doesn't take.

    on_unsupported: "fallback" to torch silently, "warn" once a signature, or "raise" UnsupportedError.
    min_kv: the fewest keys to route; None takes the measured crossover.  pv: precision of P @ V, "auto", "16bit" or
    "fp8".  precision: of the int8 scores, "auto" (keys share scales) or "high" (a scale for each key).
    skip: a predicate on the Call; True sends it to torch.  log: whether a first sight is logged.
    backends: names in the order of preference (kept as a tuple), or "fastest"; torch answers what nobody else does.
    allow_mask_blind: whether backends are taken whose scales depend on what masked keys hold.
    max_error: the largest error class (the worst relative error that `sdpa-router tune` measured) to take.
    on_error: whether the error of a backend is raised, or the next one answers ("fallback").
    by_tile: whether masks with a row for each query are answered by tile where that is faster (see by_tile.py).
    """

    on_unsupported: str = "fallback"
    min_kv: int | None = None
    pv: str = "auto"
    precision: str = "auto"
    skip: Callable[[Call], bool] | None = None
    log: bool = True
    backends: str | Sequence[str] = BACKENDS
    allow_mask_blind: bool = False
    max_error: float | None = None
    on_error: str = "raise"
    by_tile: bool = True

    def __post_init__(self) -> None:
        if self.on_unsupported not in ON_UNSUPPORTED:
            raise ValueError(f"on_unsupported is {self.on_unsupported!r}; accepted: {', '.join(ON_UNSUPPORTED)}")
        scalars.whole(self, "min_kv", 0, or_none=True)
        if self.pv not in LIMITS.pv:
            raise ValueError(f"pv is {self.pv!r}; accepted: {', '.join(LIMITS.pv)}")
        if self.precision not in LIMITS.precision:
            raise ValueError(f"precision is {self.precision!r}; accepted: {', '.join(LIMITS.precision)}")
        if self.skip is not None and not callable(self.skip):
            raise TypeError(f"skip is {self.skip!r}; accepted: None or a function of a Call")
        try:
            hash(self.skip)
        except TypeError:
            raise TypeError(f"skip is {self.skip!r}; accepted: None or a function of a Call that is hashable") from None
        scalars.flags(self, "log", "allow_mask_blind", "by_tile")
        scalars.real(self, "max_error", or_none=True)
        if self.on_error not in ON_ERROR:
            raise ValueError(f"on_error is {self.on_error!r}; accepted: {', '.join(ON_ERROR)}")
        self._check_backends()

    def _check_backends(self) -> None:
        if isinstance(self.backends, list):
            object.__setattr__(self, "backends", tuple(self.backends))
        names = () if self.backends == FASTEST else self.backends
        known = backend_names()
        ordered = isinstance(names, tuple) and all(name in known for name in names) and len({*names}) == len(names)
        if not ordered or self.backends == ():
            accepted = f"{FASTEST!r} or different names out of {', '.join(known)}, as a tuple in order"
            raise ValueError(f"backends is {self.backends!r}; accepted: {accepted}{_meant(self.backends, known)}")

    @property
    def only_int8(self) -> bool:
        """Whether int8 and torch are all there is to choose from, by rules alone."""
        return self.backends == BACKENDS and self.max_error is None and self.on_error == "raise"


def _meant(backends: object, known: tuple[str, ...]) -> str:
    """Return what was probably meant by names that are not taken, as the end of a sentence."""
    given = backends.split(",") if isinstance(backends, str) else backends if isinstance(backends, tuple) else ()
    texts = [name.strip().lower() for name in given if isinstance(name, str)]
    names = [close for text in texts for close in difflib.get_close_matches(text, (*known, FASTEST), 1)]
    meant = FASTEST if FASTEST in names else tuple(dict.fromkeys(names))
    return f"; did you mean {meant!r}?" if names else ""


_Function = TypeVar("_Function", bound=Callable[..., Any])


def traced_as_constant(function: _Function) -> _Function:
    """Decorate a function that torch.compile is to run when it traces, and to keep the answer of."""
    # What torch.compiler.assume_constant_result does, which imports torch._dynamo and Triton first.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class _Kept:
    """Settings by name, as attributes: torch.compile guards the one that it reads, but of a dict the size too."""


# The name "off" means "not routing"; its settings are the defaults. A compiled graph is guarded by the name, so that
# equal settings share a graph. It is a str because torch.compile turns an int that changes into a symbol, and torch 2.7
# misreads an object in a threading.local.
OFF = "off"
_kept = _Kept()
skipping: set[str] = set()  # names of settings with a skip
_names: dict[Settings, str] = {}
_lock = free_after_fork(threading.Lock())


class _Active(threading.local):
    """The name that holds in each thread; none at first, so that a graph's guard never finds the attribute missing."""

    # In a class attribute torch 2.7 would read the default at all times.
    def __init__(self) -> None:
        self.name = OFF


active = _Active()


def intern(settings: Settings) -> str:
    """Return the name of `settings`, the same one for equal settings; both are kept for the life of the process."""
    with _lock:
        name = _names.setdefault(settings, f"settings{len(_names)}")
        setattr(_kept, name, settings)
        if settings.skip is not None:
            skipping.add(name)
    return name


def settings_of(name: str) -> Settings:
    """Return the settings with this name."""
    settings: Settings = getattr(_kept, name)
    return settings


def active_name() -> str:
    """Return the name of the settings that hold in this thread, OFF outside of route()."""
    return active.name


def activate(name: str) -> None:
    """Let the settings `name` hold in this thread."""
    active.name = name


def skips(settings: Settings, call: Call) -> bool:
    """Whether `settings` send `call` to torch by their skip, whose own attention calls are not routed."""
    if settings.skip is None:
        return False
    name = active_name()
    activate(OFF)
    if torch.compiler.is_dynamo_compiling():
        # No `finally`: a graph break inside one is an error. What a frame that fails to trace has set is undone.
        answer = settings.skip(call)
        activate(name)
        return bool(answer)
    try:
        return bool(settings.skip(call))
    finally:
        activate(name)


setattr(_kept, OFF, Settings())
