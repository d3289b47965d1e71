"""Variants of the Hopper kernel on a GPU that has it: all of one source must give one answer."""

from __future__ import annotations

import math

import pytest
import torch

from sdpa_router.kernels.int8_attention.configs import hopper_config
from sdpa_router.testing import relative_error, sdpa_oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
    ),
]
NARROW = {"block_n": 64, "num_stages": 4}
TWO = {"block_m": 128, "block_n": 128, "num_stages": 5, "turns": 1, "as_float": 0}
WIDE = {"block_m": 128, "block_n": 128, "num_stages": 3}
VARIANTS = [
    (64, {}), (64, WIDE), (64, {"block_m": 64, **NARROW}), (64, {"block_m": 192, **NARROW}),
    (96, {}), (128, {}), (128, {"as_float": 0}), (128, {"polynomial": 4}), (256, {}),
    (64, {"turns": 1}), (96, {"as_float": 0}), (96, {"turns": 1}), (128, {"turns": 1}),
]  # fmt: skip
FP8 = [
    (64, {}), (64, WIDE), (96, {}), (128, {}), (128, {"as_float": 0}),
    (256, {}), (128, {"turns": 1}), (128, TWO), (128, TWO | {"polynomial": 2}), (128, {"polynomial": 4}),
]  # fmt: skip


def draw(heads, kv_heads, q_len, kv_len, head_dim):
    shapes = ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    return [torch.randn(2, h, n, head_dim, device="cuda").bfloat16() for h, n in shapes]


def run(
    query, key, value, mask=None, *, changes, fp8=False, high=False, is_causal=False, online=False, scale=None, out=None
):
    from sdpa_router.kernels.int8_attention import hopper
    from sdpa_router.kernels.int8_attention.quantize import quantize
    from sdpa_router.kernels.int8_attention.quantize_value import quantize_value

    head_dim = query.shape[3]
    config = hopper_config(head_dim, fp8)._replace(**changes)
    scale = head_dim**-0.5 if scale is None else scale
    quantized = quantize(query, key, mask, scale, config, lse=True, per_token=high)
    values = quantize_value(value, quantized.bias, config) if fp8 else value
    out = torch.full_like(query, torch.nan) if out is None else out
    lse = torch.full(query.shape[:3], torch.nan, device="cuda")
    hopper.attention(quantized, values, config, is_causal=is_causal, out=out, lse=lse, online=online)
    return out, lse


def variants():
    for head_dim, changes in VARIANTS:
        yield pytest.param(head_dim, changes, False, id=f"D{head_dim} {changes}")
    for head_dim, changes in FP8:
        yield pytest.param(head_dim, changes, True, id=f"D{head_dim} fp8 {changes}")


