"""Biases of any size: a query tile whose own keys lie far below others' answers as if those others were not there."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdpa_router import KeyRange, Window, banded_attention, block_sparse_attention
from sdpa_router.banded import bias_of
from sdpa_router.testing import gaussian, relative_error, sdpa_oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUDGET = 0.0135  # as in test_kernel_int8.py
LOWEST = torch.finfo(torch.float32).min
# Those over 2^24 leave nothing of a score in float32; float64, which the oracle works in, keeps it up to 2^52.
SIZES = [0.0, 30.0, -300.0, 9000.0, -20000.0, -1.0e6, 5.0e6, -1.0e30, 2.0e38, LOWEST]


def check(inputs, mask, answer):
    exact, exact_lse = sdpa_oracle(*inputs, mask, enable_gqa=True)
    out, lse = answer
    assert relative_error(out, exact) < 2 * BUDGET
    empty = exact_lse == -math.inf
    assert (out[empty] == 0).all()
    assert (lse[empty] == -math.inf).all()
    # A row that one key answers has that score's own rounding as its error: rms 0.0105 here, and 4.3 times that at most
    # in 2664 rows. Float32 holds the LSE itself to 2^-22.
    error = ((lse.double() - exact_lse)[~empty].abs() - 2.0**-22 * exact_lse[~empty].abs()).clamp(min=0)
    assert (error < 0.07).all()
    assert error.square().sum() <= 0.02**2 * error.numel()


@st.composite
def biases(draw, kv_len, rows):
    """A bias [1, rows, 1, K]: every 64 keys near one size, here and there -inf, and one key of another size."""
    near = torch.tensor([[draw(st.sampled_from(SIZES)) for _ in range(-(-kv_len // 64))] for _ in range(rows)])
    bias = near.repeat_interleave(64, 1)[:, :kv_len] + torch.randn(rows, kv_len)
    bias[:, draw(st.integers(0, kv_len - 1))] = draw(st.sampled_from(SIZES))
    bias[torch.rand(rows, kv_len) < draw(st.sampled_from([0.0, 0.3]))] = -math.inf
    return bias.clamp(LOWEST if draw(st.booleans()) else -math.inf)[None, :, None].to(DEVICE)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(
    data=st.data(),
    rows=st.sampled_from([1, 2]),
    q_len=st.integers(65, 200),
    kv_len=st.integers(65, 330),
    density=st.sampled_from([0.3, 0.6, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_tiles_of_any_bias(data, rows, q_len, kv_len, density, seed):
    torch.manual_seed(seed)
    inputs = gaussian(1, 2, q_len, kv_len, 64, kv_heads=1, device=DEVICE, seed=seed)
    bias = data.draw(biases(kv_len, rows))
    tiles = torch.rand(1, 2, -(-q_len // 64), -(-kv_len // 64), device=DEVICE) < density
    expanded = tiles.repeat_interleave(64, 2).repeat_interleave(64, 3)[..., :q_len, :kv_len]
    answer = block_sparse_attention(*inputs, tiles, attn_mask=bias, return_lse=True)
    check(inputs, torch.where(expanded, bias, -math.inf), answer)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(data=st.data(), rows=st.sampled_from([1, 2]), kv_len=st.integers(65, 330), seed=st.integers(0, 2**16))
def test_windows_of_any_bias(data, rows, kv_len, seed):
    torch.manual_seed(seed)
    inputs = gaussian(1, 2, 170, kv_len, 64, kv_heads=1, device=DEVICE, seed=seed)
    bias = data.draw(biases(kv_len, rows))
    edge = data.draw(st.integers(1, kv_len - 1))
    fade = data.draw(st.integers(0, min(edge, kv_len - edge)))
    windows = [Window(0, 70, (KeyRange(0, edge, 0, fade),)), Window(70, 150, (KeyRange(edge, kv_len, fade, 0),))]
    mask = torch.full((1, 1, 170, kv_len), -math.inf, device=DEVICE)
    for window in windows:
        mask[:, :, window.start : window.stop] = bias_of(window, kv_len, device=DEVICE)
    mask = torch.where(mask == -math.inf, mask.double(), mask.double() + bias)
    check(inputs, mask, banded_attention(*inputs, windows, bias, return_lse=True))


@pytest.mark.parametrize("low", [-1.0e5, -1.0e30, LOWEST])
def test_what_a_far_key_holds_changes_nothing_where_others_count(low):
    inputs = gaussian(1, 2, 130, 256, 64, device=DEVICE)
    bias = torch.zeros(1, 1, 1, 256, device=DEVICE)
    bias[..., 100:192] = low
    tiles = torch.ones(1, 1, 3, 4, dtype=torch.bool, device=DEVICE)
    windows = [Window(0, 130, (KeyRange(0, 256),))]
    before = block_sparse_attention(*inputs, tiles, attn_mask=bias), banded_attention(*inputs, windows, bias)
    inputs[1][:, :, 100:192] *= 1000
    inputs[2][:, :, 100:192] = 60000
    after = block_sparse_attention(*inputs, tiles, attn_mask=bias), banded_attention(*inputs, windows, bias)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_nan_and_infinity_stay_with_those_who_see_them(spoilt):
    inputs = gaussian(1, 2, 128, 256, 64, device=DEVICE)
    bias = torch.randn(1, 1, 1, 256, device=DEVICE)
    bias[..., :64] -= 1.0e6
    tiles = torch.tensor([[True, True, False, False], [False, True, True, True]], device=DEVICE)
    before = block_sparse_attention(*inputs, tiles, attn_mask=bias)
    bias[..., 20] = spoilt
    out = block_sparse_attention(*inputs, tiles, attn_mask=bias)
    assert out[:, :, :64].isnan().all()
    assert relative_error(out[:, :, 64:], before[:, :, 64:]) < BUDGET
    windows = [Window(0, 64, (KeyRange(0, 30),)), Window(64, 128, (KeyRange(30, 256),))]
    out = banded_attention(*inputs, windows, bias)
    assert out[:, :, :64].isnan().all()
    assert out[:, :, 64:].isfinite().all()
