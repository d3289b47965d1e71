"""The float64 oracle against torch's own float64 SDPA, and measures that can fail."""

import math

import pytest
import torch
import torch.nn.functional as F

from sdpa_router import testing
from sdpa_router.testing import BUDGET, lse_error, relative_error, sdpa_oracle


def masks(batch, heads, q_len, kv_len):
    generator = torch.Generator().manual_seed(3)
    keep = torch.rand(batch, 1, q_len, kv_len, generator=generator) > 0.3
    keep[..., 0] = True
    bias = torch.randn(1, heads, 1, kv_len, generator=generator)
    return {
        "none": None,
        "bool full": keep,
        "bool per key": keep[:, :, :1],
        "bias per head": bias,
        "expanded": bias.expand(batch, heads, q_len, kv_len),
        "two axes": bias[0, 0].expand(q_len, kv_len),
        "-inf": bias.masked_fill(bias > 0, -math.inf),
    }


@pytest.mark.parametrize("kind", list(masks(1, 1, 1, 1)))
@pytest.mark.parametrize("scale", [None, 0.5, -0.3])
@pytest.mark.parametrize("block", [1, 7, 2**26])
def test_oracle_equals_float64_sdpa(kind, scale, block, monkeypatch):
    monkeypatch.setattr(testing, "_ORACLE_SCORES", block * 20)
    query, key, value = testing.gaussian(2, 3, 9, 20, 8, dtype=torch.float64)
    mask = masks(2, 3, 9, 20)[kind]
    out, lse = sdpa_oracle(query, key, value, mask, scale=scale)
    wide = mask.double() if mask is not None and mask.is_floating_point() else mask
    assert relative_error(out, F.scaled_dot_product_attention(query, key, value, wide, scale=scale)) < 1e-12
    scores = query @ key.mT * (8**-0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    assert lse_error(lse, scores.logsumexp(-1)) < 1e-12


@pytest.mark.parametrize("block", [1, 4, 2**26])
@pytest.mark.parametrize(("q_len", "kv_len"), [(9, 9), (5, 9), (9, 5)])
def test_oracle_causal_is_top_left(q_len, kv_len, block, monkeypatch):
    monkeypatch.setattr(testing, "_ORACLE_SCORES", block * kv_len)
    query, key, value = testing.gaussian(1, 2, q_len, kv_len, 8, dtype=torch.float64)
    out, _ = sdpa_oracle(query, key, value, is_causal=True)
    assert relative_error(out, F.scaled_dot_product_attention(query, key, value, is_causal=True)) < 1e-12


def test_oracle_repeats_key_heads():
    query, key, value = testing.gaussian(2, 6, 5, 7, 8, kv_heads=2, dtype=torch.float64)
    out, lse = sdpa_oracle(query, key, value, enable_gqa=True)
    expected, expected_lse = sdpa_oracle(query, key.repeat_interleave(3, 1), value.repeat_interleave(3, 1))
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_oracle_takes_a_value_dim_of_its_own():
    query, key, _ = testing.gaussian(1, 1, 5, 7, 8, dtype=torch.float64)
    value = torch.randn(1, 1, 7, 3, dtype=torch.float64)
    out, _ = sdpa_oracle(query, key, value)
    assert relative_error(out, F.scaled_dot_product_attention(query, key, value)) < 1e-12


def test_oracle_empty_rows_are_zero_and_minus_infinity():
    query, key, value = testing.gaussian(1, 1, 3, 4, 8)
    keep = torch.tensor([[True] * 4, [False] * 4, [True] * 4])
    out, lse = sdpa_oracle(query, key, value, keep)
    assert torch.equal(out[0, 0, 1], torch.zeros(8, dtype=torch.float64))
    assert lse[0, 0, 1] == -math.inf
    assert lse[0, 0, [0, 2]].isfinite().all()
    out, lse = sdpa_oracle(query, key[:, :, :0], value[:, :, :0])
    assert not out.any()
    assert torch.equal(lse, torch.full((1, 1, 3), -math.inf, dtype=torch.float64))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_oracle_passes_nan_on_like_sdpa(bad):
    query, key, value = testing.gaussian(1, 1, 3, 4, 8)
    bias = torch.tensor([0.0, bad, 0.0, 0.0])
    assert sdpa_oracle(query, key, value, bias.view(1, 1, 1, 4))[0].isnan().all()


def test_oracle_leaves_its_inputs_alone():
    inputs = testing.gaussian(1, 1, 3, 4, 8, dtype=torch.float64)
    bias = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    copies = [tensor.clone() for tensor in (*inputs, bias)]
    sdpa_oracle(*inputs, bias)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip((*inputs, bias), copies, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v), "ranks"),
        (lambda q, k, v: (q, k[:, :1], v[:, :1]), "2 query heads and 1 key heads"),
        (lambda q, k, v: (q, k[..., :4], v), "do not fit"),
        (lambda q, k, v: (q, k, v[:, :, :3]), "do not fit"),
    ],
)
def test_oracle_refuses_what_sdpa_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        sdpa_oracle(*change(*testing.gaussian(1, 2, 3, 4, 8)))
    query, key, value = testing.gaussian(1, 2, 3, 4, 8)
    with pytest.raises(ValueError, match="is_causal together with attn_mask"):
        sdpa_oracle(query, key, value, torch.ones(3, 4, dtype=torch.bool), is_causal=True)


