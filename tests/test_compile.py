"""torch.compile: whole graphs, right guards, few recompiles, records at trace time."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.overrides import TorchFunctionMode

import sdpa_router
from sdpa_router import UnsupportedError, disable, enable, int8_attention, route, stats

# "eager" would hide what goes wrong in ahead-of-time tracing; inductor runs where its result is the point.
BACKEND = "aot_eager"
X = torch.randn(1, 2, 8, 16)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    sdpa_router.reset_stats()


@pytest.fixture
def counter():
    return CompileCounterWithBackend(BACKEND)


def attend(q, k=None, mask=None, **arguments):
    k = q if k is None else k
    return F.scaled_dot_product_attention(q, k, k, mask, **arguments) * 2


def attend_inside(q):
    with route(min_kv=1):
        return attend(q)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x):
        return attend(self.project(x))


def compiled(function, backend=BACKEND, fullgraph=True):
    return torch.compile(function, backend=backend, fullgraph=fullgraph)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("mask", [None, torch.randn(1, 1, 1, 8)])
def test_a_fallback_in_a_context_outside(backend, mask):
    with route():
        found = compiled(attend, backend)(X, None, mask)
    torch.testing.assert_close(found, attend(X, None, mask))
    (record,) = stats()["signatures"]
    assert record["phase"] == "trace"
    assert "dtype" in record["reasons"]
    assert record["signature"]["query"]["shape"] == [1, 2, 8, 16]
    assert "test_compile.py" in record["caller"]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_fallback_in_a_context_inside(backend):
    before = F.scaled_dot_product_attention
    function = compiled(attend_inside, backend)
    torch.testing.assert_close(function(X), attend(X))
    torch.testing.assert_close(function(X), attend(X))
    assert stats()["calls"] == 1
    assert sdpa_router.settings.active_name() == "off"
    attend(X)
    assert stats()["calls"] == 1, "what stays in place passes through"
    if before is not F.scaled_dot_product_attention:
        assert F.scaled_dot_product_attention.__wrapped__ is before


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("masked", [False, True])
def test_an_int8_call_in_a_whole_graph(device, backend, head_dim, masked):
    q = torch.randn(1, 12, 2, head_dim, device=device).half().transpose(1, 2)
    k = torch.randn(1, 2, 20, head_dim, device=device).half()
    mask = torch.randn(1, 1, 1, 20, device=device) if masked else None
    with torch.no_grad(), route(min_kv=1):
        expected = attend(q, k, mask)
        found = compiled(attend, backend)(q, k, mask)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert [(s["phase"], s["backend"]) for s in stats()["signatures"]] == [("eager", "int8"), ("trace", "int8")]


def test_int8_attention_with_lse_and_buffers(device):
    q = torch.randn(1, 2, 12, 64, device=device).half()
    out, lse = torch.empty_like(q), torch.empty(1, 2, 12, device=device)

    def into(q, out, lse):
        int8_attention(q, q, q, out=out, lse=lse)
        return out + 1

    expected, expected_lse = int8_attention(q, q, q, return_lse=True)
    found, found_lse = compiled(lambda q: int8_attention(q, q, q, return_lse=True))(q)
    assert torch.equal(found, expected)
    assert torch.equal(found_lse, expected_lse)
    assert torch.equal(compiled(into)(q, out, lse), expected + 1)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_five_lengths_make_at_most_two_graphs(device, counter, dtype):
    function = compiled(attend, counter)
    with torch.no_grad(), route(min_kv=1):
        for length in (8, 12, 17, 24, 33):
            q = torch.randn(1, 2, length, 16, device=device, dtype=dtype)
            k = torch.randn(1, 2, length + 2, 16, device=device, dtype=dtype)
            mask = torch.zeros(1, 1, 1, length + 2, device=device)
            torch.testing.assert_close(function(q, k, mask), attend(q, k, mask), atol=1e-5, rtol=1e-5)
    assert counter.frame_count <= 2
    shapes = [s["signature"]["query"]["shape"][2] for s in stats()["signatures"] if s["phase"] == "trace"]
    assert shapes == [8, 12], "the sizes of the example, in numbers"


def test_equal_settings_share_a_graph_and_others_make_one(counter):
    function, counts = compiled(attend, counter), []
    for _ in range(2):
        for settings in ({}, {"min_kv": 5}, {}, {"min_kv": 5}):
            with route(**settings):
                function(X)
            counts.append(counter.frame_count)
        function(X)
        counts.append(counter.frame_count)
    assert counts == [1, 2, 2, 2, 3, 3, 3, 3, 3, 3]


def test_settings_made_later_do_not_disturb_a_graph(counter):
    function = compiled(attend, counter)
    for least in range(100, 120):
        with route(min_kv=least):
            pass
        with route():
            function(X)
    assert counter.frame_count == 1


@pytest.mark.parametrize("before", ["", "with sdpa_router.route(): pass"])
def test_calls_inside_and_outside_of_a_context_in_one_graph_for_all_threads(before):
    """In a process of its own, where the router is not in place yet: the first graph holds torch's function."""
    script = f"""
import threading
import torch, torch.nn.functional as F, sdpa_router
from torch._dynamo.testing import CompileCounterWithBackend
counter = CompileCounterWithBackend("aot_eager")

@torch.compile(backend=counter, fullgraph=True)
def function(x):
    before = F.scaled_dot_product_attention(x, x, x)
    with sdpa_router.route():
        inside = F.scaled_dot_product_attention(x, x, x)
    return before + inside + F.scaled_dot_product_attention(x, x, x)

x = torch.randn(1, 2, 8, 16)
{before}

def call():
    torch.testing.assert_close(function(x), 3 * F.scaled_dot_product_attention(x, x, x))

for _ in range(3):
    call()
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
assert counter.frame_count <= 2, counter.frame_count
assert [found["phase"] for found in sdpa_router.stats()["signatures"]] == ["trace"]
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_an_enabled_module_is_traced_once_also_in_a_new_thread(counter):
    module = Attention().eval()
    enable(module)
    function = compiled(module, counter)
    for _ in range(2):
        thread = threading.Thread(target=function, args=(X,))
        thread.start()
        thread.join()
        function(X)
    assert counter.frame_count == 1


def test_a_compiled_module_is_enabled_and_disabled(counter):
    module = Attention().eval()
    expected = module(X)
    enable(module)
    function = compiled(module, counter)
    torch.testing.assert_close(function(X), expected)
    assert stats()["calls"] == 1
    disable(module)
    torch.testing.assert_close(function(X), expected)
    assert stats()["calls"] == 1
    assert counter.frame_count == 2


def test_the_public_function_outside_of_any_context(counter):
    function = compiled(lambda x: sdpa_router.scaled_dot_product_attention(x, x, x, scale=0.5), counter)
    torch.testing.assert_close(function(X), F.scaled_dot_product_attention(X, X, X, scale=0.5))
    assert stats()["calls"] == 1


def test_scales_make_as_many_graphs_as_they_do_in_torch(device):
    def count(context):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(BACKEND)
        function = compiled(attend, counter)
        q = X.to(device)
        for scale in (0.1, 0.2, 0.3, 0.4):
            with context:
                torch.testing.assert_close(function(q, scale=scale), attend(q, scale=scale))
        return counter.frame_count

    assert count(route()) <= count(torch.no_grad())


def test_gradients():
    x = X.clone().requires_grad_()
    with route():
        compiled(attend)(x).sum().backward()
    found, x.grad = x.grad, None
    attend(x).sum().backward()
    torch.testing.assert_close(found, x.grad)
    assert stats()["reasons"]["requires_grad"] == 1


def test_autocast_inside():
    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            return attend(x)

    with route():
        assert compiled(function)(X).dtype == torch.bfloat16
    assert stats()["reasons"]["autocast"] == 1


def test_transforms_inside():
    def function(x):
        return torch.func.grad(lambda y: attend(y).sum())(x)

    half = X.half()
    with route(min_kv=1):
        found = compiled(function)(half)
    torch.testing.assert_close(found, function(half), atol=1e-2, rtol=1e-2)
    assert stats()["reasons"]["functorch"] == 1


def test_skip_is_traced():
    def is_short(call):
        return call.key.shape[2] < 100

    def inside(x):
        with route(skip=is_short):
            return attend(x)

    with route(skip=is_short):
        compiled(attend)(X)
    compiled(inside)(X)
    assert stats()["reasons"]["skipped"] == 2


def test_warn_warns_when_it_traces():
    function = compiled(attend)
    with route(on_unsupported="warn"):
        with pytest.warns(UserWarning, match="sdpa because"):
            function(X)
        function(X)


def test_raise_raises_the_error_or_names_the_codes_in_torchs():
    with route(on_unsupported="raise"):
        with pytest.raises(UnsupportedError, match="dtype") as caught:
            compiled(attend, fullgraph=False)(X)
        assert "dtype" in [reason.code for reason in caught.value.decision.reasons]
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"UnsupportedError: .*dtype"):
            compiled(attend)(X)


def test_torch_function_modes_still_see_the_call():
    class Instead(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func.__name__ == "scaled_dot_product_attention":
                return args[0] + 1
            return func(*args, **(kwargs or {}))

    with route(), Instead():
        torch.testing.assert_close(compiled(attend)(X), (X + 1) * 2)


def test_export_keeps_torchs_operator():
    class Model(nn.Module):
        def forward(self, x):
            return attend(x)

    with route():
        program = torch.export.export(Model(), (X,))
    torch.testing.assert_close(program.module()(X), attend(X))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_the_caller_of_a_graphs_call_is_the_users_code(compiler):
    """With other backends the operator decides: it is called from ours, torch's and generated code."""

    def attend(query):
        return F.scaled_dot_product_attention(query, query, query) + 1

    compiled = torch.compile(attend, fullgraph=True, backend=compiler)
    with torch.no_grad(), sdpa_router.route(backends=("sage", "torch")), sdpa_router.record() as seen:
        compiled(torch.randn(1, 2, 8, 16))
    assert [record["caller"].rpartition("test_compile.py:")[2].split()[1:] for record in seen.records] == [["attend"]]
