"""Value in e4m3: dequantised it is the value, up to rounding, whatever masked keys hold."""

from __future__ import annotations

import math

import pytest
import torch

from sdpa_router import int8_attention
from sdpa_router.kernels.int8_attention.configs import Config
from sdpa_router.kernels.int8_attention.limits import interpreting
from sdpa_router.kernels.int8_attention.quantize_value import quantize_value

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = 2**-4  # of a value, at most


def dequantised(quantized, kv_len, head_dim, permuted):
    values = quantized.value.float() * quantized.scale[..., None]
    n = torch.arange(values.shape[3], device=values.device)
    if permuted:
        n = n // 16 * 16 + n % 8 // 2 * 4 + n % 16 // 8 * 2 + n % 2
    return values[..., n].transpose(-1, -2)[:, :, :kv_len, :head_dim]


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize(("kv_len", "head_dim"), [(1, 32), (131, 40), (300, 96), (513, 128)])
def test_value_comes_back(kv_len, head_dim, permuted):
    value = torch.randn(2, 2, kv_len, head_dim, device=DEVICE).half()
    value[..., 1] *= 1000  # a channel of its own size takes no precision from the others
    quantized = quantize_value(value, None, Config(64, 64, 4, 2, gluon=permuted))
    back = dequantised(quantized, kv_len, head_dim, permuted)
    floor = value.float().abs().amax(2, keepdim=True) * 2**-15
    assert ((back - value).abs() <= ROUNDING * value.float().abs() + floor).all()


@pytest.mark.parametrize("kv_len", [600, 2000])
@pytest.mark.parametrize("size", [5.0, 50.0, 6e4])
def test_what_the_sample_of_keys_does_not_hold_comes_back_too(kv_len, size):
    """Every second (fourth) key is looked at before the pass that rounds; the others may be larger by any factor."""
    value = torch.rand(1, 3, kv_len, 64, device=DEVICE).half()
    value[:, 0, 7::16, 5] = size
    value[:, 1, ::4] = 0  # all that is looked at
    value[:, 1, 1::4] = size
    quantized = quantize_value(value, None, Config(64, 64, 4, 2))
    back = dequantised(quantized, kv_len, 64, False)
    floor = value.float().abs().amax(2, keepdim=True) * 2**-15
    assert ((back - value).abs() <= ROUNDING * value.float().abs() + floor).all()
    assert torch.equal(quantized.scale.log2(), quantized.scale.log2().round())


def test_a_value_is_rounded_alike_whatever_the_others_are():
    value = torch.randn(1, 2, 700, 64, device=DEVICE).half()
    value += 2 * value.sign()  # none near 0, where e4m3 has fewer digits
    larger = value.clone()
    larger[:, 0, 100:130:3] *= 100
    config = Config(64, 64, 4, 2)
    back, again = (dequantised(quantize_value(v, None, config), 700, 64, False) for v in (value, larger))
    same = larger == value
    assert torch.equal(back[same], again[same])


def test_masked_keys_count_for_nothing():
    value = torch.randn(1, 4, 200, 64, device=DEVICE).half()
    bias = torch.zeros(1, 8, 256, device=DEVICE)
    bias[..., 200:] = -math.inf
    bias[:, :, 10:20] = -math.inf
    bias[:, 0, 15] = 0.0  # one query head of the first key head sees this key
    clean = value.clone()
    clean[:, :, 10:20] = 0
    clean[:, 0, 15] = value[:, 0, 15]
    value[:, :, 12] = 6e4
    value[:, :, 13] = math.nan
    config = Config(64, 64, 4, 2)
    garbage, none = quantize_value(value, bias, config), quantize_value(clean, None, config)
    assert torch.equal(garbage.scale, none.scale)
    assert torch.equal(garbage.value.view(torch.uint8), none.value.view(torch.uint8))


@pytest.mark.skipif(interpreting(), reason="Triton's interpreter makes no NaN of e4m3")
def test_what_is_not_finite_becomes_nan_alone():
    value = torch.randn(1, 1, 100, 32, device=DEVICE).half()
    value[0, 0, 5, 3], value[0, 0, 7, 2] = math.nan, -math.inf
    back = dequantised(quantize_value(value, None, Config(64, 64, 4, 2)), 100, 32, False)
    assert torch.equal(back.isnan(), ~value.isfinite())


@pytest.mark.parametrize("size", [1e-37, 1e-33, 1e-31])
@pytest.mark.parametrize("sampled", [True, False])
def test_tiny_values_are_no_zeros(size, sampled):
    value = size * (1 + torch.rand(1, 1, 600, 64, device=DEVICE))
    if not sampled:
        value[:, :, ::2] = 0  # all that is looked at before the pass that rounds
    back = dequantised(quantize_value(value.bfloat16(), None, Config(64, 64, 4, 2)), 600, 64, False)
    assert ((back - value).abs() <= 1.1 * ROUNDING * value.abs()).all()


@pytest.mark.parametrize("size", [6e4, 6.2e4, 6.4e4, 65504.0])
def test_the_largest_float16_values_do_not_become_infinite(size):
    """Rounded to e4m3 they would be 2^16, or that once their weight is rounded up too."""
    query, key, value = (torch.randn(1, 2, n, 64, device=DEVICE).half() for n in (40, 200, 200))
    query[..., 0], key[..., 0] = 30, 4 * key[..., 0]  # few keys a row
    out = int8_attention(query, key, torch.full_like(value, size) * value.sign(), pv="fp8")
    assert out.isfinite().all()
    same = int8_attention(query, key, torch.full_like(value, size), pv="fp8")
    assert same.isfinite().all()
    assert ((same - size).abs() <= 2 * ROUNDING * size).all()
