"""Choose submodules by qualified name: which of them route the attention calls made inside them, and which don't."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from .decide import Call

# What holds inside a submodule: calls are routed, or torch answers; where there is None nothing was said.
Switch = Literal["on", "off"]
Patterns = str | Iterable[str] | None

_NAMES_SHOWN = 8


def excluded(call: Call) -> bool:
    """Skip every call: the `skip` of a submodule that was excluded, so that records show its calls as skipped."""
    return True


def check_module(function: str, module: object) -> None:
    """Raise TypeError for what is not a torch.nn.Module; of a pipeline it names the modules."""
    if isinstance(module, nn.Module):
        return
    parts = [f".{name}" for name, part in getattr(module, "__dict__", {}).items() if isinstance(part, nn.Module)]
    whose = f", whose modules are {_some(parts)}" if parts else ""
    raise TypeError(f"{function}() takes a torch.nn.Module; given {type(module).__name__}{whose}")


def may_attend(module: nn.Module) -> bool:
    """Whether some part of it might call SDPA from Python, where a replacement of the function is seen.

    Parts of other packages might, and torch's own attention or a layer whose forward somebody has replaced; other
    layers of torch don't, nor do TorchScript and graphs, which hold the operator.
    """
    return any(map(_part_may_attend, module.modules()))


def _part_may_attend(part: nn.Module) -> bool:
    if any(not f"{kind.__module__}.".startswith(("torch.", "builtins.")) for kind in type(part).__mro__):
        return True
    replaced = "forward" in part.__dict__ and type(part).__module__.startswith("torch.nn.")
    return replaced or isinstance(part, nn.MultiheadAttention)


def switches(module: nn.Module, include: Patterns, exclude: Patterns) -> dict[str, Switch | None]:
    """Say for every submodule by qualified name, "" for `module` itself, what holds inside it.

    include and exclude: glob patterns such as "blocks.0" or "*.attn1"; `*` spans dots. A match holds for everything
    inside it, and an exclusion wins. No `include` means all of `module`.
    Raises ValueError for a pattern that matches nothing and for an empty `include`, TypeError for what is no pattern.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    included = {""} if include is None else _matches("include", include, modules, module)
    outside = set() if exclude is None else _matches("exclude", exclude, modules, module)
    found: dict[str, Switch | None] = {}
    for name in modules:
        parent = found[_parent(name)] if name else None
        if parent == "off" or name in outside:
            found[name] = "off"
        elif parent == "on" or name in included:
            found[name] = "on"
        else:
            found[name] = None
    return found


def borders(module: nn.Module, chosen: dict[str, Switch | None]) -> dict[str, Switch]:
    """Return those of switches() whose submodule must be wrapped: another thing holds inside, and it has a forward."""
    holds: dict[str, Switch | None] = {}
    wrapped = {}
    for name, submodule in module.named_modules(remove_duplicate=False):
        outer = holds[_parent(name)] if name else None
        # A ModuleList is never called, only its children are.
        called = getattr(submodule.forward, "__func__", None) is not nn.Module.forward
        switch = chosen[name] if called else outer
        if switch is not None and switch != outer:
            wrapped[name] = switch
        holds[name] = switch
    return wrapped


def by_first_name(module: nn.Module, chosen: dict[str, Switch | None]) -> dict[str, Switch | None]:
    """Return what switches() says as enable() takes it where a submodule has several names: an exclusion wins."""
    first = {part: name for name, part in module.named_modules()}
    found: dict[str, Switch | None] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        switch, before = chosen[name], found.get(first[part])
        found[first[part]] = "off" if "off" in (switch, before) else switch or before
    return found


def plain_name(name: str) -> str:
    """Return the qualified name of a submodule as it was before torch.compile put something around it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return (", ".join(names[:_NAMES_SHOWN]) or "none") + more


def _matches(argument: str, patterns: str | Iterable[str], modules: dict[str, nn.Module], root: nn.Module) -> set[str]:
    if not isinstance(patterns, Iterable):
        raise TypeError(f"{argument} is {patterns!r}; accepted: glob patterns over the names of submodules")
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    if argument == "include" and not listed:
        raise ValueError("include is empty; accepted: patterns, or None for the whole module")
    matched: set[str] = set()
    for pattern in listed:
        if not isinstance(pattern, str):
            raise TypeError(f"{argument} holds {pattern!r}; accepted: glob patterns over the names of submodules")
        hits = {name for name in modules if fnmatchcase(plain_name(name), pattern) or fnmatchcase(name, pattern)}
        if not hits:
            raise ValueError(
                f"{argument}={pattern!r} matches no submodule of {type(root).__name__}; it has {_some([*modules][1:])}"
            )
        matched |= hits
    return matched
