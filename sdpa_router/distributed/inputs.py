"""What a rank is given, made ready: DTensors, masks."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..decision import show
from ..mask import key_view
from .group import Facts, Group, naming


class Mesh(NamedTuple):
    """How DTensor inputs are laid out: their mesh, the placements of the query, and the group along the sequence."""

    mesh: Any
    placements: tuple[Any, ...]
    group: dist.ProcessGroup


_Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


class Local(NamedTuple):
    """A rank's own tensors, their group (None: of all processes), the Mesh of DTensors, and why they are refused."""

    tensors: _Inputs
    group: dist.ProcessGroup | None
    mesh: Mesh | None = None
    cause: ValueError | None = None


def unwrap(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    group: dist.ProcessGroup | None,
) -> Local:
    """Return the local tensors, and the Mesh if query, key, value (and mask) are DTensors.

    Sharded along the sequence on one axis of the mesh (Shard(2); of a mask the keys, its last axis, or replicated), and
    replicated on the others. Anything else is a ValueError: returned, so that the group hears of it, raised where none
    can be told.
    """
    given: _Inputs = (query, key, value, mask)
    module = sys.modules.get("torch.distributed.tensor")  # importing it takes a second, and then there is no DTensor
    kind: type = getattr(module, "DTensor", type(None))
    if module is None or not any(isinstance(tensor, kind) for tensor in given):
        return Local(given, group)
    try:
        if group is not None:
            raise ValueError("given a group and DTensors; expected one of them: the mesh of a DTensor says the group")
        tensors, mesh = _unwrapped(*given, kind)
    except ValueError as cause:
        told = group or _sequence_group(given)
        if told is None and any(isinstance(tensor, kind) for tensor in given[:3]):
            raise  # a mask alone tells no group: the others take that of all processes
        return Local(given, told, None, cause)
    return Local(tensors, mesh.group, mesh)


def _unwrapped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, kind: type
) -> tuple[_Inputs, Mesh]:
    q: Any = query
    axis = _sharded_axis("query", q, 2)
    tensors: dict[str, Any] = {"key": key, "value": value}
    for name, tensor in tensors.items():
        if _sharded_axis(name, tensor, 2) != axis or tensor.device_mesh != q.device_mesh:
            raise ValueError(f"{name} is sharded over another mesh or axis than query; expected the same")
    local: Any = mask
    if isinstance(mask, kind):
        whole = all(placement.is_replicate() for placement in local.placements)
        keys = max(local.dim() - 1, 0)
        if local.device_mesh != q.device_mesh or not (whole or _sharded_axis("attn_mask", local, keys) == axis):
            raise ValueError("attn_mask is sharded over another mesh or axis than query; expected the same")
        local = local.to_local()
    mesh = Mesh(q.device_mesh, q.placements, q.device_mesh.get_group(axis))
    return (q.to_local(), tensors["key"].to_local(), tensors["value"].to_local(), local), mesh


def _sharded_axis(name: str, tensor: Any, wanted: int) -> int:
    """Return the axis of its mesh over which a DTensor is sharded along its own axis `wanted`, if that is all."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        raise ValueError(f"{name} is a {type(tensor).__name__}; expected a DTensor, as other arguments are")
    sharded = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    if len(sharded) != 1 or not placements[sharded[0]].is_shard(wanted):
        raise ValueError(
            f"{name} is a DTensor placed {show(placements)}; expected Shard({wanted}), the sequence, on one axis of "
            "the mesh and Replicate() on the others"
        )
    return sharded[0]


def _sequence_group(given: _Inputs) -> dist.ProcessGroup | None:
    """Return the group that other ranks take from the same DTensors: along a sharded sequence, or a mesh's only one."""
    meshes = [(getattr(tensor, "device_mesh", None), getattr(tensor, "placements", ())) for tensor in given[:3]]
    for mesh, placements in meshes:
        axes = [axis for axis, placement in enumerate(placements) if placement.is_shard(2)]
        if mesh is not None and (len(axes) == 1 or mesh.ndim == 1):
            group: dist.ProcessGroup = mesh.get_group(axes[0] if axes else 0)
            return group
    return None


def wrap(local: torch.Tensor, like: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Make the DTensor that is laid out as the query `like` from an answer's local part, [B, H, Lq(, D)]."""
    from torch.distributed.tensor import DTensor

    shape = like.shape[: local.dim()]
    stride = torch.empty(shape, device="meta").stride()
    wrapped: torch.Tensor = DTensor.from_local(
        local, mesh.mesh, mesh.placements, run_check=False, shape=shape, stride=stride
    )
    return wrapped


def mask_facts(mask: torch.Tensor | None) -> dict[str, Any]:
    """Return what the other ranks need to know of a mask that was judged: fields of Facts."""
    if mask is None:
        return {}
    rows = _rows(mask)
    kind = f"a mask of {show(mask.dtype)}"  # an all-to-all moves its bytes: ranks must give one dtype
    return {"mask": kind, "mask_len": rows.shape[3], "mask_rows": tuple(rows.shape[:2])}


def shard_of_mask(mask: torch.Tensor, everyone: list[Facts], rank: int) -> torch.Tensor:
    """Return this rank's part of a mask, [rows of batch, rows of heads, 1, L], that was given whole or sharded."""
    rows = _rows(mask)
    mine = everyone[rank]
    if rows.shape[3] not in (mine.kv_len, 1):
        before = sum(facts.kv_len for facts in everyone[:rank])
        rows = rows.narrow(3, before, mine.kv_len)
    sizes = mask_rows(everyone)
    wide = rows.expand(*sizes, 1, mine.kv_len)
    return wide if wide.shape == rows.shape else wide.contiguous()


def mask_rows(everyone: list[Facts]) -> tuple[int, int]:
    """Return the sizes of the mask's batch and head axes that hold for all ranks."""
    return max(facts.mask_rows[0] for facts in everyone), max(facts.mask_rows[1] for facts in everyone)


def anchored(mask: torch.Tensor, ranks: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Subtract the largest finite bias over all ranks from a floating mask; return it and that bias, float32 [rows].

    So a constant that is added to the whole bias changes nothing, and one that absorbs every score does so everywhere.
    """
    bias = mask.float()
    finite = bias.masked_fill(~bias.isfinite(), -math.inf)
    top = torch.nn.functional.pad(finite, (0, 1), value=-math.inf).amax((2, 3))
    with naming(ranks, "the exchange of the largest bias"):
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=ranks.handle)
    top = top.masked_fill(top == -math.inf, 0.0)
    return bias - top[..., None, None], top


def softmax_scale(facts: Facts) -> float:
    """Return the softmax scale of a call."""
    return 1 / math.sqrt(facts.head_dim) if facts.scale is None else facts.scale


def _rows(mask: torch.Tensor) -> torch.Tensor:
    """View a mask as [1 or B, 1 or H, 1, keys]; axes that repeat one row are cut to it."""
    view = key_view(mask)
    for axis in (0, 1):
        if view.stride(axis) == 0 and view.shape[axis] > 1:
            view = view.narrow(axis, 0, 1)
    return view
