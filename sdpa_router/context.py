"""Route the calls of a block of code or of a module: one attribute patch and a name in a thread-local.

torch.nn.functional.scaled_dot_product_attention is replaced while some thread is inside route(); in threads that are
not, the replacement passes through. Which settings hold is a name in a plain threading.local: torch.compile guards it,
so that a graph is shared by equal settings and never used under others.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from . import api, run
from .decide import Call
from .dispatch import dispatch
from .record import judge_anew
from .settings import OFF, Settings, activate, active, active_name, intern, settings_of

_Function = TypeVar("_Function", bound=Callable[..., Any])

_lock = threading.Lock()
_thread = threading.local()  # .outer: names to go back to, innermost last
_users = 0
# Every replacement made so far, one for each function found in place. Only _top routes: another one, which somebody's
# own patch may still call, passes through.
_patches: list[run.Attention] = []
_top: run.Attention | None = None
_stays = False
_foreign: object = None
_environment: tuple[str | None, ...] = ()
# scale and enable_gqa are keyword-only in torch.
_POSITIONAL = 6


class _Region:
    """The block of code in which the settings `name` hold; built inside of code that torch.compile traces."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._outer = OFF

    def __enter__(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            _stay_installed()
            self._outer = active_name()
            activate(self._name)
        else:
            _enter(self._name)

    def __exit__(self, *error: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            activate(self._outer)
        else:
            _leave()


class route(_Region):  # noqa: N801 (used like a function)
    """Send the F.scaled_dot_product_attention calls of this thread through the router; a context or a decorator.

    on_unsupported: "fallback" to torch, "warn" once a signature, or "raise" UnsupportedError with all reasons.
    min_kv: the fewest keys to route; None takes the measured crossover.  pv: "auto" or "16bit".
    skip: a function of the Call; True sends it to torch.  It is kept, so don't make a new one for every entry.
    log: whether first sights are logged on "sdpa_router.dispatch".

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
        skip: Callable[[Call], bool] | None = None,
        log: bool = True,
    ) -> None:
        super().__init__(_name_of(on_unsupported, min_kv, pv, skip, log))

    def __call__(self, function: _Function) -> _Function:
        """Decorate `function`: its body runs inside this context."""
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise TypeError("route() decorates plain functions; use `with route():` inside a generator or coroutine")
        name = self._name

        @functools.wraps(function)
        def routed(*args: Any, **kwargs: Any) -> Any:
            with _Region(name):
                return function(*args, **kwargs)

        return routed  # type: ignore[return-value]


def enable(
    module: torch.nn.Module,
    *,
    on_unsupported: str = "fallback",
    min_kv: int | None = None,
    pv: str = "auto",
    skip: Callable[[Call], bool] | None = None,
    log: bool = True,
) -> None:
    """Run the forward of `module` inside route() with these settings; other modules stay as they are.

    Enabling again replaces the settings. A copy of the module is enabled too, by itself. Raises TypeError for anything
    but a torch.nn.Module.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"enable() takes a torch.nn.Module; given {type(module).__name__}")
    settings = Settings(on_unsupported, min_kv, pv, skip, log)
    scope = module.__dict__.get(_SCOPE)
    if scope is not None:
        scope.name = intern(settings)
        return
    scope = _Scope(intern(settings), "forward" in module.__dict__)
    forward = functools.partial(_routed_forward, scope, module.forward)
    module.__dict__[_SCOPE] = scope
    module.__dict__["forward"] = functools.update_wrapper(forward, module.forward)


def disable(module: torch.nn.Module) -> None:
    """Undo enable(module); nothing happens to a module that is not enabled.

    Where somebody has wrapped the forward since, that wrapper stays and what it calls passes through.
    """
    scope = module.__dict__.pop(_SCOPE, None)
    if scope is None:
        return
    scope.name = OFF
    forward = module.__dict__.get("forward")
    if isinstance(forward, functools.partial) and forward.args[:1] == (scope,):
        if scope.had_forward:
            module.__dict__["forward"] = forward.args[1]
        else:
            del module.__dict__["forward"]


_SCOPE = "_sdpa_router_scope"


class _Scope:
    """The settings of an enabled module by name, OFF once disabled, and whether it had a forward of its own."""

    def __init__(self, name: str, had_forward: bool) -> None:
        self.name = name
        self.had_forward = had_forward

    def __reduce__(self) -> tuple[Any, ...]:
        # Names mean nothing in another process.
        return _scope_of, (settings_of(self.name) if self.name != OFF else None, self.had_forward)


def _scope_of(settings: Settings | None, had_forward: bool) -> _Scope:
    return _Scope(OFF if settings is None else intern(settings), had_forward)


def _routed_forward(scope: _Scope, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if scope.name == OFF:
        return forward(*args, **kwargs)
    with _Region(scope.name):
        return forward(*args, **kwargs)


@torch.compiler.assume_constant_result
def _name_of(on_unsupported: str, min_kv: int | None, pv: str, skip: Callable[[Call], bool] | None, log: bool) -> str:
    return intern(Settings(on_unsupported, min_kv, pv, skip, log))


def _enter(name: str) -> None:
    _install(users=1)
    if not hasattr(_thread, "outer"):
        _thread.outer = []
    _thread.outer.append(active_name())
    activate(name)


def _leave() -> None:
    activate(_thread.outer.pop())
    _uninstall()


@torch.compiler.assume_constant_result
def _stay_installed() -> None:
    """Put the replacement in place for good: the guards of the graph that is being traced need it there."""
    global _stays
    _install(users=0 if _stays else 1)
    _stays = True


def _install(users: int) -> None:
    global _users, _top
    _judge_anew_if_environment_changed()
    with _lock:
        if not _patches:
            # Computed later it would list the replacement, and dynamo would hide SDPA from every TorchFunctionMode.
            torch.overrides.get_overridable_functions()
        found = F.scaled_dot_product_attention
        if _users == 0 or found is not _top:
            _top = _patch_for(found)
            run.below = _top.__wrapped__  # type: ignore[attr-defined]
            F.scaled_dot_product_attention = _top
        _users += users


def _patch_for(found: run.Attention) -> run.Attention:
    """Return `found` if it is ours, else our patch that falls back to it: always the same, as graphs are guarded by it."""
    for patch in _patches:
        if found in (patch, patch.__wrapped__):  # type: ignore[attr-defined]
            return patch
    _patches.append(_patch_over(found))
    return _patches[-1]


def _patch_over(previous: run.Attention) -> run.Attention:
    @functools.wraps(api.scaled_dot_product_attention)
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        name = getattr(active, "name", OFF)
        if name is not OFF and _top is scaled_dot_product_attention and len(args) <= _POSITIONAL:
            try:
                answer = dispatch(name, previous, *args, **kwargs)
            except TypeError as error:
                if not _is_of_the_call_itself(error):
                    raise
                answer = None  # the arguments don't fit the signature: let torch say so
            if answer is not None:
                return answer
        return previous(*args, **kwargs)

    patch: run.Attention = scaled_dot_product_attention
    patch.__wrapped__ = previous  # type: ignore[attr-defined]
    patch.__signature__ = inspect.signature(api.scaled_dot_product_attention)  # type: ignore[attr-defined]
    return patch


def _is_of_the_call_itself(error: TypeError) -> bool:
    """Whether the frame that caught `error` is the one that raised it: the call had the wrong arguments."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is None


def _uninstall() -> None:
    global _users, _foreign
    with _lock:
        _users -= 1
        if _users:
            return
        below, run.below = run.below, None
        found = F.scaled_dot_product_attention
        if found is _top:
            F.scaled_dot_product_attention = below
            return
        known, _foreign = _foreign is found, found
    if not known:
        warnings.warn(
            f"{found!r} took the place of F.scaled_dot_product_attention inside route() and is left there; "
            "what it calls of sdpa_router passes through",
            stacklevel=4,
        )


def _judge_anew_if_environment_changed() -> None:
    global _environment
    environment = (os.environ.get("SDPA_ROUTER"), os.environ.get("TRITON_INTERPRET"))
    if environment != _environment:
        _environment = environment
        judge_anew()
