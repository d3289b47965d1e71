"""The int8 kernels against their plain-torch reference and the float64 oracle, and properties of any attention."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sdpa_router
from sdpa_router import int8_attention, merge_attention
from sdpa_router.kernels.int8_attention import configs
from sdpa_router.kernels.int8_attention.configs import config_of
from sdpa_router.kernels.int8_attention.launch import forget
from sdpa_router.kernels.int8_attention.quantize import HOPPER_TILINGS, balanced_steps
from sdpa_router.kernels.int8_attention.reference import int8_attention_reference
from sdpa_router.testing import relative_error, sdpa_oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUDGET = 0.0135  # the H3 window's 0.0125, and what a few hundred samples scatter
HEAD_DIMS = (1, 8, 32, 40, 64, 96, 128, 192, 256)


def draw(batch, heads, kv_heads, q_len, kv_len, head_dim, dtype=torch.float16):
    shapes = ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    return [torch.randn(batch, h, n, head_dim, device=DEVICE).to(dtype) for h, n in shapes]


def masks(kind, batch, heads, kv_len, dtype=torch.float16):
    keep = torch.rand(batch, heads, 1, kv_len, device=DEVICE) > 0.4
    keep[..., kv_len // 2] = True
    return {
        "none": None,
        "bool": keep[:1, :1],
        "bool per batch": keep[:, :1],
        "0/-10000 per head": torch.where(keep, 0.0, -10000.0).to(dtype),
        "float32": 2 * torch.randn(1, 1, 1, kv_len, device=DEVICE),
        "half": torch.randn(batch, 1, 1, kv_len, device=DEVICE).to(dtype),
        "one number": torch.full((1, 1, 1, 1), -3.0, device=DEVICE).expand(1, 1, 1, kv_len),
        "expanded": keep[:, :1].expand(batch, heads, 1, kv_len),
    }[kind]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", ["none", "bool per batch", "float32"])
def test_matches_reference_and_oracle(head_dim, kind):
    query, key, value = draw(2, 4, 2, 70, 131, head_dim)
    key += 3  # a common offset that the shift must take out
    mask = masks(kind, 2, 4, 131)
    config = config_of(query, value)
    out, lse = int8_attention(query, key, value, mask, enable_gqa=True, return_lse=True)
    ref, ref_lse = int8_attention_reference(
        *(t.cpu() for t in (query, key, value)), None if mask is None else mask.cpu(),
        block_n=config.block_n,
    )  # fmt: skip
    # The Hopper kernel has four scales a tile, and the reference one.
    assert relative_error(out.cpu(), ref) < (2 * BUDGET if config.gluon else 2e-3)
    assert (lse.cpu() - ref_lse).abs().max() < (0.08 if config.gluon else 2e-3)
    exact, exact_lse = sdpa_oracle(query, key, value, mask, enable_gqa=True)
    assert relative_error(out, exact) < BUDGET
    assert (lse - exact_lse).abs().max() < 0.04  # a score is off by up to that; the mean over keys is not


# The largest error against the oracle of each mode; the kernel and its reference round alike, but where a sum of
# another order falls on the other side of a tie.
MODES = {("auto", "high"): (0.0105, 2e-3), ("fp8", "auto"): (0.045, 8e-3), ("fp8", "high"): (0.045, 8e-3)}


@pytest.mark.parametrize(("pv", "precision"), MODES)
@pytest.mark.parametrize(("head_dim", "kind"), [(64, "none"), (96, "bool per batch"), (128, "float32"), (256, "none")])
def test_modes_match_reference_and_oracle(pv, precision, head_dim, kind):
    query, key, value = draw(2, 4, 2, 70, 331, head_dim)
    key += 3
    mask = masks(kind, 2, 4, 331)
    config = config_of(query, value, pv, precision)
    out, lse = int8_attention(
        query, key, value, mask, enable_gqa=True, return_lse=True, pv=pv, precision=precision
    )  # fmt: skip
    ref, ref_lse = int8_attention_reference(
        *(t.cpu() for t in (query, key, value)), None if mask is None else mask.cpu(),
        pv=pv, precision=precision, block_n=config.block_n,
    )  # fmt: skip
    budget, against_reference = MODES[pv, precision]
    shared = config.gluon and precision == "auto"  # the Hopper kernel has four scales a tile, and the reference one
    assert relative_error(out.cpu(), ref) < (2 * budget if shared else against_reference)
    assert (lse.cpu() - ref_lse).abs().max() < (0.08 if shared else 2e-3)
    exact, exact_lse = sdpa_oracle(query, key, value, mask, enable_gqa=True)
    assert relative_error(out, exact) < budget
    assert (lse - exact_lse).abs().max() < 0.04


@given(
    heads=st.tuples(st.integers(0, 90), st.integers(0, 90)),
    blocks=st.tuples(st.integers(1, 600), st.integers(1, 600)),
    processors=st.integers(1, 144),
    tiling=st.sampled_from(HOPPER_TILINGS),
)
@settings(deadline=None, max_examples=200)
def test_programs_of_the_quantiser_fill_the_gpu_evenly(heads, blocks, processors, tiling):
    key, query = zip(heads, blocks, strict=True)
    steps = balanced_steps(tiling, processors, key, query)
    slots, total = processors * tiling.resident, heads[0] * blocks[0] + heads[1] * blocks[1]
    programs = sum(count * -(-work // steps) for count, work in (key, query))
    rounds = -(-programs // slots)
    assert steps >= 1
    assert programs * steps >= total
    if steps < max(blocks):  # each head in more than one program
        assert rounds <= max(1, round(total / (slots * tiling.steps)))


def test_weights_in_e4m3_do_not_depend_on_the_order_of_the_keys():
    """Powers of two apart a row's weights round alike, whichever maximum they were taken under."""
    query, key, value = draw(1, 2, 2, 40, 200, 64)
    order = torch.randperm(200, device=DEVICE)
    modes = {"pv": "fp8", "precision": "high", "return_lse": True}
    out, lse = int8_attention(query, key, value, **modes)
    other, other_lse = int8_attention(query, key[:, :, order], value[:, :, order], **modes)
    assert relative_error(out, other) < 5e-3  # 0.036 where the maximum is no whole number
    assert (lse - other_lse).abs().max() < 1e-3


