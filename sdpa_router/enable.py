"""Route the calls made inside one module: enable() and disable(), and what they make of its forward."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from .context import inside, is_plain_function
from .decide import Call
from .selection import Patterns, borders, check_module, excluded, may_attend, switches
from .settings import BACKENDS, OFF, Settings, intern, settings_of


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
    fuse_qk: let diffusers' blocks (Wan, Flux, Qwen-Image, LTX) norm, rotate and quantise query and key in one pass
    where a call is routed to int8; the log says which blocks don't match, and why. They take their plain path under
    torch.compile, a trace, autocast or a TorchFunctionMode, and with a skip, pv="fp8", on_error="fallback" or a backend
    of set_attention_backend().
    Raises TypeError for anything but a torch.nn.Module with a plain forward, ValueError for a pattern that matches
    nothing, and for a module that can't attend, such as one of linear layers, or where Python doesn't see it, as in
    TorchScript.

    >>> enable(pipe.transformer, exclude=["blocks.0", "blocks.29"])
    >>> enable(pipe.transformer, skip=lambda call: call.query.shape[2] != call.key.shape[2])  # no cross-attention
    """
    check_module("enable", module)
    if not isinstance(fuse_qk, bool):
        raise TypeError(f"fuse_qk is {fuse_qk!r}; accepted: True or False")
    settings = Settings(
        on_unsupported, min_kv, pv, precision, skip, log, backends, allow_mask_blind, max_error, on_error, by_tile
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
        if not is_plain_function(module.get_submodule(path).forward):
            raise TypeError(f"enable() takes modules whose forward is a plain function; that of {path!r} is not")
    for path, scope in _scopes_set_by(module):
        if path not in wrapped:
            _unwrap(module.get_submodule(path), scope)
    use = _uncompiled(module).__dict__.setdefault(_USE, _Use())
    # Last those that are off: one module may have two names, and an exclusion wins.
    for path in sorted(wrapped, key=lambda path: wrapped[path] == "off"):
        _wrap(module.get_submodule(path), names[wrapped[path]], use)
    _fuse_qk(module, fuse_qk, log)
    parallel = any(hasattr(getattr(part, "processor", None), "_parallel_config") for part in module.modules())
    if parallel and "diffusers.models.attention_dispatch" in sys.modules:
        use.serve_context_parallelism()


def disable(module: torch.nn.Module) -> None:
    """Undo enable(module); nothing happens to a module that is not enabled.

    It may have been compiled since, whole or in parts, and its parts may have other names now. Where somebody has
    wrapped the forward since, that wrapper stays and what it calls passes through. Raises TypeError for anything but a
    torch.nn.Module.
    """
    check_module("disable", module)
    for path, scope in _scopes_set_by(module):
        _unwrap(module.get_submodule(path), scope)
    _fuse_qk(module, False, False)
    use = _uncompiled(module).__dict__.pop(_USE, None)
    if use is not None:
        use.end()


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
_USE = "_sdpa_router_use"


def _uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that torch.compile was given, if `module` is what it returned."""
    inner = module._modules.get("_orig_mod")
    return module if inner is None else _uncompiled(inner)


def _scopes_set_by(root: torch.nn.Module) -> list[tuple[str, _Scope]]:
    """List what enable(root) wrapped, by qualified name, and `root` itself if another enable() did."""
    inner = _uncompiled(root)
    use = inner.__dict__.get(_USE)
    found = []
    for path, module in root.named_modules(remove_duplicate=False):
        scope = module.__dict__.get(_SCOPE)
        if scope is not None and (module is root or module is inner or scope.use is use):
            found.append((path, scope))
    return found


def _wrap(module: torch.nn.Module, name: str, use: _Use) -> None:
    scope = module.__dict__.get(_SCOPE)
    if scope is not None and scope.is_of_another(module):
        _unwrap(module, scope)
        scope = None
    if scope is not None and _place_of(module, scope) is not None:
        scope.name, scope.use = name, use
        return
    if scope is not None:
        scope.name = OFF  # somebody has replaced the forward since, and may still call what enable() had made of it
    holder, key = _places(module)[0]
    forward = holder.get(key, module.forward)
    scope = _Scope(name, key in holder, use, weakref.ref(module))
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


class _Use:
    """Stands for an enabled module: what enable() set in its parts holds the same object, whatever becomes of names."""

    serving = False

    def serve_context_parallelism(self) -> None:
        """Let diffusers' context parallelism know the router, until end() or as long as this object lives."""
        from .integrations.diffusers_parallel import serve_torch_backends

        serve_torch_backends(self)
        self.serving = True

    def end(self) -> None:
        """Undo serve_context_parallelism()."""
        if self.serving:
            from .integrations.diffusers_parallel import stop_serving

            stop_serving(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _use_of, (self.serving,)


def _use_of(serving: bool) -> _Use:
    use = _Use()
    if serving:
        use.serve_context_parallelism()
    return use


class _Scope:
    """What enable() set for one module.

    name: of the settings, OFF once disabled.  had_forward: whether it had a forward of its own.  use: of the module
    that enable() was given.  owner: the module, None in a deep copy.
    """

    def __init__(
        self, name: str, had_forward: bool, use: _Use, owner: weakref.ref[torch.nn.Module] | None = None
    ) -> None:
        self.name = name
        self.had_forward = had_forward
        self.use = use
        self._owner = owner

    def is_of_another(self, module: torch.nn.Module) -> bool:
        """Whether `module` came by this through copy.copy, which shares it."""
        return self._owner is not None and self._owner() is not module

    def __reduce__(self) -> tuple[Any, ...]:
        # Names mean nothing in another process.
        return _scope_of, (settings_of(self.name) if self.name != OFF else None, self.had_forward, self.use)


def _scope_of(settings: Settings | None, had_forward: bool, use: _Use) -> _Scope:
    return _Scope(OFF if settings is None else intern(settings), had_forward, use)


def _routed_forward(scope: _Scope, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    name = scope.name
    return forward(*args, **kwargs) if name == OFF else inside(name, forward, args, kwargs)