def test_measures():
    ones = torch.ones(4)
    assert relative_error(ones, ones) == 0
    assert relative_error(ones * 1.01, ones) == pytest.approx(0.01, rel=1e-4)
    assert relative_error(ones * 0, ones * 0) == 0
    assert relative_error(ones, ones * 0) == math.inf
    assert math.isnan(relative_error(ones * math.nan, ones))
    assert math.isnan(relative_error(ones * math.nan, ones * 0))
    empty = torch.tensor([0.0, -math.inf])
    assert lse_error(empty, empty) == 0
    assert lse_error(empty, torch.tensor([0.5, -math.inf])) == pytest.approx(0.5 / math.sqrt(2))
    assert lse_error(empty, torch.zeros(2)) == math.inf
    assert math.isnan(lse_error(torch.tensor([math.nan]), torch.zeros(1)))


def wrong_answers():
    """Mistakes that real int8 attention libraries made; each must be over the budget."""
    query, key, value = testing.gaussian(1, 2, 64, 128, 64)
    bias = testing.fade_bias(128)
    half = torch.zeros(1, 1, 1, 128).masked_fill(torch.arange(128) >= 64, -math.inf)

    def attend(query, key, value, mask=None, scale=None):
        return sdpa_oracle(query, key, value, mask, scale=scale)

    def coarse(tensor, bits):
        step = tensor.abs().amax() / 2**bits
        return (tensor / step).round() * step

    right = attend(query, key, value, bias)
    return {
        "mask swallowed": (attend(query, key, value, half), attend(query, key, value)),
        "bias in base 2": (right, attend(query, key, value, bias * math.log(2))),
        "scale ignored": (attend(query, key, value, scale=0.5), attend(query, key, value)),
        "last tile dropped": (right, attend(query, key[:, :, :120], value[:, :, :120], bias[..., :120])),
        "6 bits": (right, attend(coarse(query, 5), coarse(key, 5), value, bias)),
        "8-bit value": (right, attend(query, key, value.to(torch.float8_e4m3fn), bias)),
    }


@pytest.mark.parametrize("mistake", list(wrong_answers()))
def test_budget_catches_known_mistakes(mistake):
    (right, right_lse), (wrong, wrong_lse) = wrong_answers()[mistake]
    assert relative_error(right, right) <= BUDGET.gaussian
    if mistake == "last tile dropped":
        assert lse_error(wrong_lse, right_lse) > 0
    else:
        assert relative_error(wrong, right) > BUDGET.gaussian


def test_lse_in_base_2_or_without_its_shift_is_over_the_budget():
    query, key, value = testing.outliers(1, 2, 64, 128, 64)
    _, lse = sdpa_oracle(query, key, value)
    _, centred = sdpa_oracle(query, key.float() - key.float().mean(2, keepdim=True), value)
    assert lse_error(centred, lse) > BUDGET.lse
    assert lse_error(lse / math.log(2), lse) > BUDGET.lse


def test_inputs_are_reproducible_and_as_described():
    first, again = testing.gaussian(1, 4, 8, 16, 32, kv_heads=2), testing.gaussian(1, 4, 8, 16, 32, kv_heads=2)
    assert [tuple(tensor.shape) for tensor in first] == [(1, 4, 8, 32), (1, 2, 16, 32), (1, 2, 16, 32)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], testing.gaussian(1, 4, 8, 16, 32, seed=1)[0])
    query, key, value = testing.outliers(1, 8, 256, 256, 64, dtype=torch.bfloat16)
    assert query.dtype == key.dtype == value.dtype == torch.bfloat16
    assert query[..., 0].float().std() == pytest.approx(8, rel=0.1)
    assert key.float().mean(2).pow(2).mean().sqrt() == pytest.approx(40, rel=0.1)


def test_fade_is_a_raised_cosine_down_to_the_floor():
    bias = testing.fade_bias(1000)
    assert bias.shape == (1, 1, 1, 1000)
    assert bias.dtype == torch.float32
    flat = bias.flatten()
    assert not flat[:600].any()
    assert (flat[599:].diff() < 0).all()
    assert flat[-1] == pytest.approx(math.log(1e-4), rel=1e-3)
    assert flat[800] == pytest.approx(math.log(1e-4) / 2, rel=0.01)


def test_banded_window_is_the_field_shape():
    window = testing.banded_window()
    assert window.kv_len == 33600
    assert window.bias.shape == (1, 1, 1, 33600)
    assert (window.bias == 0).float().mean() > 0.6
    assert not window.bias[..., window.parts["core"]].any()
    assert window.bias[..., 0].item() == 0
    before, after = (window.bias[0, 0, 0, window.parts[name]] for name in ("skirt before", "skirt after"))
    assert torch.equal(before, after.flip(0))
    assert after[-1] == pytest.approx(math.log(1e-4), rel=1e-3)
    assert [part.start for part in window.parts.values()][1:] == [part.stop for part in window.parts.values()][:-1]
    assert list(window.parts.values())[-1].stop == window.kv_len