@pytest.mark.parametrize(("pv", "precision"), MODES)
def test_modes_with_tails_causal_garbage_and_rows_without_keys(pv, precision):
    modes = {"pv": pv, "precision": precision}
    query, key, value = draw(2, 2, 1, 70, 200, 64)
    for options in ({}, {"is_causal": True}):
        exact = sdpa_oracle(query, key, value, enable_gqa=True, **options)[0]
        out = int8_attention(query, key, value, enable_gqa=True, **options, **modes)
        assert relative_error(out, exact) < 2 * MODES[pv, precision][0]  # the first rows of a causal call see few keys
    keep = torch.ones(2, 1, 1, 200, dtype=torch.bool, device=DEVICE)
    keep[0, ..., 130:] = False
    keep[1] = False
    clean, clean_lse = int8_attention(query, key, value, keep, enable_gqa=True, return_lse=True, **modes)
    assert (clean[1] == 0).all()
    assert (clean_lse[1] == -math.inf).all()
    key[0, :, 130:] = math.nan
    value[0, :, 130:] *= 1000
    dirty, dirty_lse = int8_attention(query, key, value, keep, enable_gqa=True, return_lse=True, **modes)
    assert torch.equal(clean, dirty)
    assert torch.equal(clean_lse, dirty_lse)
    if pv == "fp8" and DEVICE == "cpu":
        return  # Triton's interpreter has no NaN in e4m3
    value[0, 0, 5, 3] = math.nan
    assert int8_attention(query, key, value, keep, enable_gqa=True, **modes)[0, :, :, 3].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", ["none", "bool", "bool per batch", "0/-10000 per head", "float32", "half", "one number", "expanded"]
)
def test_masks(kind, dtype):
    query, key, value = draw(2, 2, 2, 33, 200, 64, dtype)
    mask = masks(kind, 2, 2, 200, dtype)
    out = int8_attention(query, key, value, mask)
    assert out.dtype == dtype
    assert relative_error(out, sdpa_oracle(query, key, value, mask)[0]) < BUDGET


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (64, 64), (65, 63), (130, 40), (40, 130), (129, 257)])
def test_causal_is_aligned_top_left(q_len, kv_len):
    query, key, value = draw(1, 2, 1, q_len, kv_len, 64)
    out, lse = int8_attention(query, key, value, is_causal=True, enable_gqa=True, return_lse=True)
    exact, exact_lse = sdpa_oracle(query, key, value, is_causal=True, enable_gqa=True)
    assert relative_error(out, exact) < BUDGET
    assert (lse - exact_lse).abs().max() < 0.06


