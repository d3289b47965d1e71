"""Buffers that int8_attention() is to fill: whether they fit, and whether writing to them overwrites something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .decide import PLAIN_TYPES, Call
from .decision import show

# Steps that numpy may take to find out whether two layouts that interleave share an element.
_MAX_WORK = 100_000


def check_buffer(name: str, buffer: torch.Tensor, query: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    """Raise TypeError or ValueError, which names the buffer, if it can't hold the kernel's answer."""
    if not isinstance(buffer, torch.Tensor):
        raise TypeError(f"{name} is a {type(buffer).__name__}; accepted: None or a tensor")
    if type(buffer) not in PLAIN_TYPES or buffer.is_nested or buffer.layout != torch.strided:
        raise ValueError(
            f"{name} is a {type(buffer).__name__} of layout {buffer.layout}; accepted: a plain dense tensor"
        )
    fits = buffer.shape == shape and buffer.dtype == dtype and buffer.device == query.device
    contiguous = len(shape) == 3 or shape[-1] == 1 or buffer.stride(-1) == 1  # lse may have any strides
    if not fits or not contiguous or _overlaps_itself(buffer):
        layout = "strides" if len(shape) == 3 else "a contiguous last axis and strides"
        raise ValueError(
            f"{name} is {show(buffer.dtype)} {show(buffer.shape)} with strides {show(buffer.stride())} on "
            f"{buffer.device}; accepted: {show(dtype)} {show(shape)} on {query.device}, with {layout} that give every "
            "element a place of its own"
        )
    if buffer.requires_grad:
        raise ValueError(f"{name} is a tensor that requires a gradient; accepted: one that requires none")


def check_memory(
    call: Call,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    more: Mapping[str, torch.Tensor | None] | None = None,
) -> None:
    """Raise ValueError if a buffer shares memory with an argument, with one of `more` or with the other buffer.

    Not while tracing.
    """
    if torch.compiler.is_compiling() or isinstance(call.query, FakeTensor):
        return
    arguments = {"query": call.query, "key": call.key, "value": call.value, "attn_mask": call.attn_mask, **(more or {})}
    for name, buffer, others in (("out", out, {**arguments, "lse": lse}), ("lse", lse, arguments)):
        for other, tensor in others.items():
            if buffer is not None and tensor is not None and _share_memory(buffer, tensor):
                raise ValueError(
                    f"{name} is memory that {other} uses; accepted: a buffer that shares none with {other}"
                )


def _overlaps_itself(buffer: torch.Tensor) -> bool:
    """Whether elements may share a place: none do if each stride leads past all that the smaller ones reach."""
    axes = [(stride, size) for size, stride in zip(buffer.shape, buffer.stride(), strict=True) if size != 1]
    if torch.compiler.is_compiling():
        return any(stride == 0 for stride, _ in axes)  # ordering sizes would tie the graph to them
    reach = 0
    for stride, size in sorted(axes):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether an element of `one` lies in memory that `other` uses; True also where that takes long to find out."""
    if one.device.type == "meta" or one.device != other.device:
        return False
    (start, end), (other_start, other_end) = _range(one), _range(other)
    if end <= other_start or other_end <= start:
        return False
    import numpy

    one_array, other_array = numpy.asarray(_Memory(one)), numpy.asarray(_Memory(other))
    shares: Callable[..., bool] = numpy.shares_memory  # its stubs know two of the values of max_work
    try:
        # Numpy answers from shapes and strides, and reads nothing.
        return shares(one_array, other_array, max_work=_MAX_WORK)
    except (RuntimeError, ValueError):  # numpy's TooHardError is a RuntimeError
        return True


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address that `tensor` uses and the one after its last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.element_size()


class _Memory:
    """Where a tensor's elements lie, as an array of bytes of unknown meaning."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), True),
        }
