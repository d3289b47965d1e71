"""Kernels of attention over sharded sequences: values for the wire, the LSE term of one shard, merging in place.

Values travel as 8- or 9-bit integers with a scale for each key. The ninth bit is what keeps their rounding under that
of the int8 scores: on N(0, 1) 9 bits err by 0.0032, 8 bits by 0.0064, the scores by 0.011.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .configs import padded_head_dim
from .launch import launch
from .quantize_kernels import _hadamard

_ROWS = 32


@triton.jit(do_not_specialize=["L", "heads"])
def _encode(
    V, CODE, LOW, SCALE, L, heads, s_b, s_h, s_l,
    D: tl.constexpr, DP: tl.constexpr, NINTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program ROWS keys of one head: V = (2 * CODE + LOW) * SCALE, or CODE * SCALE without the ninth bit."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, DP)
    inside = (rows < L)[:, None] & (cols < D)[None, :]
    V += (head // heads) * s_b + (head % heads) * s_h
    v = tl.load(V + rows[:, None].to(tl.int64) * s_l + cols[None, :], mask=inside, other=0).to(tl.float32)
    peak = tl.max(tl.abs(v), 1) + tl.sum(v * 0.0, 1)  # NaN where a value is NaN or infinite
    scale = peak / (255.0 if NINTH else 127.0)
    # Rounded up to a bfloat16, so that no value is cut off.
    scale = ((scale.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
    tl.store(SCALE + head * L + rows, scale.to(SCALE.dtype.element_ty), mask=rows < L)
    x = v * tl.where(scale > 0, 1.0 / tl.where(scale > 0, scale, 1.0), 0.0)[:, None]
    code = (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # nearest integer, ties to even
    stored = head * L + rows
    if NINTH:
        tl.store(CODE + stored[:, None] * D + cols[None, :], (code >> 1).to(tl.int8), mask=inside)
        bits = tl.where(inside, code & 1, 0).reshape([ROWS, DP // 8, 8])
        place = tl.arange(0, 8)[None, None, :]
        low = tl.sum(bits << place, 2)
        byte = tl.arange(0, DP // 8)
        width: tl.constexpr = (D + 7) // 8
        keep = (rows < L)[:, None] & (byte < width)[None, :]
        tl.store(LOW + stored[:, None] * width + byte[None, :], low.to(tl.uint8), mask=keep)
    else:
        tl.store(CODE + stored[:, None] * D + cols[None, :], code.to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["L"])
def _decode(
    CODE, LOW, SCALE, V, L,
    D: tl.constexpr, DP: tl.constexpr, NINTH: tl.constexpr, ROWS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """The inverse of _encode into a contiguous V of a dtype whose largest finite number is LARGEST."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, DP)
    inside = (rows < L)[:, None] & (cols < D)[None, :]
    stored = head * L + rows
    place = stored[:, None] * D + cols[None, :]
    code = tl.load(CODE + place, mask=inside, other=0).to(tl.int32)
    if NINTH:
        width: tl.constexpr = (D + 7) // 8
        low = tl.load(LOW + stored[:, None] * width + (cols // 8)[None, :], mask=inside, other=0).to(tl.int32)
        code = 2 * code + (low >> (cols % 8)[None, :] & 1)
    scale = tl.load(SCALE + stored, mask=rows < L, other=0).to(tl.float32)
    v = code.to(tl.float32) * scale[:, None]
    # Half a step above the largest number is not infinity; NaN stays, and is all that an infinity may have become.
    v = tl.where(v > LARGEST, LARGEST, tl.where(v < -LARGEST, -LARGEST, v))
    tl.store(V + place, v.to(V.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["L", "heads", "group"])
def _lse_term(
    Q, SHIFT, TERM, factor, L, heads, group, s_b, s_h, s_l,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """TERM[B, H, L] = factor * query . mean key, where SHIFT [B, Hkv, DP] is the rotated mean of the shard's keys."""
    head = tl.program_id(1).to(tl.int64)
    b = head // heads
    cols = tl.arange(0, DP)
    shift = tl.load(SHIFT + (b * (heads // group) + head % heads // group) * DP + cols)
    # The rotation's rows have norm sqrt(B): its transpose over B undoes it.
    parts = shift.reshape([DP // B, B])
    mean = (tl.sum(parts[:, None, :] * _hadamard(B)[None, :, :], 2) / B).reshape([DP])
    Q += b * s_b + (head % heads) * s_h
    for step in range(STEPS):
        rows = (tl.program_id(0) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        inside = (rows < L)[:, None] & (cols < D)[None, :]
        q = tl.load(Q + rows[:, None].to(tl.int64) * s_l + cols[None, :], mask=inside, other=0).to(tl.float32)
        tl.store(TERM + head * L + rows, tl.sum(q * mean[None, :], 1) * factor, mask=rows < L)


@triton.jit(do_not_specialize=["L"])
def _merge(
    A, A_LSE, X, X_LSE, OUT, LSE, L, s_ob, s_oh, s_ol, heads,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """OUT, LSE = the parts (A, A_LSE) and (X, X_LSE) over disjoint keys together; OUT may be A, LSE may be A_LSE."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, DP)
    inside = (rows < L)[:, None] & (cols < D)[None, :]
    stored = head * L + rows
    a_lse = tl.load(A_LSE + stored, mask=rows < L, other=float("-inf"))
    x_lse = tl.load(X_LSE + stored, mask=rows < L, other=float("-inf"))
    top = tl.maximum(a_lse, x_lse)
    top = tl.where(top == float("-inf"), 0.0, top)
    a_weight = tl.exp(a_lse - top)
    x_weight = tl.exp(x_lse - top)
    total = a_weight + x_weight
    empty = total == 0  # not "total > 0": NaN must stay NaN
    inverse = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))
    place = stored[:, None] * D + cols[None, :]
    # An empty part counts for nothing, whatever it holds.
    a = tl.load(A + place, mask=inside & (a_lse != float("-inf"))[:, None], other=0.0)
    x = tl.load(X + place, mask=inside & (x_lse != float("-inf"))[:, None], other=0.0)
    out = a * (a_weight * inverse)[:, None] + x * (x_weight * inverse)[:, None]
    o_ptr = OUT + (head // heads) * s_ob + (head % heads) * s_oh + rows[:, None].to(tl.int64) * s_ol + cols[None, :]
    tl.store(o_ptr, out.to(OUT.dtype.element_ty), mask=inside)
    lse = tl.where(empty, float("-inf"), top + tl.log(tl.where(empty, 1.0, total)))
    tl.store(LSE + stored, lse, mask=rows < L)


def encode_value(value: torch.Tensor, code: torch.Tensor, low: torch.Tensor | None, scale: torch.Tensor) -> None:
    """Write value [B, Hkv, L, D] (contiguous last axis) as integers and a scale for each key.

    code: int8 [B, Hkv, L, D], the upper 8 bits.  low: uint8 [B, Hkv, L, ceil(D / 8)], the ninth, or None for 8 bits.
    scale: bfloat16 [B, Hkv, L]. All three contiguous. A value that is not finite makes its whole key NaN.
    """
    batch, heads, length, head_dim = value.shape
    launch(
        _encode, (triton.cdiv(length, _ROWS), batch * heads),
        value, code, low if low is not None else code, scale, length, heads, *value.stride()[:3],
        D=head_dim, DP=padded_head_dim(head_dim), NINTH=low is not None, ROWS=_ROWS, num_warps=4,
    )  # fmt: skip


def decode_value(code: torch.Tensor, low: torch.Tensor | None, scale: torch.Tensor, value: torch.Tensor) -> None:
    """Undo encode_value() into a contiguous value [B, Hkv, L, D] of any floating dtype."""
    batch, heads, length, head_dim = value.shape
    launch(
        _decode, (triton.cdiv(length, _ROWS), batch * heads),
        code, low if low is not None else code, scale, value, length,
        D=head_dim, DP=padded_head_dim(head_dim), NINTH=low is not None, ROWS=_ROWS,
        LARGEST=torch.finfo(value.dtype).max, num_warps=4,
    )  # fmt: skip


def lse_term(query: torch.Tensor, shift: torch.Tensor, scale: float) -> torch.Tensor:
    """Return what a key shift took off the log-sum-exp, float32 [B, H, Lq]: scale * query . mean key, in float32.

    query [B, H, Lq, D] with a contiguous last axis; shift: of a QuantizedKey, float32 [B, Hkv, DP].
    """
    batch, heads, length, head_dim = query.shape
    padded = padded_head_dim(head_dim)
    term = torch.empty((batch, heads, length), dtype=torch.float32, device=query.device)
    steps = max(1, min(32, length // (4 * _ROWS)))
    launch(
        _lse_term, (triton.cdiv(length, _ROWS * steps), batch * heads),
        query, shift, term, scale, length, heads, heads // shift.shape[1], *query.stride()[:3],
        D=head_dim, DP=padded, B=min(padded, 128), ROWS=_ROWS, STEPS=steps, num_warps=8,
    )  # fmt: skip
    return term


def merge_parts(
    whole: torch.Tensor,
    whole_lse: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Merge two partial attentions over disjoint keys as sdpa_router.merge_attention() does, in one pass.

    whole, part: float32 [B, H, L, D]; their log-sum-exps float32 [B, H, L]; all contiguous. out [B, H, L, D] of any
    dtype, contiguous last axis, and lse float32 [B, H, L] are filled; they may be `whole` and `whole_lse`.
    """
    batch, heads, length, head_dim = whole.shape
    launch(
        _merge, (triton.cdiv(length, _ROWS), batch * heads),
        whole, whole_lse, part, part_lse, out, lse, length, *out.stride()[:3], heads,
        D=head_dim, DP=padded_head_dim(head_dim), ROWS=_ROWS, num_warps=4,
    )  # fmt: skip