def test_an_error_of_the_kernel_would_be_seen():
    """The oracle tests can fail: one key scale off by 10 %, or one key block left out, breaks the budget."""
    query, key, value = draw(1, 2, 2, 64, 256, 64)
    exact = sdpa_oracle(query, key, value)[0]
    wrong_scale = key.clone()
    wrong_scale[:, :, :64] *= 1.1
    assert relative_error(int8_attention(query, wrong_scale, value), exact) > 2 * BUDGET
    assert relative_error(int8_attention(query, key[:, :, 64:], value[:, :, 64:]), exact) > 2 * BUDGET
    assert relative_error(int8_attention(query, key, value, scale=1.1 / 8), exact) > 2 * BUDGET


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    q_len=st.integers(1, 90),
    kv_len=st.integers(1, 150),
    head_dim=st.sampled_from(HEAD_DIMS),
    kind=st.sampled_from(["none", "bool", "bool per batch", "0/-10000 per head", "float32", "half", "causal"]),
    layout=st.sampled_from(["contiguous", "heads inside", "slice of fused", "expanded heads"]),
    factor=st.sampled_from([None, 1.3, -0.7, 0.0]),
    seed=st.integers(0, 2**16),
)
def test_any_shape_layout_and_mask(batch, kv_heads, group, q_len, kv_len, head_dim, kind, layout, factor, seed):
    torch.manual_seed(seed)
    scale = None if factor is None else factor / math.sqrt(head_dim)  # errors grow with the scores
    heads = kv_heads * group
    query, key, value = draw(batch, heads, kv_heads, q_len, kv_len, head_dim)
    if layout == "heads inside":
        query, key, value = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value))
    elif layout == "slice of fused":
        query, key, value = (torch.cat([t, t], -1)[..., head_dim:] for t in (query, key, value))
    elif layout == "expanded heads":
        key, value = (t[:, :1].expand(-1, kv_heads, -1, -1) for t in (key, value))
    mask = None if kind == "causal" else masks(kind, batch, heads, kv_len)
    arguments = {"is_causal": kind == "causal", "scale": scale, "enable_gqa": True}
    before = [t.clone() for t in (query, key, value)]
    out, lse = int8_attention(query, key, value, mask, return_lse=True, **arguments)
    exact, exact_lse = sdpa_oracle(query, key, value, mask, **arguments)
    # A few numbers scatter more than many, and averages of many values can be small themselves.
    assert (out - exact).pow(2).mean().sqrt() < 0.03 * max(exact.pow(2).mean().sqrt().item(), 0.5)
    assert (lse - exact_lse).abs().max() < 0.1
    assert all(torch.equal(a, b) for a, b in zip(before, (query, key, value), strict=True))


@pytest.mark.parametrize("constant", [1.0, -1000.0, 65504.0, -65504.0, 1e6])
def test_a_constant_added_to_the_bias_changes_nothing(constant):
    query, key, value = draw(1, 2, 2, 20, 100, 64)
    bias = torch.randn(1, 1, 1, 100, device=DEVICE)
    bias = (bias * 64).round() / 64 if abs(constant) < 1e5 else bias.round()  # so that the sum is exact
    out, lse = int8_attention(query, key, value, bias, return_lse=True)
    moved, moved_lse = int8_attention(query, key, value, bias + constant, return_lse=True)
    assert torch.equal(out, moved)
    assert (moved_lse - lse - constant).abs().max() <= max(1e-5, abs(constant) * 1e-6)


