"""The designs of the fused quantisation kernel answer alike: how it loads, what it holds, what a program does."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from sdpa_router import int8_attention, quantize_qk, rms_rope_quantize, rope_qk
from sdpa_router.kernels.int8_attention import fused, fused_parts, fused_tiles
from sdpa_router.kernels.int8_attention.configs import HOPPER_GLUON
from sdpa_router.kernels.int8_attention.fused_reference import rms_rope_reference
from sdpa_router.kernels.int8_attention.fused_tiles import Tile, heads_of_program, key_tile, query_tile
from sdpa_router.kernels.int8_attention.launch import forget
from sdpa_router.testing import relative_error, sdpa_oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PARTS = ("query", "query_scale", "key", "key_scale", "key_shift", "lse_term")


@pytest.fixture(autouse=True)
def _launched_anew():
    """Launches that are remembered would hide a design that changed since."""
    forget()
    yield
    forget()


def arguments(*, across=False, two=False, dtype=torch.bfloat16, heads=3, length=40, head_dim=64):
    """A call's tensors: query and key [1, heads, length, head_dim] with heads inside, weights, and angles of halves."""
    sides = [
        torch.randn(1, length, heads, head_dim, device=DEVICE).to(dtype).transpose(1, 2) + offset for offset in (0, 0.5)
    ]
    weights = [(torch.rand(heads * head_dim if across else head_dim, device=DEVICE) + 0.5).to(dtype) for _ in sides]
    turn = 6.3 * torch.rand(length, head_dim // 2, device=DEVICE)
    if two:
        sides = [(x[:, :, :13], x[:, :, 13:]) for x in sides]
    return (*sides, *weights, turn.cos(), turn.sin())


def quantized(call, interleaved):
    return rms_rope_quantize(*call, interleaved=interleaved, eps=1e-6, lse=True)


def same(one, other):
    return [name for name in PARTS if not torch.equal(getattr(one, name), getattr(other, name))] == []


@pytest.fixture
def designed(monkeypatch):
    """A function that changes fields of both launches."""

    def change(**fields):
        for name, usual in (("query_tile", query_tile), ("key_tile", key_tile)):
            monkeypatch.setattr(fused, name, lambda *a, _usual=usual, **k: _usual(*a, **k)._replace(**fields))
        forget()

    return change


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("across", "two"), [(True, False), (False, True)])
def test_words_are_two_channels(monkeypatch, interleaved, across, two):
    call = arguments(across=across, two=two)
    answers = []
    usual = fused._in_words
    monkeypatch.setattr(fused, "_in_words", lambda *x: answers.append(usual(*x)) or answers[-1])
    words = quantized(call, interleaved)
    assert answers == [True] * 4
    monkeypatch.setattr(fused, "_in_words", lambda *x: False)
    forget()
    assert same(words, quantized(call, interleaved))


def test_no_words_where_they_would_be_cut():
    x = torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16)
    assert fused._in_words(x)
    assert fused._in_words(x, None)
    assert not fused._in_words(x.half())
    assert not fused._in_words(x[..., 1:])
    assert not fused._in_words(x.flatten()[:505].as_strided((1, 4, 2, 62), (505, 126, 63, 1)))
    assert not fused._in_words(torch.zeros(1, 4, 2, 63, dtype=torch.bfloat16))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("across", [False, True])
def test_what_is_loaded_ahead_is_what_would_be_loaded_then(designed, interleaved, across):
    call = arguments(across=across)
    expected = quantized(call, interleaved)
    designed(ahead=True)
    assert same(quantized(call, interleaved), expected)


@pytest.mark.parametrize("interleaved", [True, False])
def test_what_is_not_held_is_read_again(designed, interleaved):
    call = arguments(dtype=torch.float16)
    expected = quantized(call, interleaved)
    designed(held=False)
    fresh = quantized(call, interleaved)
    # Of queries weights and angles are multiplied in another order: a rounding that falls the other way is a step.
    assert torch.equal(fresh.key, expected.key)
    assert (fresh.query.int() - expected.query).abs().max() <= 1
    assert (fresh.query != expected.query).float().mean() < 0.02
    assert torch.allclose(fresh.query_scale, expected.query_scale, rtol=2e-3)


