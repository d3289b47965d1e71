"""Route the calls of a block of code or of a module: a name in a thread-local says which settings hold."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from .decide import Call
from .patch import enter, leave, stay_installed
from .selection import Patterns, borders, check_module, excluded, may_attend, switches
from .settings import BACKENDS, OFF, Settings, activate, active_name, in_order, intern, settings_of, traced_as_constant

_Function = TypeVar("_Function", bound=Callable[..., Any])

_compiling = torch.compiler.is_dynamo_compiling
_thread = threading.local()  # .outer: names to go back to, innermost last


class _Region:
    """The block of code in which the settings `name` hold; built inside of code that torch.compile traces."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._outer = OFF

    def __enter__(self) -> None:
        stay_installed()
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
    on_error: "raise" what a backend raises, with the decision attached, or log it and "fallback" to the next one.
    by_tile: answer masks with a row for each query by their tiles, where that is faster; each is summarised once.
    min_kv and pv are for int8.

    Contexts nest, and the inner settings hold. Leaving restores what was there, also after an exception. The switch
    belongs to the thread: other threads are not routed, asyncio tasks and suspended generators of this one are. Where
    torch.compile traces the `with`, the replacement stays in place afterwards and passes through.
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
        chosen = in_order(backends)
        super().__init__(
            _name_of(
                on_unsupported, min_kv, pv, precision, skip, log, chosen, allow_mask_blind, max_error, on_error, by_tile
            )
        )

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
        if not _is_plain_function(function):
            raise TypeError(
                f"route() decorates plain functions; given {function!r}. Use `with route():` inside a generator or "
                "coroutine, and decorate the methods of a class"
            )
        name = self._name

        @functools.wraps(function)
        def routed(*args: Any, **kwargs: Any) -> Any:
            return _inside(name, function, args, kwargs)

        return routed  # type: ignore[return-value]


def _is_plain_function(function: object) -> bool:
    """Whether the body of `function` is run by calling it, and returns when that is done."""
    if not callable(function) or isinstance(function, type):
        return False
    # Of a staticmethod, or of an object that is called, the function that runs.
    inner = getattr(function, "__func__", function)
    if not (inspect.isroutine(inner) or isinstance(inner, functools.partial)):
        inner = type(inner).__call__
    later = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return not any(test(inner) for test in later)


def enable(
    module: torch.nn.Module,
    *,
    include: Patterns = None,
    exclude: Patterns = None,
    on_unsupported: str = "fallback",
    min_kv: int | None = None,
    pv: str = "auto",
    precision: str = "auto",
    skip: Callable[[Call], bool] | None = None,
    log: bool = True,
    fuse_qk: bool = False,
    backends: str | Sequence[str] = BACKENDS,
    allow_mask_blind: bool = False,
    max_error: float | None = None,
    on_error: str = "raise",
    by_tile: bool = True,
) -> None:
    """Run the forward of `module` inside route() with these settings; other modules stay as they are.

    include, exclude: glob patterns over the qualified names of its submodules. Calls are routed inside of those that
    match `include`, by default in all of `module`; inside of those that match `exclude` torch answers ("skipped").
    Enabling again replaces settings and choice. A deep copy of the module is enabled too, by itself. A copy.copy runs
    the module's own forward, enabled or not, until enable() or disable() is called on the copy. To pickle an enabled
    module its skip must be a named function of some module, not a lambda.
    fuse_qk: let diffusers' Wan and Flux blocks norm, rotate and quantise query and key in one pass where a call is
    routed to int8; the log says which blocks don't match, and why. They take their plain path under torch.compile, and
    with a skip, pv="fp8" or on_error="fallback".
    Raises TypeError for anything but a torch.nn.Module with a plain forward, ValueError for a pattern that matches
    nothing, and for a module that can't attend, such as one of linear layers, or where Python doesn't see it, as in
    TorchScript.

    >>> enable(pipe.transformer, exclude=["blocks.0", "blocks.29"])
    >>> enable(pipe.transformer, skip=lambda call: call.query.shape[2] != call.key.shape[2])  # no cross-attention
    """
    check_module("enable", module)
    chosen = in_order(backends)
    settings = Settings(
        on_unsupported, min_kv, pv, precision, skip, log, chosen, allow_mask_blind, max_error, on_error, by_tile
    )
    outside = replace(settings, on_unsupported="fallback", skip=excluded)
    names = {"on": intern(settings), "off": intern(outside)}
    wrapped = borders(module, switches(module, include, exclude))
    if not may_attend(module):
        raise ValueError(
            f"given {type(module).__name__}, which can't make an attention call that Python sees; accepted: a module "
            "that calls torch.nn.functional.scaled_dot_product_attention"
        )
    for path in wrapped:
        if not _is_plain_function(module.get_submodule(path).forward):
            raise TypeError(f"enable() takes modules whose forward is a plain function; that of {path!r} is not")
    for path, scope in _scopes_set_by(module):
        if path not in wrapped:
            _unwrap(module.get_submodule(path), scope)
    # Last those that are off: one module may have two names, and an exclusion wins.
    for path in sorted(wrapped, key=lambda path: wrapped[path] == "off"):
        _wrap(module.get_submodule(path), names[wrapped[path]], path)
    _fuse_qk(module, fuse_qk, log)


def disable(module: torch.nn.Module) -> None:
    """Undo enable(module); nothing happens to a module that is not enabled.

    Where somebody has wrapped the forward since, that wrapper stays and what it calls passes through. Raises TypeError
    for anything but a torch.nn.Module.
    """
    check_module("disable", module)
    for path, scope in _scopes_set_by(module):
        _unwrap(module.get_submodule(path), scope)
    _fuse_qk(module, False, False)


