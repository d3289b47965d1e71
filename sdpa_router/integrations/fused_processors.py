"""Attention processors of diffusers with norm, rotation and quantisation of query and key in one pass; see fuse().

Nothing of diffusers is imported.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from .fused_processor import FusedProcessor, Pair, attend, attend_jointly, project, split_heads


class FusedWan(FusedProcessor):
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
        rotary_emb: Pair | None = None,
    ) -> torch.Tensor:
        """Attend as WanAttnProcessor does."""
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        lengths = (hidden_states.shape[1], source.shape[1])
        given = (hidden_states, encoder_hidden_states, *(rotary_emb or ()))
        if not self.answers(attn, given, attn.inner_dim // attn.heads, lengths, attention_mask):
            return self.plain(  # type: ignore[no-any-return]
                attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb
            )
        query, key, value = project(attn, hidden_states, source)
        angles = None if rotary_emb is None else (rotary_emb[0][:, :, 0], rotary_emb[1][:, :, 0])
        norms = (attn.norm_q, attn.norm_k)
        out = attend(query, key, value, norms, angles, attention_mask, across_heads=True)
        return attn.to_out[1](attn.to_out[0](out))  # type: ignore[no-any-return]


class FusedFlux(FusedProcessor):
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
        image_rotary_emb: Pair | None = None,
    ) -> torch.Tensor | Pair:
        """Attend as FluxAttnProcessor does."""
        joint = encoder_hidden_states is not None
        text_len = 0 if encoder_hidden_states is None else encoder_hidden_states.shape[1]
        length = text_len + hidden_states.shape[1]
        given = (hidden_states, encoder_hidden_states, *(image_rotary_emb or ()))
        if joint != (attn.added_kv_proj_dim is not None) or not self.answers(
            attn, given, attn.head_dim, (length, length), attention_mask
        ):
            return self.plain(  # type: ignore[no-any-return]
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
        if encoder_hidden_states is None:
            query, key, value = project(attn, hidden_states, hidden_states)
            norms = (attn.norm_q, attn.norm_k)
            return attend(query, key, value, norms, image_rotary_emb, attention_mask, across_heads=False)
        out = attend_jointly(attn, hidden_states, encoder_hidden_states, image_rotary_emb, attention_mask)
        image_out = attn.to_out[1](attn.to_out[0](out[:, text_len:].contiguous()))
        return image_out, attn.to_add_out(out[:, :text_len].contiguous())


class FusedQwenImage(FusedProcessor):
    """For QwenDoubleStreamAttnProcessor2_0: as Flux's joint attention, complex angles and a mask of the text's own."""

    @classmethod
    def why_not(cls, block: Any) -> str | None:
        """Why this block can't be fused."""
        if getattr(block, "add_q_proj", None) is None or getattr(block, "to_add_out", None) is None:
            return "it has no text stream (add_q_proj, to_add_out)"
        return super().why_not(block)

    @classmethod
    def norms_of(cls, block: Any) -> tuple[str, ...]:
        """Names of the norms, with those of the text."""
        return (*super().norms_of(block), "norm_added_q", "norm_added_k")

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_hidden_states_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Pair | None = None,
    ) -> Pair:
        """Attend as QwenDoubleStreamAttnProcessor2_0 does."""
        given = (encoder_hidden_states, encoder_hidden_states_mask, attention_mask, image_rotary_emb)
        if encoder_hidden_states is None or attention_mask is not None:
            return self.plain(attn, hidden_states, *given)  # type: ignore[no-any-return]
        text_len = encoder_hidden_states.shape[1]
        length, mask = text_len + hidden_states.shape[1], None
        if encoder_hidden_states_mask is not None:
            if not _builds_joint_masks(self.plain):
                return self.plain(attn, hidden_states, *given)  # type: ignore[no-any-return]
            image = torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=hidden_states.device)
            mask = torch.cat([encoder_hidden_states_mask, image], 1)[:, None, None]
        sources = (hidden_states, encoder_hidden_states, *(image_rotary_emb or ()))
        if not self.answers(attn, sources, attn.inner_dim // attn.heads, (length, length), mask):
            return self.plain(attn, hidden_states, *given)  # type: ignore[no-any-return]
        angles = None
        if image_rotary_emb is not None:
            table = torch.cat([image_rotary_emb[1], image_rotary_emb[0]])
            angles = (table.real, table.imag)
        out = attend_jointly(attn, hidden_states, encoder_hidden_states, angles, mask)
        image_out = out[:, text_len:].contiguous()
        for layer in attn.to_out:
            image_out = layer(image_out)
        return image_out, attn.to_add_out(out[:, :text_len].contiguous())


class FusedLTX(FusedProcessor):
    """For LTXVideoAttnProcessor: a norm across all heads, each head turned by its own angles, pairs interleaved."""

    @classmethod
    def why_not(cls, block: Any) -> str | None:
        """Why this block can't be fused."""
        if block.inner_kv_dim != block.inner_dim:
            return f"its keys have {block.inner_kv_dim} channels, and its queries {block.inner_dim}"
        return super().why_not(block)

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Pair | None = None,
    ) -> torch.Tensor:
        """Attend as LTXVideoAttnProcessor does."""
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        batch, kv_len, _ = source.shape
        mask = attention_mask
        if attention_mask is not None:
            prepared = attn.prepare_attention_mask(attention_mask, kv_len, batch)
            mask = prepared.view(batch, attn.heads, -1, prepared.shape[-1])
        # Rotated keys of another length fail in the plain one, and with its words.
        rotates_others = image_rotary_emb is not None and kv_len != hidden_states.shape[1]
        lengths = (hidden_states.shape[1], kv_len)
        given = (hidden_states, encoder_hidden_states, *(image_rotary_emb or ()))
        if rotates_others or not self.answers(attn, given, attn.head_dim, lengths, mask):
            return self.plain(  # type: ignore[no-any-return]
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
        query, key, value = project(attn, hidden_states, source)
        angles = None
        if image_rotary_emb is not None:
            angles = (split_heads(image_rotary_emb[0], attn.heads), split_heads(image_rotary_emb[1], attn.heads))
        out = attend(query, key, value, (attn.norm_q, attn.norm_k), angles, mask, across_heads=True)
        return attn.to_out[1](attn.to_out[0](out))  # type: ignore[no-any-return]


def _builds_joint_masks(plain: Any) -> bool:
    """Whether this diffusers' Qwen-Image reads the text's mask, which older ones take and leave alone."""
    return hasattr(sys.modules.get(type(plain).__module__), "compute_text_seq_len_from_mask")
