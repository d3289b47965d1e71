"""Block masks of every form -> a bool mask of 64x64 tiles; what doesn't fit raises ValueError."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .mask_summary import stream_of

TILE = 64
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

# Tile masks of BlockMask objects that are alive, the versions that their tensors had, and the stream that made them.
_converted: dict[int, tuple[weakref.ref[Any], tuple[int, ...], int, torch.Tensor]] = {}


def tile_mask(
    block_mask: Any, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device, block: int, validate: bool
) -> torch.Tensor:
    """Return bool [1 or B, 1 or H, ceil(Q / 64), ceil(K / 64)] on `device`: which key tiles each query tile attends.

    block_mask: a bool tensor [nq, nk] with up to two axes in front, a pair (indices [..., nq, W], counts [..., nq]) of
    integers, or a FlexAttention BlockMask.  validate: whether values on a GPU are checked too, which synchronises.
    """
    if hasattr(block_mask, "kv_num_blocks") and hasattr(block_mask, "kv_indices"):
        tiles = _of_flex(block_mask, q_len, kv_len)
    elif isinstance(block_mask, torch.Tensor):
        tiles = _of_bool(block_mask, q_len, kv_len, block)
    elif isinstance(block_mask, (tuple, list)) and len(block_mask) == 2:
        tiles = _of_lists(block_mask[0], block_mask[1], q_len, kv_len, block, validate)
    else:
        raise ValueError(
            f"block_mask is {type(block_mask).__name__}; accepted: a bool tensor [.., nq, nk], a pair (indices, "
            "counts) of integer tensors, or a BlockMask of torch.nn.attention.flex_attention"
        )
    if tiles.dim() < 4:
        tiles = tiles[(None,) * (4 - tiles.dim())]
    if tiles.shape[0] not in (1, batch) or tiles.shape[1] not in (1, heads):
        raise ValueError(
            f"block_mask has {list(tiles.shape[:2])} for batch and heads; accepted: 1 or {batch}, and 1 or {heads}"
        )
    nq, nk = -(-q_len // TILE), -(-kv_len // TILE)
    if tiles.shape[2:] != (nq, nk):
        tiles = tiles[:, :, :nq, :nk]
    return tiles if tiles.device == device else tiles.to(device)


def _of_bool(mask: torch.Tensor, q_len: int, kv_len: int, block: int) -> torch.Tensor:
    nq, nk = -(-q_len // block), -(-kv_len // block)
    if not has_values(mask) or mask.dtype != torch.bool or not 2 <= mask.dim() <= 4 or mask.shape[-2:] != (nq, nk):
        raise ValueError(
            f"block_mask is {_name(mask)}; accepted: bool [.., {nq}, {nk}], a value for each block "
            f"of {block} queries and {block} keys of {q_len} and {kv_len}"
        )
    return _split(mask, block)


def _split(mask: torch.Tensor, block: int) -> torch.Tensor:
    times = block // TILE
    return mask if times == 1 else mask.repeat_interleave(times, -1).repeat_interleave(times, -2)


def _of_lists(indices: Any, counts: Any, q_len: int, kv_len: int, block: int, validate: bool) -> torch.Tensor:
    nq, nk = -(-q_len // block), -(-kv_len // block)
    for name, given in (("indices", indices), ("counts", counts)):
        if (
            not isinstance(given, torch.Tensor)
            or not has_values(given)
            or given.dtype not in (torch.int32, torch.int64)
        ):
            raise ValueError(f"the block {name} are {_name(given)}; accepted: a tensor of int32 or int64")
    fits = indices.dim() >= 2 and indices.shape[:-1] == counts.shape and indices.shape[-2] == nq and indices.dim() <= 4
    if not fits or indices.device != counts.device:
        raise ValueError(
            f"block indices and counts are {list(indices.shape)} on {indices.device} and {list(counts.shape)} on "
            f"{counts.device}; accepted: [.., {nq}, W] and [.., {nq}] on one device"
        )
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    inside = (indices >= 0) & (indices < nk)
    if indices.device.type == "cpu" or validate:
        if bool((listed & ~inside).any()):
            raise ValueError(
                f"the block indices reach from {indices.min()} to {indices.max()}; accepted: 0 to {nk - 1}"
            )
        if bool(((counts < 0) | (counts > indices.shape[-1])).any()):
            raise ValueError(
                f"the block counts reach from {counts.min()} to {counts.max()}; accepted: 0 to {indices.shape[-1]}"
            )
    # What is not checked is not followed either: an index out of range falls into a column that is cut off.
    mask = torch.zeros((*counts.shape, nk + 1), dtype=torch.bool, device=indices.device)
    mask.scatter_(-1, torch.where(listed & inside, indices, nk).long(), True)
    return _split(mask[..., :nk], block)


def _of_flex(block_mask: Any, q_len: int, kv_len: int) -> torch.Tensor:
    """A BlockMask's blocks; its counts are read, which synchronises, once an object unless it is written to."""
    sizes = block_mask.BLOCK_SIZE
    size = sizes if isinstance(sizes, (tuple, list)) else (sizes, sizes)
    if len(set(size)) != 1 or size[0] % TILE:
        raise ValueError(f"the BlockMask has blocks of {tuple(size)}; accepted: square blocks of a multiple of {TILE}")
    counts, indices = block_mask.kv_num_blocks, block_mask.kv_indices
    rows, columns = indices.shape[-2:]
    if (rows, columns) != (-(-q_len // size[0]), -(-kv_len // size[0])):
        raise ValueError(
            f"the BlockMask has {rows} by {columns} blocks of {size[0]}; accepted: {-(-q_len // size[0])} by "
            f"{-(-kv_len // size[0])}, for {q_len} queries and {kv_len} keys"
        )
    versions = _versions(block_mask)
    kept, stream = _converted.get(id(block_mask)), stream_of(counts.device)
    # While a stream is captured counts can't be read; all that was launched before the capture is done then.
    if kept is not None and kept[0]() is block_mask and kept[1] == versions and stream in (kept[2], None):
        return kept[3]
    name = getattr(block_mask.mask_mod, "__name__", "mask_mod")
    if name != "noop_mask" and bool((counts > 0).any()):
        raise ValueError(
            f"the BlockMask has blocks that its mask_mod ({name}) masks in part; accepted: blocks that are full or "
            "empty (BlockMask.from_kv_blocks without a mask_mod), or the mask as a tensor for attn_mask of "
            "scaled_dot_product_attention"
        )
    blocks = _of_lists(indices, counts, rows * size[0], columns * size[0], size[0], False)
    if block_mask.full_kv_num_blocks is not None:
        full = _of_lists(
            block_mask.full_kv_indices, block_mask.full_kv_num_blocks, rows * size[0], columns * size[0], size[0], False
        )
        blocks = blocks | full
    number = id(block_mask)
    if versions and stream is not None:
        kept_alive = weakref.ref(block_mask, lambda _: _converted.pop(number, None))
        _converted[number] = (kept_alive, versions, stream, blocks)
    return blocks


def _versions(block_mask: Any) -> tuple[int, ...]:
    """What changes when the lists of a BlockMask do; empty where nothing tells."""
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    lists = [tensor for tensor in (getattr(block_mask, name) for name in names) if tensor is not None]
    if any(tensor.is_inference() for tensor in lists):
        return ()  # such tensors count no versions
    return tuple(number for tensor in lists for number in (id(tensor), tensor._version))


def valid_keys(sizes: Any, kv_len: int, device: torch.device, validate: bool) -> torch.Tensor:
    """Return which keys count, bool [1, 1, 1, K], from the valid ones of each tile of 64, integers [ceil(K / 64)]."""
    count = -(-kv_len // TILE)
    try:
        valid_sizes: torch.Tensor = sizes if isinstance(sizes, torch.Tensor) else torch.tensor(sizes)
    except (TypeError, ValueError, RuntimeError):  # torch raises any of them for what is no rectangle of numbers
        raise ValueError(
            f"valid_sizes is {_name(sizes)}; accepted: integers [{count}], one for each key tile"
        ) from None
    if not has_values(valid_sizes) or valid_sizes.dtype not in _INTEGERS or valid_sizes.shape != (count,):
        raise ValueError(f"valid_sizes is {_name(valid_sizes)}; accepted: integers [{count}], one for each key tile")
    on_host = valid_sizes.device.type == "cpu"
    if (on_host or validate) and bool(((valid_sizes < 0) | (valid_sizes > TILE)).any()):
        raise ValueError(
            f"valid_sizes reach from {valid_sizes.min()} to {valid_sizes.max()}; accepted: 0 to {TILE}, the valid keys "
            "at the beginning of each tile"
        )
    within = torch.arange(TILE, device=device) < valid_sizes.to(device)[:, None]
    return within.reshape(1, 1, 1, -1)[..., :kv_len]


def has_values(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a dense one that holds its values."""
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_meta


def _name(given: Any) -> str:
    if not isinstance(given, torch.Tensor):
        return type(given).__name__
    kind = "" if has_values(given) else "meta " if given.is_meta else "sparse or nested "
    return f"{kind}{given.dtype} {list(given.shape)}"
