"""int8_linear_qk(): one rounding from the exact int32 result, attention over a joined pair, bad input."""

from __future__ import annotations

import math

import numpy
import pytest
import torch

from sdpa_router import int8_attention, int8_linear_qk, join_qk, quantize_qk
from sdpa_router.kernels.int8_attention import linear
from sdpa_router.testing import relative_error, sdpa_oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def layer(rows, channels):
    weight = torch.randn(rows, channels, device=DEVICE) / math.sqrt(channels)
    scale = weight.abs().amax(1) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale


def exact(x, x_scale, weight, scale, bias, heads):
    """float64 [B, heads, L, D] from the exact integer products."""
    y = (x.double() @ weight.double().T) * x_scale[..., None].double() * scale.double()
    y = y if bias is None else y + bias.double()
    return y.unflatten(2, (heads, -1)).transpose(1, 2)


def steps_off(side, wanted, factor=1.0):
    """Largest distance from `wanted` in units of the int8 step."""
    index = side.layout.key.index(side.length, side.scale.device) if side.is_key else slice(None)
    step = side.scale[..., index, None].double() / factor
    got = side.values[:, :, : side.length, : side.head_dim].double() * step
    return ((got - wanted).abs() / step.clamp(min=1e-30)).max().item()


@pytest.mark.parametrize(("heads", "head_dim", "channels"), [(3, 64, 96), (2, 40, 130), (5, 32, 64), (1, 128, 64)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_one_rounding_from_the_exact_result(heads, head_dim, channels, with_bias):
    x = torch.randn(2, 150, channels, device=DEVICE).half()
    weight, scale = layer(heads * head_dim, channels)
    bias = torch.randn(heads * head_dim, device=DEVICE).half() if with_bias else None
    rows, row_scale = linear.quantize_rows(x)
    assert ((rows.double() * row_scale[..., None] - x.double()).abs() <= 0.501 * row_scale[..., None]).all()
    wanted = exact(rows, row_scale, weight, scale, bias, heads)
    query = int8_linear_qk(x, weight, scale, heads=heads, role="query", bias=bias)
    assert steps_off(query, wanted, query.softmax_scale * math.log2(math.e)) < 0.501
    given = int8_linear_qk(
        rows, weight, scale, heads=heads, role="query", bias=bias, x_scale=row_scale, dtype=torch.float16
    )
    assert torch.equal(given.values, query.values)
    key = int8_linear_qk(x, weight, scale, heads=heads, role="key", bias=bias)
    assert steps_off(key, wanted - key.key_shift[:, :, None, :head_dim].double()) < 0.501
    assert (key.values[:, :, 150:] == 0).all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("precision", ["auto", "high"])
def test_attention_over_a_joined_pair(masked, precision):
    heads, head_dim = 3, 64
    hidden, text = torch.randn(2, 150, 96, device=DEVICE).half(), torch.randn(2, 77, 70, device=DEVICE).half() + 1
    value = torch.randn(2, heads, 77, head_dim, device=DEVICE).half()
    (wq, sq), (wk, sk) = layer(heads * head_dim, 96), layer(heads * head_dim, 70)
    mask = (torch.rand(2, 1, 1, 77, device=DEVICE) > 0.3) if masked else None
    query = int8_linear_qk(hidden, wq, sq, heads=heads, role="query")
    key = int8_linear_qk(text, wk, sk, heads=heads, role="key", attn_mask=mask, precision=precision)
    out = int8_attention(join_qk(query, key), value)
    wanted = [exact(*linear.quantize_rows(x), w, s, None, heads) for x, w, s in ((hidden, wq, sq), (text, wk, sk))]
    assert relative_error(out, sdpa_oracle(*wanted, value, mask)[0]) < 0.0135
    assert out.transpose(1, 2).is_contiguous()


def test_masked_keys_count_for_nothing():
    text = torch.randn(1, 77, 64, device=DEVICE).half()
    weight, scale = layer(128, 64)
    mask = torch.rand(1, 2, 1, 77, device=DEVICE) > 0.4
    dropped = ~mask[0].any(0)[0]
    garbage = torch.where(dropped[None, :, None], 1000 * text, text)
    keys = [int8_linear_qk(x, weight, scale, heads=2, role="key", attn_mask=mask) for x in (text, garbage)]
    assert torch.equal(keys[0].values, keys[1].values)
    assert torch.equal(keys[0].scale, keys[1].scale)


def test_what_is_not_finite_stays_with_those_who_see_its_tile():
    x, value = torch.randn(1, 200, 64, device=DEVICE).half(), torch.randn(1, 1, 200, 32, device=DEVICE).half()
    (weight, scale), rows = layer(32, 64), x.clone()
    x[0, 150, 5] = math.nan
    query = int8_linear_qk(rows, weight, scale, heads=1, role="query")
    key = int8_linear_qk(x, weight, scale, heads=1, role="key")
    out = int8_attention(join_qk(query, key), value, is_causal=True)
    assert out[0, 0, 150:].isnan().all()
    assert out[0, 0, :128].isfinite().all()


def test_the_plain_layer_and_grouped_heads():
    x = torch.randn(1, 70, 64, device=DEVICE).half()
    weight, scale = layer(4 * 32, 64)
    rows, row_scale = linear.quantize_rows(x)
    plain = linear.int8_linear(linear.Layer(rows, row_scale, weight, scale, None, 4), torch.float16)
    assert (
        relative_error(plain.unflatten(2, (4, 32)).transpose(1, 2), exact(rows, row_scale, weight, scale, None, 4))
        < 1e-3
    )
    query = int8_linear_qk(x, weight, scale, heads=4, role="query")
    key = int8_linear_qk(x, weight[:64], scale[:64], heads=2, role="key", group=2)
    value = torch.randn(1, 2, 70, 32, device=DEVICE).half()
    q, k = plain.unflatten(2, (4, 32)).transpose(1, 2), plain[..., :64].unflatten(2, (2, 32)).transpose(1, 2)
    assert (
        relative_error(int8_attention(join_qk(query, key), value), sdpa_oracle(q, k, value, enable_gqa=True)[0])
        < 0.0135
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(150, 64)}, ("x is [150, 64]", "[B, L, C]")),
        ({"weight_int8": torch.zeros(128, 63, dtype=torch.int8)}, ("weight_int8", "[128, 63]", "[heads * D, 64]")),
        ({"weight_int8": torch.zeros(128, 64)}, ("weight_int8 is float32", "int8")),
        ({"weight_scale": torch.zeros(127)}, ("weight_scale", "[127]", "[128]")),
        ({"weight_scale": torch.zeros(128).half()}, ("weight_scale is float16", "float32")),
        ({"bias": torch.zeros(64)}, ("bias", "[64]", "[128]")),
        ({"bias": "zeros"}, ("bias is of type str", "a tensor")),
        ({"x_scale": 1.0}, ("x_scale is of type float", "a tensor")),
        ({"bias": torch.zeros(128).int()}, ("bias is int32", "floating")),
        ({"x": None}, ("x is of type NoneType", "a tensor")),
        ({"group": 0}, ("group is 0", "at least 1")),
        ({"heads": 3}, ("heads is 3", "128")),
        ({"heads": "2"}, ("heads is '2'", "128")),
        ({"x": torch.zeros(1, 0, 64)}, ("x is [1, 0, 64]", "at least 1")),
        ({"x": torch.zeros(1, 150, 64).double()}, ("x is float64", "int8, float16")),
        ({"dtype": "half"}, ("dtype is 'half'", "float16")),
        ({"bias": torch.zeros(128, requires_grad=True)}, ("bias requires a gradient", "no_grad")),
        ({"role": "value"}, ("role is 'value'", "'query' or 'key'")),
        ({"x_scale": torch.zeros(1, 150)}, ("x_scale is given", "not int8")),
        ({"x": torch.zeros(1, 150, 64, dtype=torch.int8)}, ("x_scale is None", "[1, 150]")),
        (
            {"x": torch.zeros(1, 150, 64, dtype=torch.int8), "x_scale": torch.zeros(1, 150)},
            ("dtype is None", "float16"),
        ),
        ({"attn_mask": torch.ones(1, 1, 1, 150, dtype=torch.bool)}, ("attn_mask is given", "None")),
        ({"role": "key", "scale": 0.1}, ("scale is 0.1", "None")),
    ],
)
def test_bad_input(change, words):
    good = {"x": torch.zeros(1, 150, 64), "weight_int8": torch.zeros(128, 64, dtype=torch.int8),
            "weight_scale": torch.zeros(128), "heads": 2, "role": "query"}  # fmt: skip
    arguments = {k: v.to(DEVICE) if torch.is_tensor(v) else v for k, v in (good | change).items()}
    if arguments["x"] is not None and arguments["x"].dtype == torch.float32:
        arguments["x"] = arguments["x"].half()
    with pytest.raises(ValueError, match=r".") as caught:
        int8_linear_qk(**arguments)
    assert all(word in str(caught.value) for word in words), caught.value


