"""The operator `sdpa_router::routed_attention`: a call in a compiled graph that is decided when it runs.

Who answers among several backends depends on the sizes and on the peers, whose own operators can't be trusted in a
graph (comfy-kitchen's has wrong strides for some head_dims). Importing this module registers the operator.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from . import run
from .decide import Call, needs_mask_cast
from .dispatch import Turn, dispatch
from .kernels.int8_attention import op as _op
from .settings import intern, settings_of

_LIBRARY = torch.library.Library("sdpa_router", "FRAGMENT")
_LIBRARY.define(
    "routed_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, bool is_causal, "
    "float? scale, bool enable_gqa, str settings) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _routed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    settings: str,
) -> torch.Tensor:
    """Answer under the settings of this name, with the strides that _fake() promised."""
    native = run.torch_attention()
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    answer = dispatch(_without_tiles(settings), native, call)
    if isinstance(answer, Turn):
        answer = run.native(call, native, cast_mask=needs_mask_cast(call))
    promised, _ = run.empty_outputs(query, lse=False)
    return answer if answer.stride() == promised.stride() else promised.copy_(answer)


@functools.cache
def _without_tiles(name: str) -> str:
    """Return the name of settings that look at no mask: a graph writes masks into memory without leaving a trace."""
    return intern(dataclasses.replace(settings_of(name), by_tile=False))


def _fake(query: torch.Tensor, *arguments: object) -> torch.Tensor:
    return run.empty_outputs(query, lse=False)[0]


_LIBRARY.impl("routed_attention", _routed_attention, "CUDA")
_LIBRARY.impl("routed_attention", _routed_attention, "CPU")
_LIBRARY.impl("routed_attention", _op._without_gradient("routed_attention"), "Autograd")
torch.library.register_fake("sdpa_router::routed_attention", _fake, lib=_LIBRARY)