@pytest.mark.parametrize(("head_dim", "changes", "fp8"), list(variants()))
@pytest.mark.parametrize("online", [False, True])
def test_every_variant_matches_the_oracle(head_dim, changes, fp8, online):
    budget = 0.045 if fp8 else 0.0135
    for kv_len in (1, 64, 200, 515):
        query, key, value = draw(4, 2, 200, kv_len, head_dim)
        bias = torch.randn(2, 4, 1, kv_len, device="cuda")
        bias[1, 0, :, kv_len // 3 : kv_len - kv_len // 4] = -math.inf
        for mask, is_causal in ((None, False), (bias, False), (None, True)):
            out, lse = run(query, key, value, mask, changes=changes, fp8=fp8, is_causal=is_causal, online=online)
            exact, exact_lse = sdpa_oracle(query, key, value, mask, is_causal=is_causal, enable_gqa=True)
            assert relative_error(out, exact) < budget, (kv_len, mask is None, is_causal)
            difference = torch.where(lse == exact_lse, 0.0, (lse - exact_lse).abs())  # -inf where a row has no keys
            assert difference.max() < 0.06, (kv_len, mask is None, is_causal)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("head_dim", [40, 72, 80, 104, 136])
def test_rows_of_any_width_are_written_and_nothing_beside_them(head_dim, fp8):
    """A head_dim that is no width of the kernel's own: its last columns are not the next row's first."""
    query, key, value = draw(2, 2, 200, 300, head_dim)
    room = torch.full((2, 2, 200, 2 * head_dim), 7.0, device="cuda").bfloat16()
    out, lse = run(query, key, value, changes={}, fp8=fp8, out=room[..., :head_dim])
    exact, exact_lse = sdpa_oracle(query, key, value)
    assert (room[..., head_dim:] == 7).all()
    # Of 136 the last 8 are rotated into 128 columns, each of which is rounded.
    assert relative_error(out, exact) < (0.045 if fp8 else 0.0135 if head_dim <= 128 else 0.016)
    assert (lse - exact_lse).abs().max() < 0.06


@pytest.mark.parametrize("changes", [{}, NARROW])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_scale_for_each_key_is_more_exact(changes, fp8):
    query, key, value = draw(2, 2, 256, 1024, 128)
    exact = sdpa_oracle(query, key, value)[0]
    high, auto = (relative_error(run(query, key, value, changes=changes, fp8=fp8, high=h)[0], exact) for h in (1, 0))
    assert high < auto
    assert high < (0.045 if fp8 else 0.0105)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_weights_in_e4m3_round_alike_with_and_without_a_running_maximum(head_dim):
    """Both are whole numbers (log2), and e4m3 is the same under any of these."""
    query, key, value = draw(2, 2, 200, 1000, head_dim)
    bounded, running = (run(query, key, value, changes={}, fp8=True, high=True, online=o)[0] for o in (False, True))
    assert relative_error(bounded, running) < 5e-3


@pytest.mark.parametrize("changes", [{}, TWO])
@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("reach", [4.0, 18.0, 60.0])
def test_weights_in_e4m3_follow_scores_that_rise_or_fall_along_the_keys(reach, direction, changes):
    """The range of e4m3 holds 18 (log2): rows are lowered as their scores rise; over the bound a maximum is kept."""
    query, key, value = draw(2, 2, 128, 2000, 128)
    along = torch.nn.functional.normalize(torch.randn(128, device="cuda"), dim=0)
    key += direction * torch.linspace(-reach, reach, 2000, device="cuda")[:, None].bfloat16() * along.bfloat16()
    query += 11.3 * along.bfloat16()
    # Of keys quantised alike.
    exact, exact_lse = run(query, key, value, changes={"block_n": hopper_config(128, True)._replace(**changes).block_n})
    out, lse = run(query, key, value, changes=changes, fp8=True)
    assert relative_error(out, exact) < 0.05
    assert (lse - exact_lse).abs().max() < 1e-3


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize(("fp8", "high"), [(False, False), (True, False), (False, True), (True, True)])
def test_tiles_of_one_bias_beside_tiles_of_several(fp8, high, online):
    """All of one, all of several, and both: in the middle, first and last, and where a part of a tile is masked."""
    query, key, value = draw(4, 2, 200, 1024, 128)
    bias = torch.zeros(2, 4, 1, 1024, device="cuda")
    bias[0, 1, :, 130:330] = -torch.rand(200, device="cuda") * 9
    bias[0, 2, :, 512:] = -4.0
    bias[0, 3] = torch.randn(1024, device="cuda")
    bias[1, 0, :, 384:520] = -math.inf
    bias[1, 1] += 3.0
    bias[1, 2, :, :100] = torch.randn(100, device="cuda")
    bias[1, 3, :, 960:] = torch.randn(64, device="cuda")
    out, lse = run(query, key, value, bias, changes={}, fp8=fp8, high=high, online=online)
    exact, exact_lse = sdpa_oracle(query, key, value, bias, enable_gqa=True)
    assert relative_error(out, exact) < (0.045 if fp8 else 0.0135)
    assert (lse - exact_lse).abs().max() < 0.06


def test_keys_under_a_heavy_bias_first_leave_room_for_the_others():
    query, key, value = draw(2, 2, 128, 700, 128)
    bias = torch.zeros(1, 1, 1, 700, device="cuda")
    bias[..., :300] = -3000.0  # the walk under a mask is from the first tile to the last
    out, lse = run(query, key, value, bias, changes={}, fp8=True)
    exact, exact_lse = sdpa_oracle(query, key, value, bias)
    assert relative_error(out, exact) < 0.045
    assert (lse - exact_lse).abs().max() < 0.05


def test_a_row_without_keys_is_zero_and_what_is_not_finite_is_nan():
    query, key, value = draw(2, 2, 64, 300, 64)
    mask = torch.ones(2, 1, 1, 300, dtype=torch.bool, device="cuda")
    mask[1] = False
    value[0, 0, 5, 3], value[0, 1, 7, 2] = math.nan, math.inf
    out, lse = run(query, key, value, mask, changes={}, fp8=True)
    assert (out[1] == 0).all()
    assert (lse[1] == -math.inf).all()
    nan = out[0].isnan()
    assert nan[0, :, 3].all()
    assert nan[1, :, 2].all()
    assert nan.sum() == 2 * 64
