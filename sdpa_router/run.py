"""Run a call that was decided: the only place that calls a kernel or torch's own SDPA."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from .backends.base import Backend
from .call import Call, kind_of, plain, tensors_of
from .kernels.int8_attention import op as _op  # registers the operators
from .kernels.int8_attention.alike import check_of
from .kernels.int8_attention.configs import describable
from .kernels.sparse_attention import op as _sparse_op  # noqa: F401 (registers more)
from .mask import key_view
from .settings import OFF, Settings, active

if TYPE_CHECKING:
    from .kernels.sparse_attention.summary import Summary
    from .qk import QuantizedQK
    from .sighting import Sighting

Attention = Callable[..., torch.Tensor]

_is_alias_of: Callable[[torch.Tensor, torch.Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]

# What F.scaled_dot_product_attention was before the router took its place; None while it is not there.
below: Attention | None = None


def torch_attention() -> Attention:
    """Return torch's function, or a foreign one that had replaced it before the router came."""
    return F.scaled_dot_product_attention if below is None else below


def int8(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    pv: str,
    precision: str,
    *,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse [B, H, Q]) of the int8 kernel, for a call that was decided; lse is empty unless asked for."""
    mask = None if attn_mask is None else key_view(attn_mask)
    number = None if scale is None else float(scale)
    return _op.attend(query, key, value, mask, is_causal, number, return_lse, pv, precision)


# int8() for a call of int8_attention() that was not judged yet: None unless it has answered one like it.
int8_again = _op.attend_again


def int8_into(call: Call, pv: str, precision: str, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Let the int8 kernel answer `call`, which was decided, into buffers: out like the query, lse float32 [B, H, Q]."""
    query, key, value, attn_mask, _, is_causal, scale, _ = call
    mask = None if attn_mask is None else key_view(attn_mask)
    number = None if scale is None else float(scale)
    _op.attend_into(query, key, value, mask, is_causal, number, pv, precision, out, lse)
    if not torch.compiler.is_compiling():
        # So that autograd notices where it had saved a buffer; a graph that writes to one does this by itself.
        torch.autograd.graph.increment_version([buffer for buffer in (out, lse) if buffer is not None])