def test_pairs_that_do_not_belong_together():
    x = torch.randn(1, 70, 64, device=DEVICE).half()
    weight, scale = layer(64, 64)
    query = int8_linear_qk(x, weight, scale, heads=2, role="query")
    key = int8_linear_qk(x, weight, scale, heads=1, role="key")
    with pytest.raises(ValueError, match="key is of type Tensor; expected what int8_linear_qk"):
        join_qk(query, key.values)
    with pytest.raises(ValueError, match="given key, query; expected query, key"):
        join_qk(key, query)
    with pytest.raises(ValueError, match="key's head_dim is 64; expected 32"):
        join_qk(query, key)
    value = torch.randn(1, 2, 70, 32, device=DEVICE).half()
    pair = join_qk(query, int8_linear_qk(x, weight, scale, heads=2, role="key"))
    with pytest.raises(ValueError, match="return_lse is True"):
        int8_attention(pair, value, return_lse=True)
    assert quantize_qk(value, value).layout.rotation != pair.layout.rotation


def test_scales_of_any_strides_and_a_number_of_numpy():
    x = torch.randn(1, 70, 64, device=DEVICE).half()
    weight, scale = layer(128, 64)
    apart = torch.stack([scale, 9 * scale], 1)[:, 0]
    for role in ("query", "key"):
        sides = [int8_linear_qk(x, weight, s, heads=n, role=role) for s, n in ((scale, 2), (apart, numpy.int64(2)))]
        assert torch.equal(sides[0].values, sides[1].values)
        assert torch.equal(sides[0].scale, sides[1].scale)


def test_a_mask_of_other_heads_than_the_query_has():
    x = torch.randn(1, 70, 64, device=DEVICE).half()
    mask = torch.randn(1, 4, 1, 70, device=DEVICE)
    key = int8_linear_qk(x, *layer(64, 64), heads=2, role="key", group=2, attn_mask=mask)
    join_qk(int8_linear_qk(x, *layer(128, 64), heads=4, role="query"), key)
    for heads in (2, 8):
        query = int8_linear_qk(x, *layer(32 * heads, 64), heads=heads, role="query")
        with pytest.raises(ValueError, match=f"query has {heads} heads; expected 4"):
            join_qk(query, key)
