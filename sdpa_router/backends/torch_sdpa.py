"""`torch-cudnn`, `torch-flash`, `torch-efficient`, `torch-math`: one of torch's own backends on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import run
from ..call import Call, is_regular, needs_mask_cast
from ..decision import Code, MaskKind, Reason
from ..settings import Settings
from .base import Backend, BackendLimits

_ALL = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
_CAN_USE = {
    SDPBackend.CUDNN_ATTENTION: "can_use_cudnn_attention",
    SDPBackend.FLASH_ATTENTION: "can_use_flash_attention",
    SDPBackend.EFFICIENT_ATTENTION: "can_use_efficient_attention",
}
# Over so many elements of a dense mask the efficient backend of some releases answers garbage.
_MOST_MASK = 2**32


def _reasons_against(chosen: SDPBackend, call: Call, settings: Settings) -> Iterator[Reason]:
    if not is_regular(call):
        yield Reason(Code.RANK, "other than four", "plain tensors of four")
        return
    if call.query.device.type == "meta":  # by shape alone: torch's checks ask the GPU
        if chosen is SDPBackend.FLASH_ATTENTION and call.attn_mask is not None:
            yield Reason(Code.MASK, call.attn_mask.shape, "none")
        return
    if call.query.device.type != "cuda" or not torch.cuda.is_available():
        yield Reason(Code.DEVICE, f"{call.query.device.type} tensors", "CUDA tensors, on a GPU that torch can use")
        return
    dense = call.query.shape[2] * call.key.shape[2]
    if chosen is SDPBackend.EFFICIENT_ATTENTION and call.attn_mask is not None and dense > _MOST_MASK:
        yield Reason(Code.SHAPE, "a mask of over 2**32 pairs", "smaller ones")
    if chosen in _CAN_USE and not _usable(chosen, call):
        yield Reason(Code.TORCH_REFUSES, chosen.name, "a call that torch's own check accepts")


def _usable(chosen: SDPBackend, call: Call) -> bool:
    query, key, value, mask, dropout_p, is_causal, _, enable_gqa = call
    if mask is not None and needs_mask_cast(call):
        mask = torch.empty_strided(mask.shape, mask.stride(), dtype=query.dtype, device="meta")
    if mask is not None and mask.dim() and mask.shape[-1] == 1:
        # torch expands it after its check, and its memory-efficient kernel raises over the stride of 0.
        mask = mask.expand(*mask.shape[:-1], key.shape[2])
    try:
        params = torch.backends.cuda.SDPAParams(query, key, value, mask, float(dropout_p), is_causal, enable_gqa)
    except (TypeError, ValueError):
        return False
    return bool(getattr(torch.backends.cuda, _CAN_USE[chosen])(params, False))


def _run(chosen: SDPBackend, call: Call, settings: Settings, attention: Callable[..., torch.Tensor]) -> torch.Tensor:
    _settle_order(call.query.device)
    # The choice is one of the process, so the others stay allowed for what other threads do meanwhile.
    order = [chosen, *(backend for backend in _ALL if backend is not chosen)]
    with sdpa_kernel(order, set_priority=True):
        return run.native(call, attention, cast_mask=needs_mask_cast(call))


@functools.cache
def _settle_order(device: torch.device) -> None:
    """Let torch choose once by itself: only then it sets its own order, over what sdpa_kernel() asked for before."""
    query = torch.empty(1, 1, 1, 8, dtype=torch.float16, device=device)
    torch._fused_sdp_choice(query, query, query)


def _backend(name: str, chosen: SDPBackend, *masks: MaskKind) -> Backend:
    limits = BackendLimits(masks=masks, error=0.005)
    return Backend(name, limits, functools.partial(_reasons_against, chosen), functools.partial(_run, chosen))


_MASKS = (MaskKind.PER_KEY, MaskKind.FULL)
BACKENDS = (
    _backend("torch-cudnn", SDPBackend.CUDNN_ATTENTION, *_MASKS),
    _backend("torch-flash", SDPBackend.FLASH_ATTENTION),
    _backend("torch-efficient", SDPBackend.EFFICIENT_ATTENTION, *_MASKS),
    _backend("torch-math", SDPBackend.MATH, *_MASKS),
)
