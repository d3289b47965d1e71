"""rms_rope_quantize(): against norm and RoPE in float64, attention over it, its lengths, masks and bad input."""

from __future__ import annotations

import math
import warnings

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdpa_router import UnsupportedError, int8_attention, rms_rope_quantize
from sdpa_router.kernels.int8_attention.fused_reference import rms_rope_reference
from sdpa_router.testing import relative_error, sdpa_oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUDGET = 0.0135


def draw(batch, heads, length, head_dim, dtype=torch.float16, offset=0.0):
    """[B, H, L, D] with heads inside the sequence in memory, as a projection gives it."""
    x = torch.randn(batch, length, heads, head_dim, device=DEVICE) + offset
    return x.to(dtype).transpose(1, 2)


def angles(length, rotary):
    turn = torch.rand(length, rotary // 2, device=DEVICE) * 6.3
    return turn.cos(), turn.sin()


def check(query, key, value, weights, tables, mask=None, budget=BUDGET, lse=True, key_tables=None, **options):
    """The attention over the fused quantisation is that over norm and RoPE in float64."""
    wq, wk = weights
    cos, sin = tables
    key_cos, key_sin = key_tables or (None, None)
    quantized = rms_rope_quantize(
        query,
        key,
        wq,
        wk,
        cos,
        sin,
        attn_mask=mask,
        lse=lse,
        enable_gqa=True,
        key_cos=key_cos,
        key_sin=key_sin,
        **options,
    )
    shape = {n: options.get(n) for n in ("interleaved", "eps", "rotary_dim")}
    across = options.get("across_heads", False) or (wq is not None and wq.numel() > query.shape[3])
    normed = [
        rms_rope_reference(x, w, *t, across_heads=across, **shape)
        for x, w, t in ((query, wq, tables), (key, wk, key_tables or tables))
    ]
    exact, exact_lse = sdpa_oracle(*normed, value.double(), mask, enable_gqa=True)
    out, got_lse = int8_attention(quantized, value, return_lse=True)
    assert relative_error(out, exact) < budget
    assert (got_lse - exact_lse)[exact_lse > -math.inf].abs().max() < 0.05
    return quantized


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (128, 64), (40, 40), (96, 32), (32, 2)])
def test_norm_a_head_with_rope(interleaved, head_dim, rotary):
    query, key, value = draw(2, 4, 70, head_dim), draw(2, 2, 131, head_dim, offset=1.0), draw(2, 2, 131, head_dim)
    weights = [torch.rand(head_dim, device=DEVICE) + 0.5 for _ in range(2)]
    check(
        query, key, value, weights, angles(70, rotary), key_tables=angles(131, rotary), interleaved=interleaved,
        eps=1e-6, rotary_dim=rotary,
    )  # fmt: skip


@pytest.mark.parametrize("masked", [False, True])
def test_norm_across_heads(masked):
    query, key, value = draw(1, 6, 70, 64), draw(1, 3, 70, 64, offset=0.5), draw(1, 3, 70, 64)
    query[:, :3] *= 20  # the other heads of a token change what the norm makes of one
    key[:, 1:] *= 20
    weights = [torch.rand(heads * 64, device=DEVICE) + 0.5 for heads in (6, 3)]
    mask = (torch.rand(1, 1, 1, 70, device=DEVICE) > 0.4) if masked else None
    check(query, key, value, weights, angles(70, 64), mask, interleaved=True, eps=1e-5, budget=0.03)


def test_norm_across_heads_without_weights():
    query, key, value = draw(1, 3, 40, 32), draw(1, 3, 40, 32), draw(1, 3, 40, 32)
    query[:, 0] *= 5
    check(query, key, value, (None, None), (None, None), interleaved=True, eps=1e-5, across_heads=True)


