"""Stand-ins for other attention packages: their real signatures and their hazards, in plain torch on the CPU."""

from __future__ import annotations

import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Optional

import torch

from sdpa_router.backends.peers import entry_point


def install(monkeypatch, name, **members):
    """Put a module into sys.modules for the time of a test."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    for key, value in members.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)
    entry_point.cache_clear()
    return module


def attend(q, k, v, scale, causal=False, bias=None):
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q.double() * scale) @ k.transpose(-1, -2)
    if bias is not None:
        scores = scores + bias
    if causal:  # aligned bottom right
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~keep, -math.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ v).to(q.dtype)


def _layout(tensor_layout, q, k, v, function):
    if tensor_layout == "NHD":
        return function(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2).contiguous()
    return function(q, k, v).contiguous()


class Sage1:
    """sageattention 1.0.6: subtracts the mean in place, sums values in float16, attends beyond the last full tile."""

    def __init__(self):
        self.calls = []

    def module(self, monkeypatch):
        calls = self.calls

        def sageattn(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            tensor_layout: str = "HND",
            is_causal=False,
            sm_scale: Optional[float] = None,  # noqa: UP045 (as the original has it)
            smooth_k: bool = True,
            **kwargs: Any,
        ) -> torch.Tensor:
            calls.append({"layout": tensor_layout, "is_causal": is_causal, "sm_scale": sm_scale, **kwargs})
            assert q.size(-1) in (64, 96, 128), "headdim should be in [64, 96, 128]."
            sequence = 1 if tensor_layout == "NHD" else 2
            if smooth_k:
                k -= k.mean(dim=sequence, keepdim=True)
            assert k.shape[sequence] % 64 == 0, "the real one answers wrongly here"
            v = v.half()
            assert v[v.isfinite()].abs().max() < 2000, "the real one overflows here"
            scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
            out = _layout(tensor_layout, q, k, v, lambda q, k, v: attend(q, k, v, scale, is_causal))
            return out.to(q.dtype)

        return install(monkeypatch, "sageattention", sageattn=sageattn)


class Sage2:
    """SageAttention 2: changes the current device, launches on the default stream."""

    def __init__(self):
        self.calls = []

    def module(self, monkeypatch):
        calls = self.calls

        def sageattn(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            tensor_layout: str = "HND",
            is_causal: bool = False,
            sm_scale: Optional[float] = None,  # noqa: UP045
            return_lse: bool = False,
            **kwargs: Any,
        ):
            calls.append({"layout": tensor_layout, "is_causal": is_causal, "sm_scale": sm_scale, **kwargs})
            torch.cuda.set_device(v.device)
            scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
            return _layout(tensor_layout, q, k, v, lambda q, k, v: attend(q, k, v, scale, is_causal))

        return install(monkeypatch, "sageattention", sageattn=sageattn)


class Comfy:
    """comfy-kitchen 0.2.40: answers 0 where all biases are under -34657, wants strides in fours."""

    def __init__(self, available=True):
        self.calls = []
        self.available = available

    def module(self, monkeypatch):
        def int8_attention(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            *,
            scale: float | None = None,
            attn_mask: torch.Tensor | None = None,
        ) -> torch.Tensor:
            self.calls.append({"scale": scale, "attn_mask": attn_mask})
            bias = None
            if attn_mask is not None:
                bias = attn_mask
                assert bias.stride(-1) == 1, "a value in memory for each key"
                assert bias.shape[-1] == k.shape[2], "a value in memory for each key"
                if bias.dtype == torch.bool:
                    bias = torch.zeros(bias.shape).masked_fill(~bias, -math.inf)
                bias = bias.double().masked_fill(bias < -34657, -math.inf)
            return attend(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, bias=bias)

        def int8_attention_is_available(device: torch.device | None = None) -> bool:
            return self.available

        return install(
            monkeypatch,
            "comfy_kitchen",
            int8_attention=int8_attention,
            int8_attention_is_available=int8_attention_is_available,
        )


class Fa3:
    """fa3-fwd 0.0.3: [B, L, H, D], causal aligned bottom right, built without float16."""

    def __init__(self, returns_lse=False):
        self.calls = []
        self.returns_lse = returns_lse

    def module(self, monkeypatch):
        def flash_attn_func(
            q,
            k,
            v,
            softmax_scale=None,
            causal=False,
            qv=None,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            window_size=(-1, -1),
            attention_chunk=0,
            softcap=0.0,
            num_splits=1,
            pack_gqa=None,
            deterministic=False,
            sm_margin=0,
            return_attn_probs=False,
        ):
            self.calls.append({"softmax_scale": softmax_scale, "causal": causal})
            scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
            out = _layout("NHD", q, k, v, lambda q, k, v: attend(q, k, v, scale, causal))
            return (out, torch.zeros(q.shape[0], q.shape[2], q.shape[1])) if self.returns_lse else out

        flags = {"FLASHATTENTION_DISABLE_FP16": True}
        install(monkeypatch, "fa3_fwd_config", CONFIG={"build_flags": flags})
        return install(monkeypatch, "fa3_fwd_interface", flash_attn_func=flash_attn_func)
