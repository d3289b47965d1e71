"""Context parallelism of diffusers: its own templated ring and Ulysses attention, with the router attending to a shard.

diffusers exchanges keys and values (ring) or heads (Ulysses) and merges; the router is its forward operator. A mask
under the ring goes another way: diffusers would apply one shard's mask to all shards, sdpa_router.distributed does not.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ..decision import MaskKind, show
from ..mask import classify_mask
from ..selection import excluded
from ..settings import OFF, active_name, settings_of

Attend = Callable[..., Any]
_FUNCTION = "diffusers' context parallelism"
# Backends of diffusers that are torch's own.
_TORCH = ("native", "_native_cudnn", "_native_efficient", "_native_flash")


class Arguments(NamedTuple):
    """What a backend of diffusers is given: query, key, value [B, S, H, D], the mask as diffusers hands it on."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    return_lse: bool


def attend_in_parallel(
    templated: Callable[..., Any], native: Attend, attend: Attend, arguments: Arguments, config: Any
) -> Any:
    """Answer a call under a ParallelConfig with its context parallelism; the LSE is float32 [B, S, H] if asked for.

    templated: diffusers' _templated_context_parallel_attention.  native: its backend of torch, which has gradients.
    attend: our backend without parallelism, with the fields of Arguments in their order.
    Masks: one row for all queries, over this rank's keys or over all. Under a ring with a mask the int8 kernel must
    take the call. Ranks first exchange what they were given (group.agree), so that where one is refused all raise
    ValueError at once; not under torch.compile or while a CUDA graph is captured, where each judges alone.
    """
    parallel = config.context_parallel_config
    arguments = _agreed(arguments, parallel)
    if _needs_gradient(arguments[:3]) and not arguments.return_lse:
        return native(*arguments, _parallel_config=config)
    if arguments.attn_mask is not None and parallel.ring_degree > 1:
        return _ring_with_mask(arguments, parallel)

    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        *settings: Any,
        _save_ctx: bool = True,
        _parallel_config: Any = None,
    ) -> Any:
        mask = attn_mask
        if mask is not None and mask.dim() == 4 and mask.shape[1] not in (1, query.shape[2]):
            # Ulysses deals out the heads of query, key and value, but not of the mask.
            mask = mask.narrow(1, parallel._ulysses_local_rank * query.shape[2], query.shape[2])
        return attend(query, _arrived(key), _arrived(value), mask, *settings)

    return templated(*arguments, forward_op=forward, backward_op=_no_backward, _parallel_config=config)