def test_no_weight_past_the_last_head_is_read():
    """Three heads go in a tile of eight; a NaN behind their weights would show as a warning of numpy."""
    query, key = draw(1, 3, 20, 32), draw(1, 3, 20, 32)
    behind = torch.full((8 * 32,), math.nan, device=DEVICE)
    behind[: 3 * 32] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rms_rope_quantize(query, key, behind[:96], behind[:96], None, None, interleaved=True, eps=1e-6)


def test_without_norm_and_without_rope():
    query, key, value = draw(1, 2, 40, 64), draw(1, 2, 90, 64, offset=0.5), draw(1, 2, 90, 64)
    weights = [torch.rand(64, device=DEVICE) + 0.5 for _ in range(2)]
    check(query, key, value, weights, (None, None), interleaved=True, eps=1e-6)
    check(query, key, value, (None, None), angles(40, 64), interleaved=True, eps=None, key_tables=angles(90, 64))
    check(query, key, value, (None, None), (None, None), interleaved=False, eps=None)


def test_norm_takes_the_size_of_the_rows_out():
    """Rows of very different sizes, which float16 could not hold after a weight: the norm is part of the rounding."""
    query, key, value = draw(1, 2, 64, 64), draw(1, 2, 64, 64), draw(1, 2, 64, 64)
    query *= torch.logspace(-3, 3, 64, device=DEVICE).half()[None, None, :, None]
    key *= torch.logspace(3, -3, 64, device=DEVICE).half()[None, None, :, None]
    weights = [torch.full((64,), 30.0, device=DEVICE), torch.full((64,), 0.03, device=DEVICE)]
    check(query, key, value, weights, angles(64, 64), interleaved=True, eps=1e-12)


def test_angles_in_every_form():
    query, key, value = draw(2, 2, 40, 64), draw(2, 2, 40, 64), draw(2, 2, 40, 64)
    cos, sin = angles(40, 64)
    options = {"interleaved": True, "eps": 1e-6, "enable_gqa": False}
    expected = int8_attention(rms_rope_quantize(query, key, None, None, cos, sin, **options), value)
    twice = [t.repeat_interleave(2, -1) for t in (cos, sin)]
    complex_table = torch.complex(cos, sin)
    parts = (complex_table.real, complex_table.imag)
    full = [t.expand(2, 2, -1, -1).contiguous() for t in (cos, sin)]
    for table in (twice, parts, (cos[None], sin[None]), (cos[None, None], sin[None, None]), full, (cos.double(), sin)):
        assert torch.equal(
            int8_attention(rms_rope_quantize(query, key, None, None, *table, **options), value), expected
        )
    halves = rms_rope_quantize(query, key, None, None, cos, sin, interleaved=False, eps=1e-6)
    doubled = [torch.cat([t, t], -1) for t in (cos, sin)]
    again = rms_rope_quantize(query, key, None, None, *doubled, interleaved=False, eps=1e-6)
    assert torch.equal(halves.query, again.query)
    assert not torch.equal(int8_attention(halves, value), expected)


def test_angles_of_each_head():
    """LTX turns each head by its own angles."""
    query, key, value = draw(1, 3, 50, 32), draw(1, 3, 50, 32), draw(1, 3, 50, 32)
    turn = torch.rand(1, 3, 50, 16, device=DEVICE) * 6.3
    weights = [torch.rand(3 * 32, device=DEVICE) + 0.5 for _ in range(2)]
    check(query, key, value, weights, (turn.cos(), turn.sin()), interleaved=True, eps=1e-5, budget=0.02)


