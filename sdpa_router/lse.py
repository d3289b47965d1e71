"""Attention together with its log-sum-exp, whoever answers: for callers that merge partial results."""

from __future__ import annotations

import math

import torch

from . import run
from .decide import Call, decide, needs_mask_cast, reasons_against
from .record import sight
from .settings import settings_of
from .traced import record_trace, refuse

# Scores in memory at once where torch answers: 2**26 float32 are 256 MiB, some times that with temporaries.
_SCORES = 2**26


def attention_with_lse(
    name: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Answer an attention call under the settings `name` with (out [B, H, Q, D], lse float32 [B, H, Q]).

    The arguments are those of SDPA. lse is the natural logarithm of the sum over keys of exp(scale * q . k + bias),
    -inf for a row without a key. Where torch answers, the scores are computed once more for it.
    """
    # record_trace() reads the arguments from this frame.
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    settings = settings_of(name)
    if torch.compiler.is_dynamo_compiling():
        from torch._dynamo.comptime import comptime

        codes = [reason.code.value for reason in reasons_against(call, settings)]
        comptime(record_trace)
    else:
        decision = decide(call, settings)
        sight(("lse", name, str(decision)), call, decision, settings).tick()
        codes = [reason.code.value for reason in decision.reasons]
    if not codes:
        modes = settings.pv, settings.precision
        return run.int8(query, key, value, attn_mask, is_causal, scale, *modes, return_lse=True)
    if settings.on_unsupported == "raise":
        refuse(codes, decide, call, settings)
    out = run.native(call, run.torch_attention(), cast_mask=needs_mask_cast(call))
    return out, _log_sum_exp(call)


def _log_sum_exp(call: Call) -> torch.Tensor:
    """Compute the log-sum-exp in float32, in blocks of queries, so that long sequences fit."""
    query, key, _, mask, _, is_causal, scale, _ = call
    batch, heads, q_len, head_dim = query.shape
    kv_len = key.shape[2]
    factor = 1 / math.sqrt(head_dim) if scale is None else scale
    keys = key.float().transpose(-2, -1)
    if key.shape[1] != heads:
        keys = keys.repeat_interleave(heads // key.shape[1], dim=1)
    if mask is not None:
        bias = torch.zeros((), device=mask.device).where(mask, -math.inf) if mask.dtype == torch.bool else mask.float()
        bias = bias.expand(batch, heads, q_len, kv_len)
    rows = max(1, _SCORES // max(1, batch * heads * kv_len))
    parts = []
    for start in range(0, q_len, rows):
        block = slice(start, min(start + rows, q_len))
        scores = (query[:, :, block].float() * factor) @ keys
        if mask is not None:
            scores = scores + bias[:, :, block]
        if is_causal:
            last = torch.arange(start, start + scores.shape[2], device=scores.device)
            scores = scores.masked_fill(torch.arange(kv_len, device=scores.device) > last[:, None], -math.inf)
        parts.append(scores.logsumexp(dim=-1))
    return torch.cat(parts, dim=2) if parts else query.new_empty((batch, heads, 0), dtype=torch.float32)
