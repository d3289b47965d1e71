"""quantize_qk() and int8_attention() over what it returns: the same bits as the direct call, memory, bad input."""

from __future__ import annotations

import dataclasses
import gc
import math
import subprocess
import sys
import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdpa_router import UnsupportedError, int8_attention, quantize_qk
from sdpa_router import quantized as quantized_module
from sdpa_router.kernels.int8_attention.configs import HOPPER_GLUON, config_for
from sdpa_router.kernels.int8_attention.limits import fp8_unavailable
from sdpa_router.testing import relative_error, sdpa_oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(batch=1, heads=2, kv_heads=2, q_len=70, kv_len=131, head_dim=64, dtype=torch.float16):
    shapes = ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    return [torch.randn(batch, h, n, head_dim, device=DEVICE).to(dtype) for h, n in shapes]


def masks(kind, batch, heads, kv_len):
    keep = torch.rand(batch, heads, 1, kv_len, device=DEVICE) > 0.4
    return {
        "none": None,
        "bool": keep[:1, :1],
        "per head": torch.where(keep, 0.0, -10000.0).half(),
        "float32": torch.randn(1, 1, 1, kv_len, device=DEVICE),
        "expanded": keep[:, :1].expand(batch, heads, 7, kv_len),
    }[kind]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 2),
    kv_len=st.integers(1, 150),
    head_dim=st.sampled_from([1, 32, 40, 64, 128]),
    kind=st.sampled_from(["none", "bool", "per head", "float32", "expanded", "causal"]),
    precision=st.sampled_from(["auto", "high"]),
    factor=st.sampled_from([None, 0.5, -0.2, 0.0]),
    inside=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_bitwise_the_direct_call(batch, kv_heads, group, kv_len, head_dim, kind, precision, factor, inside, seed):
    torch.manual_seed(seed)
    heads = kv_heads * group
    if kind == "causal":
        kv_len = min(kv_len, 7)  # the direct call leaves out keys that no query sees
    query, key, value = draw(batch, heads, kv_heads, 7, kv_len, head_dim)
    if inside:
        query, key, value = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value))
    mask = None if kind == "causal" else masks(kind, batch, heads, kv_len)
    options = {"is_causal": kind == "causal", "return_lse": True}
    out, lse = int8_attention(query, key, value, mask, scale=factor, enable_gqa=True, precision=precision, **options)
    quantized = quantize_qk(query, key, mask, factor, enable_gqa=True, lse=True, precision=precision)
    for given_mask in (None, mask):
        got, got_lse = int8_attention(quantized, value, attn_mask=given_mask, **options)
        assert torch.equal(got, out)
        assert torch.equal(got_lse, lse)
        assert got.stride() == out.stride()
    assert torch.equal(int8_attention(quantize_qk(query, key, mask, factor, enable_gqa=True, precision=precision),
                                      value, is_causal=kind == "causal"), out)  # fmt: skip


def test_quantised_value_for_fp8():
    query, key, value = draw()
    if fp8_unavailable(query.device) is not None:
        pytest.skip(f"no fp8 here: {fp8_unavailable(query.device)}")
    mask = torch.rand(1, 1, 1, 131, device=DEVICE) > 0.4
    quantized = quantize_qk(query, key, mask, value=value)
    assert torch.equal(int8_attention(quantized), int8_attention(query, key, value, mask, pv="fp8"))
    with pytest.raises(ValueError, match="pv is 16bit"):
        int8_attention(quantized, pv="16bit")


def test_no_reference_to_the_float_tensors():
    query, key, value = draw()
    watched = [weakref.ref(t) for t in (query, key)] + [weakref.ref(t.untyped_storage()) for t in (query, key)]
    quantized = quantize_qk(query, key, lse=True)
    expected = int8_attention(query, key, value)
    del query, key
    gc.collect()
    assert [w() for w in watched[:2]] == [None, None]
    tensors = [v for v in vars(quantized).values() if torch.is_tensor(v)]
    assert {t.dtype for t in tensors} == {torch.int8, torch.float32}
    assert torch.equal(int8_attention(quantized, value), expected)


@pytest.mark.gpu
def test_memory_of_the_float_tensors_is_released():
    shape = (1, 16, 4096, 128)
    query, key = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    quantized = quantize_qk(query, key)
    del query, key
    freed = before - torch.cuda.memory_allocated()
    assert freed > 0.45 * 2 * math.prod(shape) * 2  # half of it went, the other half is int8 now
    assert quantized.query.dtype == torch.int8


