"""Calls that were made before are recognised without their signature, and only those."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import sdpa_router
from sdpa_router import reset_stats, route, stats

dispatching = sys.modules["sdpa_router.dispatch"]
recent = sys.modules["sdpa_router.recent"]


@pytest.fixture(autouse=True)
def signatures(monkeypatch):
    """The calls that needed their signature."""
    reset_stats()
    seen, by_signature = [], dispatching._dispatch_by_signature

    def counted(name, attention, call):
        seen.append(call)
        return by_signature(name, attention, call)

    monkeypatch.setattr(dispatching, "_dispatch_by_signature", counted)
    with torch.no_grad(), route(min_kv=1, log=False):
        yield seen


def inputs(length=8, **options):
    return tuple(torch.randn(1, 2, length, 16, **options) for _ in range(3))


def test_calls_in_any_order_need_their_signature_once(signatures):
    mask = torch.zeros(1, 1, 1, 8)
    for _ in range(3):
        for length in (8, 8, 12, 8, 12, 12, 20):
            F.scaled_dot_product_attention(*inputs(length))
        F.scaled_dot_product_attention(*inputs(8), mask)
    assert len(signatures) == 4
    assert sorted(entry["count"] for entry in stats()["signatures"]) == [3, 3, 9, 9]


def test_what_follows_is_tried_first(monkeypatch):
    """Self- and cross-attention in turns: nothing is looked up by size once their order is known."""
    lookups, by_size = [], recent.with_key_of_size
    monkeypatch.setattr(dispatching, "with_key_of_size", lambda *given: lookups.append(given) or by_size(*given))
    for turn in range(5):
        for length in (8, 8, 8, 12):
            F.scaled_dot_product_attention(*inputs(8)[:1], *inputs(length)[1:])
        if turn == 2:
            lookups.clear()
    # What follows depends on one call, not on two: of each round the first, second and last were foreseen.
    assert len(lookups) == 4


def test_positional_and_named_arguments_are_one_call(signatures):
    query, key, value = inputs()
    mask = torch.zeros(1, 1, 1, 8)
    F.scaled_dot_product_attention(query, key, value, mask, 0.0, False, scale=0.5)
    F.scaled_dot_product_attention(query, key, value=value, attn_mask=mask, scale=0.25 * 2)
    F.scaled_dot_product_attention(value=value, key=key, query=query, attn_mask=mask, is_causal=False, scale=0.5)
    assert len(signatures) == 1
    assert stats()["calls"] == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"scale": 0.3},
        {"is_causal": True},
        {"is_causal": 0},
        {"enable_gqa": True},
        {"dropout_p": 0.5},
        {"attn_mask": torch.zeros(1, 1, 1, 8)},
        {"key": torch.randn(1, 8, 2, 16).transpose(1, 2)},
        {"value": torch.randn(1, 2, 8, 32)},
        {"query": torch.randn(1, 2, 8, 16, dtype=torch.float64)},
        {"query": torch.nn.Parameter(torch.randn(1, 2, 8, 16), requires_grad=False)},
    ],
)
def test_other_calls_are_not(signatures, changed):
    call = dict(zip(("query", "key", "value"), inputs(), strict=True))
    F.scaled_dot_product_attention(**call)
    try:
        F.scaled_dot_product_attention(**call | changed)
    except (RuntimeError, TypeError):  # float64 beside float32, and a number for is_causal
        assert changed.keys() & {"query", "is_causal"}
    assert len(signatures) == 2


def test_gradients_count_where_a_tensor_requires_them(signatures):
    plain, leaves = inputs(), inputs(requires_grad=True)
    for enabled in (True, False, True, False):
        with torch.set_grad_enabled(enabled):
            F.scaled_dot_product_attention(*plain)
            out = F.scaled_dot_product_attention(*leaves)
            assert out.requires_grad == enabled
    assert len(signatures) == 3
    assert stats()["reasons"]["requires_grad"] == 2


def test_a_known_call_is_not_routed_under_forward_mode_ad(device):
    query, key, value = (tensor.to(device).half() for tensor in inputs())
    F.scaled_dot_product_attention(query, key, value)
    assert stats()["routes"]["int8"] == 1
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query, torch.ones_like(query))
        with sdpa_kernel(SDPBackend.MATH):  # the others have no forward mode
            out = F.scaled_dot_product_attention(dual, key, value)
        assert forward_ad.unpack_dual(out).tangent is not None
    assert stats()["routes"]["int8"] == 1
    assert stats()["reasons"] == {"functorch": 1}


def test_forgotten_calls_are_not_revived(signatures):
    call = inputs()
    F.scaled_dot_product_attention(*call)
    held = recent.latest.call
    reset_stats()
    recent.latest.call = held  # as a thread does that was on its way
    for _ in range(2):
        F.scaled_dot_product_attention(*call)
    assert len(signatures) == 2
    assert stats()["calls"] == 2


def test_settings_keep_calls_apart():
    call = inputs()
    for _ in range(2):
        F.scaled_dot_product_attention(*call)
        with route(on_unsupported="raise", log=False), pytest.raises(sdpa_router.UnsupportedError):
            F.scaled_dot_product_attention(*call)


def test_arguments_that_do_not_fit_are_torchs_to_refuse(monkeypatch):
    query, key, value = inputs()
    wrong = [
        ((query, key), {}),
        ((), {}),
        ((query, key, value, None, 0.0, False, 0.5), {}),
        ((query, key, value), {"query": query}),
        ((query, key, value), {"sale": 0.5}),
        ((query, key, 3), {}),
    ]
    for args, kwargs in wrong:
        with pytest.raises(TypeError) as ours:
            F.scaled_dot_product_attention(*args, **kwargs)
        with pytest.raises(TypeError) as theirs:
            torch._C._nn.scaled_dot_product_attention(*args, **kwargs)
        assert str(ours.value) == str(theirs.value)
