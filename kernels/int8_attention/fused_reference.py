"""Plain-torch reference of RMSNorm and RoPE in float64; no code in common with the kernels, for tests."""

from __future__ import annotations

import torch


def rms_rope_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    interleaved: bool,
    eps: float | None,
    rotary_dim: int | None = None,
    across_heads: bool = False,
) -> torch.Tensor:
    """Return x [B, H, L, D] after norm and RoPE, in float64.

    weight: [D], or across heads [H * D], or [L, D], one a row; None is all ones.  cos, sin: broadcast to
    [B, H, L, R / 2], an angle a pair.  The rest as in rms_rope_quantize().
    """
    y = x.double()
    if eps is not None:
        y = y * (y.pow(2).mean((1, 3) if across_heads else 3, keepdim=True) + eps).rsqrt()
    if weight is not None:
        across = across_heads and weight.dim() == 1
        y = y * (weight.double().view(1, x.shape[1], 1, x.shape[3]) if across else weight.double())
    if cos is None or sin is None:
        return y
    rotary = x.shape[3] if rotary_dim is None else rotary_dim
    turned, rest = y[..., :rotary], y[..., rotary:]
    pairs = turned.unflatten(-1, (-1, 2)) if interleaved else turned.unflatten(-1, (2, -1)).transpose(-1, -2)
    rotated = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos.double(), sin.double())
    pairs = torch.view_as_real(rotated)
    turned = (pairs if interleaved else pairs.transpose(-1, -2)).flatten(-2)
    return torch.cat([turned, rest], -1)
