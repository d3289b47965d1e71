"""What the adapters of other packages share: finding their functions by signature, and reasons in layout."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ..call import Call, is_plain
from ..decision import Code, Reason
from .base import said


class EntryPoint(NamedTuple):
    """A function of another package with the names of its parameters, or None and why there is none.

    installed: whether there is something that could be repaired.
    """

    function: Callable[..., Any] | None
    parameters: frozenset[str] = frozenset()
    why: str = ""
    installed: bool = True


@functools.cache
def entry_point(module: str, name: str, needs: tuple[str, ...]) -> EntryPoint:
    """Import `module` and return its function `name` if it has the parameters `needs`; asked once a process.

    A package that fails to import gives its error's own words.
    """
    try:
        if sys.modules.get(module) is None and importlib.util.find_spec(module) is None:
            return EntryPoint(None, why=f"{module} is not installed", installed=False)
        function = getattr(importlib.import_module(module), name)
        parameters = frozenset(inspect.signature(function).parameters)
    except (Exception, SystemExit) as error:  # importing somebody's package may raise anything: it becomes the reason
        return EntryPoint(None, why=f"{module} can't be used: {said(error)}")
    if missing := [parameter for parameter in needs if parameter not in parameters]:
        return EntryPoint(None, why=f"{module}.{name}() has no parameter {', '.join(missing)}")
    return EntryPoint(function, parameters)


def missing(call: Call, find: Callable[[], EntryPoint], needs: str) -> Iterator[Reason]:
    """Yield the reason that there is no such package, or a broken one, whatever else is against it on this device."""
    if is_plain(call) and call.query.device.type != "meta" and find().function is None:
        yield Reason(Code.PACKAGE, find().why, needs)


def on_gpu(device: torch.device, least: tuple[int, int], only: tuple[tuple[int, int], ...] = ()) -> Reason | None:
    """Return the reason why `device` is no CUDA GPU of capability `least` or newer, or of one in `only`."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return Reason(Code.DEVICE, f"{device.type} tensors", "CUDA tensors, on a GPU that torch can use")
    if torch.version.hip:
        return Reason(Code.CAPABILITY, "a ROCm one", "CUDA GPUs")
    capability = torch.cuda.get_device_capability(device)
    if capability < least or (only and capability not in only):
        accepted = ", ".join(map(_sm, only)) if only else f"{_sm(least)} or newer"
        return Reason(Code.CAPABILITY, _sm(capability), accepted)
    return None


def _sm(capability: tuple[int, int]) -> str:
    return "sm_{}{}".format(*capability)


def uneven_strides(call: Call, multiple: int) -> Iterator[Reason]:
    """Yield the reason that a stride of an axis that is walked is no positive multiple of `multiple` elements."""
    given = [_walked(tensor) for tensor in (call.query, call.key, call.value)]
    if any(stride <= 0 or stride % multiple for strides in given for stride in strides):
        yield Reason(Code.STRIDES, given, f"positive multiples of {multiple}")


def _walked(tensor: torch.Tensor) -> list[int]:
    pairs = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return [stride for size, stride in pairs if size > 1]


def too_many_elements(call: Call) -> Iterator[Reason]:
    """Yield the reason that offsets into a tensor don't fit 32 bits."""
    spans = [
        sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        for tensor in (call.query, call.key, call.value)
    ]
    if max(spans) >= 2**31:
        yield Reason(Code.SHAPE, f"a tensor over {max(spans)} elements", "offsets under 2**31")


def heads_last(query: torch.Tensor) -> bool:
    """Whether the heads lie inside the sequence in memory, as models permute them."""
    return 0 < query.stride(1) < query.stride(2)


def softmax_scale(call: Call) -> float:
    """Return the scale of a call as a number."""
    return float(call.query.shape[-1] ** -0.5 if call.scale is None else call.scale)


def spoil(out: torch.Tensor, call: Call, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Make `out` NaN in place where torch answers NaN because an argument isn't finite, and return it.

    Kernels that round to int8 lose it: the largest of numbers and NaN is a number to them. A query spoils its row, a
    key its head, a value its channel; bias: 0, or NaN to be added to a head. Looking first would wait for the device.
    """
    largest = functools.partial(torch.linalg.vector_norm, ord=float("inf"), keepdim=True)
    # Each times 0 before the sum, which float16 need not hold where it holds both.
    seen = largest(call.key, dim=(2, 3)) * 0 + largest(call.value, dim=2) * 0
    group = call.query.shape[1] // seen.shape[1]
    if group > 1:
        seen = seen.repeat_interleave(group, dim=1)
    # In one pass: 0 * 0 is 0, and NaN times either of them NaN.
    return out.addcmul_(seen if bias is None else seen + bias, largest(call.query, dim=-1) * 0)
