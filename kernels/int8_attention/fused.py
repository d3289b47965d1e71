"""RMSNorm, rotary embedding, Hadamard rotation and int8 rounding of query and key in one pass over the 16-bit values.

RoPE turns pairs of channels, so int8 values can't pass through it; everything round it is linear or a factor per row,
and is done on the float32 values between one read and one int8 write. A pair lies in one thread: (2j, 2j + 1) where
pairs are interleaved, (j, j + R/2) where they are halves; the order of channels that this leaves is the same for query
and key, and their products don't notice.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .bias import LOG2E, _kept, prepare, row_strides
from .configs import Config, padded_head_dim
from .limits import interpreting
from .quantize import QuantizedKey, QuantizedQuery
from .quantize_kernels import _hadamard, _inverse, _rotate

_SAMPLE = 128  # keys whose mean is the shift: what is left of the mean is a tenth of the keys' own scatter


@dataclass(frozen=True)
class Rows:
    """One side of the attention before norm and RoPE, for the kernels.

    x: [B, H, L, D], fp16 or bf16, contiguous last axis.  second: None, or [B, H, L2, D] that follows x in the sequence.
    weight, second_weight: of the RMSNorm, [D] or, across heads, [H * D]; None is all ones.
    cos, sin: float32 [1 or B, 1 or H, L + L2, R / 2] with any strides; None leaves RoPE out.
    """

    x: torch.Tensor
    weight: torch.Tensor | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    second: torch.Tensor | None = None
    second_weight: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """Rows of the whole sequence."""
        return self.x.shape[2] + (0 if self.second is None else self.second.shape[2])


@dataclass(frozen=True)
class Norm:
    """The RMSNorm: eps, None for no norm at all; across: one over all heads of a token, else one a head."""

    eps: float | None
    across: bool = False


class Tile(NamedTuple):
    """Launch of the quantising kernel: rows of a program, heads that it walks with the same angles, warps, stages."""

    rows: int
    heads: int
    num_warps: int
    num_stages: int


@triton.jit
def _columns(HALF: tl.constexpr, R: tl.constexpr):
    """Channels of the first and the second of each pair of halves; those that RoPE leaves alone as they come."""
    j = tl.arange(0, HALF)
    return tl.where(j < R // 2, j, j + R // 2), tl.where(j < R // 2, j + R // 2, j + HALF)


@triton.jit
def _tile(X, rows, keep, s_l, D: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr, HALVES: tl.constexpr):
    """[ROWS, HALF] of the first and of the second channels of the pairs, in their own dtype; 0 where not kept."""
    start = X + rows[:, None].to(tl.int64) * s_l
    if HALVES:
        first, second = _columns(HALF, R)
        a = tl.load(start + first[None, :], mask=keep[:, None] & (first < D)[None, :], other=0)
        b = tl.load(start + second[None, :], mask=keep[:, None] & (second < D)[None, :], other=0)
    else:
        c = tl.arange(0, 2 * HALF)
        x = tl.load(start + c[None, :], mask=keep[:, None] & (c < D)[None, :], other=0)
        a, b = x.reshape([x.shape[0], HALF, 2]).split()
    return a, b


@triton.jit
def _weights(W, h, D: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr, HALVES: tl.constexpr, ACROSS: tl.constexpr):
    if ACROSS:
        W += h * D
    if HALVES:
        first, second = _columns(HALF, R)
        a = tl.load(W + first, mask=first < D, other=0)
        b = tl.load(W + second, mask=second < D, other=0)
    else:
        c = tl.arange(0, 2 * HALF)
        a, b = tl.load(W + c, mask=c < D, other=0).reshape([HALF, 2]).split()
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _angles(COS, SIN, rows, keep, s_l, s_j, HALF: tl.constexpr, R: tl.constexpr):
    """[ROWS, HALF] cosines and sines; 1 and 0 for channels that RoPE leaves alone."""
    j = tl.arange(0, HALF)
    at = rows[:, None].to(tl.int64) * s_l + (j * s_j)[None, :]
    inside = keep[:, None] & (j < R // 2)[None, :]
    cos = tl.load(COS + at, mask=inside, other=1.0).to(tl.float32)
    return cos, tl.load(SIN + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _normed_and_rotated(
    X, X2, W, W2, RSTD, rows, keep, h, split, eps, cos, sin, s_h, s_l, s_h2, s_l2,
    D: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr, HALVES: tl.constexpr, NORM: tl.constexpr,
    ACROSS: tl.constexpr, HAS_WEIGHT: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Head h of some rows: pairs [ROWS, HALF] after weight and RoPE but before 1 / rms; sum of squares; 1 / rms.

    1 / rms is that of the head alone where NORM is across heads and RSTD does not hold the whole one.
    """
    X += h * s_h
    if TWO:
        X2 += h * s_h2
        a, b = _tile(X, rows, keep & (rows < split), s_l, D, HALF, R, HALVES)
        a2, b2 = _tile(X2, rows - split, keep & (rows >= split), s_l2, D, HALF, R, HALVES)
        a = a.to(tl.float32) + a2.to(tl.float32)
        b = b.to(tl.float32) + b2.to(tl.float32)
    else:
        a, b = _tile(X, rows, keep, s_l, D, HALF, R, HALVES)
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    if NORM:
        squares = tl.sum(a * a + b * b, 1)
        if ACROSS and RSTD is not None:
            rstd = tl.load(RSTD + rows, mask=keep, other=0.0)
        elif ACROSS:
            # Goes out again with the whole one: a head that is zero must not make it infinite where eps is 0.
            rstd = tl.math.rsqrt(tl.maximum(squares * (1.0 / D) + eps, 1e-30))
        else:
            rstd = tl.math.rsqrt(squares * (1.0 / D) + eps)
    else:
        squares = tl.sum(a * 0.0 + b * 0.0, 1)
        rstd = tl.full([a.shape[0]], 1.0, tl.float32)
    if HAS_WEIGHT:
        wa, wb = _weights(W, h, D, HALF, R, HALVES, ACROSS)
        if TWO:
            wa2, wb2 = _weights(W2, h, D, HALF, R, HALVES, ACROSS)
            front = (rows < split)[:, None]
            a *= tl.where(front, wa[None, :], wa2[None, :])
            b *= tl.where(front, wb[None, :], wb2[None, :])
        else:
            a *= wa[None, :]
            b *= wb[None, :]
    if R > 0:
        turned = a * cos - b * sin
        b = a * sin + b * cos
        a = turned
    return a, b, squares, rstd


