"""int8_linear_qk(): a query or a key straight from an int8 linear layer, with one rounding; join_qk() pairs them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .decide import Call
from .decision import show
from .entry import kernel_entry
from .kernels.int8_attention.limits import LIMITS
from .mask import key_view
from .qk import Groups, Layout, Prepared, QuantizedQK, expect, expect_type
from .quantized import choose_config, default_scale, key_row, native_layout, require_kernel, version_of
from .rope_tables import check_gradient
from .scalars import is_whole

NOT_ROTATED = "none"


@dataclass(frozen=True, eq=False)
class QuantizedSide:
    """A query or a key alone, for join_qk(): the fields of QuantizedQK that belong to it; the key's rows are padded.

    values: int8 [B, heads, L or N, DP]; scale: float32 [B, heads, groups].  length: rows that are not padding.
    softmax_scale: of a query, folded into its scales; None for a key.
    """

    values: torch.Tensor
    scale: torch.Tensor
    length: int
    head_dim: int
    dtype: torch.dtype
    layout: Layout
    softmax_scale: float | None = None
    attn_mask: torch.Tensor | None = None
    mask_version: int | None = None
    key_shift: torch.Tensor | None = None
    prepared: Prepared | None = None

    @property
    def is_key(self) -> bool:
        """Whether it is a key."""
        return self.softmax_scale is None


@kernel_entry
def int8_linear_qk(
    x: torch.Tensor,
    weight_int8: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    heads: int,
    role: str,
    bias: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    scale: float | None = None,
    attn_mask: torch.Tensor | None = None,
    group: int = 1,
    precision: str = "auto",
) -> QuantizedSide:
    """Compute the int8 query or key of an attention without RoPE from an int8 linear layer, rounded once.

    x: [B, L, C], fp16 or bf16, which is quantised to int8 with a scale a row first; or int8 with x_scale float32 [B, L]
    and dtype, that of value and output.  weight_int8: [heads * D, C], contiguous, and weight_scale: float32
    [heads * D], one an output channel.  bias: [heads * D], any float dtype.
    role: "query" or "key".  scale: the softmax scale, of a query, by default D ** -0.5.  attn_mask: of a key, as
    int8_attention() takes it, with group, the number of query heads that a key head serves.  precision: of a key.

    The int32 accumulator times its two scales, plus the bias, is rounded to int8 with a scale a query row, or a group
    of keys after their mean was taken off: at most half a step from the exact result. Nothing is Hadamard-rotated,
    because on tensor cores that would round to 16 bits in between: outlier channels cost precision here. Let a key that
    stays the same (of a text) be computed once. Raises ValueError naming argument, given and expected; UnsupportedError
    where the kernel doesn't run.

    >>> query = int8_linear_qk(hidden, wq, wq_scale, heads=10, role="query")
    >>> key = int8_linear_qk(text, wk, wk_scale, heads=10, role="key")
    >>> out = int8_attention(join_qk(query, key), value)
    """
    head_dim = _check(x, weight_int8, weight_scale, heads, bias, x_scale, dtype)
    if role not in ("query", "key"):
        raise ValueError(f"role is {role!r}; expected 'query' or 'key'")
    if not is_whole(group) or group < 1:
        raise ValueError(f"group is {group!r}; expected how many query heads a key head serves, at least 1")
    if role == "query" and attn_mask is not None:
        raise ValueError("attn_mask is given with role='query'; expected None, for the key is quantised with it")
    if role == "key" and scale is not None:
        raise ValueError(f"scale is {scale} with role='key'; expected None, for the query holds it")
    heads, group = int(heads), int(group)
    kind = x.dtype if dtype is None else dtype
    like = x.new_empty((1, 1, 1, head_dim), dtype=kind)
    query = like.expand(x.shape[0], heads * (group if role == "key" else 1), x.shape[1], head_dim)
    key = like.expand(x.shape[0], heads, x.shape[1], head_dim)
    require_kernel(Call(query, key, key, attn_mask, 0.0, False, scale, enable_gqa=True), "auto", precision)
    from .kernels.int8_attention import linear

    config = choose_config(like, "auto", precision)
    layout = native_layout(config, precision, NOT_ROTATED)
    layer_bias = None if bias is None else bias.detach().contiguous()
    weight_scale = weight_scale.contiguous()  # the kernel steps through it one by one
    with torch.cuda.device_of(x):
        rows, row_scale = (x, x_scale.contiguous()) if x_scale is not None else linear.quantize_rows(x)
        layer = linear.Layer(rows, row_scale, weight_int8, weight_scale, layer_bias, heads)
        if role == "query":
            softmax_scale = default_scale(like, scale)
            made = linear.linear_query(layer, softmax_scale)
            return QuantizedSide(
                made.query, made.query_scale, x.shape[1], head_dim, kind, layout, softmax_scale=softmax_scale
            )
        keys = linear.linear_key(layer, key_row(attn_mask), config, group=group, per_token=precision == "high")
    return QuantizedSide(
        keys.key,
        keys.key_scale.flatten(2),
        x.shape[1],
        head_dim,
        kind,
        layout,
        attn_mask=attn_mask,
        mask_version=version_of(attn_mask),
        key_shift=keys.shift,
        prepared=Prepared(config, keys.bias, keys.anchor, keys.live, keys.key_norm),
    )


def join_qk(query: QuantizedSide, key: QuantizedSide) -> QuantizedQK:
    """Pair a query and a key that were quantised apart; raises ValueError where they don't belong together.

    The LSE of such a pair is not available: it needs the query that was not rounded.
    """
    for name, side in (("query", query), ("key", key)):
        expect_type(name, side, QuantizedSide, "what int8_linear_qk() returns")
    if query.is_key or not key.is_key:
        given = ["key" if side.is_key else "query" for side in (query, key)]
        raise ValueError(f"given {given[0]}, {given[1]}; expected query, key")
    expect("key's rotation", key.layout.rotation, query.layout.rotation)
    expect("key's head_dim", key.head_dim, query.head_dim)
    expect("key's dtype", key.dtype, query.dtype)
    expect("key's device", key.values.device, query.values.device)
    _check_mask_heads(query, key)
    assert query.softmax_scale is not None
    return QuantizedQK(
        query.values,
        query.scale,
        key.values,
        key.scale,
        kv_len=key.length,
        head_dim=query.head_dim,
        dtype=query.dtype,
        softmax_scale=query.softmax_scale,
        layout=replace(key.layout, query=Groups(1)),
        attn_mask=key.attn_mask,
        mask_version=key.mask_version,
        key_shift=key.key_shift,
        heads_inside=True,
        prepared=key.prepared,
    )


def _check_mask_heads(query: QuantizedSide, key: QuantizedSide) -> None:
    """Raise ValueError where the key's mask has a row for each of another number of query heads."""
    heads, mask = query.values.shape[1], key.attn_mask
    rows = 1 if mask is None else key_view(mask).shape[1]
    if rows not in (1, heads):
        group = rows // key.values.shape[1]
        raise ValueError(
            f"query has {heads} heads; expected {rows}, for the key was quantised with group={group} and a mask of "
            f"{rows} heads"
        )


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    heads: int,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    dtype: torch.dtype | None,
) -> int:
    """Raise ValueError for what doesn't fit; returns head_dim."""
    wanted = {"x": x, "weight_int8": weight, "weight_scale": weight_scale}
    optional = {"bias": bias, "x_scale": x_scale}
    for name, given in (wanted | {name: given for name, given in optional.items() if given is not None}).items():
        expect_type(name, given, torch.Tensor, "a tensor")
    if x.dim() != 3 or x.stride(-1) != 1 or 0 in x.shape:
        raise ValueError(
            f"x is {show(x.shape)}, strides {show(x.stride())}; expected [B, L, C], each at least 1, with a contiguous "
            "last axis"
        )
    batch, length, channels = x.shape
    if (x.dtype == torch.int8) != (x_scale is not None):
        expected = "None, for x is not int8" if x_scale is not None else f"float32 [{batch}, {length}], for x is int8"
        raise ValueError(f"x_scale is {'given' if x_scale is not None else None}; expected {expected}")
    if x.dtype not in (torch.int8, *LIMITS.dtypes):
        raise ValueError(f"x is {show(x.dtype)}; expected {show((torch.int8, *LIMITS.dtypes))}")
    if dtype not in LIMITS.dtypes and (dtype is not None or x.dtype == torch.int8):
        raise ValueError(f"dtype is {dtype!r}; expected {show(LIMITS.dtypes)}, that of the value")
    if weight.dim() != 2 or weight.dtype != torch.int8 or weight.shape[1] != channels or not weight.is_contiguous():
        raise ValueError(
            f"weight_int8 is {show(weight.dtype)} {show(weight.shape)}; expected int8 [heads * D, {channels}], "
            "contiguous"
        )
    if weight.device != x.device:
        raise ValueError(f"weight_int8 is on {weight.device}; expected {x.device}, as x")
    rows = weight.shape[0]
    if not is_whole(heads) or heads < 1 or rows % heads:
        raise ValueError(f"heads is {heads!r}; expected a divisor of the {rows} output channels of weight_int8")
    parts = {"weight_scale": (weight_scale, (rows,)), "x_scale": (x_scale, (batch, length)), "bias": (bias, (rows,))}
    for name, (tensor, shape) in parts.items():
        wrong = tensor is not None and (tuple(tensor.shape) != shape or tensor.device != x.device)
        if tensor is not None and (wrong or not _is_kind(tensor, name)):
            kind = "floating" if name == "bias" else "float32"
            raise ValueError(
                f"{name} is {show(tensor.dtype)} {show(tensor.shape)} on {tensor.device}; expected {kind} "
                f"{show(shape)} on {x.device}"
            )
    for name, tensor in {"x": x, "weight_scale": weight_scale, **optional}.items():
        check_gradient(name, tensor)
    return rows // int(heads)


def _is_kind(tensor: torch.Tensor, name: str) -> bool:
    return tensor.is_floating_point() if name == "bias" else tensor.dtype == torch.float32
