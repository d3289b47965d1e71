"""`comfy`: comfy-kitchen's int8 attention, with int8 probabilities: a key bias, no causal mask, no log-sum-exp."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ..call import Call, is_regular
from ..decide import call_against
from ..decision import Code, MaskKind, Reason
from ..mask import key_view
from ..settings import Settings
from .base import Backend, BackendLimits, mask_blind, said
from .peers import EntryPoint, entry_point, missing, on_gpu, softmax_scale, spoil, uneven_strides

LIMITS = BackendLimits(masks=(MaskKind.PER_KEY,), causal="none", positive_scale=True, blind=True, error=0.02)
_NEEDS = ("q", "k", "v", "scale", "attn_mask")
_MIN_CAPABILITY = (7, 5)
_MIN_DRIVER = 13000
_PACKAGE = "comfy-kitchen with its CUDA extension"
# Heads of these sizes are read in place, by rows of 4 elements; others are padded into a copy.
_IN_PLACE = (64, 128, 256)
_ABSORBS = 2.0**24


def _found() -> EntryPoint:
    return entry_point("comfy_kitchen", "int8_attention", _NEEDS)


@functools.cache
def _driver() -> int | None:
    """Return the CUDA version of the driver as 1000 major + 10 minor, None where it can't be asked."""
    version = ctypes.c_int()
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        failed = library.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value


def _unavailable(device: torch.device) -> Reason | None:
    elsewhere = on_gpu(device, _MIN_CAPABILITY)
    if elsewhere is not None or _found().function is None:
        return elsewhere
    driver = _driver()
    if driver is not None and driver < _MIN_DRIVER:
        return Reason(Code.DRIVER, f"{driver // 1000}.{driver % 1000 // 10}", "13.0 or newer")
    available = entry_point("comfy_kitchen", "int8_attention_is_available", ())
    try:
        if available.function is None or available.function(device):
            return None
        why = "comfy_kitchen says that its extension does not run here"
    except Exception as error:  # as when it is imported
        why = f"comfy_kitchen can't be used: {said(error)}"
    return Reason(Code.PACKAGE, why, _PACKAGE)


def _reasons_against(call: Call, settings: Settings) -> Iterator[Reason]:
    yield from missing(call, _found, _PACKAGE)
    yield from call_against(call, LIMITS, _unavailable)
    yield from mask_blind(call, LIMITS, settings)
    if is_regular(call) and call.query.shape[3] in _IN_PLACE:
        yield from uneven_strides(call, 4)


class _Anchored(NamedTuple):
    """What comfy-kitchen is asked with, and what to add to its answer: 0 or NaN, None where no bias can hold one."""

    query: torch.Tensor
    mask: torch.Tensor
    poison: torch.Tensor | None = None


def _anchored(query: torch.Tensor, mask: torch.Tensor, kv_len: int) -> _Anchored:
    """Give a mask a value in memory for each key, and move a bias so that its largest value in a row is 0.

    comfy-kitchen answers 0 where all are under -34657. Softmax doesn't see it, and a row that is -inf everywhere stays
    so. From 2**24 on a bias absorbs the scores, as in float32: there the query is set to 0. It answers 0, too, where
    a bias is NaN or +inf, which softmax turns into NaN: looking for those would wait for the device.
    """
    bias = key_view(mask)
    if bias.shape[3] != kv_len or bias.stride(3) != 1:
        bias = bias.expand(-1, -1, -1, kv_len).contiguous()
    if bias.dtype == torch.bool:
        return _Anchored(query, bias)
    bias = bias.float()
    largest = bias.amax(dim=-1, keepdim=True)  # NaN if one is
    anchor = largest.masked_fill(largest == -float("inf"), 0)
    scores_count = (largest.abs() < _ABSORBS).to(query.dtype)
    return _Anchored(query * scores_count, bias - anchor, (anchor * 0).to(query.dtype))


def _run(call: Call, settings: Settings, attention: Callable[..., torch.Tensor]) -> torch.Tensor:
    function = _found().function
    assert function is not None
    query, mask, poison = call.query, None, None
    if call.attn_mask is not None:
        query, mask, poison = _anchored(query, call.attn_mask, call.key.shape[2])
    out: torch.Tensor = function(query, call.key, call.value, scale=softmax_scale(call), attn_mask=mask)
    return spoil(out, call, poison)


BACKENDS = (Backend("comfy", LIMITS, _reasons_against, _run),)
