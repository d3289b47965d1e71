"""Portable sparse int8 attention (plain Triton): each tile of 64 queries walks its own list of tiles of 64 keys.

FlashAttention's online softmax (Dao et al., 2022) over the entries of a list (see lists.py). One kernel serves tile
masks, banded windows and dense masks by tile: an entry is a key tile with nothing, a number, a row of a bias table or
a tile of the mask added to its scores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..int8_attention.bias import row_strides
from ..int8_attention.configs import Config, padded_head_dim
from ..int8_attention.launch import launch
from ..int8_attention.limits import interpreting
from ..int8_attention.quantize import Quantized
from .list_kernels import _in_log2
from .lists import TILE, Lists


@triton.jit
def _mask_tile(MASK, rows, n, end, N, s_mq, s_mk, IS_BOOL: tl.constexpr):
    """The mask of query `rows` and keys `n` in log2 units; -inf past the last key."""
    inside = (rows < end)[:, None] & (n < N)[None, :]
    at = MASK + rows[:, None].to(tl.int64) * s_mq + n[None, :].to(tl.int64) * s_mk
    m = tl.load(at, mask=inside, other=0)
    if IS_BOOL:
        bias = tl.where(m != 0, 0.0, float("-inf"))
    else:
        bias = _in_log2(m.to(tl.float32))
    return tl.where((n < N)[None, :], bias, float("-inf"))


@triton.jit
def _step(
    acc, total, top, q, q_scale, rows, tile, offset, K8, K_SCALE, BIAS, MASK, V, end, N, s_vn, s_mq, s_mk,
    D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    IS_BOOL: tl.constexpr, TAIL: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One key tile of the online softmax, in log2 units; `top` is the row maximum, `total` the row sum."""
    d = tl.arange(0, DP)
    n = tile * TILE + tl.arange(0, TILE)
    k = tl.load(K8 + n[None, :].to(tl.int64) * DP + d[:, None])
    s = tl.dot(q, k).to(tl.float32) * (q_scale * tl.load(K_SCALE + tile))[:, None]
    if HAS_BIAS:
        s += (tl.load(BIAS + tl.arange(0, TILE)) + offset)[None, :]
    if HAS_MASK:
        if offset != offset:
            s += _mask_tile(MASK, rows, n, end, N, s_mq, s_mk, IS_BOOL)
        else:
            s += offset
    new_top = tl.maximum(top, tl.max(s, 1))
    p = tl.math.exp2(s - new_top[:, None])
    decay = tl.math.exp2(top - new_top)
    total = total * decay + tl.sum(p, 1)
    inside = (d < D)[None, :]
    if TAIL:
        inside = inside & (n < N)[:, None]
    v = tl.load(V + n[:, None].to(tl.int64) * s_vn + d[None, :], mask=inside, other=0)
    p = p.to(v.dtype)
    if UPCAST:
        # Triton's interpreter computes bf16 products wrongly.
        acc = tl.dot(p.to(tl.float32), v.to(tl.float32), acc * decay[:, None])
    else:
        acc = tl.dot(p, v, acc * decay[:, None])
    return acc, total, new_top


