"""The public calls."""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.nn.functional as F

from . import (
    graph_op,  # noqa: F401 (registers the operator)
    run,
)
from .buffers import check_buffer, check_memory
from .by_tile import counts_of, refine, unknown, worth_a_look
from .choose import choose
from .decide import Call
from .decision import Decision
from .dispatch import TORCH, Turn, dispatch, under_foreign_mode
from .kernels.int8_attention.limits import unavailable
from .patch import as_if_absent, follow_environment
from .qk import QuantizedQK
from .quantized import attend
from .settings import OFF, active, active_name, settings_of
from .traced import require_kernel

_modes = torch._C._len_torch_function_stack


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Answer like torch.nn.functional.scaled_dot_product_attention, with int8 where that is right.

    query [B, H, Q, D], key [B, Hkv, K, D], value [B, Hkv, K, D], attn_mask broadcasting to [B, H, Q, K]: bool (True =
    keep), float32 or the query's dtype (added). Returns [B, H, Q, D] in the query's dtype. The settings are those of
    the surrounding route() or the defaults. What the int8 kernel can't answer goes to torch with the arguments
    untouched, so an invalid call raises torch's own error; under on_unsupported="raise" it raises UnsupportedError.
    NaN or +inf in a mask gives NaN in the rows that see it, on both routes.
    """
    # As run.torch_attention(), which would be one call more: each takes half a microsecond between calls that compute.
    below = run.below
    torch_attention = F.scaled_dot_product_attention if below is None else below
    arguments = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    name = active.name
    if name is OFF and not torch.compiler.is_dynamo_compiling():
        follow_environment()  # as route() does on entering
    # Torch's turn first, and nothing called that needn't be: a call of 256 tokens takes torch 19 us.
    answer = dispatch(name, torch_attention, arguments)
    if answer is TORCH and not (_modes() and under_foreign_mode()):
        if scale is None and enable_gqa is False:
            return torch_attention(query, key, value, attn_mask, dropout_p, is_causal)
        return torch_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if not isinstance(answer, Turn):
        return answer
    return as_if_absent(torch_attention, arguments[:6], {"scale": scale, "enable_gqa": enable_gqa})


@overload
def int8_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    pv: str = "auto",
    precision: str = "auto",
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor: ...


@overload
def int8_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[True],
    pv: str = "auto",
    precision: str = "auto",
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def int8_attention(
    query: QuantizedQK,
    value: torch.Tensor | None = None,
    /,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    pv: str = "auto",
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor: ...


@overload
def int8_attention(
    query: QuantizedQK,
    value: torch.Tensor | None = None,
    /,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: Literal[True],
    pv: str = "auto",
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def int8_attention(
    query: torch.Tensor | QuantizedQK,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    pv: str = "auto",
    precision: str = "auto",
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Answer with the int8 kernel or raise; nothing falls back and nothing is counted.

    query [B, H, Q, D], key and value [B, Hkv, K, D], fp16 or bf16, D up to 256; attn_mask: one row for all queries,
    [1 or B, 1 or H, 1, 1 or K] or expanded from it: bool (True = keep), float32 or the query's dtype (added).
    Returns out [B, H, Q, D] in the query's dtype, or with return_lse (out, lse): lse is float32 [B, H, Q], the natural
    logarithm of the sum over keys of exp(scale * q . k + bias), -inf for a row without a key, whose out is 0.
    out and lse: buffers to fill, which share no memory with each other or an argument and require no gradient; a given
    lse is filled also without return_lse.
    pv: "auto" or "16bit"; or "fp8", P @ V in e4m3 with a scale for each channel of V, where the GPU has it.
    precision: "auto", where keys share scales; or "high", a scale for each key.  On N(0, 1) the error is at most
    0.0125, with precision="high" 0.0100, with pv="fp8" 0.045.
    NaN or +inf in the mask gives NaN in the rows that see it.
    A QuantizedQK takes the place of query and key: int8_attention(quantized, value). Its mask, scale and precision
    hold; what is given besides must be the same, or ValueError says what was expected.
    SDPA_ROUTER=0 in the environment changes nothing here. Raises UnsupportedError with every reason before anything
    runs, ValueError for buffers that don't fit and TypeError for those that are no tensors.

    >>> out, lse = int8_attention(query, key, value, key_bias[None, None, None, :], return_lse=True)
    """
    if isinstance(query, QuantizedQK):
        if key is not None and value is not None:
            raise ValueError(
                "key and value are given beside a QuantizedQK; expected the value alone, for it holds the key"
            )
        return attend(
            query,
            key if value is None else value,
            attn_mask,
            is_causal=is_causal,
            scale=scale,
            return_lse=return_lse,
            pv=pv,
            precision=precision,
            out=out,
            lse=lse,
        )
    if key is None or value is None:
        raise TypeError(
            f"{'key' if key is None else 'value'} is None; accepted: a tensor, unless query is a QuantizedQK"
        )
    if out is None and lse is None:
        again = run.int8_again(query, key, value, attn_mask, is_causal, scale, enable_gqa, return_lse, pv, precision)
        if again is not None:
            return again if return_lse else again[0]
    call = Call(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)
    require_kernel(call, pv, precision)
    if out is None and lse is None:
        answer = run.int8(query, key, value, attn_mask, is_causal, scale, pv, precision, return_lse=return_lse)
        return answer if return_lse else answer[0]
    if out is not None:
        check_buffer("out", out, query, query.shape, query.dtype)
    if lse is not None:
        check_buffer("lse", lse, query, query.shape[:3], torch.float32)
    check_memory(call, out, lse)
    if out is None:
        out = run.empty_outputs(query, lse=False)[0]
    if lse is None and return_lse:
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    run.int8_into(call, pv, precision, out, lse)
    return out if lse is None or not return_lse else (out, lse)


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Decision:
    """Say what scaled_dot_product_attention() would do with this call, and every reason; nothing runs or is counted.

    Metadata is all that is looked at: tensors on the meta device will do, and are judged as if they were on a GPU that
    the kernel supports. The settings are those of the surrounding route() or the defaults.

    >>> print(explain(query, key, value, key_bias))
    int8 (mask: per key, float32 [1, 1, 1, 33600])
    """
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    settings = settings_of(active_name())
    decision = choose(call, settings)
    if not (settings.by_tile and worth_a_look(decision, call)):
        return decision
    counts = counts_of(call, False)[0]
    return unknown(decision, call, True) if counts is None else refine(decision, call, counts)


def is_available(device: torch.device | str | int | None = None) -> bool:
    """Whether the int8 kernel runs on `device`, by default the current GPU, or the CPU if there is none.

    False for a device that doesn't exist here. SDPA_ROUTER=0 in the environment changes nothing here.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        return False
    if found.type == "cuda" and found.index is not None and found.index >= torch.cuda.device_count():
        return False
    return unavailable(found) is None