@pytest.mark.parametrize("lowest", [-1e9, torch.finfo(torch.bfloat16).min, torch.finfo(torch.float32).min])
def test_a_bias_that_absorbs_all_scores_gives_the_mean_of_the_values(lowest):
    """As SDPA: in float32 nothing is left of the scores under such a bias."""
    query, key, value = draw(1, 2, 2, 20, 100, 64)
    bias = torch.full((1, 1, 1, 100), lowest, device=DEVICE)
    out, lse = int8_attention(query, key, value, bias, return_lse=True)
    assert relative_error(out, value.double().mean(2, keepdim=True).expand_as(out)) < 2e-3
    assert (lse / lowest - 1).abs().max() < 1e-6
    bias[..., :50] = 0  # where anything else is left, the lowest are as good as masked
    keep = bias == 0
    assert torch.equal(int8_attention(query, key, value, bias), int8_attention(query, key, value, keep))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_show(bad):
    query, key, value = draw(1, 2, 2, 20, 100, 64)
    bias = torch.zeros(1, 2, 1, 100, device=DEVICE)
    bias[0, 1, 0, 70] = bad
    out = int8_attention(query, key, value, bias)
    assert out[:, 1].isnan().all()
    assert out[:, 0].isfinite().all()
    query[0, 0, 3, 5] = bad
    out, lse = int8_attention(query, key, value, return_lse=True)
    assert out[0, 0, 3].isnan().all()
    assert lse[0, 0, 3].isnan()
    assert out[0, 0, :3].isfinite().all()
    assert out[0, 1].isfinite().all()
    key[0, 1, 99, 0] = bad
    assert int8_attention(query, key, value)[0, 1].isnan().all()


@pytest.mark.parametrize("held", [6e4, math.nan])
def test_keys_after_the_last_query_of_a_causal_call_change_not_one_bit(held):
    query, key, value = draw(1, 2, 2, 65, 200, 64)
    wanted = int8_attention(query, key[:, :, :65], value[:, :, :65], is_causal=True, return_lse=True)
    key[:, :, 65:], value[:, :, 65:] = held, held
    found = int8_attention(query, key, value, is_causal=True, return_lse=True)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@pytest.mark.parametrize("held", [math.nan, math.inf])
def test_what_is_not_finite_stays_with_those_who_see_its_tile(held):
    query, key, value = draw(1, 2, 1, 300, 300, 64)
    exact = sdpa_oracle(query, key, value, is_causal=True, enable_gqa=True)[0]
    key[:, :, 290, 3] = held
    out = int8_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert out[:, :, 290:].isnan().all()
    assert relative_error(out[:, :, :256], exact[:, :, :256]) < BUDGET


def test_garbage_in_masked_keys_changes_not_one_bit():
    query, key, value = draw(1, 2, 2, 40, 256, 64)
    keep = torch.ones(1, 1, 1, 256, dtype=torch.bool, device=DEVICE)
    keep[..., 200:] = False
    clean = int8_attention(query, key, value, keep, return_lse=True)
    key[:, :, 200:] = math.nan
    value[:, :, 200:] *= 1000
    dirty = int8_attention(query, key, value, keep, return_lse=True)
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])
    biased = torch.where(keep, 0.0, -10000.0).half()
    key[:, :, 200:] = 1000
    assert relative_error(int8_attention(query, key, value, biased), clean[0].double()) < 1e-6


def test_first_block_masked_and_rows_without_keys():
    query, key, value = draw(2, 2, 2, 40, 256, 64)
    keep = torch.ones(2, 1, 1, 256, dtype=torch.bool, device=DEVICE)
    keep[0, ..., :130] = False
    keep[1] = False
    out, lse = int8_attention(query, key, value, keep, return_lse=True)
    assert relative_error(out[:1], sdpa_oracle(query[:1], key[:1], value[:1], keep[:1])[0]) < BUDGET
    assert (out[1] == 0).all()
    assert (lse[1] == -math.inf).all()


def test_order_of_keys_does_not_matter():
    query, key, value = draw(1, 2, 2, 40, 300, 64)
    bias = torch.randn(1, 1, 1, 300, device=DEVICE)
    order = torch.randperm(300, device=DEVICE)
    out = int8_attention(query, key, value, bias)
    shuffled = int8_attention(query, key[:, :, order], value[:, :, order], bias[..., order])
    assert relative_error(shuffled, out.double()) < 2 * BUDGET


def test_split_and_merged_equals_the_whole():
    query, key, value = draw(1, 2, 2, 40, 300, 64)
    key += 2 * torch.randn(1, 2, 1, 64, device=DEVICE).half()
    bias = torch.randn(1, 1, 1, 300, device=DEVICE)
    parts = [
        int8_attention(query, key[:, :, a:b], value[:, :, a:b], bias[..., a:b], return_lse=True)
        for a, b in ((0, 100), (100, 101), (101, 300))
    ]
    out, lse = merge_attention([p[0] for p in parts], [p[1] for p in parts])
    exact, exact_lse = sdpa_oracle(query, key, value, bias)
    assert relative_error(out, exact) < BUDGET
    assert (lse - exact_lse).abs().max() < 0.04