@pytest.mark.parametrize("split", [1, 30, 64, 100])
def test_two_segments_are_one_sequence(split):
    query, key, value = draw(1, 2, 120, 64), draw(1, 2, 120, 64, offset=1.0), draw(1, 2, 120, 64)
    cos, sin = angles(120, 64)
    weights = [torch.rand(64, device=DEVICE) + 0.5 for _ in range(4)]
    parts = [(x[:, :, :split], x[:, :, split:]) for x in (query, key)]
    quantized = rms_rope_quantize(*parts, tuple(weights[:2]), tuple(weights[2:]), cos, sin, interleaved=True, eps=1e-6)
    front = torch.arange(120, device=DEVICE)[:, None] < split
    normed = [
        rms_rope_reference(x, torch.where(front, a, b), cos, sin, interleaved=True, eps=1e-6)
        for x, (a, b) in ((query, weights[:2]), (key, weights[2:]))
    ]
    out = int8_attention(quantized, value)
    assert relative_error(out, sdpa_oracle(*normed, value.double())[0]) < BUDGET
    same = rms_rope_quantize(*parts, weights[0], weights[2], cos, sin, interleaved=True, eps=1e-6)
    whole = rms_rope_quantize(query, key, weights[0], weights[2], cos, sin, interleaved=True, eps=1e-6)
    assert torch.equal(same.query, whole.query)
    assert torch.equal(same.key, whole.key)


def test_two_segments_across_heads():
    query, key, value = draw(1, 2, 90, 32), draw(1, 2, 90, 32), draw(1, 2, 90, 32)
    weight = torch.rand(64, device=DEVICE) + 0.5
    parts = [(x[:, :, :41], x[:, :, 41:]) for x in (query, key)]
    same = rms_rope_quantize(*parts, weight, weight, None, None, interleaved=True, eps=1e-6)
    whole = rms_rope_quantize(query, key, weight, weight, None, None, interleaved=True, eps=1e-6)
    assert torch.equal(int8_attention(same, value), int8_attention(whole, value))


@pytest.mark.parametrize("split", [0, 90])
def test_a_segment_may_be_empty(split):
    query, key, value = draw(1, 2, 90, 32), draw(1, 2, 90, 32), draw(1, 2, 90, 32)
    weights = tuple(torch.rand(32, device=DEVICE) + 0.5 for _ in range(2))
    parts = [(x[:, :, :split], x[:, :, split:]) for x in (query, key)]
    one = weights[0] if split else weights[1]
    tables = angles(90, 32)
    same, whole = (
        rms_rope_quantize(*pair, *tables, interleaved=True, eps=1e-6)
        for pair in ((*parts, weights, weights), (query, key, one, one))
    )
    assert torch.equal(int8_attention(same, value), int8_attention(whole, value))


def test_a_norm_across_heads_shows_in_any_weight():
    query, key, value = draw(1, 2, 40, 32), draw(1, 2, 40, 32), draw(1, 2, 40, 32)
    query[:, 0] *= 9
    weight = torch.rand(64, device=DEVICE) + 0.5
    check(query, key, value, (torch.ones_like(weight), weight), (None, None), interleaved=True, eps=1e-6)
    options = {"interleaved": True, "eps": 1e-6}
    expected = rms_rope_quantize(query, key, torch.ones_like(weight), weight, None, None, **options)
    assert torch.equal(rms_rope_quantize(query, key, None, weight, None, None, **options).query_scale,
                       expected.query_scale)  # fmt: skip
    parts = [(x[:, :, :9], x[:, :, 9:]) for x in (query, key)]
    pair = rms_rope_quantize(*parts, None, (None, weight), None, None, **options)
    assert torch.equal(pair.query_scale, expected.query_scale)


def test_a_head_of_zeros_under_a_norm_across_heads_without_eps():
    query, key, value = draw(1, 3, 40, 32), draw(1, 3, 40, 32), draw(1, 3, 40, 32)
    query[:, 1], key[:, 2] = 0, 0
    check(query, key, value, (None, None), (None, None), interleaved=True, eps=0.0, across_heads=True)


def test_masked_keys_count_for_nothing():
    query, key, value = draw(1, 2, 64, 64), draw(1, 2, 300, 64, offset=1.0), draw(1, 2, 300, 64)
    mask = torch.rand(1, 1, 1, 300, device=DEVICE) > 0.5
    cos, sin = angles(300, 64)
    options = {"interleaved": True, "eps": None, "key_cos": cos, "key_sin": sin, "attn_mask": mask}
    tables = (cos[:64], sin[:64])
    quantized = rms_rope_quantize(query, key, None, None, *tables, **options)
    garbage = torch.where(mask.transpose(2, 3), key, 1000 * key)
    again = rms_rope_quantize(query, garbage, None, None, *tables, **options)
    assert torch.equal(quantized.key, again.key)
    assert torch.equal(int8_attention(quantized, value), int8_attention(again, value))


