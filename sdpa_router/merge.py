"""Merge attention over disjoint sets of keys by the log-sum-exp of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def merge_attention(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine partial results over disjoint keys into the result over all of them, exactly.

    outs: n tensors [B, H, Q, D] of any floating dtype.  lses: n tensors [B, H, Q], natural log, -inf where a part
    holds no key for a row: it is neutral. Returns out [B, H, Q, D] in the dtype of outs[0] and lse [B, H, Q] in
    float32 (float64 if all parts are); a row without any key gets out 0 and lse -inf. NaN in a part stays NaN.
    Raises ValueError if the parts don't fit. The sum is the one of blockwise attention (Rabe and Staats, 2021).

    >>> left = int8_attention(q, k[:, :, :100], v[:, :, :100], return_lse=True)
    >>> right = int8_attention(q, k[:, :, 100:], v[:, :, 100:], return_lse=True)
    >>> out, lse = merge_attention(*zip(left, right))
    """
    if not (isinstance(outs, Iterable) and isinstance(lses, Iterable)):
        raise ValueError(
            f"merge_attention takes sequences of tensors; given {type(outs).__name__}, {type(lses).__name__}"
        )
    outs, lses = list(outs), list(lses)
    _check(outs, lses)
    exact = all(part.dtype == torch.float64 for part in (*outs, *lses))
    dtype = torch.float64 if exact else torch.float32
    parts = torch.stack([lse.to(dtype) for lse in lses])
    lse = torch.logsumexp(parts, dim=0)
    weights = torch.exp(parts - torch.where(lse == -torch.inf, 0, lse))
    total = torch.zeros_like(outs[0], dtype=dtype)
    for out, part, weight in zip(outs, parts, weights, strict=True):
        # Not only weighted by 0: an empty part may hold NaN.
        total += torch.where(part[..., None] == -torch.inf, 0, weight[..., None] * out.to(dtype))
    return total.to(outs[0].dtype), lse


def _check(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> None:
    if not outs or len(outs) != len(lses):
        raise ValueError(f"merge_attention takes as many lses as outs, at least one; given {len(outs)} and {len(lses)}")
    strange = [part for part in (*outs, *lses) if not isinstance(part, torch.Tensor)]
    if strange:
        raise ValueError(f"merge_attention takes tensors; given {type(strange[0]).__name__}")
    if any(part.is_nested or part.layout != torch.strided for part in (*outs, *lses)):
        raise ValueError("merge_attention takes dense tensors; given nested or sparse ones")
    devices = {part.device: None for part in (*outs, *lses)}
    if len(devices) > 1:
        raise ValueError(f"merge_attention takes tensors on one device; given {', '.join(map(str, devices))}")
    shape = outs[0].shape
    if len(shape) == 0:
        raise ValueError("merge_attention takes outs [..., Q, D]; given a scalar")
    for out, lse in zip(outs, lses, strict=True):
        if out.shape != shape or lse.shape != shape[:-1]:
            raise ValueError(
                f"merge_attention takes outs of one shape and lses of that shape without its last axis; given "
                f"{list(out.shape)} and {list(lse.shape)} beside {list(shape)}"
            )
        if not (out.is_floating_point() and lse.is_floating_point()):
            raise ValueError(f"merge_attention takes floating tensors; given {out.dtype} and {lse.dtype}")
