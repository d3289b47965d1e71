"""Layouts of SageAttention and comfy-kitchen: exact round trips, groups as the libraries have them, bad input."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from sdpa_router import int8_attention, layouts, quantize_qk
from sdpa_router.kernels.int8_attention.limits import fp8_unavailable
from sdpa_router.qk import Groups
from sdpa_router.testing import relative_error, sdpa_oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = {
    "sage block": (layouts.to_sage_block, layouts.from_sage_block, {}),
    "sage warp": (layouts.to_sage_warp, layouts.from_sage_warp, {}),
    "sage warp sm90": (layouts.to_sage_warp, layouts.from_sage_warp, {"sm90": True}),
    "sage thread": (layouts.to_sage_thread, layouts.from_sage_thread, {}),
    "sage thread sm90": (layouts.to_sage_thread, layouts.from_sage_thread, {"sm90": True}),
    "comfy-kitchen 64": (layouts.to_comfy_kitchen, layouts.from_comfy_kitchen, {"cta_k": 64}),
    "comfy-kitchen 128": (layouts.to_comfy_kitchen, layouts.from_comfy_kitchen, {"cta_k": 128}),
}
# Scales of Q 200 and K 150 by the libraries' own formulas.
COUNTS = {
    "sage block": (2, 3),
    "sage warp": (8, 3),
    "sage warp sm90": (16, 2),
    "sage thread": (64, 12),
    "sage thread sm90": (128, 8),
    "comfy-kitchen 64": (64, 12),
    "comfy-kitchen 128": (64, 8),
}


def draw(q_len=200, kv_len=150, head_dim=64):
    shapes = ((4, q_len), (2, kv_len), (2, kv_len))
    return [torch.randn(1, h, n, head_dim, device=DEVICE).half() for h, n in shapes]


def back(given, name, dtype=torch.float16, **options):
    """From a foreign layout, with what its own function wants."""
    _, read, flags = FORMATS[name]
    if name != "sage block":
        options.setdefault("softmax_scale", given.softmax_scale)
    return read(*given[:4], dtype=dtype, **flags, **options)


def same(one, other):
    return all(torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", FORMATS)
def test_round_trips_are_exact(name):
    write, _, flags = FORMATS[name]
    query, key, value = draw()
    quantized = quantize_qk(query, key, enable_gqa=True)
    with pytest.raises(ValueError, match="scales differ inside groups"):
        write(quantized, **flags)
    given = write(quantized, requantize=True, **flags)
    assert tuple(t.shape[2] for t in (given.query_scale, given.key_scale)) == COUNTS[name]
    ours = back(given, name)
    assert same(write(ours, **flags), given)
    out = int8_attention(ours, value)
    assert relative_error(out, sdpa_oracle(query, key, value, enable_gqa=True)[0]) < 0.016  # rounded twice
    if name != "sage block":
        apart = given._replace(softmax_scale=-0.3)
        assert same(write(back(apart, name), **flags), apart)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scale", [0.2, -0.2])
def test_int8_values_mean_what_the_layout_says(name, scale):
    """Foreign tensors made by hand: the attention over them is the softmax of their products times their scales."""
    write, _, flags = FORMATS[name]
    shape = write(quantize_qk(*draw()[:2], enable_gqa=True), requantize=True, **flags)
    query, key = (torch.randint(-127, 128, t.shape, device=DEVICE).to(torch.int8) for t in (shape.query, shape.key))
    query_scale, key_scale = (0.02 * torch.rand_like(t) for t in (shape.query_scale, shape.key_scale))
    given = layouts.Foreign(query, query_scale, key, key_scale, scale)
    mask = torch.rand(1, 1, 1, 150, device=DEVICE) > 0.3
    block, warp, pairs = {"sage block": (128, 128, 64), "sage warp": (128, 32, 64), "sage warp sm90": (64, 16, 128),
                          "sage thread": (128, 32, 64), "sage thread sm90": (64, 16, 128)}.get(
        name, (128, 32, flags.get("cta_k")))  # fmt: skip
    each = range(8) if "thread" in name or "comfy" in name else (0,)
    row = torch.tensor([i // block * (block // warp) * len(each) + i % block // warp * len(each) + i % len(each)
                        for i in range(200)], device=DEVICE)  # fmt: skip
    four = len(each) > 1
    column = torch.tensor([i // pairs * 4 + i % 8 // 2 if four else i // pairs for i in range(150)], device=DEVICE)
    value = draw()[2]
    exact = [x.double() * s[..., i, None].double() for x, s, i in ((query, query_scale, row), (key, key_scale, column))]
    factor = 1 / math.log2(math.e) if name == "sage block" else scale
    out = int8_attention(back(given, name, attn_mask=mask), value)
    assert relative_error(out, sdpa_oracle(*exact, value, mask, scale=factor, enable_gqa=True)[0]) < 1e-3


def test_between_foreign_layouts_what_refines_is_exact():
    query, key, value = draw()
    warp = layouts.from_sage_warp(
        *layouts.to_sage_warp(quantize_qk(query, key, enable_gqa=True), requantize=True)[:4],
        softmax_scale=0.125, dtype=torch.float16,
    )  # fmt: skip
    thread = layouts.convert(warp, layouts.SAGE_THREAD)
    assert torch.equal(thread.query, warp.query)
    # A scale a key is multiplied in another order than one of a tile.
    assert relative_error(int8_attention(thread, value), int8_attention(warp, value).double()) < 1e-4
    assert torch.equal(layouts.convert(thread, layouts.SAGE_WARP).query_scale, warp.query_scale)


def test_the_mask_of_a_foreign_layout_holds_as_it_was():
    query, key, value = draw()
    mask = torch.rand(1, 1, 1, 150, device=DEVICE) > 0.4
    ours = quantize_qk(query, key, mask, enable_gqa=True)
    foreign = layouts.to_sage_warp(ours, requantize=True)
    read = layouts.from_sage_warp(*foreign[:4], softmax_scale=foreign.softmax_scale, dtype=value.dtype, attn_mask=mask)
    converted = layouts.convert(ours, layouts.SAGE_THREAD, requantize=True)
    for quantized in (read, converted):
        assert torch.equal(int8_attention(quantized, value, attn_mask=mask), int8_attention(quantized, value))
    mask[..., 3] = ~mask[..., 3]
    for quantized in (read, converted):
        with pytest.raises(ValueError, match="attn_mask was written to since"):
            int8_attention(quantized, value)


def test_a_quantised_value_stays_behind():
    query, key, value = draw()
    if fp8_unavailable(query.device) is not None:
        pytest.skip(f"no fp8 here: {fp8_unavailable(query.device)}")
    quantized = quantize_qk(query, key, value=value, enable_gqa=True)
    converted = layouts.convert(quantized, layouts.SAGE_THREAD, requantize=True)
    with pytest.raises(ValueError, match="value is None"):
        int8_attention(converted)
    assert relative_error(int8_attention(converted, value), sdpa_oracle(query, key, value, enable_gqa=True)[0]) < 0.016


def test_our_groups_for_hopper_are_sages_threads():
    hopper = Groups(128, 4)
    assert hopper == layouts.SAGE_SM90_THREAD.key
    keys = torch.arange(128)
    assert torch.equal(hopper.index(128), (keys % 8) // 2)


def test_without_a_key_shift_the_lse_is_that_of_the_keys_given():
    query, key, value = draw(64, 64)
    given = layouts.to_sage_block(quantize_qk(query, key, enable_gqa=True), requantize=True)
    ours = layouts.from_sage_block(*given[:4], dtype=torch.float16)
    _, lse = int8_attention(ours, value, return_lse=True)
    q, k = (
        given.query.double() * given.query_scale[..., :1, None].double(),
        given.key * given.key_scale[..., None].double(),
    )
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * math.log(2)
    assert (lse - scores.logsumexp(-1)).abs().max() < 1e-3


def test_sageattention_agrees_with_our_kernel():
    forward = pytest.importorskip(
        "sageattention.attn_qk_int8_per_block",
        reason="sageattention is not installed: pip install sageattention==1.0.6",
    ).forward
    per_block_int8 = pytest.importorskip("sageattention.quant_per_block").per_block_int8
    query, key, value = draw(kv_len=192)
    given = layouts.to_sage_block(quantize_qk(query, key, enable_gqa=True), requantize=True)
    theirs = forward(given.query, given.key, value, given.query_scale, given.key_scale)
    ours = int8_attention(layouts.from_sage_block(*given[:4], dtype=torch.float16), value)
    assert relative_error(theirs, ours.double()) < 2e-3  # it sums P @ V in float16
    quantized = per_block_int8(query, key)
    theirs = forward(quantized[0], quantized[2], value, quantized[1], quantized[3])
    ours = int8_attention(layouts.from_sage_block(*quantized, dtype=torch.float16), value)
    assert relative_error(theirs, ours.double()) < 2e-3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key_rotation": "hadamard"}, ("key_rotation is 'hadamard'", "'none'")),
        ({"query_rotation": None, "key_rotation": None}, ("query_rotation is of type NoneType", "a name")),
        (
            {"query": torch.zeros(1, 4, 0, 64, dtype=torch.int8), "query_scale": torch.zeros(1, 4, 0)},
            ("query is [1, 4, 0, 64]", "at least 1"),
        ),
        ({"query": torch.zeros(1, 4, 200, 64)}, ("query is torch.float32", "torch.int8")),
        ({"query": torch.zeros(1, 4, 200, 80, dtype=torch.int8)}, ("query has 80 channels", "(64, 128)")),
        ({"query": torch.zeros(1, 4, 200, 96, dtype=torch.int8)}, ("query has 96 channels", "(64, 128)")),
        ({"sm90": "no"}, ("sm90 is of type str", "True or False")),
        ({"query_scale": torch.zeros(1, 4, 7)}, ("query_scale's shape is (1, 4, 7)", "(1, 4, 8)")),
        ({"key_scale": torch.zeros(1, 2, 4)}, ("key_scale's shape is (1, 2, 4)", "(1, 2, 3)")),
        ({"key_scale": torch.zeros(1, 2, 3, dtype=torch.float16)}, ("key_scale's dtype is torch.float16", "float32")),
        ({"softmax_scale": math.nan}, ("softmax_scale is nan", "finite")),
        ({"softmax_scale": 1e30}, ("softmax_scale is 1e+30", "at most")),
        ({"dtype": torch.float32}, ("dtype is float32", "float16")),
        ({"attn_mask": torch.ones(1, 1, 200, 150)}, ("attn_mask is float32 [1, 1, 200, 150]", "one row")),
        ({"attn_mask": torch.ones(1, 1, 1, 149)}, ("attn_mask is float32 [1, 1, 1, 149]", "[1, 4, 200, 150]")),
        ({"attn_mask": torch.ones(1, 1, 1, 150).int()}, ("attn_mask is int32", "bool")),
        (
            {"key": torch.zeros(1, 3, 150, 64, dtype=torch.int8), "key_scale": torch.zeros(1, 3, 3)},
            ("4 heads and key 3",),
        ),
    ],
)
def test_foreign_fields_that_do_not_fit(change, words):
    given = layouts.to_sage_warp(quantize_qk(*draw()[:2], enable_gqa=True), requantize=True)
    fields = {**given._asdict(), "dtype": torch.float16, **change}
    fields = {k: v.to(DEVICE) if torch.is_tensor(v) else v for k, v in fields.items()}
    with pytest.raises(ValueError, match=r".") as caught:
        layouts.from_sage_warp(**fields)
    assert all(word in str(caught.value) for word in words), caught.value


def test_widths_and_tiles_that_a_library_does_not_take():
    quantized = quantize_qk(*draw(head_dim=32)[:2], enable_gqa=True)
    with pytest.raises(ValueError, match="32 channels"):
        layouts.to_sage_block(quantized, requantize=True)
    with pytest.raises(ValueError, match="cta_k is 32; expected 64 or 128"):
        layouts.to_comfy_kitchen(quantized, cta_k=32)
    with pytest.raises(ValueError, match="cta_k is '64'; expected 64 or 128"):
        layouts.to_comfy_kitchen(quantized, cta_k="64")
    with pytest.raises(ValueError, match="requantize is of type str; expected True or False"):
        layouts.to_sage_block(quantize_qk(*draw()[:2], enable_gqa=True), requantize="no")
    wide = dataclasses.replace(quantize_qk(*draw(64, 64, 256)[:2], enable_gqa=True))
    assert layouts.to_comfy_kitchen(wide, requantize=True).query_scale.shape[2] == 64


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"query": None}, "query is of type NoneType; expected a tensor"),
        ({"key_scale": 1.0}, "key_scale is of type float; expected a tensor"),
        ({"softmax_scale": "1"}, "softmax_scale is 1; expected a finite number"),
        ({"attn_mask": "mask"}, "attn_mask is of type str; expected a tensor or None"),
    ],
)
def test_parts_of_other_types(change, words):
    query, key, _ = draw()
    given = layouts.to_sage_warp(quantize_qk(query, key, enable_gqa=True), requantize=True)
    arguments = {**given._asdict(), "dtype": torch.float16} | change
    with pytest.raises(ValueError, match=words):
        layouts.from_sage_warp(**arguments)
    with pytest.raises(ValueError, match="quantized is of type Foreign; expected a QuantizedQK"):
        layouts.to_sage_warp(given)
    with pytest.raises(ValueError, match="quantized is of type Foreign; expected a QuantizedQK"):
        layouts.to_comfy_kitchen(given)
    with pytest.raises(ValueError, match="query is of type str; expected a tensor"):
        layouts.from_comfy_kitchen("q", *given[1:4], softmax_scale=0.1, dtype=torch.float16, cta_k=64)
    with pytest.raises(ValueError, match="quantized is of type Tensor; expected a QuantizedQK"):
        layouts.convert(query, layouts.SAGE_BLOCK)
    with pytest.raises(ValueError, match="layout is of type str; expected a Layout"):
        layouts.convert(quantize_qk(query, key, enable_gqa=True), "sage")


def test_a_softmax_scale_under_0_and_the_value_that_has_no_opposite():
    given = layouts.to_sage_warp(quantize_qk(*draw()[:2], enable_gqa=True), requantize=True)
    given.query[:, :, ::3] = -128
    value = draw()[2]
    query = given.query.double() * given.query_scale[..., layouts.SAGE_WARP.query.index(200), None]
    key = given.key.double() * given.key_scale[..., layouts.SAGE_WARP.key.index(150), None]
    ours = layouts.from_sage_warp(*given[:4], softmax_scale=-0.1, dtype=torch.float16)
    wanted = sdpa_oracle(query, key, value, scale=-0.1, enable_gqa=True)[0]
    assert relative_error(int8_attention(ours, value), wanted) < 0.01
    block = layouts.to_sage_block(ours, requantize=True)
    folded = layouts.from_sage_block(*block[:4], dtype=torch.float16)
    assert relative_error(int8_attention(folded, value), wanted) < 0.02


def test_scales_do_not_lose_a_gradient():
    given = layouts.to_sage_block(quantize_qk(*draw()[:2], enable_gqa=True), requantize=True)
    scale = given.query_scale.clone().requires_grad_()
    with torch.enable_grad(), pytest.raises(ValueError, match="query_scale requires a gradient"):
        layouts.from_sage_block(given.query, scale, *given[2:4], dtype=torch.float16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key_scale": None}, "key_scale is of type NoneType; expected a tensor"),
        ({"query": "q"}, "query is of type str; expected a tensor"),
        ({"layout": None}, "layout is of type NoneType; expected a Layout"),
        ({"head_dim": "64"}, "head_dim is '64'; expected 1 to 64"),
        ({"kv_len": 1.5}, "kv_len is 1.5; expected 1 to"),
    ],
)
def test_parts_of_a_quantised_pair_of_other_types(change, words):
    quantized = quantize_qk(*draw()[:2], enable_gqa=True)
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(quantized, **change)