def _fuse_qk(module: torch.nn.Module, on: bool, log: bool) -> None:
    """Put the fused attention processors into `module`, or take them out."""
    from .integrations import diffusers_fused

    if on:
        diffusers_fused.fuse(module, log)
    else:
        diffusers_fused.unfuse(module)


@contextlib.contextmanager
def suspended(module: torch.nn.Module) -> Iterator[None]:
    """Let everything in `module` that is enabled pass through meanwhile."""
    scopes = [scope for inner in module.modules() if (scope := inner.__dict__.get(_SCOPE)) is not None]
    names = [scope.name for scope in scopes]
    for scope in scopes:
        scope.name = OFF
    try:
        yield
    finally:
        for scope, name in zip(scopes, names, strict=True):
            scope.name = name


_SCOPE = "_sdpa_router_scope"


def _scopes_set_by(root: torch.nn.Module) -> list[tuple[str, _Scope]]:
    """List what enable(root) wrapped, by qualified name, and `root` itself if another enable() did."""
    found = []
    for path, module in root.named_modules(remove_duplicate=False):
        scope = module.__dict__.get(_SCOPE)
        if scope is not None and (module is root or scope.path == path):
            found.append((path, scope))
    return found


def _wrap(module: torch.nn.Module, name: str, path: str) -> None:
    scope = module.__dict__.get(_SCOPE)
    if scope is not None and scope.is_of_another(module):
        _unwrap(module, scope)
        scope = None
    if scope is not None and _place_of(module, scope) is not None:
        scope.name, scope.path = name, path
        return
    if scope is not None:
        scope.name = OFF  # somebody has replaced the forward since, and may still call what enable() had made of it
    holder, key = _places(module)[0]
    forward = holder.get(key, module.forward)
    scope = _Scope(name, key in holder, path, weakref.ref(module))
    module.__dict__[_SCOPE] = scope
    holder[key] = functools.update_wrapper(functools.partial(_routed_forward, scope, forward), forward)


def _unwrap(module: torch.nn.Module, scope: _Scope) -> None:
    module.__dict__.pop(_SCOPE, None)
    if not scope.is_of_another(module):
        scope.name = OFF
    place = _place_of(module, scope)
    if place is not None:
        holder, key = place
        if scope.had_forward or holder is not module.__dict__ or key != "forward":
            holder[key] = holder[key].args[1]
        else:
            del holder[key]


_Place = tuple[dict[str, Any], str]


def _places(module: torch.nn.Module) -> list[_Place]:
    """List where a forward of `module` may lie, as (attributes, name), the innermost one first.

    Hooks of accelerate and diffusers keep the forward that they found and put it back when they are removed, which
    diffusers' offloading does after each run of a pipeline: what stood over them would be lost.
    """
    attributes = module.__dict__
    places: list[_Place] = [(attributes, "forward")]
    registry = attributes.get("_diffusers_hook")
    if getattr(registry, "_module_ref", None) is module:
        for reference in reversed(registry._fn_refs):  # type: ignore[union-attr]
            found = "forward" if reference.original_forward is None else "original_forward"
            places.insert(0, (vars(reference), found))
    if "_hf_hook" in attributes and "_old_forward" in attributes:
        places.insert(0, (attributes, "_old_forward"))
    return places


def _place_of(module: torch.nn.Module, scope: _Scope) -> _Place | None:
    """Return where what enable() made of the forward lies, None if somebody else has replaced it."""
    for holder, key in _places(module):
        forward = holder.get(key)
        if isinstance(forward, functools.partial) and forward.args[:1] == (scope,):
            return holder, key
    return None


class _Scope:
    """What enable() set for one module.

    name: of the settings, OFF once disabled.  had_forward: whether it had a forward of its own.  path: its name in the
    module that enable() was given.  owner: the module, None in a deep copy.
    """

    def __init__(
        self, name: str, had_forward: bool, path: str, owner: weakref.ref[torch.nn.Module] | None = None
    ) -> None:
        self.name = name
        self.had_forward = had_forward
        self.path = path
        self._owner = owner

    def is_of_another(self, module: torch.nn.Module) -> bool:
        """Whether `module` came by this through copy.copy, which shares it."""
        return self._owner is not None and self._owner() is not module

    def __reduce__(self) -> tuple[Any, ...]:
        # Names mean nothing in another process.
        return _scope_of, (settings_of(self.name) if self.name != OFF else None, self.had_forward, self.path)


def _scope_of(settings: Settings | None, had_forward: bool, path: str) -> _Scope:
    return _Scope(OFF if settings is None else intern(settings), had_forward, path)


def _routed_forward(scope: _Scope, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    name = scope.name
    return forward(*args, **kwargs) if name == OFF else _inside(name, forward, args, kwargs)


def _inside(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


@traced_as_constant
def _name_of(
    on_unsupported: str,
    min_kv: int | None,
    pv: str,
    precision: str,
    skip: Callable[[Call], bool] | None,
    log: bool,
    backends: str | tuple[str, ...],
    allow_mask_blind: bool,
    max_error: float | None,
    on_error: str,
    by_tile: bool,
) -> str:
    return intern(
        Settings(
            on_unsupported, min_kv, pv, precision, skip, log, backends, allow_mask_blind, max_error, on_error, by_tile
        )
    )
