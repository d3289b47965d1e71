"""What the fused attention processors have in common: which calls they answer, and the attention itself.

A processor keeps the one that it replaces and hands it every call that it does not answer itself.
"""

from __future__ import annotations

from typing import Any

import torch

from ..api import int8_attention
from ..choose import choose
from ..decide import Call
from ..dispatch import under_foreign_mode
from ..entry import unseen_by_kernels
from ..record import sight
from ..rope_qk import rms_rope_quantize
from ..settings import OFF, active_name, settings_of

Pair = tuple[torch.Tensor, torch.Tensor]
_NORMS = ("RMSNorm",)


class FusedProcessor:
    """A processor in the place of `plain`; what diffusers sets on it goes there."""

    def __init__(self, plain: Any) -> None:
        self.plain = plain

    # diffusers looks the class up (hooks that skip layers), and makes new processors of it (IP adapters of Flux).
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.plain)

    def __reduce__(self) -> tuple[type, tuple[Any]]:
        return type(self), (self.plain,)

    @property
    def _attention_backend(self) -> Any:
        return self.plain._attention_backend

    @_attention_backend.setter
    def _attention_backend(self, backend: Any) -> None:
        self.plain._attention_backend = backend

    @property
    def _parallel_config(self) -> Any:
        return self.plain._parallel_config

    @_parallel_config.setter
    def _parallel_config(self, config: Any) -> None:
        self.plain._parallel_config = config

    @classmethod
    def why_not(cls, block: Any) -> str | None:
        """Why this block can't be fused, from what it is made of."""
        for name in cls.norms_of(block):
            norm: Any = getattr(block, name, None)
            if type(norm).__name__ not in _NORMS:
                return f"{name} is {type(norm).__name__}, not RMSNorm"
            if norm.eps is None or getattr(norm, "bias", None) is not None:
                return f"{name} has no eps of its own, or a bias"
            if norm.eps != block.norm_q.eps:
                return f"{name}'s eps is {norm.eps}, and norm_q's {block.norm_q.eps}"
            if norm._forward_hooks or norm._forward_pre_hooks or "forward" in norm.__dict__:
                return f"{name} has hooks, or a forward that somebody has put there"
        if getattr(block, "fused_projections", False):
            return "its projections are fused"
        return None

    @classmethod
    def norms_of(cls, block: Any) -> tuple[str, ...]:
        """Names of the norms that the fused path computes itself."""
        return ("norm_q", "norm_k")

    def answers(
        self,
        attn: Any,
        given: tuple[torch.Tensor | None, ...],
        head_dim: int,
        lengths: tuple[int, int],
        mask: torch.Tensor | None,
    ) -> bool:
        """Whether the router has this call, decided as for the plain one and before anything is computed for it.

        given: the hidden states, and what else query and key come from.
        """
        name = active_name()
        if torch.compiler.is_compiling() or name == OFF or (mask is not None and mask.dim() != 4):
            return False
        tensors = [tensor for tensor in given if tensor is not None]
        hidden_states = tensors[0]
        # A mode may answer in the place of SDPA, which is not called here.
        if under_foreign_mode() or unseen_by_kernels(*tensors):
            return False
        if self.plain._attention_backend is not None or self.plain._parallel_config is not None:
            return False
        settings = settings_of(name)
        if torch.is_autocast_enabled(hidden_states.device.type) or settings.pv not in ("auto", "16bit"):
            return False
        # A skip may read the tensors, and there are none yet; another backend may answer where int8 raises.
        if settings.skip is not None or settings.on_error != "raise" or self.why_not(attn) is not None:
            return False
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *attn.parameters())):
            return False
        return _routed(name, hidden_states, attn.heads, head_dim, lengths, mask)


def _routed(
    name: str,
    hidden_states: torch.Tensor,
    heads: int,
    head_dim: int,
    lengths: tuple[int, int],
    mask: torch.Tensor | None,
) -> bool:
    """Decide with tensors that look like query and key; record a call that is routed; the plain path does others."""
    q_len, kv_len = lengths
    query, key = (
        hidden_states.new_empty((hidden_states.shape[0], length, heads, head_dim)).transpose(1, 2)
        for length in (q_len, kv_len)
    )
    call, settings = Call(query, key, key, mask), settings_of(name)
    decision = choose(call, settings)
    if decision.routed:
        facts = (query.shape, key.shape, query.dtype, query.device, mask is None or (mask.shape, mask.stride()))
        sight(("fused", name, facts, str(decision)), call, decision, settings).tick()
    return decision.routed


def attend(
    query: torch.Tensor | Pair,
    key: torch.Tensor | Pair,
    value: torch.Tensor,
    norms: tuple[Any, ...],
    angles: Pair | None,
    mask: torch.Tensor | None,
    *,
    across_heads: bool,
) -> torch.Tensor:
    """[B, S, H * D] from query, key (or text and image of them) before their norms and value, all [B, H, S, D]."""
    norm_q, norm_k, *added = norms
    cos, sin = (None, None) if angles is None else angles
    quantized = rms_rope_quantize(
        query,
        key,
        (added[0].weight, norm_q.weight) if added else norm_q.weight,
        (added[1].weight, norm_k.weight) if added else norm_k.weight,
        cos,
        sin,
        interleaved=True,
        eps=norm_q.eps,
        attn_mask=mask,
        across_heads=across_heads,
        precision=settings_of(active_name()).precision,
    )
    return int8_attention(quantized, value).transpose(1, 2).flatten(2, 3)


def attend_jointly(
    attn: Any, image: torch.Tensor, text: torch.Tensor, angles: Pair | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """[B, S, H * D] of a joint attention, text before image, each with projections and norms of its own."""
    query, key, value = project(attn, image, image)
    layers = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    text_query, text_key, text_value = (split_heads(layer(text), attn.heads) for layer in layers)
    value = torch.cat([text_value.transpose(1, 2), value.transpose(1, 2)], 1).transpose(1, 2)
    norms = (attn.norm_q, attn.norm_k, attn.norm_added_q, attn.norm_added_k)
    return attend((text_query, query), (text_key, key), value, norms, angles, mask, across_heads=False)


def project(attn: Any, hidden_states: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Query of hidden_states, key and value of source, each [B, H, S, D]."""
    layers = ((attn.to_q, hidden_states), (attn.to_k, source), (attn.to_v, source))
    return tuple(split_heads(layer(states), attn.heads) for layer, states in layers)


def split_heads(projected: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, S, H * D] -> [B, H, S, D], nothing is copied."""
    split: torch.Tensor = projected.unflatten(-1, (heads, -1)).transpose(1, 2)
    return split
