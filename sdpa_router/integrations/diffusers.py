"""diffusers: an attention backend named "sdpa_router" for its own switch, and a patch for all of its models.

For one model sdpa_router.enable(pipe.transformer) is all that is needed. It also covers the models that never ask for
a backend (SD3, Sana, PixArt, the U-Nets), and no other model sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import run
from ..context import inside_unless_routed
from ..decide import Call
from ..dispatch import Turn, dispatch
from ..lse import attention_with_lse
from ..patch import follow_environment
from ..settings import BACKENDS, OFF, Settings, active_name, intern
from .diffusers_parallel import Arguments, attend_in_parallel, original_of, serve_torch_backends, stop_serving

NAME = "sdpa_router"
SUPPORTED = "0.36 or newer (tested: 0.36.0 and 0.42.1)"
_MEMBER = NAME.upper()

# Names of settings, OFF once undone; torch.compile guards graphs by them.
_registered = OFF
_patched = OFF


def register(
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
    """Make "sdpa_router" a name for set_attention_backend() and attention_backend(); the settings are those of route().

    What the int8 kernel can't answer goes on to diffusers' "native" backend, and a BlockMask to "flex".
    return_lse=True is answered on both routes. Inside route() or an enabled module their settings hold instead.
    Registering again replaces the settings.
    ContextParallelConfig works with ring_degree, ulysses_degree and both (diffusers_parallel.py says which masks), and
    for a module enabled (or models patched) after init_process_group() without the name: torch's backends are the
    router's there.
    set_attention_backend() also makes the name the default of every model without a backend of its own, and
    reset_attention_backend() leaves that so (diffusers#14249); sdpa_router.enable() touches no other model.
    Raises ImportError for a diffusers that can't be served.

    >>> register()
    >>> pipe.transformer.set_attention_backend("sdpa_router")
    """
    global _registered
    settings = Settings(
        on_unsupported, min_kv, pv, precision, skip, log, backends, allow_mask_blind, max_error, on_error, by_tile
    )
    parts = _parts()
    if NAME not in parts.names._value2member_map_:
        _add_member(parts.names)
    checks = parts.registry._constraints.get(parts.names.NATIVE)
    parts.registry.register(parts.names(NAME), constraints=checks, supports_context_parallel=True)(_backend(parts))
    _registered = intern(settings)


def unregister() -> None:
    """Undo register(): the name is unknown again, and what is still set to it is answered by "native", bit for bit."""
    global _registered
    _registered = OFF
    parts = _parts()
    if NAME not in parts.names._value2member_map_:
        return
    _remove_member(parts.names)
    parts.registry._supports_context_parallel.discard(NAME)
    if parts.registry._active_backend == NAME:
        parts.registry._active_backend = parts.default


def patch(
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
    """Run every diffusers model inside route() with these settings, future ones too; autoencoders stay native.

    Text encoders are not diffusers models. Inside route() or an enabled module their settings hold instead. Patching
    again replaces the settings. A model that torch.compile was given whole leaves what route() describes for that.
    Raises ImportError for a diffusers that can't be served.
    """
    global _patched
    settings = Settings(
        on_unsupported, min_kv, pv, precision, skip, log, backends, allow_mask_blind, max_error, on_error, by_tile
    )
    model = _parts().model
    if model.__call__ is not _routed_call:
        _calls.previous = model.__dict__.get("__call__")
        model.__call__ = _routed_call
    _calls.native = _calls.previous or torch.nn.Module.__call__
    _patched = intern(settings)
    serve_torch_backends(_calls)


def unpatch() -> None:
    """Undo patch(). Where somebody has replaced the method since, that stays, and what it calls of ours is native."""
    global _patched
    _patched = OFF
    model = _parts().model
    stop_serving(_calls)
    if model.__call__ is not _routed_call:
        return
    if _calls.previous is None:
        del model.__call__
    else:
        model.__call__ = _calls.previous


class _calls:  # noqa: N801 (a namespace)
    """What ModelMixin's own __call__ was, if it had one, and what it amounts to."""

    previous: Callable[..., Any] | None = None
    native: Callable[..., Any] = torch.nn.Module.__call__


def _routed_call(self: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    autoencoder = type(self).__module__.startswith("diffusers.models.autoencoders")
    if _patched == OFF or autoencoder:
        return _calls.native(self, *args, **kwargs)
    return inside_unless_routed(_patched, _calls.native, (self, *args), kwargs)


def _backend(parts: _Parts) -> Callable[..., Any]:
    """Make the backend: diffusers' layout in and out, query, key, value [B, S, H, D] and the LSE [B, S, H]."""

    # diffusers hands on only those arguments that the signature names.
    def sdpa_router_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> Any:
        surrounding = active_name()
        name = _registered if surrounding == OFF else surrounding
        arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if surrounding == OFF and not torch.compiler.is_dynamo_compiling():
            follow_environment()  # as route() does on entering
        if name == OFF:
            return parts.native(*arguments, return_lse=return_lse, _parallel_config=_parallel_config)
        if _parallel_config is not None and _parallel_config.context_parallel_config is not None:
            call = Arguments(*arguments, return_lse)
            return attend_in_parallel(parts.templated, parts.native, sdpa_router_attention, call, _parallel_config)
        if isinstance(attn_mask, parts.block_mask):
            return _with_block_mask(parts, name, *arguments, return_lse)
        if return_lse:
            return _with_lse(name, *arguments)
        # Where route() surrounds this, SDPA itself is routed.
        answer = _routed(name, *arguments) if surrounding == OFF else None
        return parts.native(*arguments) if answer is None else answer

    return sdpa_router_attention


def torch_backends() -> tuple[dict[Any, Callable[..., Any]], Callable[..., Any]]:
    """Return diffusers' table of backends by name, and a backend of ours that answers under the active settings."""
    parts = _parts()
    return parts.registry._backends, _backend(parts)


def _routed(
    name: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor | None:
    rest = _unfolded(attn_mask, query, key), dropout_p, is_causal, scale, enable_gqa
    answer = dispatch(name, run.torch_attention(), (*_heads_first(query, key, value), *rest))
    return None if isinstance(answer, Turn) else answer.permute(0, 2, 1, 3)


def _with_lse(
    name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = _unfolded(attn_mask, query, key)
    out, lse = attention_with_lse(name, *_heads_first(query, key, value), mask, *rest)
    return out.permute(0, 2, 1, 3), lse.permute(0, 2, 1).contiguous()


def _with_block_mask(
    parts: _Parts,
    name: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
) -> Any:
    heads_first = _heads_first(query, key, value)
    if not torch.compiler.is_dynamo_compiling():
        # Never an answer, but a record, or UnsupportedError where that was asked for.
        dispatch(name, parts.native, (*heads_first, block_mask, dropout_p, is_causal, scale, enable_gqa))
    if not return_lse:
        return parts.flex(query, key, value, block_mask, is_causal, scale, enable_gqa)
    # diffusers' own backend fails on the pair that this returns.
    out, lse = parts.flex_attention(
        *heads_first, block_mask=block_mask, scale=scale, enable_gqa=enable_gqa, return_lse=True
    )
    return out.permute(0, 2, 1, 3), lse.permute(0, 2, 1).contiguous()


def _unfolded(attn_mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return a mask [B, K] as [B, 1, 1, K], which is how diffusers reads it; others as they are."""
    if attn_mask is not None and attn_mask.dim() == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
        return attn_mask[:, None, None]
    return attn_mask


_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _heads_first(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> _Three:
    return query.permute(0, 2, 1, 3), key.permute(0, 2, 1, 3), value.permute(0, 2, 1, 3)


def _add_member(names: Any) -> None:
    """Add the name to diffusers' enumeration of backends, which Python has closed."""
    member = str.__new__(names, NAME)
    member._name_, member._value_ = _MEMBER, NAME
    member.__objclass__ = names
    member._sort_order_ = len(names._member_names_)
    setattr(names, _MEMBER, member)  # before it is a member: those can't be set
    names._member_names_.append(_MEMBER)
    names._member_map_[_MEMBER] = member
    names._value2member_map_[NAME] = member


def _remove_member(names: Any) -> None:
    names._member_names_.remove(_MEMBER)
    del names._member_map_[_MEMBER], names._value2member_map_[NAME]
    delattr(names, _MEMBER)  # after it was one: those can't be deleted


@dataclass(frozen=True)
class _Parts:
    """What is used of diffusers: names (the enumeration), registry, functions, model (ModelMixin); and of torch."""

    names: Any
    registry: Any
    default: Any
    native: Callable[..., Any]
    templated: Callable[..., Any]
    flex: Callable[..., Any]
    model: Any
    block_mask: type
    flex_attention: Callable[..., Any]


def _no_context_parallelism(*arguments: Any, **settings: Any) -> None:
    raise NotImplementedError("this diffusers has no templated context parallelism; supported: 0.36 or newer")


def _parts() -> _Parts:
    try:
        import diffusers
    except ImportError as error:
        raise ImportError(f"found no diffusers; supported: {SUPPORTED}") from error
    try:
        from diffusers import ModelMixin
        from diffusers.models import attention_dispatch
        from torch.nn.attention.flex_attention import BlockMask, flex_attention

        dispatching: Any = attention_dispatch
        names, registry = dispatching.AttentionBackendName, dispatching._AttentionBackendRegistry
        return _Parts(
            names=names,
            registry=registry,
            default=names(dispatching.DIFFUSERS_ATTN_BACKEND),
            native=original_of(registry._backends[names.NATIVE]),
            templated=getattr(dispatching, "_templated_context_parallel_attention", _no_context_parallelism),
            flex=registry._backends[names.FLEX],
            model=ModelMixin,
            block_mask=BlockMask,
            flex_attention=flex_attention,
        )
    except (ImportError, AttributeError, KeyError) as error:
        raise ImportError(f"found diffusers {diffusers.__version__}; supported: {SUPPORTED}") from error