def quantized_into(
    quantized: QuantizedQK, value: torch.Tensor | None, is_causal: bool, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Let the int8 kernel answer a query and key that are quantised in its layout; value: None for its own."""
    from .kernels.int8_attention.forward import attention
    from .kernels.int8_attention.quantize import Quantized

    prepared = quantized.prepared
    assert prepared is not None
    config, key_scale = prepared.config, quantized.key_scale
    parts = Quantized(
        quantized.query,
        quantized.query_scale,
        quantized.key,
        key_scale.unflatten(2, (-1, 4)) if quantized.layout.key.scales == 4 else key_scale,
        prepared.bias,
        prepared.anchor,
        quantized.lse_term,
        prepared.key_norm,
        prepared.live,
        kv_len=quantized.kv_len,
    )
    if value is not None and config.tma and not describable(value):
        value = value.contiguous()
    values = quantized.value if value is None else value
    assert values is not None
    attention(parts, values, config, is_causal=is_causal, out=out, lse=lse)
    torch.autograd.graph.increment_version([buffer for buffer in (out, lse) if buffer is not None])


def empty_outputs(query: torch.Tensor, *, lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) to be filled, with the strides that the int8 kernel gives by itself."""
    return _op._empty_out(query, lse)


def backend(
    chosen: Backend, call: Call, settings: Settings, attention: Attention, sighting: Sighting | None = None
) -> torch.Tensor:
    """Answer `call` with a backend that was decided on, heads inside the sequence in memory where the query's are.

    sighting: of the decision; it keeps what is known of the answers. Raises TypeError for what is no answer to this
    call, and whatever the backend raises.
    """
    outer = active.name
    active.name = OFF  # calls that it makes itself are torch's: routed ones would come back to it for ever
    try:
        out = chosen.run(call, settings, attention)
    finally:
        active.name = outer
    fits = None if sighting is None else sighting.fits
    if fits is not None and fits(call.query, out):
        return out
    found = _own_answer(chosen, call, out)
    if sighting is not None and fits is None and found is out:
        sighting.fits = check_of((call.query, out)) or _never
    return found


def _never(query: torch.Tensor, out: object) -> bool:
    return False


def _own_answer(chosen: Backend, call: Call, out: object) -> torch.Tensor:
    """Return `out` if it is an answer to `call` as torch gives it, else what makes one of it, or raise TypeError."""
    query = call.query
    if not isinstance(out, torch.Tensor) or not _fits(out, call):
        raise TypeError(
            f"backend {chosen.name!r} answered with {_described(out)}; accepted: a tensor "
            f"{[*query.shape[:3], call.value.shape[3]]} of {query.dtype} on {query.device}, "
            "with a contiguous last axis"
        )
    if out.requires_grad or type(out) is torch.nn.Parameter:
        out = out.detach()  # calls that need a gradient are torch's
    if 0 < query.stride(1) < query.stride(2) and not 0 < out.stride(1) < out.stride(2):
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    # Such as the value of an only key, expanded: whoever writes to the answer must not write to an argument.
    return out.clone() if any(_is_alias_of(out, tensor) for tensor in tensors_of(call)) else out


def _fits(out: torch.Tensor, call: Call) -> bool:
    """Whether `out` is such a tensor as torch would answer `call` with."""
    if not plain(out):
        return False
    query, head_dim = call.query, call.value.shape[-1]
    right = out.shape == (*query.shape[:-1], head_dim) and out.dtype is query.dtype and out.device == query.device
    return right and (out.stride(-1) == 1 or head_dim <= 1)


def _described(out: object) -> str:
    if not isinstance(out, torch.Tensor):
        return f"a {type(out).__name__}"
    if not plain(out):
        return f"a {kind_of(out)}"
    return f"{list(out.shape)} of {out.dtype} on {out.device} with strides {list(out.stride())}"


def native(call: Call, attention: Attention, *, cast_mask: bool) -> torch.Tensor:
    """Answer `call` with `attention`, torch's function or what stood in its place, with the arguments untouched.

    cast_mask: what needs_mask_cast() says; the one exception.
    """
    query, key, value, mask, dropout_p, is_causal, scale, enable_gqa = call
    if cast_mask and mask is not None:
        mask = _cast_mask(mask, query.dtype)
    if scale is None and enable_gqa is False:
        return attention(query, key, value, mask, dropout_p, is_causal)
    return attention(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _cast_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a mask: expanded axes stay expanded, finite values stay finite and -inf stays -inf."""
    compact = mask
    for axis, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if stride == 0 and size > 1:
            compact = compact.narrow(axis, 0, 1)
    limit = torch.finfo(dtype).max
    clamped = torch.where(compact.isinf(), compact, compact.clamp(-limit, limit))
    return clamped.to(dtype).expand(mask.shape)


def block_sparse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tiles: torch.Tensor,
    key_mask: torch.Tensor | None,
    scale: float | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) over the key tiles that `tiles` [1 or B, 1 or H, nq, nk] keeps."""
    number = None if scale is None else float(scale)
    out, lse = torch.ops.sdpa_router.block_sparse_attention(query, key, value, tiles, key_mask, number, return_lse)
    return out, lse


def banded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    windows: tuple[int, ...],
    floor: float,
    key_mask: torch.Tensor | None,
    scale: float | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of windows in the numbers of kernels.sparse_attention.windows.parse()."""
    number = None if scale is None else float(scale)
    out, lse = torch.ops.sdpa_router.banded_attention(query, key, value, windows, floor, key_mask, number, return_lse)
    return out, lse


def by_tile(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor,
    summary: Summary,
    scale: float | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) under a dense mask [1 or B, 1 or H, Q, K] with its summary; lse is empty unless asked for."""
    number = None if scale is None else float(scale)
    out, lse = torch.ops.sdpa_router.tiled_mask_attention(query, key, value, attn_mask, *summary, number, return_lse)
    return out, lse
