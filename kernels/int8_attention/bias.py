"""A per-key mask as the kernels read it: float32 in log2 units, largest finite value 0, and which tiles have a key."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .configs import Config
from .launch import empty, launch

LOG2E = math.log2(math.e)
# Finite biases of at least this size leave nothing of a score in float32 (one unit there is 2): scores count as 0.
ABSORBING = tl.constexpr(2.0**24)
# In log2: a key this far under the largest bias of its row is left out of shift and scale. Its score would have to be
# 8192 (natural log) higher than the others to count.
NEGLIGIBLE = tl.constexpr(-8192.0 * LOG2E)
BIAS_PART, BIAS_BLOCK = 2048, 8192  # keys that a program prepares, and that it looks at in a step


@triton.jit
def _raw_bias(MASK, n, N, s_n, IS_BOOL: tl.constexpr):
    """Bias (natural log) of keys as given, float32; what lies past the last key is 0 or -inf."""
    b = tl.load(MASK + n.to(tl.int64) * s_n, mask=n < N, other=0)
    return tl.where(b != 0, 0.0, float("-inf")) if IS_BOOL else b.to(tl.float32)


@triton.jit(do_not_specialize=["N", "NP", "heads"])
def _prepare_bias(
    MASK, BIAS, ANCHOR, LIVE, N, NP, heads, s_b, s_h, s_n,
    IS_BOOL: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr, HAS_LIVE: tl.constexpr,
):  # fmt: skip
    """Any dtype and strides to float32 in log2 units, shifted so that the largest of the row is 0.

    One program PART keys of a mask row: each looks at the whole row for its largest value, and at the tiles before its
    own for their place in the list of live ones.
    """
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * PART
    MASK += (row // heads) * s_b + (row % heads) * s_h
    LIVE += row * (NP // TILE + 1)
    cols = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    before = tl.zeros([BLOCK // TILE], tl.int32)
    for start in range(0, N, BLOCK):
        n = start + cols
        b = _raw_bias(MASK, n, N, s_n, IS_BOOL)
        top = tl.maximum(top, tl.where((n < N) & (tl.abs(b) < float("inf")), b, float("-inf")))
        if HAS_LIVE:
            kept = (n < tl.minimum(first, N)) & (b != float("-inf"))
            before += tl.max(kept.to(tl.int32).reshape([BLOCK // TILE, TILE]), 1)
    anchor = tl.max(top, 0)
    anchor = tl.where(anchor == float("-inf"), 0.0, anchor)
    n = first + tl.arange(0, PART)
    b = _raw_bias(MASK, n, N, s_n, IS_BOOL)
    tl.store(BIAS + row * NP + n, tl.where(n < N, (b - anchor) * 1.4426950408889634, float("-inf")), mask=n < NP)
    if first == 0:
        tl.store(ANCHOR + row * 2, anchor)
        tl.store(ANCHOR + row * 2 + 1, tl.where(tl.abs(anchor) < ABSORBING, 1.0, 0.0))
    if HAS_LIVE:
        kept = (n < N) & (b != float("-inf"))
        alive = tl.max(kept.to(tl.int32).reshape([PART // TILE, TILE]), 1)
        count = tl.sum(before, 0)
        place = count + tl.cumsum(alive, 0) - alive
        tl.store(LIVE + 1 + place, first // TILE + tl.arange(0, PART // TILE), mask=alive != 0)
        count += tl.sum(alive, 0)
        if first + PART >= NP:
            tl.store(LIVE + 1, 0, mask=count == 0)
            tl.store(LIVE, tl.maximum(count, 1))


@triton.jit
def _kept(BIAS, bias_rows, s_bias, n, N, HAS_BIAS: tl.constexpr):
    """Which keys count: those that at least one of the query heads of this key head can see."""
    keep = n < N
    if HAS_BIAS:
        best = tl.full(n.shape, float("-inf"), tl.float32)
        for r in range(bias_rows):
            best = tl.maximum(best, tl.load(BIAS + r * s_bias + n, mask=keep, other=float("-inf")))
        # A NaN bias keeps its key.
        keep = keep & ((best > NEGLIGIBLE) | (best != best))
    return keep


def prepare(
    attn_mask: torch.Tensor, kv_len: int, config: Config
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """attn_mask -> (bias, anchor, live) as in Quantized; rows that are views of one another are read once."""
    length = padded_len(kv_len, config)
    rows, strides = mask_rows(attn_mask)
    device = attn_mask.device
    bias = empty((*rows, length), torch.float32, device)
    anchor = empty((*rows, 2), torch.float32, device)
    live = empty((*rows, 1 + length // config.block_n), torch.int32, device) if config.gluon else None
    is_bool = attn_mask.dtype == torch.bool
    launch(
        _prepare_bias, (triton.cdiv(length, BIAS_PART), rows[0] * rows[1]),
        attn_mask.view(torch.uint8) if is_bool else attn_mask, bias, anchor, live if live is not None else anchor,
        kv_len, length, rows[1], *strides, IS_BOOL=is_bool, BLOCK=BIAS_BLOCK, PART=BIAS_PART,
        TILE=config.block_n, HAS_LIVE=live is not None, num_warps=8,
    )  # fmt: skip
    return bias, anchor, live


def mask_rows(attn_mask: torch.Tensor) -> tuple[list[int], list[int]]:
    """Rows [Bm, Hm] in memory of a mask [1 or B, 1 or H, 1, K], and its strides of batch, head and key."""
    rows = [1 if attn_mask.stride(axis) == 0 else attn_mask.shape[axis] for axis in (0, 1)]
    return rows, [attn_mask.stride(axis) if attn_mask.shape[axis] > 1 else 0 for axis in (0, 1, 3)]


def padded_len(kv_len: int, config: Config) -> int:
    """kv_len rounded up to whole key tiles."""
    return -(-kv_len // config.block_n) * config.block_n


def row_strides(bias: torch.Tensor) -> tuple[int, int]:
    """Rows to step in a prepared bias [Bm, Hm, ...] for the next batch and the next head; 0 where they share one."""
    return (bias.shape[1] if bias.shape[0] > 1 else 0), (1 if bias.shape[1] > 1 else 0)
