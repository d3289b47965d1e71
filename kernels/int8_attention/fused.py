"""RMSNorm, rotary embedding, Hadamard rotation and int8 rounding of query and key in one pass over the 16-bit values.

RoPE turns pairs of channels, so int8 values can't pass through it; everything round it is linear or a factor per row,
and is done on the float32 values between one read and one int8 write.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from .bias import LOG2E, prepare, row_strides
from .configs import Config, padded_head_dim
from .fused_kernels import _rms_rope_quantize, _rope_key_shift
from .fused_norm import _finish_scales, _row_rms
from .fused_tiles import Tile, heads_of_program, key_tile, query_tile
from .launch import empty, launch, replay
from .limits import interpreting
from .quantize import QuantizedKey, QuantizedQuery, processors_of

SAMPLE = 64  # keys whose mean is the shift: what is left of the mean is an eighth of the keys' own scatter
SEARCHED = 1024  # keys of a step that looks for one that is not masked
_RMS_ROWS, _RMS_HEADS = 4, 8  # rows of a program of the norm across heads, and heads that it reads at a time


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


def rms_rope_quantize_key(
    key: Rows,
    attn_mask: torch.Tensor | None,
    config: Config,
    norm: Norm,
    rope: Rope,
    *,
    group: int,
    per_token: bool = False,
) -> tuple[QuantizedKey, torch.Tensor]:
    """Norm, rotate and quantise the keys for `config`; returns (what quantize_key() does, the rotation matrix).

    Its shift is float32 [B, Hkv, 2, DP / 2]: what was taken off the first and the second channels of the pairs, before
    the Hadamard rotation.  attn_mask, group, per_token: as for quantize().
    """
    x, length = key.x, key.length
    batch, heads, _, head_dim = x.shape
    padded, blocks = padded_head_dim(head_dim), triton.cdiv(length, config.block_n)
    empty_float = functools.partial(torch.empty, device=x.device, dtype=torch.float32)
    bias, anchor, live = None, None, None
    if attn_mask is not None:
        bias, anchor, live = prepare(attn_mask, length, config)
    tail = (blocks * config.block_n,) if per_token else (blocks, 4) if config.gluon else (blocks,)
    made = QuantizedKey(
        torch.empty((batch, heads, blocks * config.block_n, padded), dtype=torch.int8, device=x.device),
        empty_float((batch, heads, *tail)),
        bias,
        anchor,
        empty_float((batch, heads, blocks)) if config.gluon else None,
        live,
        empty_float((batch, heads, 2, padded // 2)),
        length,
    )
    rotation = torch.empty((min(padded, 128),) * 2, dtype=x.dtype, device=x.device)
    written = (made.key, made.key_scale, made.key_norm, made.shift, rotation)
    replay(
        ("fused key", config, norm, rope, group, per_token), (*key.tensors(), bias, *written),
        lambda: _launch_keys(key, made, rotation, config, norm, rope, group, per_token),
    )  # fmt: skip
    return made, rotation


def _launch_keys(
    key: Rows,
    made: QuantizedKey,
    rotation: torch.Tensor,
    config: Config,
    norm: Norm,
    rope: Rope,
    group: int,
    per_token: bool,
) -> None:
    """Fill `made` and `rotation`: the shift from a sample of the keys first, then all of them."""
    batch, heads, _, _ = key.x.shape
    bias, length, padded = made.bias, key.length, padded_head_dim(key.x.shape[3])
    blocks = made.key.shape[2] // config.block_n
    common = _common(key, norm, rope)
    rstd = _row_rstd(key, norm.eps) if norm.across and norm.eps is not None else None
    arguments = _arguments(key, norm, rstd) | {
        "BIAS": bias if bias is not None else made.shift, "SHIFT": made.shift, "ROTATION": rotation,
        "bias_rows": group if bias is not None and bias.shape[1] > 1 else 1,
    }  # fmt: skip
    tile = key_tile(padded, config, normed=norm.eps is not None and not norm.across)
    if key.second is not None:
        tile = tile._replace(held=False, ahead=False)  # with a choice of weights a row they would not fit registers
    each = heads_of_program(tile, heads, batch * blocks, processors_of(key.x.device))
    arguments["SHIFT16"] = empty((batch * heads + 2, padded), torch.float16, key.x.device) if tile.fp16 else made.shift
    strides = row_strides(bias) if bias is not None else (0, 0)
    arguments |= dict(zip(("s_bias_b", "s_bias_h"), strides, strict=True))
    launch(
        _rope_key_shift, (batch * heads + 1,),
        **arguments, N=length, NP=blocks * config.block_n, ROWS=SAMPLE, SEARCHED=SEARCHED,
        K=key.x, K2=_second(key), HAS_BIAS=bias is not None, FP16=tile.fp16, num_warps=8, **common,
    )  # fmt: skip
    norms = made.key_norm
    launch(
        _rms_rope_quantize, (triton.cdiv(heads, each) * blocks, batch),
        **arguments, X=key.x, X2=_second(key), Y=made.key, SCALE=made.key_scale,
        NORMS=norms if norms is not None else made.shift, LSE_TERM=made.shift, SQUARES=made.shift, factor=1.0,
        lse_factor=1.0, L=length, each=each, group=1, IS_KEY=True, HAS_BIAS=bias is not None,
        SCALES=config.block_n if per_token else 4 if config.gluon else 1, HAS_NORM=norms is not None, HAS_LSE=False,
        EVEN=length % tile.rows == 0, **_shape(key, rope, tile), **common,
    )  # fmt: skip


def rms_rope_quantize_query(
    query: Rows,
    scale: float,
    config: Config,
    norm: Norm,
    rope: Rope,
    rotation: torch.Tensor,
    *,
    shift: torch.Tensor | None = None,
) -> QuantizedQuery:
    """Norm, rotate and quantise the queries, with the rotation that the keys came with; shift: theirs, for the LSE."""
    x, length = query.x, query.length
    batch, heads, _, head_dim = x.shape
    empty_float = functools.partial(torch.empty, (batch, heads, length), device=x.device, dtype=torch.float32)
    made = QuantizedQuery(
        torch.empty((batch, heads, length, padded_head_dim(head_dim)), dtype=torch.int8, device=x.device),
        empty_float(),
        empty_float() if shift is not None else None,
    )
    replay(
        ("fused query", scale, config, norm, rope), (*query.tensors(), rotation, shift, *made),
        lambda: _launch_queries(query, made, scale, config, norm, rope, rotation, shift),
    )  # fmt: skip
    return made


def _launch_queries(
    query: Rows,
    made: QuantizedQuery,
    scale: float,
    config: Config,
    norm: Norm,
    rope: Rope,
    rotation: torch.Tensor,
    shift: torch.Tensor | None,
) -> None:
    """Fill `made`; under a norm across heads the scales get their last factor when all heads are known."""
    x, length = query.x, query.length
    batch, heads, _, head_dim = x.shape
    padded = padded_head_dim(head_dim)
    across = norm.across and norm.eps is not None
    squares = empty((batch, heads, length), torch.float32, x.device) if across else made.query_scale
    unused, term = made.query_scale, made.lse_term
    tile = query_tile(padded, config, lse=shift is not None, normed=norm.eps is not None and not across)
    blocks = triton.cdiv(length, tile.rows)
    each = heads_of_program(tile, heads, batch * blocks, processors_of(x.device))
    launch(
        _rms_rope_quantize, (triton.cdiv(heads, each) * blocks, batch),
        **_arguments(query, norm, None), X=x, X2=_second(query),
        SHIFT=shift if shift is not None else unused, SHIFT16=unused, ROTATION=rotation, BIAS=unused, Y=made.query,
        SCALE=made.query_scale, NORMS=unused, LSE_TERM=term if term is not None else unused, SQUARES=squares,
        factor=scale * LOG2E / min(padded, 128), lse_factor=scale, L=length, each=each,
        group=heads // shift.shape[1] if shift is not None else 1, bias_rows=1, s_bias_b=0, s_bias_h=0, IS_KEY=False,
        HAS_BIAS=False, SCALES=1, HAS_NORM=False, HAS_LSE=shift is not None,
        EVEN=length % tile.rows == 0 and heads % tile.together == 0, **_shape(query, rope, tile),
        **_common(query, norm, rope),
    )  # fmt: skip
    if across:
        launch(
            _finish_scales, (triton.cdiv(length, 128), batch),
            squares, made.query_scale, term if term is not None else unused, norm.eps, length, heads,
            D=head_dim, ROWS=128, HAS_LSE=term is not None, BEFORE=x.dtype == torch.float16, num_warps=4,
        )  # fmt: skip


def _second(rows: Rows) -> torch.Tensor:
    return rows.x if rows.second is None else rows.second


def _row_rstd(rows: Rows, eps: float) -> torch.Tensor:
    """float32 [B, L]: 1 / rms over all heads of a token, which costs a read of its own."""
    x, second = rows.x, _second(rows)
    rstd = empty((x.shape[0], rows.length), torch.float32, x.device)
    launch(
        _row_rms, (triton.cdiv(rows.length, _RMS_ROWS), x.shape[0]),
        x, second, rstd, eps, rows.length, x.shape[2], x.shape[1], *x.stride()[:3], *second.stride()[:3],
        D=x.shape[3], DP=padded_head_dim(x.shape[3]), ROWS=_RMS_ROWS, TOGETHER=_RMS_HEADS,
        TWO=rows.second is not None, num_warps=4,
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
        "B": min(padded, 128),
        "R": rope.dim if rows.cos is not None else 0,
        "HALVES": rows.cos is not None and not rope.interleaved,
        "NORM": norm.eps is not None,
        "ACROSS": norm.across and norm.eps is not None,
        "HAS_WEIGHT": norm.eps is not None and rows.weight is not None,
        "TWO": rows.second is not None,
    }


def _shape(rows: Rows, rope: Rope, tile: Tile) -> dict[str, object]:
    """Compile-time facts of a launch of the quantising kernel."""
    per_head = rows.cos is not None and rows.cos.shape[1] > 1
    # Of halves that are turned in part, a word would hold channels of either kind.
    whole = rows.cos is None or rope.interleaved or rope.dim == padded_head_dim(rows.x.shape[3])
    words = whole and _in_words(rows.x, rows.second)
    options = {} if tile.max_registers is None else {"maxnreg": tile.max_registers}
    return {
        **options, "ROWS": tile.rows, "TOGETHER": tile.together, "WARPS": tile.num_warps,
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
