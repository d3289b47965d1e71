"""Attention with a dense mask by tile: masked tiles are skipped, constant ones add a number, mixed ones are read."""

from __future__ import annotations

from typing import Literal, overload

import torch

from . import run
from .decide import Call, decide_kernel, kernel_against
from .decision import Code, Decision, MaskKind, Reason, Route, UnsupportedError
from .mask import classify_mask, key_view
from .mask_summary import full_view, summary_of
from .recent import answered_before, remember_answered

TREAT_AS = ("full", "key")
_FULL = "full mask"  # in recent.py, instead of a mode of int8_attention(), which takes no such mask


@overload
def dense_mask_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor,
    *,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    treat_as: str = "full",
) -> torch.Tensor: ...


@overload
def dense_mask_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor,
    *,
    scale: float | None = None,
    return_lse: Literal[True],
    treat_as: str = "full",
) -> tuple[torch.Tensor, torch.Tensor]: ...


def dense_mask_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    treat_as: str = "full",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend with a mask that has a row for each query, with int8 scores; or raise, nothing falls back.

    query [B, H, Q, D], key and value [B, Hkv, K, D] with H a multiple of Hkv, fp16 or bf16, D up to 256.
    attn_mask: as SDPA takes it, broadcasting to [B, H, Q, K]; axes of size 1 or stride 0 are never expanded. It is
    summarised at its first sight, in one pass on the device; a mask that was written to is summarised anew. Writes
    that torch doesn't count, as those through `.data` or NumPy, are not seen: clone() such a mask for each state.
    treat_as: "full", or "key" for the outer product of which keys and which queries are valid (padded text): which keys
    count is then taken from the mask's columns, and rows that see no key answer 0. It is on the caller that the mask is
    such a product, or additive with rows that are equal or -inf altogether, not finfo.min: that is not checked.
    Returns out [B, H, Q, D], or with return_lse (out, lse): lse float32 [B, H, Q], natural logarithm. A row without a
    key gets out 0 and lse -inf; NaN or +inf in the mask gives NaN in the rows that see it.
    Raises UnsupportedError for what the kernel can't do and ValueError for an unknown treat_as.
    """
    if treat_as not in TREAT_AS:
        raise ValueError(f"treat_as is {treat_as!r}; accepted: {' or '.join(TREAT_AS)}")
    call = Call(query, key, value, attn_mask, 0.0, False, scale, True)
    kind = MaskKind.FULL
    if not answered_before(call, _FULL, "auto"):
        kind = _kind_of(call)
        if kind is MaskKind.FULL:
            remember_answered(call, _FULL, "auto")
    if kind is MaskKind.PER_KEY:
        answer = run.int8(query, key, value, attn_mask, False, scale, "auto", "auto", return_lse=return_lse)
    elif treat_as == "key":
        answer = _by_key(query, key, value, full_view(attn_mask, key.shape[2]), scale, return_lse)
    else:
        mask = full_view(attn_mask, key.shape[2])
        # What is remembered of a mask can't be traced: in a graph of torch.compile this is a break.
        summary = torch.compiler.disable(summary_of)(mask) if torch.compiler.is_dynamo_compiling() else summary_of(mask)
        answer = run.by_tile(query, key, value, mask, summary, scale, return_lse)
    return answer if return_lse else answer[0]


def _kind_of(call: Call) -> MaskKind:
    """How the mask of a call varies; raises UnsupportedError for what speaks against the kernel, a full mask aside."""
    reasons = [reason for reason in kernel_against(call, "auto", "auto") if reason.code is not Code.FULL_MASK]
    if reasons:
        raise UnsupportedError(Decision(Route.SDPA, decide_kernel(call, "auto", "auto").mask, tuple(reasons)))
    batch, heads, q_len, _ = call.query.shape
    info = classify_mask(call.attn_mask, batch, heads, q_len, call.key.shape[2])
    if info.kind is MaskKind.NONE:
        reason = Reason(Code.INVALID_MASK, None, (batch, heads, q_len, call.key.shape[2]))
        raise UnsupportedError(Decision(Route.SDPA, info, (reason,)))
    return info.kind


def _by_key(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Answer with the vector of keys that an outer product holds; rows that see no key get 0 and -inf."""
    if mask.dtype == torch.bool:
        keys, rows = mask.any(2, keepdim=True), mask.any(3)
    else:
        keys, rows = mask.amax(2, keepdim=True), mask.amax(3) != -torch.inf
    out, lse = run.int8(query, key, value, key_view(keys), False, scale, "auto", "auto", return_lse=return_lse)
    out.masked_fill_(~rows[..., None], 0)
    return out, lse.masked_fill_(~rows, -torch.inf) if return_lse else lse
