"""Query and key to int8: shift by the mean key, random-sign Hadamard rotation, symmetric rounding to [-127, 127].

Softmax ignores what all keys share, so subtracting any vector from every key is exact; the mean makes the rest small.
A rotation of query and key alike leaves their products unchanged and spreads outlier channels (QuaRot, SmoothQuant).
A masked key counts for nothing here: it changes neither the mean nor a scale.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .configs import Config, padded_head_dim
from .launch import empty, launch
from .limits import interpreting

LOG2E = math.log2(math.e)
# Finite biases of at least this size leave nothing of a score in float32 (one unit there is 2): scores count as 0.
ABSORBING = tl.constexpr(2.0**24)
# In log2: a key this far under the largest bias of its row is left out of shift and scale. Its score would have to be
# 8192 (natural log) higher than the others to count.
NEGLIGIBLE = tl.constexpr(-8192.0 * LOG2E)
SHIFT_SAMPLES = 512  # the mean of a sample is as good a shift as the mean of all keys, at a fraction of the reads
BIAS_PART, BIAS_BLOCK = 2048, 8192  # keys that a program prepares, and that it looks at in a step


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
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, SAMPLES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """SHIFT[B, Hkv, DP] = rotated mean over the kept ones of every step-th key, or of all keys where those are few.

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
    total = tl.zeros([ROWS, DP], tl.float32)
    count = tl.zeros([ROWS], tl.float32)
    for start in range(0, SAMPLES, ROWS):
        n = (start + tl.arange(0, ROWS)) * step
        total, count = _add_kept(total, count, K, BIAS, n, N, NP, bias_rows, s_n, s_bias_h, D, DP, HAS_BIAS)
    if HAS_BIAS:
        # Few of the sample are kept: all keys, and those of the sample twice.
        end = tl.where(tl.sum(count, 0) < 16, N, 0)
        for start in range(0, end, ROWS):
            n = start + tl.arange(0, ROWS)
            total, count = _add_kept(total, count, K, BIAS, n, N, NP, bias_rows, s_n, s_bias_h, D, DP, HAS_BIAS)
    mean = tl.sum(total, 0) / tl.maximum(tl.sum(count, 0), 1.0)
    parts = mean.reshape([DP // B, B])
    shift = tl.sum(parts[:, :, None] * rotation[None, :, :], 1)
    tl.store(SHIFT + head * DP + tl.arange(0, DP), shift.reshape([DP]))


@triton.jit
def _add_kept(
    total, count, K, BIAS, n, N, NP, bias_rows, s_n, s_bias_h, D: tl.constexpr, DP: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Sums [ROWS, DP] and numbers [ROWS] of keys with the kept ones of the keys n added."""
    keep = _kept(BIAS, bias_rows, s_bias_h * NP, n, N, HAS_BIAS)
    cols = tl.arange(0, DP)
    inside = keep[:, None] & (cols < D)[None, :]
    x = tl.load(K + n[:, None].to(tl.int64) * s_n + cols[None, :], mask=inside, other=0)
    return total + x.to(tl.float32), count + keep.to(tl.float32)


@triton.jit
def _rotated(X, rows, keep, s_l, rotation, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, UPCAST: tl.constexpr):
    """Rows of X, rotated: float32 [ROWS, DP], 0 where they are not kept."""
    cols = tl.arange(0, DP)
    inside = keep[:, None] & (cols < D)[None, :]
    x = tl.load(X + rows[:, None].to(tl.int64) * s_l + cols[None, :], mask=inside, other=0)
    return _rotate(x.to(tl.float32) if UPCAST else x, rotation, rows.shape[0], DP, B)


@triton.jit
def _store(Y, rows, keep, y, DP: tl.constexpr):
    """Rows of int8 values, 8 bytes a thread: with 16 Triton would have each thread load 32 bytes of X in two halves."""
    cols = tl.max_contiguous(tl.arange(0, DP), 8)
    tl.store(Y + rows[:, None] * DP + cols[None, :], y, mask=keep[:, None])


@triton.jit
def _quantize_keys(
    K, SHIFT, rotation, BIAS, Y, SCALE, NORM, block, head, N, NP, bias_rows, s_n, s_bias,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr, SCALES: tl.constexpr, HAS_NORM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One block of ROWS keys with SCALES (1, 4, ROWS) scales; `K` and `BIAS` are those of this head."""
    rows = block * ROWS + tl.arange(0, ROWS)
    keep = _kept(BIAS, bias_rows, s_bias, rows, N, HAS_BIAS)
    x = _rotated(K, rows, keep, s_n, rotation, D, DP, B, UPCAST)
    cols = tl.arange(0, DP)
    x = x - tl.load(SHIFT + head * DP + cols)[None, :] * keep.to(tl.float32)[:, None]
    # x * 0 is NaN where x is NaN or infinite: such a row or block must answer NaN, as SDPA does.
    tile = head * (NP // ROWS) + block
    bad = tl.sum(x * 0.0, 1)
    if HAS_NORM:
        tl.store(NORM + tile, tl.sqrt(tl.max(tl.sum(x * x, 1), 0)))
    peak = tl.max(tl.abs(x), 1) + bad
    if SCALES == 1:
        peak = tl.max(peak, 0) + tl.sum(bad, 0)
        tl.store(SCALE + tile, peak / 127.0)
    elif SCALES == 4:
        peak = tl.max(tl.max(peak.reshape([ROWS // 8, 4, 2]), 2), 0) + tl.sum(bad, 0)
        tl.store(SCALE + tile * 4 + tl.arange(0, 4), peak / 127.0)
        peak = tl.broadcast_to(peak[None, :, None], [ROWS // 8, 4, 2]).reshape([ROWS])[:, None]
    else:
        tl.store(SCALE + head * NP + rows, peak / 127.0)
        peak = peak[:, None]
    _store(Y, (head * NP + rows), rows >= 0, _round(x * _inverse(peak)), DP)


@triton.jit
def _quantize_queries(
    Q, shift, rotation, Y, SCALE, LSE_TERM, block, head, M, s_m, factor, lse_factor,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr,
    HAS_LSE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One block of ROWS queries with a scale each; `Q` and `shift` are those of this head."""
    rows = block * ROWS + tl.arange(0, ROWS)
    keep = rows < M
    x = _rotated(Q, rows, keep, s_m, rotation, D, DP, B, UPCAST)
    peak = tl.max(tl.abs(x), 1) + tl.sum(x * 0.0, 1)
    tl.store(SCALE + head * M + rows, peak / 127.0 * tl.abs(factor), mask=keep)
    sign = tl.where(factor < 0, -1.0, 1.0)  # so that scores times their scale keep the order of the int8 scores
    y = _round(x * (_inverse(peak) * sign)[:, None])
    _store(Y, head * M + rows, keep, y, DP)
    if HAS_LSE:
        tl.store(LSE_TERM + head * M + rows, tl.sum(x * shift[None, :], 1) * lse_factor, mask=keep)


@triton.jit(
    do_not_specialize=["N", "NP", "M", "kv_heads", "heads", "key_programs", "k_chunks", "q_chunks", "bias_rows"]
)
def _quantize(
    K, Q, SHIFT, ROTATION, BIAS, K8, K_SCALE, NORM, Q8, Q_SCALE, LSE_TERM, factor, lse_factor,
    N, NP, M, kv_heads, heads, key_programs, k_chunks, q_chunks, bias_rows,
    s_kb, s_kh, s_kn, s_qb, s_qh, s_qm, s_bias_b, s_bias_h,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, K_ROWS: tl.constexpr, Q_ROWS: tl.constexpr,
    STEPS: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, SCALES: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_LSE: tl.constexpr, HAS_ROTATION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Query [B, H, M, D] and key [B, Hkv, N, D] to int8: one program STEPS blocks of one head of either.

    The first `key_programs` programs do keys, k_chunks a head, the others queries, q_chunks a head.
    """
    program = tl.program_id(0)
    if HAS_ROTATION:
        i = tl.arange(0, B)
        rotation = tl.load(ROTATION + i[:, None] * B + i[None, :])
    else:
        rotation = _hadamard(B)
    rotation = rotation.to(tl.float32 if UPCAST else Q.dtype.element_ty)
    if program < key_programs:
        head = (program // k_chunks).to(tl.int64)
        b = head // kv_heads
        h = head % kv_heads
        K += b * s_kb + h * s_kh
        BIAS += (b * s_bias_b + h * bias_rows * s_bias_h) * NP
        first = program % k_chunks * STEPS
        for block in tl.range(first, tl.minimum(first + STEPS, NP // K_ROWS), num_stages=STAGES):
            _quantize_keys(
                K, SHIFT, rotation, BIAS, K8, K_SCALE, NORM, block, head, N, NP, bias_rows, s_kn, s_bias_h * NP,
                D, DP, B, K_ROWS, HAS_BIAS, SCALES, HAS_NORM, UPCAST,
            )  # fmt: skip
    else:
        program -= key_programs
        head = (program // q_chunks).to(tl.int64)
        b = head // heads
        h = head % heads
        Q += b * s_qb + h * s_qh
        first = program % q_chunks * STEPS
        shift = tl.zeros([DP], tl.float32)
        if HAS_LSE:
            shift = tl.load(SHIFT + (b * kv_heads + h // (heads // kv_heads)) * DP + tl.arange(0, DP))
        for block in tl.range(first, tl.minimum(first + STEPS, tl.cdiv(M, Q_ROWS)), num_stages=STAGES):
            _quantize_queries(
                Q, shift, rotation, Q8, Q_SCALE, LSE_TERM, block, head, M, s_qm, factor, lse_factor,
                D, DP, B, Q_ROWS, HAS_LSE, UPCAST,
            )  # fmt: skip


class Tiling(NamedTuple):
    """Launch of _quantize: query rows of a block, blocks of a program, warps, stages of its loop."""

    q_rows: int
    steps: int
    num_warps: int
    num_stages: int


# By padded head_dim up to 128, and above. On sm_90 the best of bench/bench_quantise_stage.py.
HOPPER_TILINGS = (Tiling(128, 8, 4, 2), Tiling(64, 4, 8, 2))
_TILINGS = (Tiling(64, 4, 4, 1), Tiling(32, 4, 4, 1))


def tiling_of(padded: int, config: Config) -> Tiling:
    """The launch for a padded head_dim and a configuration of the attention kernel."""
    return (HOPPER_TILINGS if config.tma else _TILINGS)[padded > 128]


def quantize(
    query: torch.Tensor,
    key: torch.Tensor,
    attn_mask: torch.Tensor | None,
    scale: float,
    config: Config,
    *,
    lse: bool,
    per_token: bool = False,
    as_bias: bool = True,
) -> Quantized:
    """Quantise query [B, H, Lq, D] and key [B, Hkv, Lk, D] (fp16 or bf16, contiguous last axis) for `config`.

    attn_mask: None or a per-key mask [1 or B, 1 or H, 1, 1 or Lk], bool (True = keep) or floating (added).
    scale: the softmax scale, of any sign.  lse: whether the term that undoes the key shift in the LSE is wanted.
    per_token: a scale for each key.  as_bias: False where attn_mask says only which keys make the shift.
    """
    shifted = _shift(key, attn_mask, config, query.shape[1] // key.shape[1])
    if not as_bias:
        shifted = _Shifted(None, None, None, shifted.shift, shifted.rotation, 1)
    k = _empty_key(key, config, per_token, shifted)
    q = _empty_query(query, shifted.shift if lse else None)
    _launch(query, key, q, k, shifted, scale, config, lse=lse, queries=True, keys=True)
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
    shifted = _shift(key, attn_mask, config, group)
    k = _empty_key(key, config, per_token, shifted)
    unused = QuantizedQuery(k.key, k.key_scale, None)
    _launch(key, key, unused, k, shifted, 1.0, config, lse=False, queries=False, keys=True)
    return k


def quantize_query(
    query: torch.Tensor, scale: float, config: Config, *, shift: torch.Tensor | None = None
) -> QuantizedQuery:
    """Quantise query [B, H, Lq, D] as quantize() does, to the same bits.

    shift: of the QuantizedKey; where it is given there is an lse_term. Nothing else depends on the keys.
    """
    q = _empty_query(query, shift)
    given = shift if shift is not None else q.query_scale
    unused = QuantizedKey(q.query, q.query_scale, None, None, None, None, given, 0)
    shifted = _Shifted(None, None, None, given, None, 1)
    heads = query if shift is None else query[:, : shift.shape[1]]
    _launch(query, heads, q, unused, shifted, scale, config, lse=shift is not None, queries=True, keys=False)
    return q


class _Shifted(NamedTuple):
    """The prepared mask, the rotated mean of the keys, the rotation and the query heads that a bias row serves."""

    bias: torch.Tensor | None
    anchor: torch.Tensor | None
    live: torch.Tensor | None
    shift: torch.Tensor
    rotation: torch.Tensor | None
    bias_rows: int


def _shift(key: torch.Tensor, attn_mask: torch.Tensor | None, config: Config, group: int) -> _Shifted:
    batch, kv_heads, kv_len, head_dim = key.shape
    padded = padded_head_dim(head_dim)
    rotated = min(padded, 128)
    bias, anchor, live, strides, bias_rows = None, None, None, (0, 0), 1
    if attn_mask is not None:
        bias, anchor, live = _prepare(attn_mask, kv_len, config)
        strides = row_strides(bias)
        bias_rows = group if bias.shape[1] > 1 else 1
    shift = empty((batch, kv_heads, padded), torch.float32, key.device)
    rotation = empty((rotated, rotated), key.dtype, key.device)
    launch(
        _key_shift, (batch * kv_heads,),
        key, bias if bias is not None else shift, shift, rotation, kv_len, _padded_len(kv_len, config),
        triton.cdiv(kv_len, SHIFT_SAMPLES), kv_heads, bias_rows, *key.stride()[:3], *strides,
        D=head_dim, DP=padded, B=rotated, ROWS=shift_rows(padded, bias is not None),
        SAMPLES=SHIFT_SAMPLES, HAS_BIAS=bias is not None, num_warps=8,
    )  # fmt: skip
    return _Shifted(bias, anchor, live, shift, rotation, bias_rows)


def _padded_len(kv_len: int, config: Config) -> int:
    return -(-kv_len // config.block_n) * config.block_n


def _empty_key(key: torch.Tensor, config: Config, per_token: bool, shifted: _Shifted) -> QuantizedKey:
    batch, kv_heads, kv_len, head_dim = key.shape
    rows = _padded_len(kv_len, config)
    blocks = rows // config.block_n
    tail = (rows,) if per_token else (blocks, 4) if config.gluon else (blocks,)
    device, float32 = key.device, torch.float32
    return QuantizedKey(
        empty((batch, kv_heads, rows, padded_head_dim(head_dim)), torch.int8, device),
        empty((batch, kv_heads, *tail), float32, device),
        shifted.bias,
        shifted.anchor,
        empty((batch, kv_heads, blocks), float32, device) if config.gluon else None,
        shifted.live,
        shifted.shift,
        kv_len,
    )


def _empty_query(query: torch.Tensor, shift: torch.Tensor | None) -> QuantizedQuery:
    batch, heads, q_len, head_dim = query.shape
    device, float32 = query.device, torch.float32
    return QuantizedQuery(
        empty((batch, heads, q_len, padded_head_dim(head_dim)), torch.int8, device),
        empty((batch, heads, q_len), float32, device),
        empty((batch, heads, q_len), float32, device) if shift is not None else None,
    )


def _launch(
    query: torch.Tensor,
    key: torch.Tensor,
    q: QuantizedQuery,
    k: QuantizedKey,
    shifted: _Shifted,
    scale: float,
    config: Config,
    *,
    lse: bool,
    queries: bool,
    keys: bool,
) -> None:
    """Fill q and k; for one of them alone the tensors of the other are not looked at, but the number of its heads."""
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    padded = padded_head_dim(head_dim)
    rotated = min(padded, 128)
    tiling = tiling_of(padded, config)
    rows = _padded_len(kv_len, config)
    k_chunks = triton.cdiv(rows // config.block_n, tiling.steps)
    q_chunks = triton.cdiv(triton.cdiv(q_len, tiling.q_rows), tiling.steps)
    key_programs = batch * kv_heads * k_chunks if keys else 0
    query_programs = batch * heads * q_chunks if queries else 0
    scales = config.block_n if k.key_scale.shape[-1] == rows else 4 if config.gluon else 1
    bias, rotation, unused = shifted.bias, shifted.rotation, shifted.shift
    launch(
        _quantize, (key_programs + query_programs,),
        key, query, shifted.shift, rotation if rotation is not None else query,
        bias if bias is not None else unused, k.key, k.key_scale, k.key_norm if k.key_norm is not None else unused,
        q.query, q.query_scale, q.lse_term if q.lse_term is not None else unused,
        scale * LOG2E / rotated, scale / rotated, kv_len, rows, q_len, kv_heads, heads,
        key_programs, k_chunks, q_chunks, shifted.bias_rows, *key.stride()[:3], *query.stride()[:3],
        *(row_strides(bias) if bias is not None else (0, 0)),
        D=head_dim, DP=padded, B=rotated, K_ROWS=config.block_n, Q_ROWS=tiling.q_rows, STEPS=tiling.steps,
        STAGES=tiling.num_stages, HAS_BIAS=bias is not None, SCALES=scales, HAS_NORM=k.key_norm is not None,
        HAS_LSE=lse, HAS_ROTATION=rotation is not None, UPCAST=interpreting(), num_warps=tiling.num_warps,
    )  # fmt: skip


def shift_rows(padded: int, masked: bool) -> int:
    """Keys that a step of _key_shift reads: as many as fit the registers of every architecture."""
    return 128 if padded < 128 or (padded == 128 and not masked) else 64 if padded == 128 else 32


def _prepare(
    attn_mask: torch.Tensor, kv_len: int, config: Config
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """attn_mask -> (bias, anchor, live) as in Quantized; rows that are views of one another are read once."""
    padded_len = _padded_len(kv_len, config)
    rows = [1 if attn_mask.stride(axis) == 0 else attn_mask.shape[axis] for axis in (0, 1)]
    strides = [attn_mask.stride(axis) if attn_mask.shape[axis] > 1 else 0 for axis in (0, 1, 3)]
    device = attn_mask.device
    bias = empty((*rows, padded_len), torch.float32, device)
    anchor = empty((*rows, 2), torch.float32, device)
    live = empty((*rows, 1 + padded_len // config.block_n), torch.int32, device) if config.gluon else None
    is_bool = attn_mask.dtype == torch.bool
    launch(
        _prepare_bias, (triton.cdiv(padded_len, BIAS_PART), rows[0] * rows[1]),
        attn_mask.view(torch.uint8) if is_bool else attn_mask, bias, anchor, live if live is not None else anchor,
        kv_len, padded_len, rows[1], *strides, IS_BOOL=is_bool, BLOCK=BIAS_BLOCK, PART=BIAS_PART,
        TILE=config.block_n, HAS_LIVE=live is not None, num_warps=8,
    )  # fmt: skip
    return bias, anchor, live


def row_strides(bias: torch.Tensor) -> tuple[int, int]:
    """Rows to step in a prepared bias [Bm, Hm, N] for the next batch and the next head; 0 where they share one."""
    return (bias.shape[1] if bias.shape[0] > 1 else 0), (1 if bias.shape[1] > 1 else 0)
