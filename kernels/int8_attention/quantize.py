"""Query and key to int8: shift by the mean key, random-sign Hadamard rotation, symmetric rounding to [-127, 127].

Softmax ignores what all keys share, so subtracting any vector from every key is exact; the mean makes the rest small.
A rotation of query and key alike leaves their products unchanged and spreads outlier channels (QuaRot, SmoothQuant).
A masked key counts for nothing here: it changes neither the mean nor a scale.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .configs import Config, padded_head_dim
from .limits import interpreting

LOG2E = math.log2(math.e)
# Finite biases of at least this size leave nothing of a score in float32 (one unit there is 2): scores count as 0.
ABSORBING = tl.constexpr(2.0**24)
# In log2: a key this far under the largest bias of its row is left out of shift and scale. Its score would have to be
# 8192 (natural log) higher than the others to count.
NEGLIGIBLE = tl.constexpr(-8192.0 * LOG2E)
_SHIFT_SAMPLES = 2048  # the mean of a sample is as good a shift as the mean of all keys, at a fraction of the reads


class QuantizedKey(NamedTuple):
    """The key's part of a Quantized, and shift: float32 [B, Hkv, DP], the rotated mean that was taken off the keys."""

    key: torch.Tensor
    key_scale: torch.Tensor
    bias: torch.Tensor | None
    anchor: torch.Tensor | None
    key_norm: torch.Tensor | None
    live: torch.Tensor | None
    shift: torch.Tensor
    kv_len: int


class QuantizedQuery(NamedTuple):
    """The query's part of a Quantized."""

    query: torch.Tensor
    query_scale: torch.Tensor
    lse_term: torch.Tensor | None


class Quantized(NamedTuple):
    """What the attention kernel reads instead of query and key; all tensors are contiguous.

    query: int8 [B, H, Lq, DP]; query_scale: float32 [B, H, Lq], holds |scale| * log2(e).
    key: int8 [B, Hkv, N, DP], N = Lk rounded up to a key tile of block_n.  key_scale: float32 [B, Hkv, N / block_n],
    one a tile; or with config.gluon [B, Hkv, N / block_n, 4], one for the keys {8j + 2t, 8j + 2t + 1} of it, t < 4; or
    with per_token [B, Hkv, N], one a key.
    bias: float32 [Bm, Hm, N], log2 units, largest finite value 0, masked and padding keys -inf; or None.
    anchor: float32 [Bm, Hm, 2]: what was subtracted from the bias (natural log), and 0 where it absorbs every score
    in float32, else 1; or None.  lse_term: float32 [B, H, Lq], scale * query . shift (natural log); or None.
    With config.gluon also key_norm: float32 [B, Hkv, N / block_n], largest norm of a key of the tile; and, with a bias,
    live: int32 [Bm, Hm, 1 + N / block_n], how many tiles have a key that is not masked (at least 1), and which.
    kv_len: Lk.
    """

    query: torch.Tensor
    query_scale: torch.Tensor
    key: torch.Tensor
    key_scale: torch.Tensor
    bias: torch.Tensor | None
    anchor: torch.Tensor | None
    lse_term: torch.Tensor | None
    key_norm: torch.Tensor | None = None
    live: torch.Tensor | None = None
    kv_len: int = 0


