"""Block-sparse int8 attention: every tile of 64 queries attends its own list of tiles of 64 keys."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from . import run
from .decide import Call
from .mask import key_view
from .tile_mask import TILE, tile_mask, valid_keys
from .traced import require_kernel


@overload
def block_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: Any,
    *,
    valid_sizes: Any = None,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    block: int = TILE,
    validate: bool = False,
) -> torch.Tensor: ...


@overload
def block_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: Any,
    *,
    valid_sizes: Any = None,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
    return_lse: Literal[True],
    block: int = TILE,
    validate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def block_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: Any,
    *,
    valid_sizes: Any = None,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    block: int = TILE,
    validate: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend the kept blocks of keys only, with int8 scores; or raise, nothing falls back.

    query [B, H, Q, D], key and value [B, Hkv, K, D] with H a multiple of Hkv, fp16 or bf16, D up to 256.
    block_mask says which blocks of keys each block of queries attends, as one of: bool [1 or B, 1 or H, nq, nk] (or
    without leading axes), True = attend; a pair (indices [.., nq, W], counts [.., nq]) of integers, a block listed
    twice counting once; a BlockMask of FlexAttention whose blocks are full or empty (at its first sight its counts are
    read, which synchronises). nq and nk are the lengths over `block`, rounded up.
    block: size of a block of block_mask, a multiple of 64.  valid_sizes: integers [ceil(K / 64)], how many keys at the
    beginning of each 64 count; the others, whatever they hold, change nothing (NaN and infinite values excepted).
    attn_mask: besides, a mask with one row for all queries, as int8_attention() takes it.
    Returns out [B, H, Q, D], or with return_lse (out, lse): lse float32 [B, H, Q], natural logarithm. A query that
    attends no key gets out 0 and lse -inf.
    validate: check indices and sizes on a GPU too, which synchronises; without, those out of range are left out.
    Raises ValueError for a block_mask or valid_sizes that don't fit and UnsupportedError for what the kernel can't do.
    Tiles of 64 are those of FastVideo's sparse attention; the softmax is FlashAttention's.

    >>> keep = torch.rand(1, 24, 512, 512, device="cuda") < 0.25
    >>> out = block_sparse_attention(q, k, v, keep)  # 32768 tokens, a quarter of the tiles
    """
    call = Call(query, key, value, attn_mask, 0.0, False, scale, True)
    require_kernel(call, "auto", "auto")
    if type(block) is not int or block < TILE or block % TILE:
        raise ValueError(f"block is {block!r}; accepted: a multiple of {TILE}")
    batch, heads, q_len, _ = query.shape
    kv_len = key.shape[2]
    tiles = tile_mask(block_mask, batch, heads, q_len, kv_len, query.device, block, validate)
    mask = None if attn_mask is None else key_view(attn_mask)
    if valid_sizes is not None:
        valid = valid_keys(valid_sizes, kv_len, query.device, validate)
        if mask is None:
            mask = valid
        else:
            mask = mask & valid if mask.dtype == torch.bool else torch.where(valid, mask, -torch.inf)
    answer = run.block_sparse(query, key, value, tiles, mask, scale, return_lse)
    return answer if return_lse else answer[0]


def sparse_sm89_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, vbs: torch.Tensor, *, int8_qk: bool = True
) -> torch.Tensor:
    """Stand in for FastVideo's function of this name, on any GPU that the int8 kernels support.

    q, k, v [B, H, S, D], fp16 or bf16 (FastVideo's: bf16 and D 128), S a multiple of 64; mask bool [B, H, S/64, S/64];
    vbs integers [S / 64], valid keys in each tile. Returns [B, H, S, D]. Raises ValueError as FastVideo's does: where
    gradients are on, for other shapes, and besides for int8_qk=False.
    """
    if torch.is_grad_enabled():
        raise ValueError("sparse int8 attention is for inference only: call it under torch.no_grad()")
    if not all(isinstance(t, torch.Tensor) for t in (q, k, v)):
        kinds = ", ".join(type(t).__name__ for t in (q, k, v))
        raise ValueError(f"q, k and v are {kinds}; accepted: three tensors")
    if q.dim() != 4 or q.shape != k.shape or q.shape != v.shape:
        shapes = ", ".join(str(list(t.shape)) for t in (q, k, v))
        raise ValueError(f"q, k and v are {shapes}; accepted: one shape [B, H, S, D]")
    if not isinstance(mask, torch.Tensor) or not isinstance(vbs, torch.Tensor):
        raise ValueError(f"mask and vbs are {type(mask).__name__} and {type(vbs).__name__}; accepted: two tensors")
    batch, heads, length, _ = q.shape
    count = length // TILE
    if length != vbs.numel() * TILE or mask.shape != (batch, heads, count, count):
        raise ValueError(
            f"mask is {list(mask.shape)} and vbs {list(vbs.shape)}; accepted with {length} tokens: "
            f"{[batch, heads, count, count]} and {[count]}, and a multiple of {TILE} tokens"
        )
    if not int8_qk:
        raise ValueError("int8_qk is False; accepted: True, this kernel has int8 scores only")
    return block_sparse_attention(q, k, v, mask.to(torch.bool), valid_sizes=vbs)
