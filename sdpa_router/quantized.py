"""Quantise query and key once: quantize_qk(), and the attention over what it and its kin return."""

from __future__ import annotations

import dataclasses
import math

import torch

from . import run
from .buffers import check_buffer, check_memory
from .decide import Call, decide_kernel
from .decision import UnsupportedError, show
from .entry import kernel_entry, readable
from .kernels.int8_attention.configs import (
    Config,
    arch_of,
    config_for,
    config_of,
    hopper_unavailable,
    padded_head_dim,
)
from .kernels.int8_attention.op import triton_refuses, use_portable
from .mask import MaskKind, classify_mask, key_view
from .qk import Groups, Layout, Prepared, QuantizedQK, expect, expect_type

_LOG2E = math.log2(math.e)
ROTATION = "sdpa_router"  # random signs and Hadamard, in the order of channels
ROTATION_OF_PAIRS = "sdpa_router, pairs"  # the same after RoPE, in the order of the fused kernels


@kernel_entry
def quantize_qk(
    query: torch.Tensor,
    key: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
    *,
    enable_gqa: bool = False,
    lse: bool = False,
    precision: str = "auto",
    value: torch.Tensor | None = None,
) -> QuantizedQK:
    """Quantise query and key as int8_attention() does, to be called any number of times: to the same bits.

    Except for is_causal with more keys than queries: that is not known yet, and the keys that no query sees count here.

    query [B, H, Q, D], key [B, Hkv, K, D], attn_mask, scale and enable_gqa as int8_attention() takes them; no reference
    to query and key is kept.  lse: whether the LSE will be asked for.  precision: as in int8_attention().
    value: [B, Hkv, K, D] to be quantised to e4m3 too; an attention without a value of its own then computes P @ V in
    fp8.
    Under torch.compile the graph breaks here. Raises UnsupportedError with every reason for a call that the kernel
    can't answer, before anything runs.

    >>> quantized = quantize_qk(query, key, key_bias)
    >>> out = int8_attention(quantized, value)
    """
    pv = "auto" if value is None else "fp8"
    check_flag("lse", lse)
    call = Call(query, key, key if value is None else value, attn_mask, 0.0, False, scale, enable_gqa)
    require_kernel(call, pv, precision)
    from .kernels.int8_attention.quantize import quantize_pair
    from .kernels.int8_attention.quantize_value import quantize_value

    softmax_scale = default_scale(query, scale)
    config = choose_config(query, pv, precision)
    mask = key_row(attn_mask)
    with torch.cuda.device_of(query):
        queries, keys = quantize_pair(query, key, mask, softmax_scale, config, lse=lse, per_token=precision == "high")
        values = None if value is None else quantize_value(value, keys.bias, config)
    return QuantizedQK(
        queries.query,
        queries.query_scale,
        keys.key,
        keys.key_scale.flatten(2),
        kv_len=key.shape[2],
        head_dim=query.shape[3],
        dtype=query.dtype,
        softmax_scale=softmax_scale,
        layout=native_layout(config, precision, ROTATION),
        attn_mask=attn_mask,
        mask_version=version_of(attn_mask),
        key_shift=keys.shift,
        lse_term=queries.lse_term,
        heads_inside=heads_inside(query),
        prepared=Prepared(config, keys.bias, keys.anchor, keys.live, keys.key_norm),
        value=values,
    )