@pytest.mark.skipif(DEVICE == "cuda", reason="a compiled kernel does not look at the changed constant")
@pytest.mark.parametrize("two", [False, True])
def test_the_order_of_axes_changes_nothing(monkeypatch, two):
    call = arguments(two=two)
    expected = quantized(call, True)
    monkeypatch.setattr(fused_parts, "LAST_FIRST", tl.constexpr(not fused_parts.LAST_FIRST.value))
    assert same(quantized(call, True), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_norm_across_heads_reads_some_heads_at_a_time(monkeypatch, dtype):
    call = arguments(across=True, dtype=dtype, heads=5)
    expected = quantized(call, True)
    for name in ("_RMS_HEADS", "_FINISHED_HEADS"):
        monkeypatch.setattr(fused, name, 2)
    forget()
    made = quantized(call, True)
    assert torch.equal(made.query, expected.query)
    for name in ("query_scale", "lse_term", "key_scale"):
        assert torch.allclose(getattr(made, name), getattr(expected, name), rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("precision", ["auto", "high"])
@pytest.mark.parametrize("masked", [False, True])
def test_without_norm_and_rope_it_is_the_plain_quantiser(precision, masked):
    query, key = arguments(dtype=torch.float16)[:2]
    options = {
        "attn_mask": torch.rand(1, 1, 1, 40, device=DEVICE) > 0.4 if masked else None,
        "scale": 0.3, "lse": True, "precision": precision,
    }  # fmt: skip
    fresh = rms_rope_quantize(query, key, None, None, None, None, interleaved=True, eps=None, **options)
    plain = quantize_qk(query, key, **options)
    assert fresh.layout == plain.layout
    assert same(fresh, plain)


@pytest.mark.parametrize("empty", [0, 1])
def test_an_empty_segment_is_no_segment(empty):
    query, key, query_weight, key_weight, *angles = arguments(dtype=torch.float16)
    expected = rms_rope_quantize(query, key, query_weight, key_weight, *angles, interleaved=True, eps=1e-6, lse=True)
    split = 40 * empty
    parts = [(x[:, :, :split], x[:, :, split:]) for x in (query, key)]
    other = torch.full_like(query_weight, 7.0)
    weights = [(w, other) if empty else (other, w) for w in (query_weight, key_weight)]
    for pair in (weights, (query_weight, key_weight)):
        assert same(rms_rope_quantize(*parts, *pair, *angles, interleaved=True, eps=1e-6, lse=True), expected)


def test_heads_of_a_program():
    """As few rounds of programs as there can be, and in them few starts."""
    keys, queries = Tile(128, 1, 8, beside=2), Tile(8, 8, 4, beside=4)
    assert heads_of_program(keys, 56, 263, 132) == 56  # one round with all heads
    assert heads_of_program(keys, 16, 32, 132) == 2  # 256 programs for 264 places
    assert heads_of_program(keys, 24, 36, 132) == 4
    assert heads_of_program(keys, 3, 1, 132) == 1
    assert heads_of_program(queries, 56, 512, 132) == 56
    assert heads_of_program(queries, 3, 5, 0) == 8


@given(
    heads=st.integers(1, 64), blocks=st.integers(1, 4000), together=st.sampled_from([1, 8]), beside=st.integers(1, 4)
)
def test_no_other_number_of_heads_would_be_done_sooner(heads, blocks, together, beside):
    tile = Tile(8, together, 4, beside=beside)

    def cost(each):
        programs = blocks * -(-heads // each)
        return -(-programs // (132 * beside)) * (each // together + 2)

    chosen = heads_of_program(tile, heads, blocks, 132)
    assert chosen % together == 0
    assert cost(chosen) == min(cost(each) for each in range(together, heads + together, together))


def attention_error(call, value, attn_mask=None, interleaved=True, scale=None):
    """Of the attention over the quantised call against float64."""
    query, key, *weights, cos, sin = call
    quantized = rms_rope_quantize(*call, interleaved=interleaved, eps=1e-6, attn_mask=attn_mask, scale=scale)
    sides = [torch.cat(x, 2) if isinstance(x, tuple) else x for x in (query, key)]
    normed = [
        rms_rope_reference(x, w, cos, sin, interleaved=interleaved, eps=1e-6)
        for x, w in zip(sides, weights, strict=True)
    ]
    return relative_error(
        int8_attention(quantized, value), sdpa_oracle(*normed, value.double(), attn_mask, scale=scale)[0]
    )


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("two", "held", "ahead"), [(False, True, True), (False, False, False), (True, False, False)])
def test_two_values_in_an_instruction(designed, interleaved, two, held, ahead):
    call, value = arguments(two=two), torch.randn(1, 3, 40, 64, device=DEVICE).bfloat16()
    mask = torch.rand(1, 1, 1, 40, device=DEVICE) > 0.3
    designed(fp16=True, held=held, ahead=ahead)
    assert attention_error(call, value, None, interleaved) < 0.0135
    assert attention_error(call, value, mask, interleaved) < 0.0135


@pytest.mark.parametrize(("query_size", "key_size"), [(1e5, 1e-5), (1e-6, 3e5), (1.0, 1.0)])
def test_weights_of_any_size_fit_fp16(designed, query_size, key_size):
    query, key, wq, wk, cos, sin = arguments(dtype=torch.float32)
    rows = torch.logspace(-3, 3, 40, device=DEVICE)[:, None]
    call = ((rows * query).bfloat16(), (key / rows).bfloat16(), query_size * wq, key_size * wk, cos, sin)
    designed(fp16=True)
    assert attention_error(call, torch.randn(1, 3, 40, 64, device=DEVICE).bfloat16()) < 0.0135


def test_weights_that_are_zero_or_absent_in_fp16(designed):
    query, key, wq, wk, cos, sin = arguments()
    value = torch.randn(1, 3, 40, 64, device=DEVICE).bfloat16()
    designed(fp16=True)
    assert attention_error((query, key, None, None, cos, sin), value) < 0.0135
    assert attention_error((query, key, torch.zeros_like(wq), wk, cos, sin), value) < 0.0135
    assert attention_error((query * 0, key, wq, wk, cos, sin), value) < 0.0135


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(("rows", "weight", "scale"), [(1e-6, 1.0, 100.0), (1.0, 1000.0, -0.125)])
def test_rows_far_below_their_norm_keep_their_steps_in_fp16(designed, side, rows, weight, scale):
    """Rows far below sqrt(eps), and rows that are zero where the weight is largest."""
    call, value = list(arguments()), torch.randn(1, 3, 40, 64, device=DEVICE).bfloat16()
    call[side] = call[side] * rows
    call[side][..., :2] = 0
    call[2 + side][:2] *= weight
    designed(fp16=True)
    assert attention_error(call, value, scale=scale) < 0.0135


@pytest.mark.parametrize("size", [1e-39, 1e37])
def test_weights_at_the_ends_of_float32_stay_finite_in_fp16(designed, size):
    query, key, wq, wk, cos, sin = arguments()
    designed(fp16=True)
    quantized = rms_rope_quantize(query, key, wq.float() * size, wk, cos, sin, interleaved=True, eps=1e-6)
    assert quantized.query_scale.isfinite().all()


@pytest.mark.skipif(DEVICE == "cuda", reason="there it is the device's own")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("fp16", "head_dim"), [(True, 64), (False, 64), (True, 128)])
def test_keys_with_the_scales_that_the_hopper_kernel_reads(monkeypatch, fp16, head_dim, masked):
    monkeypatch.setattr(rope_qk, "choose_config", lambda *_: HOPPER_GLUON[head_dim])
    monkeypatch.setattr(fused_tiles, "_QUERIES_FP16", fused_tiles._QUERIES_FP16 if fp16 else None)
    monkeypatch.setattr(fused_tiles, "_KEYS_FP16", fused_tiles._KEYS_FP16 if fp16 else None)
    call = arguments(heads=2, length=150, head_dim=head_dim, dtype=torch.float16)
    value = torch.randn(1, 2, 150, head_dim, device=DEVICE).half()
    mask = torch.rand(1, 1, 1, 150, device=DEVICE) > 0.3 if masked else None
    assert attention_error(call, value, mask) < 0.0135
    quantized = rms_rope_quantize(*call, interleaved=True, eps=1e-6, attn_mask=mask)
    scale = quantized.layout.key
    rows = quantized.key * quantized.key_scale[..., scale.index(quantized.key.shape[2])][..., None]
    largest = rows.double().norm(dim=-1).unflatten(2, (-1, scale.block)).amax(-1)
    assert torch.allclose(quantized.prepared.key_norm.double(), largest, rtol=0.02)
