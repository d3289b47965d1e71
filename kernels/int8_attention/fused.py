"""RMSNorm, rotary embedding, Hadamard rotation and int8 rounding of query and key in one pass over the 16-bit values.

RoPE turns pairs of channels, so int8 values can't pass through it; everything round it is linear or a factor per row,
and is done on the float32 values between one read and one int8 write. The kernels of a call overlap where the GPU can
do that (limits.overlaps): keys are loaded while their shift is computed, queries start as keys end.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from .bias import LOG2E, prepare, row_strides
from .configs import Config, padded_head_dim
from .fused_kernels import _rms_rope_quantize
from .fused_norm import _finish_scales, _row_rms
from .fused_shift import _rope_key_shift
from .fused_tiles import Tile, heads_of_program, key_tile, query_tile
from .launch import early, empty, first, launch, replay
from .limits import interpreting
from .quantize import QuantizedKey, QuantizedQuery, processors_of

SAMPLE = 64  # keys whose mean is the shift: what is left of the mean is an eighth of the keys' own scatter
SEARCHED = 1024  # keys of a step that looks for one that is not masked
# Of the norm across heads: rows of a program, and heads that it reads at a time, at most.
_RMS_ROWS, _RMS_HEADS = 4, 8
_FINISHED_ROWS, _FINISHED_HEADS = 32, 64


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

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All of them."""
        return self.x, self.weight, self.cos, self.sin, self.second, self.second_weight


@dataclass(frozen=True)
class Norm:
    """The RMSNorm: eps, None for no norm at all; across: one over all heads of a token, else one a head."""

    eps: float | None
    across: bool = False


@dataclass(frozen=True)
class Rope:
    """The rotary embedding: channels that are turned, 0 for none, and whether (2j, 2j + 1) or (j, j + R / 2) pair."""

    dim: int
    interleaved: bool


def rms_rope_quantize_pair(
    query: Rows,
    key: Rows,
    attn_mask: torch.Tensor | None,
    scale: float,
    config: Config,
    norm: Norm,
    rope: Rope,
    *,
    lse: bool,
    per_token: bool = False,
) -> tuple[QuantizedQuery, QuantizedKey]:
    """Norm, rotate and quantise both sides for `config`; returns what quantize_pair() does.

    The keys' shift is float32 [B, Hkv, 2, DP / 2]: what was taken off the first and the second channels of the pairs,
    before the Hadamard rotation.  attn_mask, scale, lse, per_token: as for quantize().
    """
    bias, anchor, live = None, None, None
    if attn_mask is not None:
        bias, anchor, live = prepare(attn_mask, key.length, config)
    k = _empty_key(key, config, per_token)._replace(bias=bias, anchor=anchor, live=live)
    q = _empty_query(query, lse)
    # What is given for both sides is one tensor of the call; which ones are is part of what the call is.
    written = (k.key, k.key_scale, k.key_norm, k.shift, *q)
    given = (*query.tensors(), *key.tensors(), bias, *written)
    tensors = {id(tensor): tensor for tensor in given}
    places = dict(zip(tensors, range(len(tensors)), strict=True))
    replay(
        ("fused", scale, config, norm, rope, per_token, *[places[id(tensor)] for tensor in given]),
        (*tensors.values(),),
        lambda: _launch(query, key, q, k, scale, config, norm, rope, per_token),
    )
    return q, k


