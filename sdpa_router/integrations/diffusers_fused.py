"""diffusers: attention processors that norm, rotate and quantise query and key in one pass; enable(..., fuse_qk=True).

A fused processor keeps the one that it replaces and hands it every call that it does not answer itself: what the router
would leave to torch, and what depends on more than the projections. It imports nothing of diffusers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..api import int8_attention
from ..choose import choose
from ..decide import Call
from ..record import sight
from ..rope_qk import rms_rope_quantize
from ..settings import OFF, active_name, settings_of

_LOG = logging.getLogger("sdpa_router.dispatch")
_Pair = tuple[torch.Tensor, torch.Tensor]
_NORMS = ("RMSNorm",)


def fuse(module: nn.Module, log: bool = True) -> dict[str, str | None]:
    """Give every attention block in `module` that is known here a fused processor; undone by unfuse().

    Returns the blocks by qualified name: None where it was fused, else why it stays as it is, which is also logged.
    """
    found: dict[str, str | None] = {}
    for name, block in _blocks(module):
        if isinstance(block.processor, _Fused):
            found[name] = None
            continue
        known = _KNOWN.get((type(block).__name__, type(block.processor).__name__))
        if not type(block).__module__.startswith("diffusers.") or known is None:
            names = ", ".join(f"{attention} with {processor}" for attention, processor in _KNOWN)
            found[name] = f"{type(block).__name__} with {type(block.processor).__name__} is not one of {names}"
        else:
            found[name] = known.why_not(block)
            if found[name] is None:
                block.processor = known(block.processor)
        if log and found[name] is not None:
            _LOG.info("fuse_qk leaves %s as it is: %s", name or type(module).__name__, found[name])
    if log and not found:
        _LOG.info("fuse_qk found no attention block with a processor in %s", type(module).__name__)
    return found


def unfuse(module: nn.Module) -> None:
    """Give the blocks back the processors that they had before fuse()."""
    for _, block in _blocks(module):
        if isinstance(block.processor, _Fused):
            block.processor = block.processor.plain


def _blocks(module: nn.Module) -> Iterable[tuple[str, Any]]:
    return [(name, block) for name, block in module.named_modules() if hasattr(block, "processor")]


class _Fused:
    """A processor in the place of `plain`; what diffusers sets on it goes there."""

    def __init__(self, plain: Any) -> None:
        self.plain = plain

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
        self, attn: Any, hidden_states: torch.Tensor, head_dim: int, lengths: tuple[int, int], mask: torch.Tensor | None
    ) -> bool:
        """Whether the router has this call, decided as for the plain one and before anything is computed for it."""
        name = active_name()
        if torch.compiler.is_compiling() or name == OFF or (mask is not None and mask.dim() != 4):
            return False
        if self.plain._attention_backend is not None or self.plain._parallel_config is not None:
            return False
        settings = settings_of(name)
        if torch.is_autocast_enabled(hidden_states.device.type) or settings.pv not in ("auto", "16bit"):
            return False
        # A skip may read the tensors, and there are none yet; another backend may answer where int8 raises.
        if settings.skip is not None or settings.on_error != "raise" or self.why_not(attn) is not None:
            return False
        if torch.is_grad_enabled() and (hidden_states.requires_grad or any(p.requires_grad for p in attn.parameters())):
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


def _attend(
    query: torch.Tensor | _Pair,
    key: torch.Tensor | _Pair,
    value: torch.Tensor,
    norms: tuple[Any, ...],
    angles: _Pair | None,
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


def _heads(projected: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, S, H * D] -> [B, H, S, D], nothing is copied."""
    split: torch.Tensor = projected.unflatten(-1, (heads, -1)).transpose(1, 2)
    return split


class FusedWan(_Fused):
    """For WanAttnProcessor: a norm across all heads, pairs interleaved, self and text cross attention."""

    @classmethod
    def why_not(cls, block: Any) -> str | None:
        """Why this block can't be fused."""
        if block.add_k_proj is not None:
            return "it attends to an image besides (add_k_proj)"
        return super().why_not(block)

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: _Pair | None = None,
    ) -> torch.Tensor:
        """Attend as WanAttnProcessor does."""
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        lengths = (hidden_states.shape[1], source.shape[1])
        if not self.answers(attn, hidden_states, attn.inner_dim // attn.heads, lengths, attention_mask):
            return self.plain(  # type: ignore[no-any-return]
                attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb
            )
        query, key, value = (
            _heads(layer(x), attn.heads)
            for layer, x in ((attn.to_q, hidden_states), (attn.to_k, source), (attn.to_v, source))
        )
        angles = None if rotary_emb is None else (rotary_emb[0][:, :, 0], rotary_emb[1][:, :, 0])
        norms = (attn.norm_q, attn.norm_k)
        out = _attend(query, key, value, norms, angles, attention_mask, across_heads=True)
        return attn.to_out[1](attn.to_out[0](out))  # type: ignore[no-any-return]


class FusedFlux(_Fused):
    """For FluxAttnProcessor: a norm for each head, pairs interleaved, text before image where the block has both."""

    @classmethod
    def norms_of(cls, block: Any) -> tuple[str, ...]:
        """Names of the norms, with those of the text."""
        added = () if block.added_kv_proj_dim is None else ("norm_added_q", "norm_added_k")
        return (*super().norms_of(block), *added)

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: _Pair | None = None,
    ) -> torch.Tensor | _Pair:
        """Attend as FluxAttnProcessor does."""
        joint = encoder_hidden_states is not None
        text_len = 0 if encoder_hidden_states is None else encoder_hidden_states.shape[1]
        length = text_len + hidden_states.shape[1]
        if joint != (attn.added_kv_proj_dim is not None) or not self.answers(
            attn, hidden_states, attn.head_dim, (length, length), attention_mask
        ):
            return self.plain(  # type: ignore[no-any-return]
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
        query, key, value = (_heads(layer(hidden_states), attn.heads) for layer in (attn.to_q, attn.to_k, attn.to_v))
        norms: tuple[Any, ...] = (attn.norm_q, attn.norm_k)
        if encoder_hidden_states is None:
            return _attend(query, key, value, norms, image_rotary_emb, attention_mask, across_heads=False)
        layers = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        text_query, text_key, text_value = (_heads(layer(encoder_hidden_states), attn.heads) for layer in layers)
        value = torch.cat([text_value.transpose(1, 2), value.transpose(1, 2)], 1).transpose(1, 2)
        norms = (*norms, attn.norm_added_q, attn.norm_added_k)
        out = _attend(
            (text_query, query), (text_key, key), value, norms, image_rotary_emb, attention_mask, across_heads=False
        )
        image_out = attn.to_out[1](attn.to_out[0](out[:, text_len:].contiguous()))
        return image_out, attn.to_add_out(out[:, :text_len].contiguous())


_KNOWN: dict[tuple[str, str], type[_Fused]] = {
    ("WanAttention", "WanAttnProcessor"): FusedWan,
    ("FluxAttention", "FluxAttnProcessor"): FusedFlux,
}
