"""Take the place of torch.nn.functional.scaled_dot_product_attention while some thread is inside route().

In threads that are not, the replacement passes through. torch.compile guards graphs by the identity of the replacement
and by the name of the settings, so that a graph is shared by equal settings and never used under others.
"""

from __future__ import annotations

import inspect
import os
import threading
import warnings
from typing import Any, cast

import torch
import torch.nn.functional as F

from . import run
from .dispatch import TORCH, Turn, dispatch, under_foreign_mode
from .forks import free_after_fork
from .record import judge_anew
from .settings import OFF, active, traced_as_constant

_lock = free_after_fork(threading.Lock())
_users = 0
_stays = False
# Every replacement made so far, one for each function found in place. Only _top routes: another one, which somebody's
# own patch may still call, passes through.
_patches: list[run.Attention] = []
_top: run.Attention | None = None
_under: run.Attention | None = None  # what _top replaces
_foreign: object = None
# What os.environ reads and writes: os.environ.get() raises and catches where a name is not set, which takes 25 us of
# each forward in a model.
_variables: Any = getattr(os.environ, "_data", os.environ)
_encode = os.environ.encodekey if _variables is not os.environ else str
_SWITCH, _INTERPRETER = _encode("SDPA_ROUTER"), _encode("TRITON_INTERPRET")
_environment: tuple[object, ...] = ()

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None), float, int, bool))
_compiling = torch.compiler.is_dynamo_compiling
_modes = torch._C._len_torch_function_stack
_overridden = torch.overrides.has_torch_function


def install(users: int = 1) -> None:
    """Be in place, for `users` more calls of uninstall()."""
    global _users
    follow_environment()
    with _lock:
        found = F.scaled_dot_product_attention
        if found is _under:  # as it mostly is
            run.below, F.scaled_dot_product_attention = _under, _top  # type: ignore[assignment]
        elif _users == 0 or found is not _top:
            _replace(found)
        _users += users


def follow_environment() -> None:
    """Forget all decisions if a variable that they depend on has changed since the last time."""
    global _environment
    environment = (_variables.get(_SWITCH), _variables.get(_INTERPRETER))
    if environment != _environment:
        _environment = environment
        judge_anew()


def _replace(found: run.Attention) -> None:
    global _top, _under
    if not _patches:
        # Computed later it would list the replacement, and dynamo would hide SDPA from every TorchFunctionMode.
        torch.overrides.get_overridable_functions()
    _top = _patch_for(found)
    _under = run.below = _top.__wrapped__  # type: ignore[attr-defined]
    F.scaled_dot_product_attention = _top


class _Used:
    """How often a graph was to be used once, as a text: torch.compile would turn a number into a symbol."""

    once = ""


used = _Used()


@traced_as_constant
def stay_installed() -> bool:
    """Be in place for good, as the guards of the graph that is being traced need it.

    Returns whether that graph calls torch's function already: the trace goes on with that wherever F is asked again.
    """
    global _stays
    found = F.scaled_dot_product_attention
    install(users=0 if _stays else 1)
    _stays = True
    return F.scaled_dot_product_attention is not found and _is_in_graph(found)


def _is_in_graph(function: run.Attention) -> bool:
    if torch._guards.TracingContext.try_get() is None:
        return False
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tracers = InstructionTranslator.current_tx().output.tracers
    return any(node.target is function for tracer in tracers for node in tracer.graph.nodes)


def uninstall() -> None:
    """Put back what was found, unless there are other users or somebody else has taken the place since."""
    global _users, _foreign
    with _lock:
        _users -= 1
        if _users:
            return
        below, run.below = run.below, None
        found = F.scaled_dot_product_attention
        if found is _top:
            F.scaled_dot_product_attention = below  # type: ignore[assignment]
            return
        known, _foreign = _foreign is found, found
    if not known and found is not below:
        warnings.warn(
            f"{found!r} took the place of F.scaled_dot_product_attention inside route() and is left there; "
            "what it calls of sdpa_router passes through",
            stacklevel=4,
        )


def enter(name: str) -> str:
    """Let the settings `name` hold in this thread until leave(); returns the name of those that held."""
    install()
    outer = active.name
    active.name = name
    return outer


def leave(outer: str) -> None:
    """Undo enter(), which returned `outer`."""
    active.name = outer
    uninstall()


def as_if_absent(attention: run.Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Call `attention` while it stands where the router stands.

    A tensor subclass or a TorchFunctionMode may ask whether it is being called for F.scaled_dot_product_attention, as
    torch's CausalBias does. Calls that other threads make meanwhile are not routed.
    """
    with _lock:
        found, F.scaled_dot_product_attention = F.scaled_dot_product_attention, attention
    try:
        return attention(*args, **kwargs)
    finally:
        with _lock:
            still_there = _users > 0 or found not in _patches
            if still_there and F.scaled_dot_product_attention is attention:
                F.scaled_dot_product_attention = found


def _patch_for(found: run.Attention) -> run.Attention:
    """Return `found` if it is ours, else our patch over it: always the same one, as graphs are guarded by it."""
    for patch in _patches:
        if found is patch or found is patch.__wrapped__:  # type: ignore[attr-defined]
            return patch
    _patches.append(_patch_over(found))
    return _patches[-1]


def _patch_over(previous: run.Attention) -> run.Attention:
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        name = active.name
        if name is OFF or _top is not scaled_dot_product_attention:
            usual = _compiling() or _are_plain(args, kwargs)
        else:
            try:
                call = _bound(*args, **kwargs) if kwargs or len(args) != 3 else args
            except TypeError:  # torch says what it takes
                answer: torch.Tensor | Turn = TORCH
            else:
                answer = dispatch(name, previous, call)
            usual = answer is TORCH
            if not usual and not isinstance(answer, Turn):
                return answer
        if usual and (not _modes() or _compiling() or not under_foreign_mode()):
            return previous(*args, **kwargs)
        return as_if_absent(previous, args, kwargs)

    patch: Any = scaled_dot_product_attention
    patch.__wrapped__ = previous
    patch.__doc__ = previous.__doc__
    patch.__qualname__ = patch.__name__
    patch.__signature__ = inspect.signature(_bound)
    return cast(run.Attention, patch)


def _bound(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Any, ...]:
    """Return the eight arguments of a call, or raise TypeError for what SDPA does not take."""
    return query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa


def _are_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether no argument may ask for which function it is called; the first test is the cheap one of torch in C++."""
    if not (_overridden(args) or (kwargs and _overridden(tuple(kwargs.values())))):
        return True
    return _PLAIN.issuperset(map(type, (*args, *kwargs.values())))