def _empty_key(key: Rows, config: Config, per_token: bool) -> QuantizedKey:
    batch, heads, _, head_dim = key.x.shape
    padded, blocks = padded_head_dim(head_dim), triton.cdiv(key.length, config.block_n)
    tail = (blocks * config.block_n,) if per_token else (blocks, 4) if config.gluon else (blocks,)
    empty_float = functools.partial(torch.empty, device=key.x.device, dtype=torch.float32)
    return QuantizedKey(
        torch.empty((batch, heads, blocks * config.block_n, padded), dtype=torch.int8, device=key.x.device),
        empty_float((batch, heads, *tail)),
        None,
        None,
        empty_float((batch, heads, blocks)) if config.gluon else None,
        None,
        empty_float((batch, heads, 2, padded // 2)),
        key.length,
    )


def _empty_query(query: Rows, lse: bool) -> QuantizedQuery:
    batch, heads, _, head_dim = query.x.shape
    shape = (batch, heads, query.length)
    empty_float = functools.partial(torch.empty, shape, device=query.x.device, dtype=torch.float32)
    values = torch.empty((*shape, padded_head_dim(head_dim)), dtype=torch.int8, device=query.x.device)
    return QuantizedQuery(values, empty_float(), empty_float() if lse else None)


class _Between(NamedTuple):
    """What one launch leaves to another; made before the first, for each begins while the one before it still runs.

    shift: fp16 [B * Hkv + 2, DP], see _rope_key_shift.  rstd: float32 [B, Lk], 1 / rms over all heads of a key.
    squares: float32 [B, H, Lq], of the queries.  None where nothing is left.
    """

    shift: torch.Tensor | None
    rstd: torch.Tensor | None
    squares: torch.Tensor | None


def _launch(
    query: Rows,
    key: Rows,
    q: QuantizedQuery,
    k: QuantizedKey,
    scale: float,
    config: Config,
    norm: Norm,
    rope: Rope,
    per_token: bool,
) -> None:
    """Fill q and k: a norm across heads of the keys, their shift from a sample, all keys, all queries, their norm."""
    across, device, padded = norm.across and norm.eps is not None, key.x.device, padded_head_dim(key.x.shape[3])
    batch, kv_heads = key.x.shape[:2]
    tile = key_tile(padded, config, normed=norm.eps is not None and not across)
    if key.second is not None:
        tile = tile._replace(held=False, ahead=False)  # with a choice of weights a row they would not fit registers
    between = _Between(
        empty((batch * kv_heads + 2, padded), torch.float16, device) if tile.fp16 else None,
        empty((batch, key.length), torch.float32, device) if across else None,
        empty(q.query_scale.shape, torch.float32, device) if across else None,
    )
    if across:
        _launch_row_rms(key, between, norm)
    _launch_keys(key, k, between, config, tile, norm, rope, query.x.shape[1] // kv_heads, per_token)
    _launch_queries(query, q, k.shift, between, scale, config, norm, rope)
    if across:
        _launch_finish(query, q, between, norm)


def _launch_keys(
    key: Rows,
    made: QuantizedKey,
    between: _Between,
    config: Config,
    tile: Tile,
    norm: Norm,
    rope: Rope,
    group: int,
    per_token: bool,
) -> None:
    """Fill `made`: the shift first."""
    batch, heads, _, _ = key.x.shape
    bias, length, device = made.bias, key.length, key.x.device
    blocks = made.key.shape[2] // config.block_n
    common = _common(key, norm, rope)
    arguments = _arguments(key, norm, between.rstd) | {
        "BIAS": bias if bias is not None else made.shift, "SHIFT": made.shift,
        "SHIFT16": between.shift if between.shift is not None else made.shift,
        "bias_rows": group if bias is not None and bias.shape[1] > 1 else 1,
    }  # fmt: skip
    strides = row_strides(bias) if bias is not None else (0, 0)
    arguments |= dict(zip(("s_bias_b", "s_bias_h"), strides, strict=True))
    has_own = tile.fp16 and key.weight is not None
    launch(
        _rope_key_shift, (batch * heads + has_own,),
        **arguments, N=length, NP=blocks * config.block_n, ROWS=SAMPLE, SEARCHED=SEARCHED,
        K=key.x, K2=_second(key), HAS_BIAS=bias is not None, FP16=tile.fp16, num_warps=8, **common,
        **(first(device) if between.rstd is None else early(device)),
    )  # fmt: skip
    each = heads_of_program(tile, heads, batch * blocks, processors_of(device))
    norms = made.key_norm
    launch(
        _rms_rope_quantize, (triton.cdiv(heads, each) * blocks, batch),
        **arguments, X=key.x, X2=_second(key), Y=made.key, SCALE=made.key_scale,
        NORMS=norms if norms is not None else made.shift, LSE_TERM=made.shift, SQUARES=made.shift, factor=1.0,
        lse_factor=1.0, L=length, each=each, group=1, IS_KEY=True, HAS_BIAS=bias is not None,
        SCALES=config.block_n if per_token else 4 if config.gluon else 1, HAS_NORM=norms is not None, HAS_LSE=False,
        EVEN=length % tile.rows == 0, **_shape(key, rope, tile), **common, **early(device),
    )  # fmt: skip


def _launch_queries(
    query: Rows,
    made: QuantizedQuery,
    shift: torch.Tensor,
    between: _Between,
    scale: float,
    config: Config,
    norm: Norm,
    rope: Rope,
) -> None:
    """Fill `made`; under a norm across heads the scales lack their last factor.  shift: the keys'."""
    x, length, term = query.x, query.length, made.lse_term
    batch, heads, _, head_dim = x.shape
    padded, lse, across = padded_head_dim(head_dim), term is not None, between.squares is not None
    unused = made.query_scale
    tile = query_tile(padded, config, lse=lse, normed=norm.eps is not None and not across)
    blocks = triton.cdiv(length, tile.rows)
    each = heads_of_program(tile, heads, batch * blocks, processors_of(x.device))
    launch(
        _rms_rope_quantize, (triton.cdiv(heads, each) * blocks, batch),
        **_arguments(query, norm, None), X=x, X2=_second(query), SHIFT=shift if lse else unused, SHIFT16=unused,
        BIAS=unused, Y=made.query, SCALE=made.query_scale, NORMS=unused, LSE_TERM=term if term is not None else unused,
        SQUARES=between.squares if across else unused,
        factor=scale * LOG2E / min(padded, 128), lse_factor=scale, L=length, each=each,
        group=heads // shift.shape[1], bias_rows=1, s_bias_b=0, s_bias_h=0, IS_KEY=False,
        HAS_BIAS=False, SCALES=1, HAS_NORM=False, HAS_LSE=lse,
        EVEN=length % tile.rows == 0 and heads % tile.together == 0, **_shape(query, rope, tile),
        **_common(query, norm, rope), **early(x.device),
    )  # fmt: skip


def _launch_row_rms(key: Rows, between: _Between, norm: Norm) -> None:
    """1 / rms over all heads of a key, which costs a read of its own."""
    x, second = key.x, _second(key)
    launch(
        _row_rms, (triton.cdiv(key.length, _RMS_ROWS), x.shape[0]),
        x, second, between.rstd, norm.eps, key.length, x.shape[2], x.shape[1], *x.stride()[:3], *second.stride()[:3],
        D=x.shape[3], DP=padded_head_dim(x.shape[3]), ROWS=_RMS_ROWS, TOGETHER=_RMS_HEADS,
        TWO=key.second is not None, num_warps=4, **first(x.device),
    )  # fmt: skip


def _launch_finish(query: Rows, made: QuantizedQuery, between: _Between, norm: Norm) -> None:
    """The last factor of the scales, for which all heads must be known."""
    x, length, term = query.x, query.length, made.lse_term
    launch(
        _finish_scales, (triton.cdiv(length, _FINISHED_ROWS), x.shape[0]),
        between.squares, made.query_scale, term if term is not None else made.query_scale, norm.eps, length, x.shape[1],
        D=x.shape[3], ROWS=_FINISHED_ROWS, TOGETHER=min(_FINISHED_HEADS, triton.next_power_of_2(x.shape[1])),
        HAS_LSE=term is not None, BEFORE=x.dtype == torch.float16, num_warps=4, **early(x.device),
    )  # fmt: skip


def _second(rows: Rows) -> torch.Tensor:
    return rows.x if rows.second is None else rows.second


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
        "eps": 0.0 if norm.eps is None else float(norm.eps),
        "split": x.shape[2],
        "heads": x.shape[1],
    }


def _common(rows: Rows, norm: Norm, rope: Rope) -> dict[str, object]:
    """Compile-time facts that both kernels name alike."""
    padded = padded_head_dim(rows.x.shape[3])
    return {
        "D": rows.x.shape[3],
        "DP": padded,
        "R": rope.dim if rows.cos is not None else 0,
        "HALVES": rows.cos is not None and not rope.interleaved,
        "NORM": norm.eps is not None,
        "ACROSS": norm.across and norm.eps is not None,
        "HAS_WEIGHT": norm.eps is not None and rows.weight is not None,
        "TWO": rows.second is not None,
    }


def _shape(rows: Rows, rope: Rope, tile: Tile) -> dict[str, object]:
    """Compile-time facts of a launch of the quantising kernel."""
    padded = padded_head_dim(rows.x.shape[3])
    per_head = rows.cos is not None and rows.cos.shape[1] > 1
    # Of halves that are turned in part, a word would hold channels of either kind.
    whole = rows.cos is None or rope.interleaved or rope.dim == padded
    words = whole and _in_words(rows.x, rows.second)
    options = {} if tile.max_registers is None else {"maxnreg": tile.max_registers}
    return {
        **options, "B": min(padded, 128), "ROWS": tile.rows, "TOGETHER": tile.together, "WARPS": tile.num_warps,
        "STAGES": tile.num_stages, "AHEAD": tile.ahead and words, "HELD": tile.held, "WORDS": words,
        "WEIGHT_WORDS": words and _in_words(rows.weight, rows.second_weight), "PER_HEAD": per_head,
        "UPCAST": interpreting(),
        "FP16": tile.fp16, "num_warps": tile.num_warps,
    }  # fmt: skip


def _in_words(*tensors: torch.Tensor | None) -> bool:
    """Whether two neighbours of the last axis may always be read as one word of 32 bits."""
    given = [tensor for tensor in tensors if tensor is not None]
    return all(
        tensor.dtype == torch.bfloat16
        and tensor.data_ptr() % 16 == 0
        and tensor.shape[-1] % 2 == 0
        and all(stride % 2 == 0 for stride in tensor.stride()[:-1])
        for tensor in given
    )