def test_the_sample_of_the_shift_does_not_stay_in_a_column():
    """Tokens of an image, 32 a row, whose left half has one mean and whose right half has its negative."""
    side = torch.where(torch.arange(2048, device=DEVICE) % 32 < 16, 20.0, -20.0)[:, None]
    key = draw(1, 1, 2048, 64) + (side * torch.randn(64, device=DEVICE)).half()
    query, value = draw(1, 1, 32, 64), draw(1, 1, 2048, 64)
    check(query, key, value, (None, None), (None, None), interleaved=True, eps=1e-6, budget=0.011)


def test_few_keys_are_kept_and_the_sample_misses_them():
    query, key, value = draw(1, 2, 16, 64), draw(1, 2, 1000, 64, offset=30.0), draw(1, 2, 1000, 64)
    mask = torch.zeros(1, 1, 1, 1000, dtype=torch.bool, device=DEVICE)
    mask[..., 701:704] = True
    mask[..., 708] = True
    check(query, key, value, (None, None), (None, None), mask, interleaved=True, eps=None, lse=True, budget=0.02)
    empty = rms_rope_quantize(query, key, None, None, None, None, interleaved=True, eps=None, attn_mask=mask & False)
    assert (int8_attention(empty, value) == 0).all()


def test_nan_and_infinity_answer_nan():
    query, key, value = draw(1, 1, 64, 64), draw(1, 1, 64, 64), draw(1, 1, 64, 64)
    query[0, 0, 3, 5] = math.nan
    query[0, 0, 9, 1] = math.inf
    for eps in (None, 1e-6):
        out = int8_attention(rms_rope_quantize(query, key, None, None, None, None, interleaved=True, eps=eps), value)
        assert out[0, 0, [3, 9]].isnan().all()
        assert out[0, 0, :3].isfinite().all()


def test_what_is_not_finite_stays_with_those_who_see_its_tile():
    query, key, value = draw(1, 1, 200, 64), draw(1, 1, 200, 64), draw(1, 1, 200, 64)
    key[0, 0, 150, 5] = math.nan
    quantized = rms_rope_quantize(query, key, None, None, None, None, interleaved=True, eps=1e-6)
    out = int8_attention(quantized, value, is_causal=True)
    assert out[0, 0, 150:].isnan().all()
    assert out[0, 0, :128].isfinite().all()


def test_layout_of_the_answer_and_determinism():
    query, key, value = draw(1, 2, 40, 64), draw(1, 2, 40, 64), draw(1, 2, 40, 64)
    options = {"interleaved": True, "eps": 1e-6}
    out = int8_attention(rms_rope_quantize(query, key, None, None, None, None, **options), value)
    assert out.transpose(1, 2).is_contiguous()
    assert torch.equal(out, int8_attention(rms_rope_quantize(query, key, None, None, None, None, **options), value))
    plain = rms_rope_quantize(query.contiguous(), key.contiguous(), None, None, None, None, **options)
    assert int8_attention(plain, value).is_contiguous()
    assert torch.equal(int8_attention(plain, value), out)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 2),
    q_len=st.integers(1, 70),
    kv_len=st.integers(1, 140),
    head_dim=st.sampled_from([2, 32, 40, 64, 80]),
    interleaved=st.booleans(),
    across=st.booleans(),
    eps=st.sampled_from([None, 1e-6]),
    factor=st.sampled_from([None, 0.3, -0.2]),
    precision=st.sampled_from(["auto", "high"]),
    seed=st.integers(0, 2**16),
)
def test_any_call(batch, kv_heads, group, q_len, kv_len, head_dim, interleaved, across, eps, factor, precision, seed):
    torch.manual_seed(seed)
    query, key = draw(batch, kv_heads * group, q_len, head_dim), draw(batch, kv_heads, kv_len, head_dim)
    value = draw(batch, kv_heads, kv_len, head_dim)
    mask = torch.rand(batch, 1, 1, kv_len, device=DEVICE) > 0.3
    tables, key_tables = angles(q_len, head_dim), angles(kv_len, head_dim)
    options = {"interleaved": interleaved, "eps": eps, "across_heads": across, "attn_mask": mask, "scale": factor}
    quantized = rms_rope_quantize(
        query, key, None, None, *tables, key_cos=key_tables[0], key_sin=key_tables[1], enable_gqa=True,
        precision=precision, **options,
    )  # fmt: skip
    normed = [
        rms_rope_reference(x, None, *t, interleaved=interleaved, eps=eps, across_heads=across)
        for x, t in ((query, tables), (key, key_tables))
    ]
    exact = sdpa_oracle(*normed, value.double(), mask, scale=factor, enable_gqa=True)[0]
    assert relative_error(int8_attention(quantized, value), exact) < 0.03