@pytest.mark.parametrize("factor", [2.0**-20, 2.0**5])
def test_a_common_factor_of_the_query_does_not_matter(factor):
    query, key, value = draw(1, 2, 2, 40, 100, 64, torch.bfloat16)
    out = int8_attention(query, key, value, scale=0.125)
    assert torch.equal(out, int8_attention(query * factor, key, value, scale=0.125 / factor))


def test_deterministic_and_independent_of_the_batch():
    query, key, value = draw(3, 2, 2, 70, 130, 64)
    out = int8_attention(query, key, value)
    assert torch.equal(out, int8_attention(query, key, value))
    assert torch.equal(out[1:2], int8_attention(query[1:2], key[1:2], value[1:2]))


def test_buffers_and_layout_of_the_answer():
    query, key, value = draw(1, 3, 3, 33, 65, 40)
    plain = int8_attention(query, key, value)
    assert plain.is_contiguous()
    assert int8_attention(query[:, :1].expand_as(query), key, value).is_contiguous()
    inside = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert int8_attention(inside, key, value).transpose(1, 2).is_contiguous()
    out = torch.full((1, 33, 3, 48), math.nan, dtype=query.dtype, device=DEVICE)[..., :40].transpose(1, 2)
    lse = torch.full((1, 33, 3), math.nan, device=DEVICE).transpose(1, 2)
    got = int8_attention(query, key, value, out=out, lse=lse, return_lse=True)
    assert got[0].data_ptr() == out.data_ptr()
    assert torch.equal(out, plain)
    assert torch.equal(lse, int8_attention(query, key, value, return_lse=True)[1])


def test_large_values_keep_the_range_of_bfloat16():
    query, key, value = draw(1, 1, 1, 16, 64, 64, torch.bfloat16)
    value = (value.float() * 1e30).bfloat16()
    out = int8_attention(query, key, value)
    assert relative_error(out, sdpa_oracle(query, key, value)[0]) < 0.02


def test_outlier_channels_and_a_common_key():
    query, key, value = draw(1, 2, 2, 64, 400, 128, torch.bfloat16)
    query[..., 0] *= 8
    key[..., 0] *= 8
    key += 40 * torch.randn(1, 2, 1, 128, device=DEVICE).bfloat16()
    out, lse = int8_attention(query, key, value, return_lse=True)
    exact, exact_lse = sdpa_oracle(query, key, value)
    assert relative_error(out, exact) < 0.02
    assert (lse - exact_lse).pow(2).mean().sqrt() < 0.04


def close(query, key, value, mask=None, budget=BUDGET, lse_budget=0.12, **options):
    """Whether output and LSE are the oracle's; rows without a key must be 0 and -inf."""
    out, lse = int8_attention(query, key, value, mask, enable_gqa=True, return_lse=True, **options)
    exact, exact_lse = sdpa_oracle(query, key, value, mask, enable_gqa=True, **options)
    empty = exact_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert (out[empty] == 0).all()
    assert relative_error(out, exact) < budget
    assert (lse - exact_lse)[~empty].abs().max() < lse_budget