@kernel_entry
def attend(
    quantized: QuantizedQK,
    value: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
    return_lse: bool,
    pv: str,
    precision: str,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Answer int8_attention() for a quantised query and key; raises ValueError for what differs from the quantising."""
    if precision != "auto":
        expect("precision", precision, "high" if quantized.layout.key.scales == quantized.layout.key.block else "auto")
    wanted = "return_lse is True" if return_lse else "lse is given" if lse is not None else None
    _check_call(quantized, value, attn_mask, is_causal, scale, pv, wanted)
    if out is not None:
        check_buffer("out", out, quantized.query, quantized.shape, quantized.dtype)
    if lse is not None:
        check_buffer("lse", lse, quantized.query, quantized.shape[:3], torch.float32)
    held = quantized.key if value is None else value
    if out is not None or lse is not None:
        check_memory(Call(quantized.query, quantized.key, held, quantized.attn_mask), out, lse, _others_of(quantized))
    if out is None:
        out = _empty_out(quantized)
    if lse is None and return_lse:
        lse = out.new_empty(quantized.shape[:3], dtype=torch.float32)
    with torch.cuda.device_of(quantized.query):
        ready = for_kernel(quantized)
        try:
            run.quantized_into(ready, value, is_causal, out, lse)
        except Exception as error:
            if ready.prepared is None or not ready.prepared.config.gluon or not triton_refuses(error):
                raise
            use_portable(error)
            run.quantized_into(for_kernel(quantized), value, is_causal, out, lse)
    return (out, lse) if return_lse and lse is not None else out


def for_kernel(quantized: QuantizedQK) -> QuantizedQK:
    """Return the same query and key as our kernel reads them: a scale a query row, keys in whole tiles, a bias."""
    if _is_ready(quantized):
        return quantized
    _check_unprepared(quantized)
    from .kernels.int8_attention.bias import prepare

    arch, head_dim, layout = arch_of(quantized.query.device), quantized.head_dim, quantized.layout
    # The portable kernel also takes a scale a key; only a layout like ours could go to the one for Hopper.
    aligned = _aligned(quantized.dtype, head_dim)
    config = config_for(arch, quantized.query.shape[3], describable=aligned)
    whole = layout.key.scales == 1 and layout.key.block % config.block_n == 0
    if not whole:
        config = config_for(arch, quantized.query.shape[3], describable=aligned, per_key=True)
    rows = -(-quantized.kv_len // config.block_n) * config.block_n
    width = padded_head_dim(quantized.query.shape[3])
    key = _padded(quantized.key[:, :, : quantized.kv_len], rows, width)
    step = config.block_n if whole else 1
    index = layout.key.index(quantized.kv_len, key.device)[::step]
    key_scale = _padded_last(quantized.key_scale[..., index], rows // step)
    query = _padded(quantized.query, quantized.query.shape[2], width)
    query_scale = quantized.query_scale[..., layout.query.index(query.shape[2], query.device)]
    if not layout.folded:
        query_scale = query_scale * (abs(quantized.softmax_scale) * _LOG2E)
        query = negated(query) if quantized.softmax_scale < 0 else query
    prepared = Prepared(config)
    mask = key_row(quantized.attn_mask)
    if mask is not None:
        bias, anchor, live = prepare(mask, quantized.kv_len, config)
        prepared = Prepared(config, bias, anchor, live)
    if quantized.value is not None and quantized.prepared is not None:
        held = quantized.prepared.config
        if held.gluon or held.block_n != config.block_n:
            raise ValueError(
                "value was quantised for another kernel than runs here; expected a query and key that were quantised "
                "without it, and a 16-bit value"
            )
    return dataclasses.replace(
        quantized,
        query=query,
        query_scale=query_scale.contiguous(),
        key=key,
        key_scale=key_scale.contiguous(),
        layout=Layout("sdpa_router", Groups(1), Groups(step), True, layout.rotation),
        prepared=prepared,
    )


def _is_ready(quantized: QuantizedQK) -> bool:
    """Whether the kernel of this device can read the tensors as they are."""
    prepared, device = quantized.prepared, quantized.query.device
    if prepared is None or any(t.device != device for t in prepared.tensors()):
        return False
    if prepared.config.gluon and hopper_unavailable():
        return False
    return not prepared.config.tma or arch_of(device) == 90


def _check_unprepared(quantized: QuantizedQK) -> None:
    """Raise for a query and key that can't be made ready: no kernel on their device, or a mask that is another now."""
    batch, heads, q_len, head_dim = quantized.shape
    like = quantized.query.new_empty((1, 1, 1, head_dim), dtype=quantized.dtype)
    query, key = (
        like.expand(batch, n, length, head_dim)
        for n, length in ((heads, q_len), (quantized.key.shape[1], quantized.kv_len))
    )
    require_kernel(Call(query, key, key, quantized.attn_mask, 0.0, False, None, True), "auto", "auto")
    if version_of(quantized.attn_mask) != quantized.mask_version:
        raise ValueError(
            "quantized.attn_mask was written to since; expected the mask as it was, for it is read at the call in this "
            "layout or on this device"
        )


def require_kernel(call: Call, pv: str, precision: str) -> None:
    """Raise UnsupportedError with every reason for a call that the int8 kernel can't answer."""
    decision = decide_kernel(call, pv, precision)
    if not decision.routed:
        raise UnsupportedError(decision)


def choose_config(query: torch.Tensor, pv: str, precision: str) -> Config:
    """The configuration for a value that is not here yet; attend() copies one that its kernel can't read."""
    return config_of(query, query.new_empty((1, 1, 1, query.shape[3])), pv, precision)


def native_layout(config: Config, precision: str, rotation: str) -> Layout:
    """The layout that our kernel reads under `config`."""
    keys = Groups(1) if precision == "high" else Groups(config.block_n, 4 if config.gluon else 1)
    return Layout("sdpa_router", Groups(1), keys, True, rotation)


def default_scale(query: torch.Tensor, scale: float | None) -> float:
    """The softmax scale as a plain number."""
    return 1.0 / math.sqrt(query.shape[3]) if scale is None else float(scale)


def key_row(attn_mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask as kernels read it, [1 or B, 1 or H, 1, 1 or K]."""
    return None if attn_mask is None else readable(key_view(attn_mask))


def check_flag(name: str, flag: bool) -> None:
    """Raise ValueError for what is neither True nor False."""
    if type(flag) is not bool:
        raise ValueError(f"{name} is of type {type(flag).__name__}; expected True or False")


def version_of(mask: torch.Tensor | None) -> int | None:
    """How often a mask was written to; None where torch does not count."""
    return None if mask is None or mask.is_inference() else mask._version


def heads_inside(query: torch.Tensor) -> bool:
    """Whether heads lie inside the sequence in memory."""
    return 0 < query.stride(1) < query.stride(2)


def _check_call(
    quantized: QuantizedQK,
    value: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    pv: str,
    wanted_lse: str | None,
) -> None:
    if value is None:
        if quantized.value is None:
            raise ValueError("value is None; expected a tensor, for this query and key were quantised without a value")
        expect("pv", pv, pv if pv in ("auto", "fp8") else "'auto' or 'fp8', for the value was quantised")
    else:
        expect(
            "pv", pv, pv if pv in ("auto", "16bit") else "'auto' or '16bit'; give the value to quantize_qk() for fp8"
        )
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"value is of type {type(value).__name__}; expected a tensor")
        shape = (*quantized.key.shape[:2], quantized.kv_len, quantized.head_dim)
        fits = value.shape == shape and value.dtype == quantized.dtype and value.device == quantized.query.device
        if not fits or (value.stride(-1) != 1 and value.shape[-1] > 1):
            raise ValueError(
                f"value is {show(value.dtype)} {show(value.shape)} with strides {show(value.stride())} on "
                f"{value.device}; expected {show(quantized.dtype)} {show(shape)} with a contiguous last axis on "
                f"{quantized.query.device}"
            )
        if torch.is_grad_enabled() and value.requires_grad:
            raise ValueError("value requires a gradient; expected one that doesn't, or torch.no_grad()")
    if scale is not None and not (isinstance(scale, (int, float)) and scale == quantized.softmax_scale):
        raise ValueError(f"scale is {scale!r}; expected None or {quantized.softmax_scale}, what was quantised with")
    check_flag("is_causal", is_causal)
    if attn_mask is not None:
        expect_type("attn_mask", attn_mask, torch.Tensor, "a tensor or None")
    if is_causal and quantized.attn_mask is not None:
        raise ValueError("is_causal is True; expected False, for a mask was quantised with")
    if attn_mask is not None and not _same_mask(attn_mask, quantized):
        held = "no mask" if quantized.attn_mask is None else f"the mask {show(quantized.attn_mask.shape)}, as it was,"
        raise ValueError(
            f"attn_mask is another {show(attn_mask.dtype)} {show(attn_mask.shape)} than was quantised with; expected "
            f"{held} or None, which means the mask that was quantised with"
        )
    if wanted_lse is not None and quantized.lse_term is None and quantized.key_shift is not None:
        raise ValueError(
            f"{wanted_lse}; expected no LSE to be asked for, or what quantize_qk() or rms_rope_quantize() made with "
            "lse=True"
        )


def _same_mask(given: torch.Tensor, quantized: QuantizedQK) -> bool:
    """Whether it is the same memory, read the same way and not written to since."""
    held = quantized.attn_mask
    if held is None or given.dtype != held.dtype or given.device != held.device:
        return False
    batch, heads, q_len, _ = quantized.shape
    if classify_mask(given, batch, heads, q_len, quantized.kv_len).kind is not MaskKind.PER_KEY:
        return False
    view, other = key_view(given), key_view(held)
    return (
        version_of(given) == quantized.mask_version
        and view.data_ptr() == other.data_ptr()
        and view.shape == other.shape
        and view.stride() == other.stride()
        and view.is_neg() == other.is_neg()
    )


def negated(values: torch.Tensor) -> torch.Tensor:
    """-values in int8, where -128, which foreign quantisers may give, has no opposite."""
    return values.clamp(min=-127).neg()


def _others_of(quantized: QuantizedQK) -> dict[str, torch.Tensor | None]:
    """What the kernel reads besides query, key, value and mask, by a name for errors."""
    others = {name: getattr(quantized, name) for name in ("query_scale", "key_scale", "key_shift", "lse_term")}
    inner = () if quantized.prepared is None else quantized.prepared.tensors()
    values = () if quantized.value is None else quantized.value
    return others | {f"quantized, part {place}": part for place, part in enumerate((*inner, *values))}


def _empty_out(quantized: QuantizedQK) -> torch.Tensor:
    batch, heads, q_len, head_dim = quantized.shape
    empty = quantized.query.new_empty
    if quantized.heads_inside:
        return empty((batch, q_len, heads, head_dim), dtype=quantized.dtype).transpose(1, 2)
    return empty((batch, heads, q_len, head_dim), dtype=quantized.dtype)


def _aligned(dtype: torch.dtype, head_dim: int) -> bool:
    return head_dim * dtype.itemsize % 16 == 0


def _padded(tensor: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """int8 [B, H, L, D] in whole rows and channels, contiguous; what is added is 0."""
    missing = (0, width - tensor.shape[3], 0, rows - tensor.shape[2])
    return torch.nn.functional.pad(tensor, missing) if any(missing) else tensor.contiguous()


def _padded_last(scale: torch.Tensor, count: int) -> torch.Tensor:
    return torch.nn.functional.pad(scale, (0, count - scale.shape[-1]))