@pytest.mark.parametrize("head_dim", [1, 5, 8, 72, 96, 200])
def test_odd_head_dims_and_a_single_row(head_dim):
    query, key, value = draw(1, 2, 1, head_dim), draw(1, 1, 66, head_dim), draw(1, 1, 66, head_dim)
    weights = [torch.rand(head_dim, device=DEVICE) + 0.5 for _ in range(2)]
    rotary = head_dim // 4 * 2 or None
    tables, key_tables = (angles(n, rotary) if rotary else (None, None) for n in (1, 66))
    options = {"interleaved": False, "eps": 1e-6, "rotary_dim": rotary, "key_tables": key_tables if rotary else None}
    check(query, key, value, weights, tables, budget=0.02, **options)


def test_rows_as_they_may_lie_in_memory():
    """Slices of a packed projection, rows and heads that are views of one, an offset of one value, reversed angles."""
    packed = torch.randn(1, 20, 2, 3, 64, device=DEVICE).half()
    shifted = [torch.randn(1, 2, 20, 65, device=DEVICE).bfloat16()[..., 1:] for _ in range(3)]
    options, turn = {"interleaved": True, "eps": 1e-6}, [t.flip(0).t().contiguous().t() for t in angles(20, 64)]
    check(*packed.permute(3, 0, 2, 1, 4), (None, None), turn, **options)
    check(*shifted, (None, None), [t[None] for t in turn], **options)
    rows = draw(1, 2, 1, 64).expand(1, 2, 20, 64)
    check(rows, draw(1, 1, 20, 64).expand(1, 2, 20, 64), draw(1, 2, 20, 64), (None, None), turn, **options)