def _agreed(arguments: Arguments, parallel: Any) -> Arguments:
    """Return the arguments with their mask as _with_checked_mask() does, once all ranks agree; or raise on all."""
    if torch.compiler.is_compiling() or (arguments.query.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _judged(arguments, parallel)
    from ..distributed.group import Facts, agree, open_group

    ranks = open_group(parallel._flattened_mesh.get_group(), _FUNCTION)
    cause = None
    try:
        arguments = _judged(arguments, parallel)
        facts = _facts(arguments, parallel)
    except Exception as error:  # whatever it is: to raise alone is to leave the others waiting
        cause, facts = error, Facts(_FUNCTION, refusal=str(error) or type(error).__name__)
    agree(ranks, facts, arguments.query, cause)
    return arguments


def _facts(arguments: Arguments, parallel: Any) -> Any:
    from ..distributed.group import Facts

    query, key, mask = arguments.query, arguments.key, arguments.attn_mask
    kind = "no mask"
    if mask is not None:
        whole = "all keys" if mask.shape[3] != key.shape[1] else "its keys"
        kind = f"a mask of {show(mask.dtype)} {show(mask.shape[:3])} over {whole}"
    return Facts(
        _FUNCTION,
        batch=query.shape[0],
        heads=query.shape[2],
        kv_heads=key.shape[2],
        head_dim=query.shape[3],
        dtype=show(query.dtype),
        scale=None if arguments.scale is None else float(arguments.scale),
        return_lse=arguments.return_lse,
        mask=kind,
        q_len=query.shape[1],
        kv_len=key.shape[1],
        mask_len=0 if mask is None else mask.shape[3],
        even=not _takes_any_length(parallel),
    )


def _judged(arguments: Arguments, parallel: Any) -> Arguments:
    """Return the arguments with a mask that was checked; ValueError for what is not passed on."""
    ring, name = parallel.ring_degree > 1, "ring context parallelism"
    if arguments.is_causal or arguments.enable_gqa:
        raise ValueError(
            f"given is_causal={arguments.is_causal} and enable_gqa={arguments.enable_gqa} under context parallelism; "
            "expected False and False, as diffusers exchanges neither"
        )
    if _needs_gradient(arguments[:3]) and (ring or arguments.return_lse):
        raise ValueError(
            f"given tensors that require a gradient under {name if ring else 'context parallelism with return_lse'}; "
            'sdpa_router has no backward: call under torch.no_grad(), or choose the backend "_native_flash"'
        )
    if arguments.dropout_p and arguments.attn_mask is not None and ring:
        raise ValueError(f"given dropout_p={arguments.dropout_p} with a mask under {name}; expected 0")
    return _with_checked_mask(arguments, parallel)


def _needs_gradient(tensors: Iterable[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _takes_any_length(parallel: Any) -> bool:
    return bool(getattr(parallel, "ring_anything", False) or getattr(parallel, "ulysses_anything", False))


def _arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Return what an all_gather brought: views of it are still of torch's class for tensors that are under way."""
    wait = getattr(tensor, "wait", None)
    return tensor if wait is None else wait()


def _no_backward(*arguments: Any) -> None:
    raise NotImplementedError("sdpa_router's attention has no backward")


def _with_checked_mask(arguments: Arguments, parallel: Any) -> Arguments:
    """Return the arguments with their mask as [1 or B, 1 or H, 1, keys]; ValueError if its keys or rows don't fit."""
    mask, query, key = arguments.attn_mask, arguments.query, arguments.key
    if mask is None:
        return arguments
    local = key.shape[1]
    total = local * parallel.ring_degree * parallel.ulysses_degree
    if not isinstance(mask, torch.Tensor):
        raise ValueError(f"given a {type(mask).__name__} under context parallelism; expected None or a tensor")
    if mask.dim() == 2 and mask.shape[0] == query.shape[0]:
        mask = mask[:, None, None]  # which is how diffusers reads it
    keys = mask.shape[-1] if mask.dim() else 0
    kind = classify_mask(mask, query.shape[0], query.shape[2], query.shape[1], keys)
    if kind.kind is not MaskKind.PER_KEY:
        raise ValueError(
            f"given the mask {show(mask.shape)} under context parallelism; expected one row for all queries, "
            f"[1 or {query.shape[0]}, 1 or {query.shape[2]}, 1, keys]: rows of queries are not exchanged"
        )
    if keys not in (local, total) and not (_takes_any_length(parallel) and keys > local):
        raise ValueError(
            f"given a mask over {keys} keys under context parallelism; expected {local} (this rank's) or {total} (all)"
        )
    if parallel.ring_degree > 1 and parallel.ulysses_degree > 1:
        raise ValueError(
            "given a mask under ring and Ulysses context parallelism together, which exchange no mask; expected none, "
            "or one of ring_degree and ulysses_degree to be 1"
        )
    row = mask.narrow(-2, 0, 1)
    return arguments._replace(attn_mask=row[(None,) * (4 - row.dim())].contiguous())  # all_gather takes no views


def _ring_with_mask(arguments: Arguments, parallel: Any) -> Any:
    """Answer a ring with a mask by our own ring, where the mask of each shard belongs to that shard."""
    from ..distributed import ring_attention

    query, key, value = (tensor.permute(0, 2, 1, 3) for tensor in arguments[:3])
    out, lse = ring_attention(
        *(query, key, value, arguments.attn_mask),
        group=parallel._ring_mesh.get_group(),
        scale=arguments.scale,
        return_lse=True,
    )
    answer = out.permute(0, 2, 1, 3)
    return (answer, lse.permute(0, 2, 1).contiguous()) if arguments.return_lse else answer


def serve_torch_backends(user: object) -> None:
    """Let enabled modules and patched models have the router under context parallelism too.

    There diffusers' "native" backend has no ring, and the others of torch call operators that are not SDPA. A wrapper
    in diffusers' table of backends passes through wherever the router is not on, and without context parallelism. It
    stays until stop_serving() for every `user`, or until none is alive. Nothing happens without a process group, which
    context parallelism needs: a graph of torch.compile is tied to the table.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    from .diffusers import torch_backends

    registry, ours = torch_backends()
    for name, backend in list(registry.items()):
        if name.value in _TORCH and original_of(backend) is backend:
            registry[name] = _served(backend, ours, name.value == "native")
    if user not in _users:
        _users.add(user)
        weakref.finalize(user, _restore_torch_backends).atexit = False


def stop_serving(user: object) -> None:
    """Undo serve_torch_backends(user)."""
    if user in _users:
        _users.remove(user)
        _restore_torch_backends()


_users: weakref.WeakSet[object] = weakref.WeakSet()


def _restore_torch_backends() -> None:
    if any(True for _ in _users):  # not len(), which counts one that is about to go
        return
    from .diffusers import torch_backends

    registry, _ = torch_backends()
    for name, backend in list(registry.items()):
        registry[name] = original_of(backend)


def original_of(backend: Attend) -> Attend:
    """Return diffusers' own function of a backend that serve_torch_backends() wrapped; others as they are."""
    found: Attend = getattr(backend, "_sdpa_router_original", backend)
    return found


def _served(original: Attend, ours: Attend, ringless: bool) -> Attend:
    """Wrap a backend of torch; ringless: whether it knows no ring."""

    @functools.wraps(original)
    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, _parallel_config: Any = None, **settings: Any
    ) -> Any:
        parallel = getattr(_parallel_config, "context_parallel_config", None)
        name = active_name()
        backend = original
        if parallel is not None and name != OFF:
            # In excluded blocks, and where there are gradients, a backend of torch that can does what it always did.
            leave = settings_of(name).skip is excluded or _needs_gradient((query, key, value))
            backend = original if leave and not (ringless and parallel.ring_degree > 1) else ours
        return backend(query, key, value, _parallel_config=_parallel_config, **settings)

    attention._sdpa_router_original = original  # type: ignore[attr-defined]
    return attention
