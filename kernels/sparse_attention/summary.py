"""One pass over a dense mask: what each tile of 64 queries and 64 keys holds, so that the kernel reads few of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .forward import mask_strides, readable
from .list_kernels import NEGLIGIBLE, _in_log2
from .lists import TILE

_WIDE = 2  # key tiles that a step of a program reads


class Summary(NamedTuple):
    """Of a mask [Rb, Rh, Q, K], all in log2 units; Rb and Rh are 1 where the mask's rows are shared.

    low, high: float32 [Rb, Rh, nq, nk], least and largest value of each tile. low is NaN where the tile must be read
    even if it is constant: it holds a NaN, or keys past the last.  floor: float32 [Rb, Rh, nq], the least, over the
    rows of a query tile that see a key, of a row's largest value; -inf where no row does.
    seen: bool [Rb, Rh, 1, K], keys that at least one query sees.
    """

    low: torch.Tensor
    high: torch.Tensor
    floor: torch.Tensor
    seen: torch.Tensor


@triton.jit(do_not_specialize=["M", "N", "nk", "heads", "chunk"])
def _summarise(
    MASK, LOW, HIGH, PEAK, SEEN, M, N, nk, heads, chunk, s_b, s_h, s_q, s_k,
    IS_BOOL: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program `chunk` key tiles of a row of tiles; PEAK [R, chunks, nq * 64] takes the largest of each mask row."""
    q = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    MASK += (row // heads) * s_b + (row % heads) * s_h
    m = q * TILE + tl.arange(0, TILE)
    peak = tl.full([TILE], float("-inf"), tl.float32)
    line = (row * tl.num_programs(0) + q) * nk
    for start in range(part * chunk, tl.minimum((part + 1) * chunk, nk), WIDE):
        n = start * TILE + tl.arange(0, WIDE * TILE)
        inside = (m < M)[:, None] & (n < N)[None, :]
        x = tl.load(MASK + m[:, None].to(tl.int64) * s_q + n[None, :].to(tl.int64) * s_k, mask=inside, other=0)
        if IS_BOOL:
            y = tl.where(x != 0, 0.0, float("-inf"))
        else:
            y = _in_log2(x.to(tl.float32))
        largest = tl.where(inside & (y == y), y, float("-inf"))
        bad = tl.max(tl.max((inside & (y != y)).to(tl.int32).reshape([TILE, WIDE, TILE]), 2), 0)
        high = tl.max(tl.max(largest.reshape([TILE, WIDE, TILE]), 2), 0)
        low = tl.min(tl.min(tl.where(inside & (y == y), y, float("inf")).reshape([TILE, WIDE, TILE]), 2), 0)
        tile = start + tl.arange(0, WIDE)
        high = tl.where(bad != 0, float("inf"), high)
        low = tl.where((bad != 0) | ((tile + 1) * TILE > N), float("nan"), low)
        tl.store(LOW + line + tile, low, mask=tile < nk)
        tl.store(HIGH + line + tile, high, mask=tile < nk)
        # Programs of other query tiles store the same 1 here.
        some = (tl.max(largest, 0) != float("-inf")) | (tl.max((y != y).to(tl.int32), 0) != 0)
        tl.store(SEEN + row * N + n, 1, mask=(n < N) & some)
        peak = tl.maximum(peak, tl.max(tl.where(inside & (y != y), float("inf"), largest), 1))
    tl.store(PEAK + (row * tl.num_programs(1) + part) * tl.num_programs(0) * TILE + m, peak)


def summarise(mask: torch.Tensor) -> Summary:
    """Summarise mask [1 or B, 1 or H, Q, K], bool or floating, of any strides; axes of stride 0 are read once."""
    rows_b, rows_h = (1 if mask.stride(axis) == 0 else mask.shape[axis] for axis in (0, 1))
    q_len, kv_len = mask.shape[2:]
    nq, nk = triton.cdiv(q_len, TILE), triton.cdiv(kv_len, TILE)
    rows = rows_b * rows_h
    # About a thousand programs keep every chip's memory busy.
    chunk = max(_WIDE, triton.cdiv(triton.cdiv(nk * nq * rows, 1024), _WIDE) * _WIDE)
    parts = triton.cdiv(nk, chunk)
    low, high = (torch.empty((rows_b, rows_h, nq, nk), dtype=torch.float32, device=mask.device) for _ in range(2))
    peak = torch.empty((rows, parts, nq * TILE), dtype=torch.float32, device=mask.device)
    seen = torch.zeros((rows_b, rows_h, 1, kv_len), dtype=torch.bool, device=mask.device)
    _summarise[(nq, parts, rows)](
        readable(mask), low, high, peak, seen.view(torch.uint8), q_len, kv_len, nk, rows_h, chunk, *mask_strides(mask),
        IS_BOOL=mask.dtype == torch.bool, TILE=TILE, WIDE=_WIDE, num_warps=8,
    )  # fmt: skip
    top = peak.amax(1).view(rows_b, rows_h, nq, TILE)
    least = torch.where(top == -torch.inf, torch.inf, top).amin(3)
    return Summary(low, high, torch.where(least == torch.inf, -torch.inf, least), seen)


def count_kinds(summary: Summary) -> list[int]:
    """Tiles that are kept as they are, constant, to be read, and not visited; waits for the device."""
    low, high, floor = summary.low, summary.high, summary.floor[..., None]
    skipped = (high == -torch.inf) | (high < floor + NEGLIGIBLE)
    constant = (low == high) & ~skipped
    kept = constant & (high == 0)
    counted = torch.stack([kept.sum(), (constant & ~kept).sum(), (~constant & ~skipped).sum(), skipped.sum()])
    return [int(count) for count in counted.tolist()]