@triton.jit
def _round_scaled(x, inverse):
    """quantize_kernels._round(x * inverse) in one instruction, which the compiler does not always find by itself."""
    return tl.fma(x, inverse, 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _store_queries(
    x, bad, Y, SCALE, head, rows, keep, L, factor, DP: tl.constexpr,
):  # fmt: skip
    """Round rows [ROWS, DP] with a scale each; `factor` [ROWS] or a scalar holds the softmax scale and its sign."""
    peak = tl.max(tl.abs(x), 1) + bad
    stored = head * L + rows
    tl.store(SCALE + stored, peak / 127.0 * tl.abs(factor), mask=keep)
    sign = tl.where(factor < 0, -1.0, 1.0)  # so that scores times their scale keep the order of the int8 scores
    rounded = _round_scaled(x, (_inverse(peak) * sign)[:, None])
    tl.store(Y + stored[:, None] * DP + tl.arange(0, DP)[None, :], rounded, mask=keep[:, None])


@triton.jit
def _store_keys(
    x, bad, Y, SCALE, NORMS, head, block, blocks, ROWS: tl.constexpr, DP: tl.constexpr, SCALES: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Round a block of keys [ROWS, DP] with SCALES (1, 4 or ROWS) scales; rows that don't count are 0."""
    tile = head * blocks + block
    rows = tl.arange(0, ROWS)
    peak = tl.max(tl.abs(x), 1) + bad
    if SCALES == ROWS:
        tl.store(SCALE + tile * ROWS + rows, peak / 127.0)
    elif SCALES == 4:
        bad4 = tl.sum(tl.sum((peak * 0.0).reshape([ROWS // 8, 4, 2]), 2), 0)
        peak4 = tl.max(tl.max(peak.reshape([ROWS // 8, 4, 2]), 2), 0) + bad4
        tl.store(SCALE + tile * 4 + tl.arange(0, 4), peak4 / 127.0)
        peak = tl.broadcast_to(peak4[None, :, None], [ROWS // 8, 4, 2]).reshape([ROWS])
    else:
        most = tl.max(peak, 0) + tl.sum(peak * 0.0, 0)
        tl.store(SCALE + tile, most / 127.0)
        peak = tl.broadcast_to(most[None], [ROWS])
    if HAS_NORM:
        tl.store(NORMS + tile, tl.sqrt(tl.max(tl.sum(x * x, 1), 0)))
    at = (tile * ROWS + rows)[:, None] * DP + tl.arange(0, DP)[None, :]
    tl.store(Y + at, _round_scaled(x, _inverse(peak)[:, None]))


@triton.jit(do_not_specialize=["N", "NP", "split", "heads", "bias_rows"])
def _rope_key_shift(
    K, K2, W, W2, COS, SIN, RSTD, BIAS, SHIFT, ROTATION, eps, N, NP, split, heads, bias_rows,
    s_b, s_h, s_l, s_b2, s_h2, s_l2, s_cb, s_ch, s_cl, s_cj, s_bias_b, s_bias_h,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr, HALVES: tl.constexpr,
    NORM: tl.constexpr, ACROSS: tl.constexpr, HAS_WEIGHT: tl.constexpr, TWO: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """SHIFT[B, Hkv, 2, DP / 2] = mean of the firsts and of the seconds of the pairs over a sample of the kept keys.

    ROTATION[B, B] is written for _rms_rope_quantize.
    """
    head = tl.program_id(0).to(tl.int64)
    b = head // heads
    h = head % heads
    HALF: tl.constexpr = DP // 2
    if head == 0:
        i = tl.arange(0, B)
        tl.store(ROTATION + i[:, None] * B + i[None, :], _hadamard(B).to(ROTATION.dtype.element_ty))
    K += b * s_b
    K2 += b * s_b2
    COS += b * s_cb + h * s_ch
    SIN += b * s_cb + h * s_ch
    BIAS += (b * s_bias_b + h * bias_rows * s_bias_h) * NP
    if RSTD is not None:
        RSTD += b * N
    i = tl.arange(0, ROWS)
    rows = tl.where(N <= ROWS, i, (i.to(tl.int64) * N // ROWS).to(tl.int32))
    count = tl.zeros([], tl.float32)
    first = tl.zeros([HALF], tl.float32)
    second = tl.zeros([HALF], tl.float32)
    start = 0
    # Where the sample holds no key that is kept, the first block that does.
    while (count == 0) & (start < N):
        keep = _kept(BIAS, bias_rows, s_bias_h * NP, rows, N, HAS_BIAS)
        if R > 0:
            cos, sin = _angles(COS, SIN, rows, keep, s_cl, s_cj, HALF, R)
        else:
            cos, sin = 1.0, 0.0
        x, y, _, rstd = _normed_and_rotated(
            K, K2, W, W2, RSTD, rows, keep, h, split, eps, cos, sin, s_h, s_l, s_h2, s_l2,
            D, HALF, R, HALVES, NORM, ACROSS, HAS_WEIGHT, TWO,
        )  # fmt: skip
        rstd = tl.where(keep, rstd, 0.0)[:, None]
        count = tl.sum(keep.to(tl.float32), 0)
        first = tl.sum(x * rstd, 0)
        second = tl.sum(y * rstd, 0)
        rows = start + i
        start += ROWS
    scale = 1.0 / tl.maximum(count, 1.0)
    j = tl.arange(0, HALF)
    tl.store(SHIFT + head * DP + j, first * scale)
    tl.store(SHIFT + head * DP + HALF + j, second * scale)


@triton.jit(do_not_specialize=["L", "split", "heads", "bias_rows", "group"])
def _rms_rope_quantize(
    X, X2, W, W2, COS, SIN, RSTD, SHIFT, ROTATION, BIAS, Y, SCALE, NORMS, LSE_TERM, SQUARES,
    eps, factor, lse_factor, L, split, heads, group, bias_rows,
    s_b, s_h, s_l, s_b2, s_h2, s_l2, s_cb, s_ch, s_cl, s_cj, s_bias_b, s_bias_h,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr,
    R: tl.constexpr, HALVES: tl.constexpr, NORM: tl.constexpr, ACROSS: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    TWO: tl.constexpr, PER_HEAD: tl.constexpr, IS_KEY: tl.constexpr, HAS_BIAS: tl.constexpr, SCALES: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_LSE: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program ROWS rows of HEADS heads, which share cosines and the rotation.

    Programs of the same rows follow each other: their heads lie side by side in memory.
    """
    # From the last to the first: a kernel that read the rows before has left the last ones in the cache.
    blocks = tl.num_programs(1)
    block = blocks - 1 - tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    HALF: tl.constexpr = DP // 2
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < L
    X += b * s_b
    X2 += b * s_b2
    COS += b * s_cb
    SIN += b * s_cb
    if RSTD is not None:
        RSTD += b * L
    i = tl.arange(0, B)
    rotation = tl.load(ROTATION + i[:, None] * B + i[None, :])
    dtype: tl.constexpr = tl.float32 if UPCAST else X.dtype.element_ty
    if R > 0 and not PER_HEAD:
        cos, sin = _angles(COS, SIN, rows, inside, s_cl, s_cj, HALF, R)
    else:
        cos, sin = 1.0, 0.0
    j = tl.arange(0, HALF)
    start = tl.program_id(0) * HEADS
    for h in tl.range(start, tl.minimum(start + HEADS, heads), num_stages=STAGES):
        head = b * heads + h
        keep = inside
        if HAS_BIAS:
            keep = _kept(BIAS + (b * s_bias_b + h * bias_rows * s_bias_h) * (blocks * ROWS), bias_rows,
                         s_bias_h * (blocks * ROWS), rows, L, HAS_BIAS)  # fmt: skip
        if R > 0 and PER_HEAD:
            c, s = _angles(COS + h * s_ch, SIN + h * s_ch, rows, inside, s_cl, s_cj, HALF, R)
        else:
            c, s = cos, sin
        x, y, squares, rstd = _normed_and_rotated(
            X, X2, W, W2, RSTD, rows, keep, head - b * heads, split, eps, c, s, s_h, s_l, s_h2, s_l2,
            D, HALF, R, HALVES, NORM, ACROSS, HAS_WEIGHT, TWO,
        )  # fmt: skip
        # NaN where a value is NaN or infinite: such a row or block must answer NaN, as SDPA does.
        bad = squares * 0.0
        if IS_KEY:
            x = tl.fma(x, rstd[:, None], -tl.load(SHIFT + head * DP + j)[None, :])
            y = tl.fma(y, rstd[:, None], -tl.load(SHIFT + head * DP + HALF + j)[None, :])
            if HAS_BIAS or not EVEN:
                x = tl.where(keep[:, None], x, 0.0)
                y = tl.where(keep[:, None], y, 0.0)
        else:
            x *= rstd[:, None]
            y *= rstd[:, None]
        if HAS_LSE:
            at = SHIFT + (b * (heads // group) + h // group) * DP + j
            term = tl.sum(x * tl.load(at)[None, :] + y * tl.load(at + HALF)[None, :], 1) * lse_factor
        z = tl.join(x, y).reshape([ROWS, DP]).to(X.dtype.element_ty)
        z = _rotate(z.to(dtype), rotation.to(dtype), ROWS, DP, B)
        if IS_KEY:
            _store_keys(z, bad, Y, SCALE, NORMS, head, block, blocks, ROWS, DP, SCALES, HAS_NORM)
        else:
            # Without the other heads 1 / rms isn't known yet: _finish_scales puts it in.
            whole = 1.0 / rstd if ACROSS and RSTD is None else tl.full([ROWS], 1.0, tl.float32)
            _store_queries(z, bad, Y, SCALE, head, rows, inside, L, factor * whole, DP)
            if ACROSS and RSTD is None:
                tl.store(SQUARES + head * L + rows, squares, mask=inside)
            if HAS_LSE:
                tl.store(LSE_TERM + head * L + rows, term * whole, mask=inside)


@triton.jit(do_not_specialize=["L", "split", "heads"])
def _row_rms(
    X, X2, RSTD, eps, L, split, heads, s_b, s_h, s_l, s_b2, s_h2, s_l2,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """RSTD[B, L] = 1 / rms over all heads of a token."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1).to(tl.int64)
    HALF: tl.constexpr = DP // 2
    inside = rows < L
    squares = tl.zeros([ROWS], tl.float32)
    for h in range(heads):
        x, y = _tile(X + b * s_b + h * s_h, rows, inside & (rows < split), s_l, D, HALF, 0, False)
        x = x.to(tl.float32)
        y = y.to(tl.float32)
        squares += tl.sum(x * x + y * y, 1)
        if TWO:
            x2, y2 = _tile(X2 + b * s_b2 + h * s_h2, rows - split, inside & (rows >= split), s_l2, D, HALF, 0, False)
            x2 = x2.to(tl.float32)
            y2 = y2.to(tl.float32)
            squares += tl.sum(x2 * x2 + y2 * y2, 1)
    tl.store(RSTD + b * L + rows, tl.math.rsqrt(squares / (heads * D) + eps), mask=inside)


@triton.jit(do_not_specialize=["L", "heads"])
def _finish_scales(SQUARES, SCALE, LSE_TERM, eps, L, heads, D: tl.constexpr, ROWS: tl.constexpr, HAS_LSE: tl.constexpr):
    """Multiply the query scales by 1 / rms over all heads, from the sums of squares of each."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1).to(tl.int64) * heads * L + rows
    inside = rows < L
    squares = tl.zeros([ROWS], tl.float32)
    for h in range(heads):
        squares += tl.load(SQUARES + first + h * L, mask=inside, other=0.0)
    rstd = tl.math.rsqrt(squares / (heads * D) + eps)
    for h in range(heads):
        at = first + h * L
        tl.store(SCALE + at, tl.load(SCALE + at, mask=inside) * rstd, mask=inside)
        if HAS_LSE:
            tl.store(LSE_TERM + at, tl.load(LSE_TERM + at, mask=inside) * rstd, mask=inside)


# By whether it is the keys' launch: of some twenty variants the fastest on an H200. Its three stages of keys, 8 to 14 %
# faster there, are more shared memory than most other chips have.
_TILES = {False: Tile(64, 4, 4, 1), True: Tile(128, 4, 8, 1)}
_HOPPER_STAGES = 3


def rms_rope_quantize_key(
    key: Rows,
    attn_mask: torch.Tensor | None,
    config: Config,
    norm: Norm,
    *,
    rotary_dim: int,
    interleaved: bool,
    group: int,
    per_token: bool = False,
) -> tuple[QuantizedKey, torch.Tensor]:
    """Norm, rotate and quantise the keys for `config`; returns (what quantize_key() does, the rotation matrix).

    Its shift is float32 [B, Hkv, 2, DP / 2]: what was taken off the first and the second channels of the pairs, before
    the Hadamard rotation.  attn_mask, group, per_token: as for quantize().  rotary_dim: 0 for no RoPE.
    """
    x = key.x
    batch, heads, _, head_dim = x.shape
    length, padded = key.length, padded_head_dim(head_dim)
    blocks = triton.cdiv(length, config.block_n)
    empty = functools.partial(torch.empty, device=x.device)
    bias, anchor, live, bias_rows = None, None, None, 1
    if attn_mask is not None:
        bias, anchor, live = prepare(attn_mask, length, config)
        bias_rows = group if bias.shape[1] > 1 else 1
    shift = empty((batch, heads, 2, padded // 2), dtype=torch.float32)
    rotation = empty((min(padded, 128),) * 2, dtype=x.dtype)
    common = _common(key, norm, rotary_dim, interleaved)
    mask = bias if bias is not None else shift
    rstd = _row_rstd(key, norm.eps) if norm.across and norm.eps is not None else None
    arguments = _arguments(key, norm, rstd) | {"BIAS": mask, "SHIFT": shift, "ROTATION": rotation}
    arguments["bias_rows"] = bias_rows
    arguments |= dict(zip(("s_bias_b", "s_bias_h"), row_strides(bias) if bias is not None else (0, 0), strict=True))
    _rope_key_shift[(batch * heads,)](
        **arguments, N=length, NP=blocks * config.block_n, ROWS=sample_rows(padded),
        K=x, K2=_second(key), HAS_BIAS=bias is not None, num_warps=8, **common,
    )  # fmt: skip
    scales = config.block_n if per_token else 4 if config.gluon else 1
    tail = (blocks * config.block_n,) if per_token else (blocks, 4) if config.gluon else (blocks,)
    key8 = empty((batch, heads, blocks * config.block_n, padded), dtype=torch.int8)
    key_scale = empty((batch, heads, *tail), dtype=torch.float32)
    key_norm = empty((batch, heads, blocks), dtype=torch.float32) if config.gluon else None
    tile = tile_of(True, padded, config)
    _rms_rope_quantize[(triton.cdiv(heads, tile.heads), blocks, batch)](
        **arguments, X=x, X2=_second(key), Y=key8, SCALE=key_scale, NORMS=key_norm if key_norm is not None else shift,
        LSE_TERM=shift, SQUARES=shift, factor=1.0, lse_factor=1.0, L=length, group=1, IS_KEY=True,
        HAS_BIAS=bias is not None, SCALES=scales, HAS_NORM=key_norm is not None, HAS_LSE=False,
        EVEN=length % tile.rows == 0, **_launch(key, tile), **common,
    )  # fmt: skip
    return QuantizedKey(key8, key_scale, bias, anchor, key_norm, live, shift, length), rotation


def rms_rope_quantize_query(
    query: Rows,
    scale: float,
    config: Config,
    norm: Norm,
    rotation: torch.Tensor,
    *,
    rotary_dim: int,
    interleaved: bool,
    shift: torch.Tensor | None = None,
) -> QuantizedQuery:
    """Norm, rotate and quantise the queries, with the rotation that the keys came with; shift: theirs, for the LSE."""
    x = query.x
    batch, heads, _, head_dim = x.shape
    length, padded = query.length, padded_head_dim(head_dim)
    empty = functools.partial(torch.empty, device=x.device, dtype=torch.float32)
    query8 = empty((batch, heads, length, padded), dtype=torch.int8)
    query_scale = empty((batch, heads, length))
    lse_term = empty((batch, heads, length)) if shift is not None else None
    squares = empty((batch, heads, length)) if norm.across else query_scale
    unused = query_scale
    tile = tile_of(False, padded, config)
    common = _common(query, norm, rotary_dim, interleaved)
    rotated = min(padded, 128)
    _rms_rope_quantize[(triton.cdiv(heads, tile.heads), triton.cdiv(length, tile.rows), batch)](
        **_arguments(query, norm, None), X=x, X2=_second(query),
        SHIFT=shift if shift is not None else unused, ROTATION=rotation, BIAS=unused, Y=query8, SCALE=query_scale,
        NORMS=unused, LSE_TERM=lse_term if lse_term is not None else unused, SQUARES=squares,
        factor=scale * LOG2E / rotated, lse_factor=scale, L=length,
        group=heads // shift.shape[1] if shift is not None else 1, bias_rows=1, s_bias_b=0, s_bias_h=0, IS_KEY=False,
        HAS_BIAS=False, SCALES=1, HAS_NORM=False, HAS_LSE=shift is not None, EVEN=length % tile.rows == 0,
        **_launch(query, tile), **common,
    )  # fmt: skip
    if norm.across and norm.eps is not None:
        _finish_scales[(triton.cdiv(length, 128), batch)](
            squares, query_scale, lse_term if lse_term is not None else unused, norm.eps, length, heads,
            D=head_dim, ROWS=128, HAS_LSE=lse_term is not None, num_warps=4,
        )  # fmt: skip
    return QuantizedQuery(query8, query_scale, lse_term)


def tile_of(is_key: bool, padded: int, config: Config) -> Tile:
    """The launch for keys or queries of this padded head_dim; a thread holds at most 64 channels."""
    tile = _TILES[is_key]
    rows = config.block_n if is_key else tile.rows if padded <= 128 else tile.rows // 2
    stages = _HOPPER_STAGES if is_key and config.gluon and padded == 128 else tile.num_stages
    return tile._replace(rows=rows, num_warps=max(1, min(8, rows * padded // 2048)), num_stages=stages)


def sample_rows(padded: int) -> int:
    """Keys that the shift is the mean of."""
    return _SAMPLE if padded <= 128 else _SAMPLE // 2


def _second(rows: Rows) -> torch.Tensor:
    return rows.x if rows.second is None else rows.second


def _row_rstd(rows: Rows, eps: float) -> torch.Tensor:
    """float32 [B, L]: 1 / rms over all heads of a token, which costs a read of its own."""
    x, second = rows.x, _second(rows)
    rstd = torch.empty((x.shape[0], rows.length), dtype=torch.float32, device=x.device)
    _row_rms[(triton.cdiv(rows.length, 32), x.shape[0])](
        x, second, rstd, eps, rows.length, x.shape[2], x.shape[1], *x.stride()[:3], *second.stride()[:3],
        D=x.shape[3], DP=padded_head_dim(x.shape[3]), ROWS=32, TWO=rows.second is not None, num_warps=4,
    )  # fmt: skip
    return rstd


def _arguments(rows: Rows, norm: Norm, rstd: torch.Tensor | None) -> dict[str, object]:
    """Pointers, strides and sizes that both kernels name alike."""
    x, second, cos, sin = rows.x, _second(rows), rows.cos, rows.sin
    table = (0, 0, 0, 0) if cos is None else [0 if cos.shape[axis] == 1 else cos.stride(axis) for axis in range(4)]
    names = ("s_b", "s_h", "s_l", "s_b2", "s_h2", "s_l2", "s_cb", "s_ch", "s_cl", "s_cj")
    return dict(zip(names, (*x.stride()[:3], *second.stride()[:3], *table), strict=True)) | {
        "W": rows.weight if rows.weight is not None else x,
        "W2": rows.second_weight if rows.second_weight is not None else x,
        "COS": cos if cos is not None else x,
        "SIN": sin if sin is not None else x,
        "RSTD": rstd,
        "eps": norm.eps if norm.eps is not None else 0.0,
        "split": x.shape[2],
        "heads": x.shape[1],
    }


def _common(rows: Rows, norm: Norm, rotary_dim: int, interleaved: bool) -> dict[str, object]:
    """Compile-time facts that both kernels name alike."""
    padded = padded_head_dim(rows.x.shape[3])
    return {
        "D": rows.x.shape[3],
        "DP": padded,
        "B": min(padded, 128),
        "R": rotary_dim if rows.cos is not None else 0,
        "HALVES": rows.cos is not None and not interleaved,
        "NORM": norm.eps is not None,
        "ACROSS": norm.across and norm.eps is not None,
        "HAS_WEIGHT": norm.eps is not None and rows.weight is not None,
        "TWO": rows.second is not None,
    }


def _launch(rows: Rows, tile: Tile) -> dict[str, object]:
    per_head = rows.cos is not None and rows.cos.shape[1] > 1
    return {
        "ROWS": tile.rows, "HEADS": tile.heads, "STAGES": tile.num_stages, "PER_HEAD": per_head,
        "UPCAST": interpreting(), "num_warps": tile.num_warps,
    }  # fmt: skip
