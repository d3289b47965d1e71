"""Angles of rms_rope_quantize(): the forms that cosines and sines may have, and what is said of others."""

from __future__ import annotations

import torch

from .decision import show


def tables_of(
    cos_name: str,
    sin_name: str,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    whole: torch.Tensor,
    rotary: int,
    interleaved: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Cosines and sines as the kernels read them, [1 or B, 1 or H, L, R / 2] with the same strides; None for no RoPE.

    Raises ValueError for what does not fit `whole` [B, H, L, D], naming the argument, what was given and expected.
    """
    if cos is None or sin is None:
        if cos is not None or sin is not None:
            missing, there = (sin_name, cos_name) if sin is None else (cos_name, sin_name)
            raise ValueError(f"{missing} is None; expected a tensor, for {there} is given")
        return None, None
    cos = _table(cos_name, cos, whole, rotary, interleaved, 0)
    sin = _table(sin_name, sin, whole, rotary, interleaved, 1)
    if cos.stride() != sin.stride() or cos.shape != sin.shape:
        cos, sin = (one.contiguous() for one in torch.broadcast_tensors(cos, sin))
    return cos, sin


def _table(
    name: str, table: torch.Tensor, whole: torch.Tensor, rotary: int, interleaved: bool, place: int
) -> torch.Tensor:
    """[1 or B, 1 or H, L, R / 2]; of each angle kept twice, the one at `place`."""
    if not isinstance(table, torch.Tensor):
        raise ValueError(f"{name} is {shown(table)}; expected a tensor")
    batch, heads, length, _ = whole.shape
    full = table[None, None] if table.dim() == 2 else table[:, None] if table.dim() == 3 else table
    fits = full.dim() == 4 and full.shape[0] in (1, batch) and full.shape[1] in (1, heads) and full.shape[2] == length
    if not fits or full.shape[3] not in (rotary // 2, rotary) or not table.is_floating_point():
        raise ValueError(
            f"{name} is {show(table.dtype)} {show(table.shape)}; expected floating [{length}, {rotary // 2}] or "
            f"[{length}, {rotary}], or with a batch axis of 1 or {batch} before, or that and heads of 1 or {heads}"
        )
    if table.device != whole.device:
        raise ValueError(f"{name} is on {table.device}; expected {whole.device}")
    check_gradient(name, table)
    if full.shape[3] == rotary // 2:
        return full
    return full[..., place::2] if interleaved else full[..., : rotary // 2]


def check_gradient(name: str, given: torch.Tensor | None) -> None:
    """Raise ValueError for a tensor that would lose its gradient."""
    if given is not None and given.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient; expected torch.no_grad(), for there is no backward")


def shown(given: object) -> str:
    """What was given, for an error: the shape of a tensor, the type of anything else."""
    return show(given.shape) if isinstance(given, torch.Tensor) else f"of type {type(given).__name__}"
