"""`sage`: SageAttention 1 and 2, int8 scores without masks. Which one is there is seen from its signature.

Both take **kwargs and drop what they don't know, attn_mask, scale and dropout_p among it: only named parameters are
passed. The masks of 2.2 add the bias in base 2 and turn NaN where the first tile is -inf, so none is passed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from ..call import Call, is_regular
from ..decide import call_against
from ..decision import Code, Reason
from ..settings import Settings
from .base import Backend, BackendLimits
from .peers import EntryPoint, entry_point, heads_last, missing, on_gpu, softmax_scale, spoil, too_many_elements

# error: 0.0138 measured of 1.0.6, 0.039 of 2.2 on Hopper, whose P @ V is in e4m3.
LIMITS = BackendLimits(max_head_dim=128, causal="square", positive_scale=True, error=0.045)
_NEEDS = ("q", "k", "v", "tensor_layout", "is_causal", "sm_scale")
_CAPABILITIES_2 = ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0), (12, 1))
_FIRST_HEAD_DIMS = (64, 96, 128)
_FIRST_TILE = 64
# Values are scaled to this where they are cast to float16 and summed in it, which overflows from about 2000 on.
_LARGEST_VALUE = 16.0


def _found() -> EntryPoint:
    return entry_point("sageattention", "sageattn", _NEEDS)


def _is_first() -> bool:
    """Whether SageAttention 1 is installed: it returns no log-sum-exp."""
    return "return_lse" not in _found().parameters


def _unavailable(device: torch.device) -> Reason | None:
    return on_gpu(device, (8, 0), () if _is_first() else _CAPABILITIES_2)


def _reasons_against(call: Call, settings: Settings) -> Iterator[Reason]:
    yield from missing(call, _found, "sageattention")
    yield from call_against(call, LIMITS, _unavailable)
    if not is_regular(call):
        return
    yield from too_many_elements(call)
    if not _is_first():
        return
    head_dim, kv_len = call.query.shape[3], call.key.shape[2]
    if head_dim not in _FIRST_HEAD_DIMS and head_dim <= LIMITS.max_head_dim:
        yield Reason(Code.HEAD_DIM, head_dim, _FIRST_HEAD_DIMS)
    if kv_len % _FIRST_TILE:
        # It gives the keys beyond the end a part of the softmax: error 0.28 at 77 keys.
        yield Reason(Code.KV_LENGTH, kv_len, f"multiples of {_FIRST_TILE}")


def _reasons_now(call: Call) -> Iterator[Reason]:
    """Yield the reason that SageAttention 2 launches on the default stream whatever the current one is."""
    if _is_first():
        return
    device = call.query.device
    if torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
        yield Reason(Code.STREAM, "another one, or a graph is captured", "the default stream only")


def _run(call: Call, settings: Settings, attention: Callable[..., torch.Tensor]) -> torch.Tensor:
    query, key, value = call.query, call.key, call.value
    options: dict[str, object] = {"is_causal": call.is_causal, "sm_scale": softmax_scale(call)}
    if "smooth_k" in _found().parameters:
        # It would subtract the mean from its caller's keys.
        key = key - key.mean(dim=2, keepdim=True)
        options["smooth_k"] = False
    factor: torch.Tensor | None = None
    if _is_first() or torch.cuda.get_device_capability(query.device) < (8, 9):
        factor = value.abs().amax(dim=(2, 3), keepdim=True).float().clamp(min=1e-30) / _LARGEST_VALUE
        value = (value / factor).to(value.dtype)
    with _current_device_kept(query):
        out = _call(query, key, value, options)
    if factor is not None:
        repeated = factor.repeat_interleave(out.shape[1] // factor.shape[1], dim=1)
        out = (out * repeated).to(out.dtype)
    return spoil(out, call)


@contextlib.contextmanager
def _current_device_kept(query: torch.Tensor) -> Iterator[None]:
    """Be on the query's device meanwhile, where SageAttention 1 launches; 2 stays on it for good."""
    before = torch.cuda.current_device() if torch.cuda.is_available() else -1
    try:
        with torch.cuda.device_of(query):
            yield
    finally:
        if before >= 0 and torch.cuda.current_device() != before:
            torch.cuda.set_device(before)


def _call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, object]) -> torch.Tensor:
    function = _found().function
    assert function is not None
    out: torch.Tensor
    if heads_last(query):
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out = function(query, key, value, tensor_layout="NHD", **options)
        return out.transpose(1, 2)
    out = function(query, key, value, tensor_layout="HND", **options)
    return out


BACKENDS = (Backend("sage", LIMITS, _reasons_against, _run, _reasons_now),)
