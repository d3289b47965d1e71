"""The public calls: int8 answers, buffers, and everything that must be exactly torch's."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import sdpa_router
from sdpa_router import UnsupportedError, explain, int8_attention, is_available, route, stats
from sdpa_router.testing import lse_error, relative_error, sdpa_oracle

BUDGET = 0.03  # int8 rounding where few keys are averaged
X = torch.randn(1, 2, 8, 16)


@pytest.fixture(autouse=True)
def _fresh():
    sdpa_router.reset_stats()


def inputs(device, heads=2, kv_heads=2, q_len=70, kv_len=100, head_dim=32, dtype=torch.float16):
    sizes = ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    return [torch.randn(2, *size, head_dim, device=device).to(dtype) for size in sizes]


CALLS = {
    "plain": lambda q, k, v: {},
    "scale": lambda q, k, v: {"scale": 0.5},
    "negative scale": lambda q, k, v: {"scale": -0.2},
    "zero scale": lambda q, k, v: {"scale": 0},
    "causal": lambda q, k, v: {"is_causal": True},
    "bool mask": lambda q, k, v: {"attn_mask": torch.rand(2, 1, 1, 100, device=q.device) > 0.3},
    "float32 bias": lambda q, k, v: {"attn_mask": torch.randn(1, 2, 1, 100, device=q.device)},
    "bias": lambda q, k, v: {"attn_mask": torch.randn(1, 100, device=q.device).half()},
    "one bias for all keys": lambda q, k, v: {"attn_mask": torch.randn(2, 2, 1, 1, device=q.device)},
    "expanded bias": lambda q, k, v: {"attn_mask": torch.randn(2, 1, 1, 100, device=q.device).expand(2, 2, 70, 100)},
    "three axes": lambda q, k, v: {"attn_mask": torch.randn(2, 1, 100, device=q.device)},
}


@pytest.mark.parametrize("name", CALLS)
def test_routed_answers_are_sdpas(device, name):
    q, k, v = inputs(device)
    arguments = CALLS[name](q, k, v)
    with route(min_kv=1, on_unsupported="raise"):
        routed = F.scaled_dot_product_attention(q, k, v, **arguments)
        called = sdpa_router.scaled_dot_product_attention(q, k, v, **arguments)
    direct, lse = int8_attention(q, k, v, return_lse=True, **arguments)
    expected, expected_lse = sdpa_oracle(q, k, v, **arguments)
    assert relative_error(routed, expected) < BUDGET
    assert lse_error(lse, expected_lse) < 0.02
    assert torch.equal(routed, called)
    assert torch.equal(routed, direct)
    assert routed.dtype == q.dtype
    assert lse.dtype == torch.float32
    assert lse.shape == q.shape[:3]
    assert stats()["routes"] == {"int8": 2, "sdpa": 0}


def test_grouped_heads(device):
    q, k, v = inputs(device, heads=4)
    out = int8_attention(q, k, v, enable_gqa=True)
    assert relative_error(out, sdpa_oracle(q, k, v, enable_gqa=True)[0]) < BUDGET


def test_positional_arguments_mean_what_they_mean_in_sdpa(device):
    q, k, v = inputs(device, q_len=100)
    mask = torch.rand(1, 1, 1, 100, device=q.device) > 0.5
    with route(min_kv=1, on_unsupported="raise"):
        masked = F.scaled_dot_product_attention(q, k, v, mask, 0.0, False)
        causal = F.scaled_dot_product_attention(q, k, v, None, 0.0, True)
    assert relative_error(masked, sdpa_oracle(q, k, v, mask)[0]) < BUDGET
    assert relative_error(causal, sdpa_oracle(q, k, v, is_causal=True)[0]) < BUDGET


def test_permuted_queries_get_the_strides_that_torch_gives(device):
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(device))
    with route(min_kv=1, on_unsupported="raise"):
        out = F.scaled_dot_product_attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous()


def test_the_signature_is_sdpas():
    expected = "(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False)"
    for function in (sdpa_router.scaled_dot_product_attention, explain):
        bare = [
            parameter.replace(annotation=inspect.Parameter.empty)
            for parameter in inspect.signature(function).parameters.values()
        ]
        assert str(inspect.Signature(bare)) == expected


# int8_attention


def test_buffers_are_filled_and_returned(device):
    q, k, v = inputs(device)
    expected, expected_lse = int8_attention(q, k, v, return_lse=True)
    out = torch.empty(2, 70, 2, 32, dtype=q.dtype, device=q.device).transpose(1, 2)
    lse = torch.empty(2, 2, 70, device=q.device)
    found, found_lse = int8_attention(q, k, v, return_lse=True, out=out, lse=lse)
    assert found is out
    assert found_lse is lse
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert int8_attention(q, k, v, out=out) is out
    found, found_lse = int8_attention(q, k, v, return_lse=True, out=out)
    assert found is out
    assert torch.equal(found_lse, expected_lse)
    lse.zero_()
    assert torch.equal(int8_attention(q, k, v, lse=lse), expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("out", lambda q: torch.empty_like(q[:, :, 1:])),
        ("out", lambda q: torch.empty_like(q, dtype=torch.float32)),
        ("out", lambda q: torch.empty_like(q, device="meta")),
        ("out", lambda q: torch.empty_like(q.transpose(2, 3).contiguous()).transpose(2, 3)),
        ("out", lambda q: torch.empty_like(q[:, :1]).expand(q.shape)),
        ("lse", lambda q: torch.empty(q.shape[:3], dtype=torch.float16, device=q.device)),
        ("lse", lambda q: torch.empty(2, 70, device=q.device)),
    ],
)
def test_buffers_that_do_not_fit_are_refused(device, name, make):
    q, k, v = inputs(device)
    with pytest.raises(ValueError, match=f"{name} is .*; accepted: "):
        int8_attention(q, k, v, return_lse=True, **{name: make(q)})


def slab(q, gap=0):
    """Buffers for out and lse in one storage, lse `gap` bytes after (or before) the end of out."""
    size = q.numel() * q.element_size()
    memory = torch.zeros(size + 4 * q.numel() + 64, dtype=torch.uint8, device=q.device)
    out = memory[:size].view(q.dtype).view(q.shape)
    count = q.shape[:3].numel()
    return out, memory[size + gap :][: 4 * count].view(torch.float32).view(q.shape[:3])


@pytest.mark.parametrize(
    ("name", "buffers"),
    [
        ("out.*value", lambda q, k, v, mask: {"out": v}),
        ("out.*value", lambda q, k, v, mask: {"out": v.detach()}),
        ("out.*query", lambda q, k, v, mask: {"out": q}),
        ("out.*key", lambda q, k, v, mask: {"out": k.view(-1).view(q.shape)}),
        ("lse.*attn_mask", lambda q, k, v, mask: {"lse": mask.view(-1)[: q.shape[:3].numel()].view(q.shape[:3])}),
        ("out.*lse", lambda q, k, v, mask: dict(zip(("out", "lse"), slab(q, -4), strict=True))),
        ("out is", lambda q, k, v, mask: {"out": q.new_zeros(9999).as_strided(q.shape, (64, 32, 16, 1))}),
        (
            "lse is",
            lambda q, k, v, mask: {"lse": torch.zeros(999, device=q.device).as_strided(q.shape[:3], (70, 9, 1))},
        ),
        ("out.*gradient", lambda q, k, v, mask: {"out": torch.zeros_like(q).requires_grad_()}),
        ("lse.*gradient", lambda q, k, v, mask: {"lse": torch.zeros(q.shape[:3], device=q.device).requires_grad_()}),
        ("out.*sparse", lambda q, k, v, mask: {"out": torch.zeros_like(q).to_sparse()}),
    ],
)
def test_buffers_that_would_be_overwritten_are_refused(device, name, buffers):
    q, k, v = inputs(device, kv_len=70)
    mask = torch.zeros(2, 2, 1, 70, device=device)
    before = [x.clone() for x in (q, k, v, mask)]
    with pytest.raises(ValueError, match=f"{name}.*; accepted: "):
        int8_attention(q, k, v, mask, return_lse=True, **buffers(q, k, v, mask))
    assert all(torch.equal(*pair) for pair in zip((q, k, v, mask), before, strict=True))


def test_buffers_that_only_lie_between_are_taken(device):
    q, k, v = inputs(device)
    expected, expected_lse = int8_attention(q, k, v, return_lse=True)
    memory = torch.zeros(2, 70, 2, 2, 32, dtype=q.dtype, device=device)
    twin, out = (memory[:, :, index].transpose(1, 2) for index in (0, 1))
    twin.copy_(q)
    assert torch.equal(int8_attention(twin, k, v, out=out), expected)
    assert torch.equal(twin, q)
    out, lse = slab(q)
    int8_attention(q, k, v, out=out, lse=lse)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize("name", ["out", "lse"])
def test_buffers_that_are_no_tensors_are_type_errors(device, name):
    q, k, v = inputs(device)
    with pytest.raises(TypeError, match=f"{name} is a list"):
        int8_attention(q, k, v, **{name: [0.0]})


def test_autograd_notices_that_a_buffer_was_written(device):
    q, k, v = inputs(device)
    out, lse = torch.ones_like(q), torch.ones(q.shape[:3], device=device)
    weight = torch.ones((), device=device, requires_grad=True)
    for buffer in (out, lse):
        loss = (weight * buffer).sum()
        int8_attention(q, k, v, out=out, lse=lse)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.inference_mode():
        int8_attention(q, k, v, out=torch.ones_like(q))


@pytest.mark.parametrize(
    "relayout",
    [
        lambda q: q,
        lambda q: q.transpose(1, 2).contiguous().transpose(1, 2),
        lambda q: q.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        lambda q: q[:, :1].expand(q.shape),
    ],
)
def test_a_buffer_for_lse_changes_nothing_about_out(device, relayout):
    q, k, v = inputs(device)
    q = relayout(q)
    expected, lse = int8_attention(q, k, v, return_lse=True)
    assert int8_attention(q, k, v, lse=torch.empty_like(lse)).stride() == expected.stride()
    found, _ = int8_attention(q, k, v, return_lse=True, lse=torch.empty_like(lse))
    assert found.stride() == expected.stride()


def test_int8_attention_raises_with_every_reason_before_anything_runs(device):
    q, k, v = inputs(device, head_dim=300, dtype=torch.float32)
    q.requires_grad_()
    with pytest.raises(UnsupportedError) as caught:
        int8_attention(q, k, v, torch.zeros(70, 100, device=q.device), pv="fp4", precision="low", is_causal=True)
    found = [reason.code for reason in caught.value.decision.reasons]
    assert found == ["pv", "precision", "causal_with_mask", "requires_grad", "dtype", "head_dim", "full_mask"]
    assert all(code in str(caught.value) for code in found)


def test_a_call_that_was_answered_before_is_judged_anew_where_anything_differs(device):
    q, k, v = inputs(device, q_len=20, kv_len=90, head_dim=32)
    mask = torch.zeros(1, 1, 1, 90, device=device)

    def codes(*tensors, **options):
        try:
            int8_attention(*tensors, **options)
        except UnsupportedError as error:
            return [reason.code for reason in error.decision.reasons]
        return []

    for _ in range(2):
        assert codes(q, k, v) == codes(q, k, v, mask) == codes(q, k, v, precision="high") == []
        assert codes(q, k, v, pv="fp4") == ["pv"]
        assert codes(q, k, v, precision="low") == ["precision"]
        assert codes(q, k, v, is_causal=1) == ["argument"]
        assert codes(q, k, v, scale=float("nan")) == ["argument"]
        assert codes(q, k, v, mask.expand(1, 1, 20, 90).contiguous()) == ["full_mask"]
        assert codes(q, k.float(), v) == ["mixed_dtype"]
        assert codes(q, k.transpose(2, 3).contiguous().transpose(2, 3), v) == ["last_stride"]
        assert codes(q.clone().requires_grad_(), k, v) == ["requires_grad"]
        with torch.autocast(device.type, dtype=torch.bfloat16):
            assert codes(q, k, v) == ["autocast"]
        assert codes(q, k, v) == []


@pytest.mark.parametrize("query", [None, [1.0], 3])
def test_int8_attention_refuses_what_is_no_tensor(query):
    with pytest.raises(UnsupportedError, match="tensor_subclass"):
        int8_attention(query, X, X)


def test_int8_attention_knows_no_crossover_and_no_kill_switch(device, monkeypatch):
    monkeypatch.setenv("SDPA_ROUTER", "0")
    q, k, v = inputs(device, q_len=3, kv_len=3)
    assert int8_attention(q, k, v).shape == q.shape


def test_the_kill_switch_is_followed_outside_of_any_context(device, monkeypatch):
    sdpa_router.reset_stats()
    for value in ("1", "0", "1"):
        monkeypatch.setenv("SDPA_ROUTER", value)
        sdpa_router.scaled_dot_product_attention(*inputs(device))
    assert sdpa_router.stats()["calls"] == 3
    assert sdpa_router.stats()["reasons"]["disabled"] == 1


def test_is_available(device, monkeypatch):
    assert is_available()
    assert is_available(device)
    assert is_available(str(device))
    assert not is_available("meta")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not is_available("cpu")


@pytest.mark.parametrize("thing", [0, "cuda", "cuda:99", 99, -1, "banana", "mps", torch.device("xpu"), [1], 3.5])
def test_is_available_never_raises(thing, monkeypatch):
    assert is_available(thing) in (True, False)
    assert is_available("cuda:99") is False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert is_available("cuda:99") is False


def test_explain_uses_the_settings_in_force(device):
    q, k, v = inputs(device)
    with route(min_kv=101):
        assert [reason.code for reason in explain(q, k, v).reasons] == ["short"]
    with route(min_kv=100):
        assert explain(q, k, v).routed
    assert stats()["calls"] == 0


# What goes to torch is torch's, bit for bit

EXACT = {
    "float32": lambda q: F.scaled_dot_product_attention(q, q, q),
    "full mask": lambda q: F.scaled_dot_product_attention(q, q, q, torch.ones(8, 8).tril().bool()),
    "causal": lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.3),
    "three axes": lambda q: F.scaled_dot_product_attention(q[0], q[0], q[0]),
    "two axes": lambda q: F.scaled_dot_product_attention(q[0, 0], q[0, 0], q[0, 0]),
    "broadcast heads": lambda q: F.scaled_dot_product_attention(q, q[:, :1], q[:, :1]),
    "value head_dim": lambda q: F.scaled_dot_product_attention(q, q, q[..., :4]),
    "empty batch": lambda q: F.scaled_dot_product_attention(q[:0], q[:0], q[:0]),
    "no keys": lambda q: F.scaled_dot_product_attention(q, q[:, :, :0], q[:, :, :0]),
    "no queries": lambda q: F.scaled_dot_product_attention(q[:, :, :0], q, q),
    "scale tensor": lambda q: F.scaled_dot_product_attention(q, q, q, scale=torch.tensor(0.5)),
    "autocast": lambda q: _in(torch.autocast("cpu", torch.bfloat16), lambda: F.scaled_dot_product_attention(q, q, q)),
    "keywords": lambda q: F.scaled_dot_product_attention(query=q, key=q, value=q, attn_mask=None),
    "causal bias": lambda q: F.scaled_dot_product_attention(q, q, q, causal_lower_right(8, 8)),
    "last stride": lambda q: F.scaled_dot_product_attention(*[q.transpose(2, 3)] * 3),
    "vmap": lambda q: torch.vmap(F.scaled_dot_product_attention)(q[None], q[None], q[None]),
    "grad": lambda q: torch.func.grad(lambda x: F.scaled_dot_product_attention(x, q, q).sum())(q),
    "jvp": lambda q: _math(lambda: torch.func.jvp(lambda x: F.scaled_dot_product_attention(x, q, q), (q,), (q,))[1]),
    "forward AD": lambda q: _math(lambda: _tangent(q)),
    "nested": lambda q: F.scaled_dot_product_attention(*[_jagged(q)] * 3).values(),
    "meta": lambda q: F.scaled_dot_product_attention(*[q.to("meta")] * 3).shape,
}


def _in(context, function):
    with context:
        return function()


def _math(function):
    return _in(sdpa_kernel(SDPBackend.MATH), function)


def _tangent(q):
    with torch.autograd.forward_ad.dual_level():
        out = F.scaled_dot_product_attention(torch.autograd.forward_ad.make_dual(q, q), q, q)
        return torch.autograd.forward_ad.unpack_dual(out).tangent


def _jagged(q):
    rows = [q[0].transpose(0, 1), q[0, :, :5].transpose(0, 1)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)


@pytest.mark.parametrize("name", EXACT)
def test_fallbacks_are_torchs_answers(name):
    expected = EXACT[name](X)
    with route(log=False):
        for _ in range(2):
            found = EXACT[name](X)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True) if torch.is_tensor(
                found
            ) else None
            assert torch.is_tensor(found) or found == expected
    assert stats()["routes"]["int8"] == 0
    assert stats()["routes"]["sdpa"] >= 2


def test_gradients_are_torchs(device):
    q, k, v = (x.requires_grad_() for x in inputs(device))
    bias = torch.randn(1, 1, 1, 100, device=device, dtype=q.dtype, requires_grad=True)
    with route(min_kv=1):
        F.scaled_dot_product_attention(q, k, v, bias).sum().backward()
    found = [x.grad.clone() for x in (q, k, v, bias)]
    for x in (q, k, v, bias):
        x.grad = None
    F.scaled_dot_product_attention(q, k, v, bias).sum().backward()
    for x, grad in zip((q, k, v, bias), found, strict=True):
        assert torch.equal(x.grad, grad)
    with torch.no_grad(), route(min_kv=1, on_unsupported="raise"):
        assert not F.scaled_dot_product_attention(q, k, v, bias).requires_grad


def test_a_trainable_bias_alone_keeps_the_call_with_torch(device):
    q, k, v = inputs(device)
    bias = torch.zeros(1, 1, 1, 100, device=device, requires_grad=True)
    with route(min_kv=1):
        out = F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype))
    assert out.requires_grad
    assert stats()["reasons"] == {"requires_grad": 1}


def test_inference_mode(device):
    q, k, v = (x.requires_grad_() for x in inputs(device))
    with torch.inference_mode(), route(min_kv=1, on_unsupported="raise"):
        assert F.scaled_dot_product_attention(q, k, v).is_inference()


@pytest.mark.gpu
def test_a_float32_mask_reaches_torch_in_the_querys_dtype():
    q, k, v = inputs(torch.device("cuda"), dtype=torch.bfloat16)
    bias = torch.randn(1, 1, 70, 100, device="cuda")
    bias[..., 3], bias[..., 4] = -torch.inf, torch.finfo(torch.float32).min
    with route(min_kv=1):
        found = F.scaled_dot_product_attention(q, k, v, bias)
    assert stats()["signatures"][0]["notes"] == ["mask_cast"]
    assert relative_error(found, sdpa_oracle(q, k, v, bias)[0]) < BUDGET


def test_the_cast_mask_keeps_what_masks_and_what_is_expanded():
    values = torch.tensor([0.0, 1.5, -torch.inf, torch.finfo(torch.float32).min, 1e9, torch.nan])
    mask = values.expand(2, 3, 4, 6)
    cast = sdpa_router.run._cast_mask(mask, torch.float16)
    limit = torch.finfo(torch.float16).max
    expected = torch.tensor([0.0, 1.5, -torch.inf, -limit, limit, torch.nan], dtype=torch.float16)
    torch.testing.assert_close(cast[1, 2, 3], expected, equal_nan=True)
    assert cast.shape == mask.shape
    assert cast.stride()[:3] == (0, 0, 0)
    assert cast.untyped_storage().nbytes() == 12


def test_importing_is_light():
    script = "import sys, sdpa_router; print(*(set(sys.modules) & {'triton', 'rich', 'torch._dynamo'}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_public_names():
    for name in sdpa_router.__all__:
        assert getattr(sdpa_router, name).__doc__


def test_a_huge_scale_after_a_small_one_goes_to_torch(device):
    q, k, v = inputs(device)
    with route(min_kv=0), sdpa_router.record() as seen:
        F.scaled_dot_product_attention(q, k, v, scale=0.1)
        huge = F.scaled_dot_product_attention(q, k, v, scale=1e38)
        F.scaled_dot_product_attention(q, k, v, scale=0.1)
    native = F.scaled_dot_product_attention(q, k, v, scale=1e38)
    torch.testing.assert_close(huge, native, rtol=0, atol=0, equal_nan=True)
    assert sorted((record["backend"], record["count"]) for record in seen.records) == [("int8", 2), ("sdpa", 1)]