GOOD = {"interleaved": True, "eps": 1e-6}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cos": torch.zeros(39, 32)}, ("cos is", "[39, 32]", "[40, 32]")),
        ({"sin": torch.zeros(40, 31)}, ("sin is", "[40, 31]", "[40, 64]")),
        ({"cos": torch.zeros(40, 32, dtype=torch.complex64)}, ("cos is complex64", "floating")),
        ({"sin": None}, ("sin is None", "cos is given")),
        ({"cos": 1.0}, ("cos is of type float", "a tensor")),
        ({"key_sin": torch.zeros(40, 32)}, ("key_cos is None", "key_sin is given")),
        ({"cos": None, "sin": None, "key_cos": torch.zeros(40, 32)}, ("key_cos or key_sin is given", "cos is None")),
        ({"rotary_dim": 33}, ("rotary_dim is 33", "even")),
        ({"rotary_dim": 64.0}, ("rotary_dim is 64.0", "even")),
        ({"eps": math.nan}, ("eps is nan", "at least 0")),
        ({"eps": -1.0}, ("eps is -1.0", "at least 0")),
        ({"eps": "1"}, ("eps is '1'", "finite number")),
        ({"query_weight": "ones"}, ("query_weight is of type str", "floating tensor")),
        ({"key_weight": torch.ones(64, dtype=torch.int32)}, ("key_weight is int32", "floating tensor")),
        ({"rotary_dim": 66}, ("rotary_dim is 66", "64")),
        ({"rotary_dim": 7, "cos": None, "sin": None}, ("rotary_dim is 7", "even")),
        ({"interleaved": "no"}, ("interleaved is of type str", "True or False")),
        ({"across_heads": 1}, ("across_heads is of type int", "True or False")),
        ({"lse": None}, ("lse is of type NoneType", "True or False")),
        ({"query_weight": torch.ones(64, requires_grad=True)}, ("query_weight requires a gradient", "no_grad")),
        ({"sin": torch.zeros(40, 32, requires_grad=True)}, ("sin requires a gradient", "no_grad")),
        ({"query_weight": torch.ones(63)}, ("query_weight is [63]", "[64]")),
        ({"key_weight": torch.ones(127)}, ("key_weight is [127]", "[64]")),
        ({"query_weight": torch.ones(64), "eps": None}, ("query_weight", "eps is None")),
        ({"query_weight": (torch.ones(64), None)}, ("query_weight has 2 parts", "expected 1")),
        ({"key": torch.zeros(1, 2, 41, 64).half()}, ("key_cos is None", "41 keys", "40 queries")),
        ({"key": torch.zeros(2, 2, 40, 64).half()}, ("key is [2, 2, 40, 64]", "query [1, 2, 40, 64]")),
        ({"key": torch.zeros(1, 2, 40, 32).half()}, ("key is [1, 2, 40, 32]", "query [1, 2, 40, 64]")),
        ({"query": torch.zeros(2, 40, 64).half()}, ("query is [2, 40, 64]", "[batch, heads, length, head_dim]")),
        ({"query": (torch.zeros(1, 2, 9, 64).half(), torch.zeros(1, 3, 9, 64).half())}, ("query has a part", "[1, 2,")),
        ({"query": torch.zeros(1, 2, 64, 40).half().transpose(2, 3)}, ("query has a part", "contiguous last axis")),
    ],
)  # fmt: skip
def test_bad_input(change, words):
    good = {"query": torch.zeros(1, 2, 40, 64).half(), "key": torch.zeros(1, 2, 40, 64).half(), "query_weight": None,
            "key_weight": None, "cos": torch.zeros(40, 32), "sin": torch.zeros(40, 32), **GOOD}  # fmt: skip

    def there(value):
        return (
            tuple(map(there, value))
            if isinstance(value, tuple)
            else value.to(DEVICE)
            if torch.is_tensor(value)
            else value
        )

    with pytest.raises(ValueError, match=r".") as caught:
        rms_rope_quantize(**{name: there(value) for name, value in (good | change).items()})
    assert all(word in str(caught.value) for word in words), caught.value


def test_what_the_kernel_cannot_answer():
    wide = torch.zeros(1, 2, 40, 64, device=DEVICE)
    with pytest.raises(UnsupportedError, match="float32"):
        rms_rope_quantize(wide, wide, None, None, None, None, **GOOD)
    half = wide.half().requires_grad_()
    with pytest.raises(UnsupportedError, match="requires a gradient"):
        rms_rope_quantize(half, half, None, None, None, None, **GOOD)


def test_numbers_of_numpy_are_numbers():
    query, key = draw(1, 2, 9, 64), draw(1, 2, 9, 64)
    tables = angles(9, 32)
    made = [
        rms_rope_quantize(query, key, None, None, *tables, interleaved=True, eps=eps, rotary_dim=rotary)
        for eps, rotary in ((1e-6, 32), (numpy.float64(1e-6), numpy.int64(32)))
    ]
    assert torch.equal(made[0].query, made[1].query)
    assert torch.equal(made[0].key, made[1].key)
