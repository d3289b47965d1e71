"""Context parallelism of diffusers: its own templated ring and Ulysses attention, with the router attending to a shard.

diffusers exchanges keys and values (ring) or heads (Ulysses) and merges; the router is its forward operator. A mask
under the ring goes another way: diffusers would apply one shard's mask to all shards, sdpa_router.distributed does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..decision import MaskKind, show
from ..mask import classify_mask

Attend = Callable[..., Any]


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
    Masks: one row for all queries, over this rank's keys or over all. Under the ring the int8 kernel must take the
    call. Raises ValueError with the reason for what can't be passed on; causal and grouped calls are refused by
    diffusers itself.
    """
    parallel = config.context_parallel_config
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in arguments[:3])
    if needs_gradient and parallel.ring_degree == 1 and not arguments.return_lse:
        return native(*arguments, _parallel_config=config)
    if needs_gradient:
        raise ValueError(
            "given tensors that require a gradient under ring context parallelism; sdpa_router has no backward: call "
            'under torch.no_grad(), or choose the backend "_native_flash"'
        )
    arguments = _with_checked_mask(arguments, parallel)
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
    anything = getattr(parallel, "ring_anything", False) or getattr(parallel, "ulysses_anything", False)
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
    if keys not in (local, total) and not (anything and keys > local):
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

    if arguments.dropout_p or arguments.is_causal or arguments.enable_gqa:
        raise ValueError(
            f"given dropout_p={arguments.dropout_p}, is_causal={arguments.is_causal} and "
            f"enable_gqa={arguments.enable_gqa} with a mask under ring context parallelism; expected 0, False and False"
        )
    query, key, value = (tensor.permute(0, 2, 1, 3) for tensor in arguments[:3])
    out, lse = ring_attention(
        *(query, key, value, arguments.attn_mask),
        group=parallel._ring_mesh.get_group(),
        scale=arguments.scale,
        return_lse=True,
    )
    answer = out.permute(0, 2, 1, 3)
    return (answer, lse.permute(0, 2, 1).contiguous()) if arguments.return_lse else answer
