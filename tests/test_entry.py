"""Tensors whose memory doesn't hold their values: every function that launches kernels itself reads them right."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

from sdpa_router import (
    UnsupportedError,
    int8_attention,
    int8_linear_qk,
    join_qk,
    quantize_qk,
    rms_rope_quantize,
)
from sdpa_router.layouts import from_sage_warp, to_sage_warp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = (1, 2, 40, 32)
REFUSED = r"functorch|tensor_subclass"


def normal(*shape, dtype=torch.float16):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def negated(tensor):
    """The same values, negated by view."""
    view = torch._neg_view(-tensor)
    assert view.is_neg()
    return view


def through_quantize(q, k, mask, value):
    return int8_attention(quantize_qk(q, k, mask, lse=True), value, return_lse=True)


def through_rope(q, k, weight, cos, sin, mask, value):
    options = {"interleaved": True, "eps": 1e-6, "attn_mask": mask}
    return (int8_attention(rms_rope_quantize(q, k, weight, weight, cos, sin, **options), value),)


def through_segments(q, q2, k, k2, weight, other):
    options = {"interleaved": False, "eps": 1e-6}
    made = rms_rope_quantize((q, q2), (k, k2), (weight, other), (weight, other), None, None, **options)
    return made.query, made.query_scale, made.key, made.key_scale


def through_linear(x, weight, weight_scale, bias, mask):
    query = int8_linear_qk(x, weight, weight_scale, heads=2, role="query", bias=bias)
    key = int8_linear_qk(x, weight, weight_scale, heads=2, role="key", bias=bias, attn_mask=mask)
    made = join_qk(query, key)
    return made.query, made.query_scale, made.key, made.key_scale


def through_int8_linear(x, x_scale, weight, weight_scale):
    made = int8_linear_qk(x, weight, weight_scale, heads=2, role="query", x_scale=x_scale, dtype=torch.float16)
    return made.values, made.scale


def through_layout(query, query_scale, key, key_scale, value):
    made = from_sage_warp(query, query_scale, key, key_scale, softmax_scale=0.2, dtype=torch.float16)
    return (int8_attention(made, value), *to_sage_warp(made)[:4])


def arguments_of(function):
    int8 = torch.randint(-127, 128, (1, 40, 64), dtype=torch.int8, device=DEVICE)
    layer = torch.randint(-127, 128, (64, 64), dtype=torch.int8, device=DEVICE), torch.rand(64, device=DEVICE) / 900
    rows = [torch.randint(-127, 128, (1, 2, 40, 64), dtype=torch.int8, device=DEVICE) for _ in range(2)]
    scales = [torch.rand(1, 2, n, device=DEVICE) / 99 for n in (4, 1)]
    mask = normal(1, 1, 1, 40, dtype=torch.float32)
    given = {
        through_quantize: (normal(*SHAPE), normal(*SHAPE), mask, normal(*SHAPE)),
        through_rope: (
            normal(*SHAPE), normal(*SHAPE), normal(32), *(normal(40, 16, dtype=torch.float32) for _ in range(2)),
            mask, normal(*SHAPE),
        ),
        through_segments: (*(normal(*SHAPE) for _ in range(4)), normal(32), normal(32)),
        through_linear: (normal(1, 40, 64), *layer, normal(64), mask),
        through_int8_linear: (int8, torch.rand(1, 40, device=DEVICE), *layer),
        through_layout: (rows[0], scales[0], rows[1], scales[1], normal(1, 2, 40, 64)),
    }  # fmt: skip
    return list(given[function])


EVERY = [through_quantize, through_rope, through_segments, through_linear, through_int8_linear, through_layout]


@pytest.mark.parametrize("function", EVERY)
def test_negation_by_view_is_read(function):
    arguments = arguments_of(function)
    expected = function(*arguments)
    for place, argument in enumerate(arguments):
        changed = list(arguments)
        changed[place] = negated(argument)
        assert all(map(torch.equal, function(*changed), expected)), place


@pytest.mark.parametrize("function", [through_quantize, through_linear, through_layout])
def test_zeros_without_memory_are_read(function):
    arguments = arguments_of(function)
    for place, argument in enumerate(arguments):
        with_zeros = [torch.zeros_like(t) if i == place else t for i, t in enumerate(arguments)]
        expected = function(*with_zeros)
        with_zeros[place] = torch._efficientzerotensor(argument.shape, dtype=argument.dtype, device=DEVICE)
        got = function(*with_zeros)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(got, expected, strict=True)), place


def test_angles_of_the_inverse_turn():
    """sin of a conjugated table of angles is a negation by view."""
    table = torch.polar(torch.ones(40, 16, device=DEVICE), 6.3 * torch.rand(40, 16, device=DEVICE)).conj()
    q, k = normal(*SHAPE), normal(*SHAPE)
    made, plain = (
        rms_rope_quantize(q, k, None, None, t.real, t.imag, interleaved=True, eps=1e-6)
        for t in (table, table.resolve_conj())
    )
    assert table.imag.is_neg()
    assert torch.equal(made.query, plain.query)


def test_a_mask_is_the_one_quantised_with_by_its_values():
    q, k, value = (normal(*SHAPE) for _ in range(3))
    mask = negated(normal(1, 1, 1, 40, dtype=torch.float32))
    made = quantize_qk(q, k, mask)
    int8_attention(made, value, attn_mask=mask)
    with pytest.raises(ValueError, match="attn_mask is another"):
        int8_attention(made, value, attn_mask=torch._neg_view(mask))


def test_a_buffer_is_no_negated_view():
    q, k, value = (normal(*SHAPE) for _ in range(3))
    with pytest.raises(ValueError, match="out is a negated view"):
        int8_attention(quantize_qk(q, k), value, out=negated(value))


def wrapped(tensor):
    return TwoTensor(tensor, tensor.clone())


def fake(tensor):
    return FakeTensorMode().from_tensor(tensor)


@pytest.mark.parametrize("wrap", [wrapped, fake, lambda t: t.to("meta")])
@pytest.mark.parametrize("function", EVERY)
def test_what_holds_no_values_is_refused(function, wrap):
    arguments = arguments_of(function)
    for place, argument in enumerate(arguments):
        changed = list(arguments)
        changed[place] = wrap(argument)
        with pytest.raises((UnsupportedError, ValueError), match=r"tensor_subclass|device|on meta|expected"):
            function(*changed)


@pytest.mark.parametrize("function", EVERY)
def test_transforms_and_traces_are_refused(function):
    arguments = arguments_of(function)
    for place, argument in enumerate(arguments):

        def alone(x):
            return function(*arguments[:place], x, *arguments[place + 1 :])  # noqa: B023

        with pytest.raises(UnsupportedError, match=REFUSED):
            torch.func.vmap(alone)(argument[None])
        with pytest.raises(UnsupportedError, match=REFUSED):
            make_fx(alone)(argument)
        if argument.is_floating_point():
            with pytest.raises(UnsupportedError, match=REFUSED):
                torch.func.jvp(alone, (argument,), (argument,))
            with forward_ad.dual_level(), pytest.raises(UnsupportedError, match=REFUSED):
                alone(forward_ad.make_dual(argument, argument))
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(UnsupportedError, match=REFUSED):
        function(*arguments)


def test_a_value_that_is_wrapped_is_refused():
    q, k, value = (normal(*SHAPE) for _ in range(3))
    made = quantize_qk(q, k)
    with pytest.raises(UnsupportedError, match="value: a TwoTensor"):
        int8_attention(made, wrapped(value))
    with pytest.raises(UnsupportedError, match=REFUSED):
        torch.func.vmap(lambda v: int8_attention(made, v))(value[None])
    with pytest.raises(UnsupportedError, match="query_scale: a FakeTensor"):
        dataclasses.replace(made, query_scale=fake(made.query_scale))