def test_buffers_are_filled():
    query, key, value = draw()
    quantized = quantize_qk(query, key, lse=True)
    out, lse = torch.empty_like(query), torch.empty(1, 2, 70, device=DEVICE)
    got = int8_attention(quantized, value, out=out, lse=lse)
    assert got is out
    assert torch.equal(out, int8_attention(query, key, value))
    assert torch.equal(lse, int8_attention(query, key, value, return_lse=True)[1])
    with pytest.raises(ValueError, match="out is memory that value uses"):
        int8_attention(quantized, value, out=value[:, :, :70])
    for name in ("query_scale", "lse_term"):
        with pytest.raises(ValueError, match=f"lse is memory that {name} uses"):
            int8_attention(quantized, value, lse=getattr(quantized, name))
    assert torch.equal(int8_attention(quantized, value), out)


def test_a_value_that_can_not_be_described_is_copied():
    query, key, value = draw(head_dim=64)
    expanded = value[:, :1].expand(-1, 2, -1, -1)
    shifted = torch.cat([value, value], -1)[..., 1:65]
    for odd in (expanded, shifted):
        assert torch.equal(
            int8_attention(quantize_qk(query, key), odd), int8_attention(quantize_qk(query, key), odd.clone())
        )


def test_under_compile_the_graph_breaks_and_the_answer_stays():
    query, key, value = draw()
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def attend(query, key, value):
        return int8_attention(quantize_qk(query * 2, key), value) + 1

    assert torch.equal(attend(query, key, value), int8_attention(query * 2, key, value) + 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"value": torch.zeros(1, 2, 130, 64)}, ("value is", "[1, 2, 130, 64]", "[1, 2, 131, 64]")),
        ({"value": torch.zeros(1, 2, 131, 64, dtype=torch.bfloat16)}, ("value is bfloat16", "float16")),
        ({"value": None}, ("value is None", "a tensor")),
        ({"scale": 0.3}, ("scale is 0.3", "0.125")),
        ({"scale": "0.125"}, ("scale is '0.125'", "0.125")),
        ({"is_causal": True}, ("is_causal is True", "mask")),
        ({"attn_mask": torch.ones(1, 1, 1, 131, dtype=torch.bool)}, ("attn_mask is another", "was quantised with")),
        ({"attn_mask": torch.zeros(1, 1, 1, 131)}, ("attn_mask is another float32", "was quantised with")),
        ({"return_lse": True}, ("return_lse is True", "lse=True")),
        ({"lse": torch.zeros(1, 2, 70)}, ("lse is given", "lse=True")),
        ({"pv": "fp8"}, ("pv is fp8", "quantize_qk")),
        ({"out": torch.zeros(1, 2, 70, 63)}, ("out is", "[1, 2, 70, 64]")),
        ({"precision": "high"}, ("precision is high", "auto")),
        ({"is_causal": "no"}, ("is_causal is of type str", "True or False")),
        ({"value": "ones"}, ("value is of type str", "a tensor")),
        ({"attn_mask": "ones"}, ("attn_mask is of type str", "a tensor")),
        ({"attn_mask": torch.ones(131, dtype=torch.bool)}, ("attn_mask is another bool [131]", "was quantised with")),
    ],
)
def test_bad_calls(options, words):
    query, key, value = draw()
    mask = torch.rand(1, 1, 1, 131, device=DEVICE) > 0.4
    quantized = quantize_qk(query, key, mask)
    options = {k: v.to(DEVICE) if torch.is_tensor(v) else v for k, v in options.items()}
    if torch.is_tensor(options.get("value")) and options["value"].dtype == torch.float32:
        options["value"] = options["value"].half()
    given = options.pop("value", value)
    with pytest.raises(ValueError, match=r".") as caught:
        int8_attention(quantized, given, **options)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_mask_written_to_since_is_another_one():
    query, key, value = draw()
    mask = torch.randn(1, 1, 1, 131, device=DEVICE)
    quantized = quantize_qk(query, key, mask)
    int8_attention(quantized, value, attn_mask=mask.view(1, 1, 1, 131))
    mask[..., 3] = -1.0
    with pytest.raises(ValueError, match="attn_mask is another"):
        int8_attention(quantized, value, attn_mask=mask)


