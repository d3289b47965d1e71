"""`fa3`: FlashAttention-3 on Hopper, exact, without masks; PyPI's fa3-fwd or the original's flash_attn_interface."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping

import torch

from ..call import Call, is_regular
from ..decide import call_against
from ..decision import Code, Reason
from ..settings import Settings
from .base import Backend, BackendLimits
from .peers import EntryPoint, entry_point, missing, on_gpu, softmax_scale, uneven_strides

# Its causal mask is aligned bottom right; scores are scaled after their maximum was taken, so the scale is positive.
LIMITS = BackendLimits(causal="square", positive_scale=True, lse=True, error=0.005)
_MODULES = ("fa3_fwd_interface", "flash_attn_interface")
_NEEDS = ("q", "k", "v", "softmax_scale", "causal")
# What it reads in one piece: 16 bytes, which strides and addresses must be multiples of.
_ALIGNMENT = 8


def _found() -> EntryPoint:
    found = [entry_point(module, "flash_attn_func", _NEEDS) for module in _MODULES]
    return next(
        (point for point in found if point.function), next((point for point in found if point.installed), found[0])
    )


@functools.cache
def _build_flags() -> Mapping[str, bool]:
    """Return what the installed wheel was built without: fa3-fwd 0.0.3 has no float16."""
    for module in ("fa3_fwd_config", "flash_attn_config"):
        try:
            flags: Mapping[str, bool] = importlib.import_module(module).CONFIG["build_flags"]
        except (ImportError, AttributeError, KeyError):
            continue
        return flags
    return {}


def _unavailable(device: torch.device) -> Reason | None:
    return on_gpu(device, (9, 0), ((9, 0),))


def _reasons_against(call: Call, settings: Settings) -> Iterator[Reason]:
    yield from missing(call, _found, "FlashAttention-3, such as PyPI's fa3-fwd")
    yield from call_against(call, LIMITS, _unavailable)
    if not is_regular(call):
        return
    head_dim = call.query.shape[3]
    if head_dim % _ALIGNMENT:
        yield Reason(Code.HEAD_DIM, head_dim, f"multiples of {_ALIGNMENT}")
    if call.query.dtype == torch.float16 and _build_flags().get("FLASHATTENTION_DISABLE_FP16"):
        yield Reason(Code.DTYPE, torch.float16, "bfloat16: this build has no float16")
    yield from uneven_strides(call, _ALIGNMENT)


def _reasons_now(call: Call) -> Iterator[Reason]:
    """Yield the reason that a tensor begins where its rows can't be read in pieces of 16 bytes."""
    if (call.query.data_ptr() | call.key.data_ptr() | call.value.data_ptr()) % 16:
        yield Reason(Code.STRIDES, "a tensor that begins between 16-byte borders", "aligned ones")


def _run(call: Call, settings: Settings, attention: Callable[..., torch.Tensor]) -> torch.Tensor:
    function = _found().function
    assert function is not None
    query, key, value = (tensor.transpose(1, 2) for tensor in (call.query, call.key, call.value))
    answer = function(query, key, value, softmax_scale=softmax_scale(call), causal=call.is_causal)
    out: torch.Tensor = answer[0] if isinstance(answer, tuple) else answer  # older ones return (out, lse)
    return out.transpose(1, 2)


BACKENDS = (Backend("fa3", LIMITS, _reasons_against, _run, _reasons_now),)
