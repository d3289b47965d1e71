"""The torch operators of sparse attention: importing this module registers them; Triton is imported when one runs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import torch

from ..int8_attention.configs import Config
from ..int8_attention.op import _empty_out, _without_gradient, triton_refuses
from .configs import config_of, give_up_hopper, heads_at_a_time

if TYPE_CHECKING:
    from ..int8_attention.quantize import Quantized
    from .lists import Lists
    from .windows import Plan

_LOG = logging.getLogger("sdpa_router.dispatch")
_LIBRARY = torch.library.Library("sdpa_router", "FRAGMENT")
_TENSORS = "Tensor query, Tensor key, Tensor value"
_SCHEMAS = {
    "block_sparse_attention": "Tensor tile_mask, Tensor? attn_mask",
    "banded_attention": "int[] windows, float floor, Tensor? attn_mask",
    "tiled_mask_attention": "Tensor attn_mask, Tensor low, Tensor high, Tensor floor, Tensor seen",
}

# What a configuration needs: quantised operands, lists and bias table.
Work = tuple["Quantized", "Lists", "torch.Tensor | None"]
Tensors = tuple["torch.Tensor | None", ...]


def _into(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    query: torch.Tensor,
    value: torch.Tensor,
    numbers: Hashable,
    tensors: Callable[[], Tensors],
    prepare: Callable[[Config], Work],
    mask: torch.Tensor | None = None,
) -> None:
    """Run what `prepare` makes, once more with the portable kernel if the other can't be compiled.

    numbers and tensors(): all that prepare() depends on, besides out and lse (see launch.replay).
    """
    from ..int8_attention.launch import replay
    from .forward import attention

    def run() -> None:
        config = config_of(query, value, mask)
        quantized, lists, bias = prepare(config)
        attention(quantized, value, lists, config, mask=mask, bias=bias, out=out, lse=lse)

    with torch.cuda.device_of(query):  # Triton launches on the current device
        try:
            replay(numbers, (*tensors(), out, lse), run)
        except Exception as error:
            if not (config_of(query, value, mask).gluon and triton_refuses(error)):
                raise
            _LOG.warning("the portable sparse kernel from now on: %s", give_up_hopper(error))
            replay(numbers, (*tensors(), out, lse), run)


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[3]) if scale is None else scale


def _own_rows(tiles: torch.Tensor) -> torch.Tensor:
    """The batches and heads of [B, H, nq, nk] that lie in memory of their own."""
    for axis in (0, 1):
        if tiles.stride(axis) == 0 and tiles.shape[axis] > 1:
            tiles = tiles.narrow(axis, 0, 1)
    return tiles


def _block_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tile_mask: torch.Tensor,
    attn_mask: torch.Tensor | None,
    scale: float | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    keep, softmax_scale = _own_rows(tile_mask), _scale(query, scale)

    def prepare(config: Config) -> Work:
        from ..int8_attention.quantize import quantize
        from .key_bias import forget_unseen, kept_keys, key_bias
        from .lists import TILE, Tiles, make_lists

        # Without a mask of the user's, a bias is needed for the padding of a last tile only.
        if attn_mask is None and key.shape[2] % TILE == 0:
            kept = kept_keys(keep, None, None)
            quantized = quantize(
                query, key, None, softmax_scale, config, lse=return_lse, kept=kept, only_shift=True
            )  # fmt: skip
            if quantized.key_norm is not None:
                forget_unseen(quantized.key_norm, kept)
            return quantized, make_lists(Tiles(keep), None, paired=config.gluon), None
        bias = key_bias(attn_mask, key.shape[2], query)
        lists = make_lists(Tiles(keep), bias.top, paired=config.gluon)
        kept = kept_keys(keep, bias, lists)
        quantized = quantize(query, key, None, softmax_scale, config, lse=return_lse, kept=kept)
        return quantized, lists, bias.table

    out, lse = _empty_out(query, return_lse)
    given = (query, key, value, keep, attn_mask)
    _into(out, lse if return_lse else None, query, value, ("block sparse", softmax_scale), lambda: given, prepare)
    return out, lse


def _banded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    windows: list[int],
    floor: float,
    attn_mask: torch.Tensor | None,
    scale: float | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _empty_out(query, return_lse)
    for heads, kv_heads in heads_at_a_time(query, key, value):
        some = attn_mask if attn_mask is None or attn_mask.shape[1] == 1 else attn_mask[:, heads]
        part = query[:, heads], key[:, kv_heads], value[:, kv_heads], some
        into = out[:, heads], lse[:, heads] if return_lse else None
        _windows_of_heads(*part, tuple(windows), floor, _scale(query, scale), *into)
    return out, lse


def _windows_of_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    windows: tuple[int, ...],
    floor: float,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Attend windows into out and lse, all of them in one launch."""

    def planned() -> Plan:
        from .windows import plan

        return plan(
            windows, floor, query.shape[2], key.shape[2], own_rows=attn_mask is not None,
            paired=config_of(query, value).gluon, device=query.device,
        )  # fmt: skip

    def tensors() -> Tensors:
        lists, table, row_of, kept = planned()
        given = (query, key, value, attn_mask, table, row_of, kept, lists.tiles, lists.counts, lists.bias_rows)
        return (*given, lists.blocks, *((lists.floor, lists.anchor) if attn_mask is None else ()))

    def prepare(config: Config) -> Work:
        from ..int8_attention.quantize import quantize
        from .window_bias import with_bias

        found = planned()
        lists, table, kept = found.lists, found.table, found.kept
        if attn_mask is not None:
            lists, table, kept = with_bias(found, attn_mask, key.shape[2])
        return quantize(query, key, None, scale, config, lse=lse is not None, kept=kept), lists, table

    _into(out, lse, query, value, ("banded", scale), tensors, prepare)


def _tiled_mask_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    floor: torch.Tensor,
    seen: torch.Tensor,
    scale: float | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    softmax_scale = _scale(query, scale)

    def prepare(config: Config) -> Work:
        from ..int8_attention.quantize import quantize
        from .lists import Tiles, make_lists

        quantized = quantize(query, key, seen, softmax_scale, config, lse=return_lse)
        return quantized, make_lists(Tiles(None, low, high, floor), None, paired=config.gluon), None

    out, lse = _empty_out(query, return_lse)
    given = (query, key, value, attn_mask, low, high, floor, seen)
    into = lse if return_lse else None
    _into(out, into, query, value, ("tiled mask", softmax_scale), lambda: given, prepare, attn_mask)
    return out, lse


def _fake(query: torch.Tensor, *arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_out(query, bool(arguments[-1]))


for _name, _kernel in (
    ("block_sparse_attention", _block_sparse_attention),
    ("banded_attention", _banded_attention),
    ("tiled_mask_attention", _tiled_mask_attention),
):
    # Without the tag inductor may hand over other strides than the ones the call was judged by.
    _LIBRARY.define(
        f"{_name}({_TENSORS}, {_SCHEMAS[_name]}, float? scale, bool return_lse) -> (Tensor out, Tensor lse)",
        tags=(torch.Tag.needs_fixed_stride_order,),
    )
    _LIBRARY.impl(_name, _kernel, "CUDA")
    _LIBRARY.impl(_name, _kernel, "CPU")  # reached with Triton's interpreter only
    _LIBRARY.impl(_name, _without_gradient(_name), "Autograd")
    torch.library.register_fake(f"sdpa_router::{_name}", _fake, lib=_LIBRARY)
