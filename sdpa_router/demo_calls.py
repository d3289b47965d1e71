"""The demo's inputs: a banded video window as in the field, and nine other calls of SDPA around it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdpa_router.testing import BandedWindow, gaussian


@dataclass(frozen=True)
class Size:
    """Sizes of the demo's attention: query heads, key heads of the GQA call, and banded_window()'s keywords."""

    heads: int
    kv_heads: int
    q_len: int
    head_dim: int
    dtype: torch.dtype
    window: dict[str, Any]


FIELD = Size(heads=56, kv_heads=8, q_len=4096, head_dim=128, dtype=torch.bfloat16, window={})
# fp16, because Triton's interpreter multiplies bf16 wrongly; 265 keys end in the middle of a tile.
SMALL_WINDOW: dict[str, Any] = {"text": 24, "refs": 8, "audio": 8, "frame": 25, "core": 5, "skirt": 2}
SMALL = Size(heads=4, kv_heads=2, q_len=128, head_dim=64, dtype=torch.float16, window=SMALL_WINDOW)


class DemoCall(NamedTuple):
    """One call of SDPA: its name in the table, its tensors and its other arguments."""

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]


def demo_calls(size: Size, window: BandedWindow) -> Iterator[DemoCall]:
    """Yield the window as in the field and nine other calls, one at a time, so that only one is in memory."""
    device = window.bias.device
    query, key, value = gaussian(
        1, size.heads, size.q_len, window.kv_len, size.head_dim, dtype=size.dtype, device=device
    )
    own = slice(0, size.q_len)
    grouped = slice(0, size.kv_heads)
    expanded = window.bias.to(size.dtype).expand(1, size.heads, size.q_len, window.kv_len)
    yield DemoCall("fading window", query, key, value, {"attn_mask": window.bias})
    yield DemoCall("padding gap", query, key, value, {"attn_mask": _gap(window)})
    yield DemoCall("bias per head", query, key, value, {"attn_mask": _per_head(size, window)})
    yield DemoCall("expanded view", query, key, value, {"attn_mask": expanded})
    yield DemoCall("full mask", query, key, value, {"attn_mask": _band(size, window)})
    yield DemoCall("causal", query, key[:, :, own], value[:, :, own], {"is_causal": True})
    yield DemoCall("GQA", query, key[:, grouped], value[:, grouped], {"enable_gqa": True})
    yield DemoCall("dropout", query, key, value, {"dropout_p": 0.1})
    yield DemoCall("float32", query.float(), key.float(), value.float(), {})
    yield DemoCall("requires_grad", query.clone().requires_grad_(), key, value, {})


def _gap(window: BandedWindow) -> Tensor:
    """Make a bool [1, 1, 1, K]: the last third of the prefix is padding, with valid keys before and after it."""
    prefix = window.parts["prefix"].stop
    keep = torch.ones_like(window.bias, dtype=torch.bool)
    keep[..., prefix * 2 // 3 : prefix] = False
    return keep


def _per_head(size: Size, window: BandedWindow) -> Tensor:
    """Make a bias [1, H, 1, K] in q's dtype: 0, and -10000 on a third of the keys, elsewhere in each head."""
    keys = torch.arange(window.kv_len, device=window.bias.device)
    heads = torch.arange(size.heads, device=window.bias.device)
    out = (keys + heads[:, None]) % 3 == 0
    return torch.zeros_like(out, dtype=size.dtype).masked_fill(out, -10000).view(1, size.heads, 1, -1)


def _band(size: Size, window: BandedWindow) -> Tensor:
    """Make a bool [1, 1, Q, K]: each query sees a quarter of the keys on either side of its own place."""
    places = torch.arange(size.q_len, device=window.bias.device) * window.kv_len // size.q_len
    keys = torch.arange(window.kv_len, device=window.bias.device)
    return ((keys - places[:, None]).abs() <= window.kv_len // 4).view(1, 1, size.q_len, -1)
