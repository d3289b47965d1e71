"""The torch operators of sparse attention: importing this module registers them; Triton is imported when one runs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..int8_attention.configs import Config
from ..int8_attention.op import _compile_errors, _empty_out, _without_gradient
from .configs import config_of, give_up_hopper

if TYPE_CHECKING:
    from ..int8_attention.quantize import Quantized
    from .lists import Lists

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


def _run(
    query: torch.Tensor,
    value: torch.Tensor,
    return_lse: bool,
    prepare: Callable[[Config], Work],
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the outputs and run what `prepare` makes, once more with the portable kernel if the other can't be."""
    from .forward import attention

    out, lse = _empty_out(query, return_lse)

    def run(config: Config) -> None:
        quantized, lists, bias = prepare(config)
        attention(quantized, value, lists, config, mask=mask, bias=bias, out=out, lse=lse if return_lse else None)

    config = config_of(query, value, mask)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        try:
            run(config)
        except _compile_errors() as error:
            if not config.gluon:
                raise
            _LOG.warning("the portable sparse kernel from now on: %s", give_up_hopper(error))
            run(config_of(query, value, mask))
    return out, lse


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[3]) if scale is None else scale


def _seen(seen: torch.Tensor, attn_mask: torch.Tensor | None) -> torch.Tensor:
    """The mask that quantisation goes by: a key that no query sees must change neither scales nor the shift."""
    if attn_mask is None:
        return seen
    return seen & attn_mask if attn_mask.dtype == torch.bool else torch.where(seen, attn_mask, -math.inf)


def _forget_unseen(key_norm: torch.Tensor, seen: torch.Tensor) -> None:
    """Let tiles of keys that no query sees, `seen` [1 or B, 1 or H, nk], have no norm: key_norm [B, Hkv, nk]."""
    kv_heads = key_norm.shape[1]
    if seen.shape[1] not in (1, kv_heads):
        seen = seen.unflatten(1, (kv_heads, -1)).any(2)
    key_norm.masked_fill_(~seen, 0.0)


def _block_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tile_mask: torch.Tensor,
    attn_mask: torch.Tensor | None,
    scale: float | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    def prepare(config: Config) -> Work:
        from ..int8_attention.quantize import quantize
        from .lists import TILE, Tiles, make_lists, seen_keys, tile_tops

        seen = seen_keys(tile_mask, key.shape[2])
        # Without a mask of the user's, a bias is needed for the padding of a last tile only.
        biased = attn_mask is not None or key.shape[2] % TILE != 0
        mask = _seen(seen, attn_mask)
        quantized = quantize(query, key, mask, _scale(query, scale), config, lse=return_lse, as_bias=biased)
        bias = quantized.bias
        if bias is None and quantized.key_norm is not None:
            _forget_unseen(quantized.key_norm, seen[:, :, 0, ::TILE])
        lists = make_lists(Tiles(tile_mask), None if bias is None else tile_tops(bias), paired=config.gluon)
        return quantized, lists, None if bias is None else bias.view(*bias.shape[:2], -1, TILE)

    return _run(query, value, return_lse, prepare)


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
    def prepare(config: Config) -> Work:
        from ..int8_attention.quantize import quantize
        from .windows import plan, with_bias

        found = plan(
            tuple(windows), floor, query.shape[2], key.shape[2],
            own_rows=attn_mask is not None, paired=config.gluon, device=query.device,
        )  # fmt: skip
        mask = attn_mask if found.seen is None else _seen(found.seen, attn_mask)
        quantized = quantize(query, key, mask, _scale(query, scale), config, lse=return_lse)
        if attn_mask is None or quantized.bias is None:
            return quantized._replace(anchor=found.anchor), found.lists, found.table[None, None]
        lists, table = with_bias(found, quantized.bias)
        return quantized, lists, table

    return _run(query, value, return_lse, prepare)


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
    def prepare(config: Config) -> Work:
        from ..int8_attention.quantize import quantize
        from .lists import Tiles, make_lists

        quantized = quantize(query, key, seen, _scale(query, scale), config, lse=return_lse)
        return quantized, make_lists(Tiles(None, low, high, floor), None, paired=config.gluon), None

    return _run(query, value, return_lse, prepare, attn_mask)


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