# A tail of queries and of keys, and one warpgroup of two without a row.
@pytest.mark.parametrize("shape", [(1, 2, 1, 129, 257), (1, 1, 1, 64, 641)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_tails_groups_and_causal(shape, head_dim):
    query, key, value = draw(*shape, head_dim, torch.bfloat16)
    key += 2
    close(query, key, value)
    close(query, key, value, is_causal=True)


def test_heads_inside_and_a_half_precision_value():
    for dtype in (torch.float16, torch.bfloat16):
        query, key, value = (
            t.transpose(1, 2).contiguous().transpose(1, 2) for t in draw(2, 4, 2, 150, 300, 128, dtype)
        )
        close(query, key, value)
        close(query, key, value, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tiles_masked_altogether(dtype):
    """Each mask row has its own list of tiles with a kept key; one of them is empty."""
    query, key, value = draw(2, 4, 2, 40, 700, 64, dtype)
    bias = torch.randn(2, 4, 1, 700, device=DEVICE)
    bias[0, 0, :, :300] = -math.inf
    bias[0, 1, :, 300:] = -math.inf
    bias[0, 2] = -math.inf
    bias[0, 3] = torch.full_like(bias[0, 3], -math.inf).index_fill(1, torch.tensor([391], device=DEVICE), 3.0)
    bias[1] = torch.where(torch.rand(4, 1, 700, device=DEVICE) < 0.5, -math.inf, 1.5)
    close(query, key, value, bias)
    close(query, key, value, bias[1:, :1] * 20, budget=2 * BUDGET)


def test_scores_too_large_for_a_softmax_without_a_maximum():
    """Some rows over the bound under which the Hopper kernel needs no row maximum, and some under it."""
    query, key, value = draw(1, 2, 2, 256, 500, 64, torch.bfloat16)
    query[:, :, 64:128] *= 20
    bias = torch.linspace(0, -9, 500, device=DEVICE).view(1, 1, 1, 500)
    for mask in (None, bias):
        out = int8_attention(query, key, value, mask)
        exact = sdpa_oracle(query, key, value, mask)[0]
        assert relative_error(out[:, :, 64:128], exact[:, :, 64:128]) < 0.4  # nearly one key a row: a rough softmax
        assert relative_error(out[:, :, :64], exact[:, :, :64]) < BUDGET
        assert relative_error(out[:, :, 128:], exact[:, :, 128:]) < BUDGET
    close(query, key, value, is_causal=True, budget=0.4, lse_budget=3.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_weights_count_together_beside_the_key_of_the_largest_bias(dtype):
    """It scores -11.5 (log2), just what the Hopper kernel takes without a row maximum; 8191 of 2^-24.5 equal it."""
    query, key, value = (torch.zeros(1, 1, n, 64, device=DEVICE, dtype=dtype) for n in (64, 8192, 8192))
    query[..., 0], key[:, :, 0, 0] = 8, -8
    value += 1 + 0.1 * torch.randn(1, 1, 8192, 64, device=DEVICE)
    value[:, :, 0] = -1
    bias = torch.full((1, 1, 1, 8192), -17.0, device=DEVICE)
    bias[..., 0] = 0
    exact = sdpa_oracle(query, key, value, bias)[0]
    assert (int8_attention(query, key, value, bias) - exact).abs().max() < 0.03


def test_float16_has_a_row_maximum_under_a_bias():
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper", reason="this Triton has no Gluon")
    from sdpa_router.kernels.int8_attention import hopper

    assert hopper.limit_of(torch.float16, True) < 0
    for dtype, biased in ((torch.float16, False), (torch.bfloat16, True), (torch.float8_e4m3fn, True)):
        assert hopper.limit_of(dtype, biased) == hopper.BOUND[dtype]


def test_the_choice_of_a_kernel_is_explained(monkeypatch):
    query = torch.zeros(1, 1, 8, 64, dtype=torch.float16)
    monkeypatch.setattr(configs, "arch_of", lambda device: "cpu")
    assert configs.kernel_name(query, query) == "portable"
    assert "sm_90" in configs.why_portable(query, query)
    monkeypatch.setattr(configs, "arch_of", lambda device: 90)
    monkeypatch.setattr(configs, "_descriptors", lambda: True)
    monkeypatch.setattr(configs, "_hopper_not_importable", lambda: None)
    monkeypatch.setattr(configs, "_failures", [])
    assert configs.kernel_name(query, query) == "Hopper (Gluon)"
    assert configs.config_of(query, query).gluon
    assert "head_dim 32" in configs.why_portable(query[..., :32], query)
    assert "stride of 0" in configs.why_portable(query, query[:, :, :1].expand(1, 1, 8, 64))
    assert "CompilationError" in configs.give_up_hopper(ValueError("CompilationError"))
    assert not configs.config_of(query, query).gluon


REFUSALS = [
    lambda: importlib.import_module("triton.compiler.errors").CompilationError("", None, "no such layout"),
    lambda: RuntimeError("PassManager::run failed"),
    lambda: TypeError("TensorDescriptor.__init__() missing 1 required positional argument: 'padding'"),
    lambda: AttributeError("module 'gluon.language' has no attribute 'warp_specialize'"),
    lambda: ImportError("cannot import name 'TensorDescriptor'"),
    lambda: KeyError("Keyword argument num_warps was specified but unrecognised"),
]


@pytest.mark.parametrize("number", range(len(REFUSALS)))
def test_a_kernel_that_does_not_compile_is_replaced_once(monkeypatch, caplog, number):
    """Where Triton can't compile the Hopper kernel, the portable one answers, and one warning says why."""
    from sdpa_router.kernels.int8_attention import forward, op

    refusal = REFUSALS[number]()

    calls = []
    portable = forward.attention

    def attention(quantized, value, config, **options):
        calls.append(config.gluon)
        if config.gluon:
            raise refusal
        return portable(quantized, value, config, **options)

    def choose(query, value, pv, precision):
        gluon = not configs._failures
        return configs.Config(64, 64, 4, 1, gluon=gluon)

    monkeypatch.setattr(configs, "_failures", [])
    monkeypatch.setattr(op, "config_of", choose)
    monkeypatch.setattr(forward, "attention", attention)
    query, key, value = draw(1, 1, 1, 20 + number, 77, 64)  # sizes of its own, for what was launched is replayed
    with caplog.at_level("WARNING", "sdpa_router.dispatch"):
        for _ in range(2):
            assert relative_error(int8_attention(query, key, value), sdpa_oracle(query, key, value)[0]) < BUDGET
    assert calls == [True, False, False][: len(calls)]  # on a GPU the third is a replay
    assert len(calls) >= 2
    assert [record.name for record in caplog.records] == ["sdpa_router.dispatch"]
    assert type(refusal).__name__ in configs.hopper_unavailable()


def test_decisions_are_made_anew_once_the_hopper_kernel_is_given_up(monkeypatch):
    from sdpa_router.kernels.int8_attention import launch, op
    from sdpa_router.record import known

    monkeypatch.setattr(launch, "_plans", {"a call": "a plan"})
    monkeypatch.setattr(configs, "_failures", [])
    query, key, value = draw(1, 1, 1, 20, 77, 64)
    with sdpa_router.route():
        torch.nn.functional.scaled_dot_product_attention(query, key, value)
        assert known
        op.use_portable(ValueError("x"))
        assert not known
        assert not launch._plans


@pytest.mark.parametrize(
    "error", [RuntimeError("Triton Error [CUDA]: an illegal memory access"), torch.OutOfMemoryError("CUDA"), OSError()]
)
def test_other_failures_of_the_hopper_kernel_are_raised(monkeypatch, error):
    from sdpa_router.kernels.int8_attention import forward, op

    def attention(*arguments, **options):
        raise error

    monkeypatch.setattr(configs, "_failures", [])
    monkeypatch.setattr(op, "config_of", lambda *arguments: configs.Config(64, 64, 4, 1, gluon=True))
    monkeypatch.setattr(forward, "attention", attention)
    with pytest.raises(type(error)) as raised:
        int8_attention(*draw(1, 1, 1, 20, 78, 64))
    assert raised.value is error
    assert configs._failures == []


@pytest.mark.gpu
def test_current_stream_and_graph_capture():
    query, key, value = draw(1, 8, 8, 512, 2048, 128, torch.bfloat16)
    bias = torch.randn(1, 1, 1, 2048, device=DEVICE)
    expected = int8_attention(query, key, value, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = int8_attention(query, key, value, bias)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, expected)
    value.copy_(value.flip(2))
    graph.replay()
    assert torch.equal(captured, int8_attention(query, key, value, bias))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"precision": "high"}, {"pv": "fp8"}, {"is_causal": True}])
def test_replayed_launches_answer_like_the_first(options):
    """Other addresses, another stream and another thread's memory, with and without what the first call had."""
    forget()
    answers = []
    for number in range(4):
        query, key, value = draw(1, 4, 2, 200, 900, 64, torch.bfloat16)
        bias = None if "is_causal" in options else torch.randn(1, 4, 1, 900, device=DEVICE)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream if number % 2 else torch.cuda.current_stream()):
            answers.append(int8_attention(query, key, value, bias, enable_gqa=True, return_lse=True, **options))
        torch.cuda.synchronize()
        forget()
        fresh = int8_attention(query, key, value, bias, enable_gqa=True, return_lse=True, **options)
        assert torch.equal(answers[-1][0], fresh[0])
        assert torch.equal(answers[-1][1], fresh[1])


@pytest.mark.gpu
def test_offsets_past_2_to_the_31():
    """A strided view whose last rows lie more than 2^31 elements from its base."""
    length = 40
    base = torch.empty(length * 60_000_000, dtype=torch.float16, device=DEVICE)
    view = base.as_strided((1, 1, length, 64), (0, 0, 60_000_000, 1))
    view.copy_(torch.randn(1, 1, length, 64, device=DEVICE))
    out = int8_attention(view, view, view)
    assert relative_error(out, sdpa_oracle(view, view, view)[0]) < 0.02
