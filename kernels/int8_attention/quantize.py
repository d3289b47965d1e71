"""Query and key to int8: shift by the mean key, random-sign Hadamard rotation, symmetric rounding to [-127, 127].

Softmax ignores what all keys share, so subtracting any vector from every key is exact; the mean makes the rest small.
A rotation of query and key alike leaves their products unchanged and spreads outlier channels (QuaRot, SmoothQuant).
A masked key counts for nothing here: it changes neither the mean nor a scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from .bias import LOG2E, padded_len, prepare, row_strides
from .configs import Config, padded_head_dim
from .launch import early, empty, first, launch
from .limits import interpreting
from .quantize_kernels import _key_shift, _quantize

SHIFT_SAMPLES = 512  # the mean of a sample is as good a shift as the mean of all keys, at a fraction of the reads


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


class Tiling(NamedTuple):
    """Launch of _quantize: query rows of a block, blocks of a program, warps, stages of its loop.

    resident: programs that a processor of the GPU has registers for, 0 where that is not known.
    """

    q_rows: int
    steps: int
    num_warps: int
    num_stages: int
    resident: int = 0


# By padded head_dim up to 64, up to 128, and above. On sm_90 the best of bench/bench_quantise_stage.py.
HOPPER_TILINGS = (Tiling(64, 8, 4, 2, 4), Tiling(128, 8, 4, 2, 2), Tiling(64, 4, 8, 2, 1))
_TILINGS = (Tiling(64, 4, 4, 1), Tiling(64, 4, 4, 1), Tiling(32, 4, 4, 1))
# Where key blocks are small, for want of registers; and query blocks too (RDNA).
_AMD_TILINGS = (Tiling(32, 4, 4, 1), Tiling(32, 4, 4, 1), Tiling(16, 4, 8, 1))
_RDNA_TILINGS = (Tiling(32, 4, 4, 1), Tiling(32, 4, 8, 1), Tiling(16, 4, 8, 1))


def tiling_of(padded: int, config: Config) -> Tiling:
    """The launch for a padded head_dim and a configuration of the attention kernel."""
    small = config.block_n < 64 and config.block_n * padded <= 4096
    amd = _RDNA_TILINGS if config.block_m <= 64 else _AMD_TILINGS
    table = HOPPER_TILINGS if config.tma else amd if small else _TILINGS
    return table[(padded > 64) + (padded > 128)]


def balanced_steps(tiling: Tiling, processors: int, key: tuple[int, int], query: tuple[int, int]) -> int:
    """Blocks of a program so that programs fill the GPU a whole number of times, near tiling.steps if once or more.

    key, query: heads, and blocks of a head.
    """
    slots = processors * tiling.resident
    if slots == 0:
        return tiling.steps
    blocks = key[0] * key[1] + query[0] * query[1]
    room = slots * max(1, round(blocks / (slots * tiling.steps)))
    steps = max(1, -(-blocks // room))
    while steps < max(key[1], query[1]):
        if sum(heads * triton.cdiv(count, steps) for heads, count in (key, query)) <= room:
            break
        steps += 1
    return steps


def quantize(
    query: torch.Tensor,
    key: torch.Tensor,
    attn_mask: torch.Tensor | None,
    scale: float,
    config: Config,
    *,
    lse: bool,
    per_token: bool = False,
    kept: torch.Tensor | None = None,
    only_shift: bool = False,
) -> Quantized:
    """Quantise query [B, H, Lq, D] and key [B, Hkv, Lk, D] (fp16 or bf16, contiguous last axis) for `config`.

    attn_mask: None or a per-key mask [1 or B, 1 or H, 1, 1 or Lk], bool (True = keep) or floating (added).
    scale: the softmax scale, of any sign.  lse: whether the term that undoes the key shift in the LSE is wanted.
    per_token: a scale for each key.  kept: instead of attn_mask, float32 [1 or B, 1 or H, N], 0 for keys that count and
    -inf for others; the answer has no bias then.  only_shift: these make the shift, and scales are those of all keys.
    """
    q, k = quantize_pair(
        query, key, attn_mask, scale, config, lse=lse, per_token=per_token, kept=kept, only_shift=only_shift
    )
    return join(q, k if kept is None else k._replace(bias=None))


def quantize_pair(
    query: torch.Tensor,
    key: torch.Tensor,
    attn_mask: torch.Tensor | None,
    scale: float,
    config: Config,
    *,
    lse: bool,
    per_token: bool = False,
    kept: torch.Tensor | None = None,
    only_shift: bool = False,
) -> tuple[QuantizedQuery, QuantizedKey]:
    """Quantise as quantize() says and return both parts; of `kept` the key still holds the bias."""
    shifted = _empty_shift(key, attn_mask, config, query.shape[1] // key.shape[1], kept)
    k = _empty_key(key, config, per_token, shifted)
    q = _empty_query(query, shifted.shift if lse else None)
    _launch_shift(key, shifted, config)
    if only_shift:
        shifted, k = shifted._replace(bias=None, bias_rows=1), k._replace(bias=None)
    _launch(query, key, q, k, shifted, scale, config, lse=lse, queries=True, keys=True)
    return q, k


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
    shifted = _empty_shift(key, attn_mask, config, group)
    k = _empty_key(key, config, per_token, shifted)
    _launch_shift(key, shifted, config)
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
    shifted = _Shifted(None, None, None, given, 1)
    heads = query if shift is None else query[:, : shift.shape[1]]
    _launch(query, heads, q, unused, shifted, scale, config, lse=shift is not None, queries=True, keys=False)
    return q


class _Shifted(NamedTuple):
    """The prepared mask, room for the rotated mean of the keys, and the query heads that a bias row serves."""

    bias: torch.Tensor | None
    anchor: torch.Tensor | None
    live: torch.Tensor | None
    shift: torch.Tensor
    bias_rows: int


def _empty_shift(
    key: torch.Tensor, attn_mask: torch.Tensor | None, config: Config, group: int, kept: torch.Tensor | None = None
) -> _Shifted:
    bias, anchor, live = kept, None, None
    if attn_mask is not None:
        bias, anchor, live = prepare(attn_mask, key.shape[2], config)
    shift = empty((*key.shape[:2], padded_head_dim(key.shape[3])), torch.float32, key.device)
    return _Shifted(bias, anchor, live, shift, group if bias is not None and bias.shape[1] > 1 else 1)


def _launch_shift(key: torch.Tensor, shifted: _Shifted, config: Config) -> None:
    batch, kv_heads, kv_len, head_dim = key.shape
    padded = padded_head_dim(head_dim)
    bias, shift = shifted.bias, shifted.shift
    launch(
        _key_shift, (batch * kv_heads,),
        key, bias if bias is not None else shift, shift, kv_len, padded_len(kv_len, config),
        triton.cdiv(kv_len, SHIFT_SAMPLES), kv_heads, shifted.bias_rows, *key.stride()[:3],
        *(row_strides(bias) if bias is not None else (0, 0)),
        D=head_dim, DP=padded, B=min(padded, 128), ROWS=shift_rows(padded), SAMPLES=SHIFT_SAMPLES,
        UNROLL=shift_steps(config), HAS_BIAS=bias is not None, num_warps=8, **first(key.device),
    )  # fmt: skip


def _empty_key(key: torch.Tensor, config: Config, per_token: bool, shifted: _Shifted) -> QuantizedKey:
    batch, kv_heads, kv_len, head_dim = key.shape
    rows = padded_len(kv_len, config)
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
    """Fill q and k, after _launch_shift() of these keys.

    For one of them alone the tensors of the other are not looked at, but the number of its heads.
    """
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    padded = padded_head_dim(head_dim)
    rotated = min(padded, 128)
    tiling = tiling_of(padded, config)
    rows = padded_len(kv_len, config)
    key_work = (batch * kv_heads if keys else 0, rows // config.block_n)
    query_work = (batch * heads if queries else 0, triton.cdiv(q_len, tiling.q_rows))
    steps = balanced_steps(tiling, processors_of(query.device), key_work, query_work)
    k_chunks, q_chunks = (triton.cdiv(blocks, steps) for _, blocks in (key_work, query_work))
    key_programs, query_programs = key_work[0] * k_chunks, query_work[0] * q_chunks
    scales = config.block_n if k.key_scale.shape[-1] == rows else 4 if config.gluon else 1
    bias, unused = shifted.bias, shifted.shift
    launch(
        _quantize, (query_programs + key_programs,),
        key, query, shifted.shift, bias if bias is not None else unused,
        k.key, k.key_scale, k.key_norm if k.key_norm is not None else unused,
        q.query, q.query_scale, q.lse_term if q.lse_term is not None else unused,
        scale * LOG2E / rotated, scale / rotated, kv_len, rows, q_len, kv_heads, heads,
        query_programs, k_chunks, q_chunks, steps, *key.stride()[:3], *query.stride()[:3],
        *(row_strides(bias) if bias is not None else (0, 0)),
        D=head_dim, DP=padded, B=rotated, K_ROWS=config.block_n, Q_ROWS=tiling.q_rows,
        STAGES=tiling.num_stages, HAS_BIAS=bias is not None, BIAS_ROWS=shifted.bias_rows, SCALES=scales,
        HAS_NORM=k.key_norm is not None, HAS_LSE=lse, UPCAST=interpreting(),
        num_warps=tiling.num_warps, **(early(key.device) if keys else {"PDL": False}),
    )  # fmt: skip


def shift_rows(padded: int) -> int:
    """Keys that a step of _key_shift reads: as many as fit the registers of every architecture."""
    return 128 if padded <= 128 else 32


def shift_steps(config: Config) -> int:
    """Steps of _key_shift whose loads are under way together: more where registers allow it."""
    return 4 if config.tma else 1


def processors_of(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU, or compute units; 0 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
