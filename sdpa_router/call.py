"""What an attention call is, and what its metadata says; it reads no values and allocates nothing.

torch.compile traces these functions: no size may be formatted here, or a graph would be made for each length.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .decision import MaskInfo, MaskKind
from .mask import classify_mask

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, FakeTensor)


class Call(NamedTuple):
    """The arguments of scaled_dot_product_attention, as given."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def is_regular(call: Call) -> bool:
    """Whether query, key and value are plain tensors of four axes, which sizes can be asked of."""
    return is_plain(call) and call.query.dim() == call.key.dim() == call.value.dim() == 4


def needs_mask_cast(call: Call) -> bool:
    """Whether torch must get the mask in the query's dtype: a float32 one makes cuDNN answer garbage (torch 2.11)."""
    if call.attn_mask is None or not is_plain(call):
        return False
    half = call.query.dtype in (torch.float16, torch.bfloat16)
    return half and call.attn_mask.dtype == torch.float32 and call.query.device.type == "cuda"


_UNJUDGED = MaskInfo(MaskKind.INVALID, "not judged: the tensors are not plain, or of another rank")


def mask_info(call: Call) -> MaskInfo:
    """Return what the metadata of the call's mask says."""
    if call.attn_mask is None or not is_plain(call):
        return classify_mask(None, 1, 1, 1, 1) if call.attn_mask is None else _UNJUDGED
    if not (2 <= call.query.dim() <= 4 and call.key.dim() >= 2):
        return _UNJUDGED
    batch, heads = (1, 1, *call.query.shape[:-2])[-2:]
    return classify_mask(call.attn_mask, batch, heads, call.query.shape[-2], call.key.shape[-2])


def tensors_of(call: Call) -> tuple[torch.Tensor, ...]:
    """Return query, key, value and the mask if there is one."""
    given = (call.query, call.key, call.value)
    return given if call.attn_mask is None else (*given, call.attn_mask)


def is_plain(call: Call) -> bool:
    """Whether all tensors are plain() ones."""
    return all(plain(tensor) for tensor in tensors_of(call))


def plain(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is no subclass, nested or sparse tensor, which would have no shape or strides to ask for."""
    return type(tensor) in PLAIN_TYPES and not tensor.is_nested and tensor.layout == torch.strided


def kind_of(tensor: torch.Tensor) -> str:
    """Return what is not plain() about `tensor`, in words."""
    if type(tensor) not in PLAIN_TYPES:
        return type(tensor).__name__
    return "nested Tensor" if tensor.is_nested else f"Tensor of layout {tensor.layout}"