# Lengths and head counts are not specialised: no compilation for a length of 1 or of 16 * n.
@triton.jit(do_not_specialize=["M", "N", "NP", "heads", "group", "width", "step_b", "step_h", "table_rows", "anchors"])
def _attention(
    Q8, Q_SCALE, K8, K_SCALE, BIAS, ANCHOR, LSE_TERM, V, MASK, OUT, LSE, TILES, COUNTS, OFFSETS, BIAS_ROWS, BLOCKS,
    M, N, NP, heads, group, width, step_b, step_h, table_rows, anchors,
    s_vb, s_vh, s_vn, s_ob, s_oh, s_om, s_lb, s_lh, s_lm, s_bias_b, s_bias_h, s_mb, s_mh, s_mq, s_mk,
    D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TABLE: tl.constexpr,
    HAS_MASK: tl.constexpr, IS_BOOL: tl.constexpr, HAS_LSE: tl.constexpr, TAIL: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program a tile of query rows of one head.  Q8 [B*H, M, DP], K8 [B*Hkv, NP, DP], V [B, Hkv, N, D]."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    b = head // heads
    h = head % heads
    kv_head = b * (heads // group) + h // group
    start = block * TILE
    end = M
    list_row = block.to(tl.int64)
    if HAS_TABLE:
        start = tl.load(BLOCKS + block * 3)
        end = tl.load(BLOCKS + block * 3 + 1)
        list_row = tl.load(BLOCKS + block * 3 + 2).to(tl.int64)
    list_row += b.to(tl.int64) * step_b + h * step_h
    K8 += kv_head.to(tl.int64) * NP * DP
    K_SCALE += kv_head * (NP // TILE)
    V += b.to(tl.int64) * s_vb + (h // group).to(tl.int64) * s_vh
    rows = start + tl.arange(0, TILE)
    d = tl.arange(0, DP)
    inside = rows < end
    first = head.to(tl.int64) * M
    q = tl.load(Q8 + (first + rows)[:, None] * DP + d[None, :], mask=inside[:, None], other=0)
    q_scale = tl.load(Q_SCALE + first + rows, mask=inside, other=0.0)
    if HAS_BIAS:
        bias_row = b.to(tl.int64) * s_bias_b + h * s_bias_h
        BIAS += bias_row * table_rows * TILE
        ANCHOR += (bias_row * anchors + list_row) * 2
        q_scale *= tl.load(ANCHOR + 1)
    MASK += b.to(tl.int64) * s_mb + h.to(tl.int64) * s_mh
    TILES += list_row * width
    OFFSETS += list_row * width
    BIAS_ROWS += list_row * width

    acc = tl.zeros([TILE, DP], tl.float32)
    total = tl.zeros([TILE], tl.float32)
    top = tl.full([TILE], -3.4028234e38, tl.float32)  # finite, so that empty rows are no NaN
    for j in tl.range(0, tl.load(COUNTS + list_row)):
        tile = tl.load(TILES + j)
        bias_tile = tile
        offset = 0.0
        if HAS_TABLE:
            bias_tile = tl.load(BIAS_ROWS + j)
        elif HAS_BIAS or HAS_MASK:
            offset = tl.load(OFFSETS + j)
        acc, total, top = _step(
            acc, total, top, q, q_scale, rows, tile, offset, K8, K_SCALE, BIAS + bias_tile * TILE, MASK, V, end, N,
            s_vn, s_mq, s_mk, D, DP, TILE, HAS_BIAS, HAS_MASK, IS_BOOL, TAIL, UPCAST,
        )  # fmt: skip

    empty = total == 0  # not "total > 0": NaN must stay NaN
    acc = acc * tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))[:, None]
    o_ptr = OUT + b.to(tl.int64) * s_ob + h.to(tl.int64) * s_oh + rows[:, None].to(tl.int64) * s_om + d[None, :]
    tl.store(o_ptr, acc.to(OUT.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])
    if HAS_LSE:
        lse = (top + tl.math.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453
        term = tl.load(LSE_TERM + first + rows, mask=inside, other=0.0)
        if HAS_BIAS:
            lse += tl.load(ANCHOR)
            term *= tl.load(ANCHOR + 1)
        l_ptr = LSE + b.to(tl.int64) * s_lb + h.to(tl.int64) * s_lh + rows.to(tl.int64) * s_lm
        tl.store(l_ptr, tl.where(empty, float("-inf"), lse + term), mask=inside)


def attention(
    quantized: Quantized,
    value: torch.Tensor,
    lists: Lists,
    config: Config,
    *,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Run the kernel on `quantized` and value [B, Hkv, Lk, D] into `out` [B, H, Lq, D] and `lse` [B, H, Lq] (float32).

    bias: float32 [Bm, Hm, R, 64], a row for each key tile, or for lists with bias_rows any number of rows, relative to
    lists.anchor; or None.
    mask: the dense mask [1 or B, 1 or H, Lq, Lk] that lists with offsets were made of.  No checks here.
    """
    if config.gluon:
        from .hopper import attention as hopper_attention

        return hopper_attention(quantized, value, lists, config, mask=mask, bias=bias, out=out, lse=lse)
    batch, heads, q_len, head_dim = out.shape
    kv_heads, kv_len = value.shape[1:3]
    unused = quantized.query_scale
    blocks = triton.cdiv(q_len, TILE) if lists.blocks is None else lists.blocks.shape[0]
    launch(
        _attention, (blocks, batch * heads),
        quantized.query, quantized.query_scale, quantized.key, quantized.key_scale,
        *(unused if t is None else t for t in (bias, lists.anchor, quantized.lse_term)), value,
        *(unused if t is None else t for t in (readable(mask), out, lse)), lists.tiles, lists.counts,
        *(unused if t is None else t for t in (lists.offsets, lists.bias_rows, lists.blocks)),
        q_len, kv_len, quantized.key.shape[2], heads, heads // kv_heads, lists.tiles.shape[1], lists.step_b,
        lists.step_h, 0 if bias is None else bias.shape[2], lists.anchors,
        *value.stride()[:3], *out.stride()[:3], *(lse.stride() if lse is not None else (0, 0, 0)),
        *((0, 0) if bias is None else row_strides(bias)), *mask_strides(mask),
        D=head_dim, DP=padded_head_dim(head_dim), TILE=TILE, HAS_BIAS=bias is not None,
        HAS_TABLE=lists.bias_rows is not None, HAS_MASK=mask is not None,
        IS_BOOL=mask is not None and mask.dtype == torch.bool, HAS_LSE=lse is not None, TAIL=kv_len % TILE != 0,
        UPCAST=interpreting(), num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip


def readable(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask as Triton reads it: bool as bytes."""
    return mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask


def mask_strides(mask: torch.Tensor | None) -> tuple[int, int, int, int]:
    """Strides of a mask [1 or B, 1 or H, Q, K], 0 along an axis of size 1."""
    if mask is None:
        return 0, 0, 0, 0
    b, h, q, k = (s if n > 1 else 0 for s, n in zip(mask.stride(), mask.shape, strict=True))
    return b, h, q, k


def own_rows(mask: torch.Tensor) -> torch.Tensor:
    """The batches and heads of a mask that lie in memory of their own, strided so that TMA can describe it."""
    shape = [n if stride else 1 for n, stride in zip(mask.shape[:2], mask.stride(), strict=False)]
    row = mask.stride(2) if mask.shape[2] > 1 else -(-mask.shape[3] // 8) * 8
    # Along an axis of size 1 any stride does that is whole 16 bytes and not 0.
    strides = [stride if n > 1 else row for n, stride in zip(shape, mask.stride(), strict=False)]
    return mask.as_strided((*shape, *mask.shape[2:]), (*strides, row, 1))