def test_the_rows_of_a_full_mask_are_another_mask_than_its_first():
    query, key, value = draw()
    full = torch.rand(1, 1, 70, 131, device=DEVICE) > 0.4
    quantized = quantize_qk(query, key, full[:, :, :1])
    with pytest.raises(ValueError, match="attn_mask is another"):
        int8_attention(quantized, value, attn_mask=full)


def test_a_key_beside_a_quantised_one_is_refused():
    query, key, value = draw()
    with pytest.raises(ValueError, match="key and value are given"):
        int8_attention(quantize_qk(query, key), key, value)


def quantized_for(monkeypatch, config, *args, **options):
    """As quantize_qk() makes it on another device."""
    with monkeypatch.context() as patched:
        patched.setattr(quantized_module, "choose_config", lambda *_: config)
        return quantize_qk(*args, **options)


@pytest.mark.skipif(DEVICE == "cuda", reason="there it is the device's own")
@pytest.mark.parametrize("config", [HOPPER_GLUON[64], HOPPER_GLUON[128], config_for(90, 64)])
def test_what_another_device_quantised_is_read_by_its_layout(monkeypatch, config):
    query, key, value = draw()
    mask = torch.rand(1, 1, 1, 131) > 0.4
    quantized = quantized_for(monkeypatch, config, query, key, mask, lse=True)
    out, lse = int8_attention(quantized, value, return_lse=True)
    exact, exact_lse = sdpa_oracle(query, key, value, mask)
    assert relative_error(out, exact) < 0.0125
    assert (lse - exact_lse).abs().max() < 0.05
    mask[..., 7] = True
    with pytest.raises(ValueError, match="was written to since"):
        int8_attention(quantized, value)


@pytest.mark.skipif(DEVICE == "cuda", reason="there it is the device's own")
def test_a_value_in_the_order_of_another_kernel_is_refused(monkeypatch):
    query, key, value = draw()
    quantized = quantized_for(monkeypatch, HOPPER_GLUON[64], query, key, value=value)
    with pytest.raises(ValueError, match="value was quantised for another kernel"):
        int8_attention(quantized)


def test_what_the_kernel_can_not_answer_is_refused_before_anything_runs():
    query, key, _ = draw()
    with pytest.raises(UnsupportedError, match="float32"):
        quantize_qk(query.float(), key.float())
    with pytest.raises(UnsupportedError, match="heads"):
        quantize_qk(query, key[:, :1])
    with pytest.raises(ValueError, match="lse is of type str; expected True or False"):
        quantize_qk(query, key, lse="yes")
    for empty in (query[:0], query[:, :0], query[:, :, :0], query[..., :0]):
        with pytest.raises(UnsupportedError, match="sizes of at least 1"):
            quantize_qk(empty, empty)
    with pytest.raises(TypeError, match="value is None"):
        int8_attention(query, key)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_len": 500}, ("kv_len is 500", "1 to")),
        ({"head_dim": 65}, ("head_dim is 65", "1 to 64")),
        ({"query_scale": torch.zeros(1, 2, 69)}, ("query_scale", "[1, 2, 69]", "[1, 2, 70]")),
        ({"key_scale": torch.zeros(1, 2, 5)}, ("key_scale", "[1, 2, 5]")),
        ({"key": torch.zeros(1, 2, 192, 32, dtype=torch.int8)}, ("key's width is 32", "64")),
        ({"query": torch.zeros(1, 2, 70, 64)}, ("query is torch.float32", "torch.int8")),
        ({"key_shift": torch.zeros(1, 2, 64, device="meta")}, ("key_shift's device is meta", "")),
    ],
)
def test_parts_that_do_not_fit(change, words):
    query, key, _ = draw()
    quantized = quantize_qk(query, key)
    change = {k: v.to(DEVICE) if torch.is_tensor(v) and v.device.type != "meta" else v for k, v in change.items()}
    with pytest.raises(ValueError, match=r".") as caught:
        dataclasses.replace(quantized, **change)
    assert all(word in str(caught.value) for word in words), caught.value


def test_importing_loads_no_triton():
    code = "import sys, sdpa_router; print([m for m in ('triton', 'diffusers', 'torch._dynamo') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
