"""Route the calls of a block of code: a name in a thread-local says which settings hold."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from .decide import Call
from .patch import enter, leave, stay_installed, used
from .settings import BACKENDS, OFF, Settings, activate, active_name, intern, traced_as_constant

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Answer = TypeVar("_Answer")

_compiling = torch.compiler.is_dynamo_compiling
_thread = threading.local()  # .outer: names to go back to, innermost last


class _Region:
    """The block of code in which the settings `name` hold; built inside of code that torch.compile traces."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._outer = OFF

    def __enter__(self) -> None:
        if stay_installed():
            used.once += "."  # so that the guards refuse this graph from its first run on, and it is traced anew
        self._outer = active_name()
        activate(self._name)

    def __exit__(self, *error: object) -> None:
        activate(self._outer)


class route(_Region):  # noqa: N801 (used like a function)
    """Send the F.scaled_dot_product_attention calls of this thread through the router; a context or a decorator.

    on_unsupported: "fallback" to torch, "warn" once a signature, or "raise" UnsupportedError with all reasons; in code
    compiled with fullgraph=True torch raises its own Unsupported, which names the reason codes.
    min_kv: the fewest keys to route; None takes the measured crossover.  pv: "auto" or "16bit"; or "fp8", P @ V in
    e4m3, at an error of about 0.04; not faster on an H200.  precision: "auto"; or "high", an int8 scale for each key.
    skip: a function of the Call; True sends it to torch.  It is kept, so don't make a new one for every entry. It must
    be hashable; attention calls that it makes itself are not routed.
    log: whether first sights are logged on "sdpa_router.dispatch".
    backends: who is asked, in this order: "int8", "comfy", "sage", "fa3", "torch", one of torch's own ("torch-cudnn",
    "torch-flash", "torch-efficient", "torch-math"), or what register_backend() was given; or "fastest": the one that
    the measured costs (`sdpa-router tune`) are best for. torch answers what nobody else does.
    allow_mask_blind: take backends whose rounding depends on what masked keys hold (garbage in padding spoils it).
    max_error: leave out backends whose measured error class is above.
    on_error: "raise" what a backend raises, with the decision attached, or log it and "fallback" to the next one; who
    failed is not asked again for that kind of call, who ran out of memory a second later.
    by_tile: answer masks with a row for each query by their tiles, where that is faster; each is summarised once.
    min_kv and pv are for int8.

    Contexts nest, and the inner settings hold. Leaving restores what was there, also after an exception. The switch
    belongs to the thread: other threads are not routed, asyncio tasks and suspended generators of this one are. Where
    torch.compile traces the `with`, the replacement stays in place afterwards and passes through; a function that calls
    SDPA before the first such `with` of the process is routed from its second run on, when it is traced again.
    Raises ValueError or TypeError for settings that don't exist.

    >>> with route(on_unsupported="warn"):
    ...     model(x)
    """

    def __init__(
        self,
        *,
        on_unsupported: str = "fallback",
        min_kv: int | None = None,
        pv: str = "auto",
        precision: str = "auto",
        skip: Callable[[Call], bool] | None = None,
        log: bool = True,
        backends: str | Sequence[str] = BACKENDS,
        allow_mask_blind: bool = False,
        max_error: float | None = None,
        on_error: str = "raise",
        by_tile: bool = True,
    ) -> None:
        chosen = on_unsupported, min_kv, pv, precision, skip, log, backends, allow_mask_blind, max_error, on_error
        super().__init__(_name_of(*chosen, by_tile))

    def __enter__(self) -> None:
        if _compiling():
            super().__enter__()
            return
        # It may be entered again, and in other threads, before it is left.
        if not hasattr(_thread, "outer"):
            _thread.outer = []
        _thread.outer.append(enter(self._name))

    def __exit__(self, *error: object) -> None:
        if _compiling():
            super().__exit__(*error)
        else:
            leave(_thread.outer.pop())

    def __call__(self, function: _Function) -> _Function:
        """Decorate `function`: its body runs inside this context."""
        if not is_plain_function(function):
            raise TypeError(
                f"route() decorates plain functions; given {function!r}. Use `with route():` inside a generator or "
                "coroutine, and decorate the methods of a class"
            )
        name = self._name

        @functools.wraps(function)
        def routed(*args: Any, **kwargs: Any) -> Any:
            return inside(name, function, args, kwargs)

        return routed  # type: ignore[return-value]


def is_plain_function(function: object) -> bool:
    """Whether the body of `function` is run by calling it, and returns when that is done."""
    if not callable(function) or isinstance(function, type):
        return False
    # Of a staticmethod, or of an object that is called, the function that runs.
    inner = getattr(function, "__func__", function)
    if not (inspect.isroutine(inner) or isinstance(inner, functools.partial)):
        inner = type(inner).__call__
    later = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return not any(test(inner) for test in later)


def inside(name: str, function: Callable[..., _Answer], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Answer:
    """Call `function` while the settings `name` hold."""
    if _compiling():
        with _Region(name):
            return function(*args, **kwargs)
    # Spelt out: a context manager would take another 15 us of each forward in a model.
    outer = enter(name)
    try:
        return function(*args, **kwargs)
    finally:
        leave(outer)


def inside_unless_routed(
    name: str, function: Callable[..., _Answer], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Answer:
    """Call `function` while the settings `name` hold, or those of the route() or enabled module around this call."""
    return function(*args, **kwargs) if active_name() != OFF else inside(name, function, args, kwargs)


@traced_as_constant
def _name_of(*settings: Any) -> str:
    return intern(Settings(*settings))