@triton.jit(do_not_specialize=["N", "NP", "heads"])
def _prepare_bias(
    MASK, BIAS, ANCHOR, LIVE, N, NP, heads, s_b, s_h, s_n,
    IS_BOOL: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, HAS_LIVE: tl.constexpr,
):  # fmt: skip
    """One program a mask row: any dtype and strides to float32 in log2 units, shifted so that its largest is 0."""
    row = tl.program_id(0).to(tl.int64)
    MASK += (row // heads) * s_b + (row % heads) * s_h
    cols = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, N, BLOCK):
        n = start + cols
        b = tl.load(MASK + n.to(tl.int64) * s_n, mask=n < N, other=0)
        b = tl.where(b != 0, 0.0, float("-inf")) if IS_BOOL else b.to(tl.float32)
        top = tl.maximum(top, tl.where((n < N) & (tl.abs(b) < float("inf")), b, float("-inf")))
    anchor = tl.max(top, 0)
    anchor = tl.where(anchor == float("-inf"), 0.0, anchor)
    tl.store(ANCHOR + row * 2, anchor)
    tl.store(ANCHOR + row * 2 + 1, tl.where(tl.abs(anchor) < ABSORBING, 1.0, 0.0))
    count = tl.full([], 0, tl.int32)
    for start in range(0, NP, BLOCK):
        n = start + cols
        b = tl.load(MASK + n.to(tl.int64) * s_n, mask=n < N, other=0)
        b = tl.where(b != 0, 0.0, float("-inf")) if IS_BOOL else b.to(tl.float32)
        b = tl.where(n < N, (b - anchor) * 1.4426950408889634, float("-inf"))
        tl.store(BIAS + row * NP + n, b, mask=n < NP)
        if HAS_LIVE:
            tile = start // TILE + tl.arange(0, BLOCK // TILE)
            alive = tl.max((b.reshape([BLOCK // TILE, TILE]) != float("-inf")).to(tl.int32), 1)
            place = count + tl.cumsum(alive, 0) - alive
            tl.store(LIVE + row * (NP // TILE + 1) + 1 + place, tile, mask=alive != 0)
            count += tl.sum(alive, 0)
    if HAS_LIVE:
        LIVE += row * (NP // TILE + 1)
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


@triton.jit
def _hadamard(B: tl.constexpr):
    """[B, B] of +-1, rows with random signs; entry (i, j) is s(i) * (-1)^popcount(i & j)."""
    i = tl.arange(0, B)[:, None]
    bits = i & tl.arange(0, B)[None, :]
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= (bits >> 1) ^ ((i * 40503) >> 9)
    return 1.0 - 2.0 * (bits & 1).to(tl.float32)


@triton.jit
def _rotate(x, rotation, ROWS: tl.constexpr, DP: tl.constexpr, B: tl.constexpr):
    """[ROWS, DP] 16-bit times the +-1 rotation, B channels at a time: products are exact, sums are float32."""
    return tl.dot(x.reshape([ROWS * (DP // B), B]), rotation).reshape([ROWS, DP])


@triton.jit
def _inverse(peak):
    some = peak > 1e-30
    return tl.where(some, 127.0 / tl.where(some, peak, 1.0), 0.0)


@triton.jit
def _round(y):
    """Nearest int8, ties to even: adding 1.5 * 2^23 leaves the integer in the low bits, cheaper than a cast."""
    return (y + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit(do_not_specialize=["N", "NP", "step", "heads", "bias_rows"])
def _key_shift(
    K, BIAS, SHIFT, ROTATION, N, NP, step, heads, bias_rows, s_b, s_h, s_n, s_bias_b, s_bias_h,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """SHIFT[B, Hkv, DP] = rotated mean over the kept keys of every step-th block of ROWS keys, or of all keys.

    ROTATION[B, B] is written for _quantize, where making it would cost more than the rest of the work.
    """
    head = tl.program_id(0)
    rotation = _hadamard(B)
    if head == 0:
        i = tl.arange(0, B)
        tl.store(ROTATION + i[:, None] * B + i[None, :], rotation.to(ROTATION.dtype.element_ty))
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    K += b * s_b + h * s_h
    BIAS += (b * s_bias_b + h * bias_rows * s_bias_h) * NP
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, DP)
    total = tl.zeros([ROWS, DP], tl.float32)
    count = tl.zeros([ROWS], tl.float32)
    for attempt in tl.static_range(2):
        # A second pass over all keys only where the sample holds none that is kept.
        stride = step * ROWS if attempt == 0 else ROWS
        end = N if attempt == 0 else tl.where(tl.sum(count, 0) == 0, N, 0)
        for start in range(0, end, stride):
            n = start + rows
            keep = _kept(BIAS, bias_rows, s_bias_h * NP, n, N, HAS_BIAS)
            inside = keep[:, None] & (cols < D)[None, :]
            total += tl.load(K + n[:, None].to(tl.int64) * s_n + cols[None, :], mask=inside, other=0).to(tl.float32)
            count += keep.to(tl.float32)
    mean = tl.sum(total, 0) / tl.maximum(tl.sum(count, 0), 1.0)
    parts = mean.reshape([DP // B, B])
    shift = tl.sum(parts[:, :, None] * rotation[None, :, :], 1)
    tl.store(SHIFT + head * DP + cols, shift.reshape([DP]))


@triton.jit(do_not_specialize=["L", "heads", "group", "bias_rows"])
def _quantize(
    X, SHIFT, ROTATION, BIAS, Y, SCALE, NORM, LSE_TERM, factor, lse_factor, L, heads, group, bias_rows,
    s_b, s_h, s_l, s_bias_b, s_bias_h,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, IS_KEY: tl.constexpr,
    HAS_BIAS: tl.constexpr, SCALES: tl.constexpr, HAS_NORM: tl.constexpr, HAS_LSE: tl.constexpr,
    HAS_ROTATION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program a block of ROWS rows of one head: a scale for each row of a query, SCALES (1, 4, ROWS) for keys."""
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    b = head // heads
    h = head % heads
    rows = block * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, DP)
    keep = rows < L
    if IS_KEY:
        NP = tl.num_programs(0) * ROWS
        BIAS += (b * s_bias_b + h * bias_rows * s_bias_h) * NP
        keep = _kept(BIAS, bias_rows, s_bias_h * NP, rows, L, HAS_BIAS)
    X += b * s_b + h * s_h
    x = tl.load(X + rows[:, None].to(tl.int64) * s_l + cols[None, :], mask=keep[:, None] & (cols < D)[None, :], other=0)
    if HAS_ROTATION:
        i = tl.arange(0, B)
        rotation = tl.load(ROTATION + i[:, None] * B + i[None, :])
    else:
        rotation = _hadamard(B)
    dtype: tl.constexpr = tl.float32 if UPCAST else X.dtype.element_ty
    x = _rotate(x.to(dtype), rotation.to(dtype), ROWS, DP, B)
    if IS_KEY:
        x = tl.where(keep[:, None], x - tl.load(SHIFT + head * DP + cols)[None, :], 0.0)
        # x * 0 is NaN where x is NaN or infinite: such a row or block must answer NaN, as SDPA does.
        tile = head * tl.num_programs(0) + block
        stored = (head * tl.num_programs(0) * ROWS + rows)[:, None]
        if SCALES == 1:
            peak = tl.max(tl.max(tl.abs(x), 1), 0) + tl.sum(tl.sum(x * 0.0, 1), 0)
            tl.store(SCALE + tile, peak / 127.0)
        else:
            peak = tl.max(tl.abs(x), 1) + tl.sum(x * 0.0, 1)
            if SCALES == 4:
                bad = tl.sum(tl.sum((peak * 0.0).reshape([ROWS // 8, 4, 2]), 2), 0)
                peak = tl.max(tl.max(peak.reshape([ROWS // 8, 4, 2]), 2), 0) + bad
                tl.store(SCALE + tile * 4 + tl.arange(0, 4), peak / 127.0)
                peak = tl.broadcast_to(peak[None, :, None], [ROWS // 8, 4, 2]).reshape([ROWS])[:, None]
            else:
                tl.store(SCALE + head * NP + rows, peak / 127.0)
                peak = peak[:, None]
        if HAS_NORM:
            tl.store(NORM + tile, tl.sqrt(tl.max(tl.sum(x * x, 1), 0)))
        tl.store(Y + stored * DP + cols[None, :], _round(x * _inverse(peak)))
    else:
        peak = tl.max(tl.abs(x), 1) + tl.sum(x * 0.0, 1)
        tl.store(SCALE + head * L + rows, peak / 127.0 * tl.abs(factor), mask=keep)
        sign = tl.where(factor < 0, -1.0, 1.0)  # so that scores times their scale keep the order of the int8 scores
        stored = (head * L + rows)[:, None]
        tl.store(Y + stored * DP + cols[None, :], _round(x * (_inverse(peak) * sign)[:, None]), mask=keep[:, None])
        if HAS_LSE:
            shift = tl.load(SHIFT + (b * (heads // group) + h // group) * DP + cols)
            tl.store(LSE_TERM + head * L + rows, tl.sum(x * shift[None, :], 1) * lse_factor, mask=keep)


def quantize(
    query: torch.Tensor,
    key: torch.Tensor,
    attn_mask: torch.Tensor | None,
    scale: float,
    config: Config,
    *,
    lse: bool,
    per_token: bool = False,
) -> Quantized:
    """Quantise query [B, H, Lq, D] and key [B, Hkv, Lk, D] (fp16 or bf16, contiguous last axis) for `config`.

    attn_mask: None or a per-key mask [1 or B, 1 or H, 1, 1 or Lk], bool (True = keep) or floating (added).
    scale: the softmax scale, of any sign.  lse: whether the term that undoes the key shift in the LSE is wanted.
    per_token: a scale for each key.
    """
    rotation = _empty_rotation(key)
    group = query.shape[1] // key.shape[1]
    k = _quantize_key(key, attn_mask, config, group, per_token, rotation)
    q = _quantize_query(query, scale, k.shift if lse else None, rotation)
    return join(q, k)


def join(query: QuantizedQuery, key: QuantizedKey) -> Quantized:
    """What the attention kernel takes, of a query and a key that were quantised for one Config."""
    q, k = query, key
    return Quantized(
        q.query, q.query_scale, k.key, k.key_scale, k.bias, k.anchor, q.lse_term, k.key_norm, k.live, k.kv_len
    )


def quantize_key(
    key: torch.Tensor, attn_mask: torch.Tensor | None, config: Config, *, group: int, per_token: bool = False
) -> QuantizedKey:
    """Quantise key [B, Hkv, Lk, D] as quantize() does, to the same bits; group: query heads of a key head."""
    return _quantize_key(key, attn_mask, config, group, per_token, _empty_rotation(key))


def quantize_query(
    query: torch.Tensor, scale: float, config: Config, *, shift: torch.Tensor | None = None
) -> QuantizedQuery:
    """Quantise query [B, H, Lq, D] as quantize() does, to the same bits.

    shift: of the QuantizedKey; where it is given there is an lse_term. Nothing else depends on the keys.
    """
    return _quantize_query(query, scale, shift, None)


def _empty_rotation(key: torch.Tensor) -> torch.Tensor:
    rotated = min(padded_head_dim(key.shape[3]), 128)
    return torch.empty((rotated, rotated), dtype=key.dtype, device=key.device)


def _quantize_key(
    key: torch.Tensor,
    attn_mask: torch.Tensor | None,
    config: Config,
    group: int,
    per_token: bool,
    rotation: torch.Tensor,
) -> QuantizedKey:
    """Quantise the keys; fills `rotation` besides."""
    batch, kv_heads, kv_len, head_dim = key.shape
    padded = padded_head_dim(head_dim)
    blocks = triton.cdiv(kv_len, config.block_n)
    empty = functools.partial(torch.empty, device=key.device)
    bias, anchor, live, strides, bias_rows = None, None, None, (0, 0), 1
    if attn_mask is not None:
        bias, anchor, live = _prepare(attn_mask, kv_len, config)
        strides = row_strides(bias)
        bias_rows = group if bias.shape[1] > 1 else 1
    shift = empty((batch, kv_heads, padded), dtype=torch.float32)
    shared = {"D": head_dim, "DP": padded, "B": min(padded, 128), "HAS_BIAS": bias is not None}
    mask = bias if bias is not None else shift
    _key_shift[(batch * kv_heads,)](
        key, mask, shift, rotation, kv_len, blocks * config.block_n, max(1, kv_len // _SHIFT_SAMPLES), kv_heads,
        bias_rows, *key.stride()[:3], *strides, ROWS=shift_rows(padded, bias is not None), num_warps=8, **shared,
    )  # fmt: skip
    key8 = empty((batch, kv_heads, blocks * config.block_n, padded), dtype=torch.int8)
    scales = config.block_n if per_token else 4 if config.gluon else 1
    tail = (blocks * config.block_n,) if per_token else (blocks, 4) if config.gluon else (blocks,)
    key_scale = empty((batch, kv_heads, *tail), dtype=torch.float32)
    key_norm = empty((batch, kv_heads, blocks), dtype=torch.float32) if config.gluon else None
    _quantize[(blocks, batch * kv_heads)](
        key, shift, rotation, mask, key8, key_scale, key_norm if key_norm is not None else key_scale, key_scale,
        1.0, 1.0, kv_len, kv_heads, 1, bias_rows, *key.stride()[:3], *strides,
        ROWS=config.block_n, IS_KEY=True, SCALES=scales, HAS_NORM=key_norm is not None, HAS_LSE=False,
        HAS_ROTATION=True, UPCAST=interpreting(), num_warps=8, **shared,
    )  # fmt: skip
    return QuantizedKey(key8, key_scale, bias, anchor, key_norm, live, shift, kv_len)


def _quantize_query(
    query: torch.Tensor, scale: float, shift: torch.Tensor | None, rotation: torch.Tensor | None
) -> QuantizedQuery:
    batch, heads, q_len, head_dim = query.shape
    padded = padded_head_dim(head_dim)
    rotated = min(padded, 128)
    empty = functools.partial(torch.empty, device=query.device)
    query8 = empty((batch, heads, q_len, padded), dtype=torch.int8)
    query_scale = empty((batch, heads, q_len), dtype=torch.float32)
    lse_term = empty((batch, heads, q_len), dtype=torch.float32) if shift is not None else None
    group = heads // shift.shape[1] if shift is not None else 1
    unused = query_scale
    rows = 64 if padded <= 128 else 32
    _quantize[(triton.cdiv(q_len, rows), batch * heads)](
        query, shift if shift is not None else unused, rotation if rotation is not None else query, unused,
        query8, query_scale, unused, lse_term if lse_term is not None else unused,
        scale * LOG2E / rotated, scale / rotated, q_len, heads, group, 1, *query.stride()[:3], 0, 0,
        D=head_dim, DP=padded, B=rotated, ROWS=rows, IS_KEY=False, HAS_BIAS=False, SCALES=1, HAS_NORM=False,
        HAS_LSE=shift is not None, HAS_ROTATION=rotation is not None, UPCAST=interpreting(), num_warps=8,
    )  # fmt: skip
    return QuantizedQuery(query8, query_scale, lse_term)


def shift_rows(padded: int, masked: bool) -> int:
    """Keys that a step of _key_shift reads: as many as fit the registers of every architecture."""
    return 128 if padded < 128 or (padded == 128 and not masked) else 64


def _prepare(
    attn_mask: torch.Tensor, kv_len: int, config: Config
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """attn_mask -> (bias, anchor, live) as in Quantized; rows that are views of one another are read once."""
    tiles = triton.cdiv(kv_len, config.block_n)
    padded_len = tiles * config.block_n
    rows = [1 if attn_mask.stride(axis) == 0 else attn_mask.shape[axis] for axis in (0, 1)]
    strides = [attn_mask.stride(axis) if attn_mask.shape[axis] > 1 else 0 for axis in (0, 1, 3)]
    bias = torch.empty((*rows, padded_len), dtype=torch.float32, device=attn_mask.device)
    anchor = torch.empty((*rows, 2), dtype=torch.float32, device=attn_mask.device)
    live = None
    if config.gluon:
        live = torch.empty((*rows, 1 + tiles), dtype=torch.int32, device=attn_mask.device)
    is_bool = attn_mask.dtype == torch.bool
    block = min(4096, triton.next_power_of_2(padded_len))
    _prepare_bias[(rows[0] * rows[1],)](
        attn_mask.view(torch.uint8) if is_bool else attn_mask, bias, anchor, live if live is not None else anchor,
        kv_len, padded_len, rows[1], *strides,
        IS_BOOL=is_bool, BLOCK=block, TILE=config.block_n, HAS_LIVE=live is not None, num_warps=8,
    )  # fmt: skip
    return bias, anchor, live


def row_strides(bias: torch.Tensor) -> tuple[int, int]:
    """Rows to step in a prepared bias [Bm, Hm, N] for the next batch and the next head; 0 where they share one."""
    return (bias.shape[1] if bias.shape[0] > 1 else 0), (1 if bias.shape[1] > 1 else 0)
