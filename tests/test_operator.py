"""Calls past torch's dispatcher: whoever would see the operator sees it, and what is remembered is right."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sdpa_router import UnsupportedError, int8_attention, record, route
from sdpa_router.kernels.int8_attention import bias, forward, op, quantize
from sdpa_router.kernels.int8_attention import launch as launching

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAME = "sdpa_router.int8_attention.default"


def draw(*, q_len=20, dtype=torch.float16):
    return [torch.randn(2, 2, n, 32, device=DEVICE).to(dtype) for n in (q_len, 70, 70)]


@pytest.fixture
def operators(monkeypatch):
    """Calls of the operator."""
    seen = []
    monkeypatch.setattr(op, "_by_operator", lambda *args, by=op._by_operator: seen.append(args) or by(*args))
    return seen


class Dispatches(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_plain_call_goes_past_the_dispatcher(operators):
    query, key, value = draw()
    expected = torch.ops.sdpa_router.int8_attention(query, key, value, None, False, None, True, "auto", "auto")
    for _ in range(3):
        out, lse = int8_attention(query, key, value, return_lse=True)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
        assert torch.equal(int8_attention(query, key, value), out)
    assert not operators


@pytest.mark.parametrize("mode", [Dispatches, Functions])
def test_modes_see_the_operator(operators, mode):
    query, key, value = draw()
    expected = int8_attention(query, key, value)
    int8_attention(query, key, value)
    with mode() as seen:
        assert torch.equal(int8_attention(query, key, value), expected)
    assert any("int8_attention" in name for name in seen.names)
    assert len(operators) == 1


def test_a_profiler_sees_the_operator(operators):
    query, key, value = draw()
    int8_attention(query, key, value)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        int8_attention(query, key, value)
    assert "sdpa_router::int8_attention" in {event.key for event in profile.key_averages()}


def test_a_trace_holds_the_operator():
    query, key, value = draw()
    graph = make_fx(lambda *inputs: op.attend(*inputs, None, False, None, False, "auto", "auto"))(query, key, value)
    assert next(str(node.target) for node in graph.graph.nodes if node.op == "call_function") == NAME


def test_the_operator_says_that_it_has_no_gradient(operators):
    query, key, value = (tensor.requires_grad_() for tensor in draw())
    with pytest.raises(RuntimeError, match="has no backward"):
        op.attend(query, key, value, None, False, None, False, "auto", "auto")
    with torch.no_grad():
        out, _ = op.attend(query, key, value, None, False, None, False, "auto", "auto")
    assert not out.requires_grad
    assert len(operators) == 1


def test_other_tensors_are_the_dispatchers(operators):
    query, key, value = draw()
    expected = int8_attention(query, key, value)
    negated = torch._neg_view(-query)
    assert negated.is_neg()
    assert torch.equal(op.attend(negated, key, value, None, False, None, False, "auto", "auto")[0], expected)
    meta = [tensor.to("meta") for tensor in (query, key, value)]
    assert op.attend(*meta, None, False, None, True, "auto", "auto")[1].shape == (2, 2, 20)
    parameter = torch.nn.Parameter(query, requires_grad=False)
    assert torch.equal(op.attend(parameter, key, value, None, False, None, False, "auto", "auto")[0], expected)
    assert len(operators) == 3


@pytest.mark.parametrize("lse", [False, True])
def test_buffers_past_the_dispatcher_and_by_it_are_filled_alike(lse):
    query, key, value = draw()
    filled = []
    for mode in (None, Dispatches()):
        out, sums = torch.zeros_like(query), torch.zeros(2, 2, 20, device=DEVICE) if lse else None
        if mode is None:
            op.attend_into(query, key, value, None, False, None, "auto", "auto", out, sums)
        else:
            with mode:
                op.attend_into(query, key, value, None, False, None, "auto", "auto", out, sums)
            assert "sdpa_router.int8_attention_out.default" in mode.names
        filled.append((out, sums))
    assert torch.equal(filled[0][0], filled[1][0])
    assert not lse or torch.equal(filled[0][1], filled[1][1])


LAYOUTS = {
    "contiguous": lambda x: x,
    "heads inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "batch inside": lambda x: x.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3),
    "part of a row": lambda x: torch.cat([x, x], 3)[..., :32],
    "one batch": lambda x: x[:1].expand(2, -1, -1, -1),
}


@pytest.fixture
def replayed(monkeypatch):
    """What was launched from a plan: the arguments of its kernels; Triton's launches are interpreted."""
    if DEVICE == "cuda":
        pytest.skip("the stand-in for Triton's launcher is for the CPU")
    ran = []

    def launch(kernel, grid, *args, **options):
        kernel[grid](*args, **options)
        compiled = SimpleNamespace(run=lambda *passed: ran.append(passed), function=7, packed_metadata=())
        tape = getattr(launching._thread, "tape", None)
        if tape is not None:
            tape.add(kernel, compiled, grid, args, options)

    for module in (quantize, forward, bias):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(launching, "_observed", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=99))
    launching.forget()
    yield ran
    launching.forget()


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_call_that_was_remembered_has_the_outputs_that_the_operator_makes(replayed, layout, lse):
    query, key, value = draw()
    query = LAYOUTS[layout](query)
    first = op.attend(query, key, value, None, False, None, lse, "auto", "auto")
    assert not replayed
    for repeat in range(1, 4):
        query, key, value = (tensor.clone() for tensor in (query, key, value))
        if layout in ("part of a row", "one batch"):
            query = LAYOUTS[layout](query[..., :32])
        out, sums = op.attend(query, key, value, None, False, None, lse, "auto", "auto")
        assert len(replayed) == 3 * repeat
        given = {passed for launch in replayed[-3:] for passed in launch if type(passed) is int}
        assert {tensor.data_ptr() for tensor in (query, key, value, out)} <= given
        assert out.stride() == first[0].stride() == op._empty(query).stride()
        assert sums.shape == first[1].shape
        assert not lse or sums.data_ptr() in given
    assert op.attend_again(query, key, value, None, False, None, False, lse, "auto", "auto") is not None


def test_what_was_answered_before_is_no_answer_to_other_arguments(replayed):
    query, key, value = draw()
    key, value = key[:, :1].contiguous(), value[:, :1].contiguous()
    mask = torch.zeros(1, 1, 1, 70)
    for _ in range(3):
        int8_attention(query, key, value, mask, enable_gqa=True)
    given = (query, key, value, mask, False, None, True, False, "auto", "auto")
    assert op.attend_again(*given) is not None
    others = {
        0: [None, [1], query.to(torch.float32), query[:, :, 1:]], 3: [None, mask[0], mask.bool(), [0.0]],
        4: [True, None, [0]], 5: [0.5, 1, "x", torch.ones(())], 6: [False], 8: ["fp8", ["auto"]], 9: ["high", None],
    }  # fmt: skip
    for place, changed in others.items():
        for argument in changed:
            assert op.attend_again(*given[:place], argument, *given[place + 1 :]) is None, (place, argument)
    with pytest.raises(UnsupportedError):
        int8_attention(query, key, value, mask)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_jit_trace_holds_torchs_call_and_changes_no_decision(device):
    x = torch.randn(1, 2, 64, 64, dtype=torch.float16, device=device)

    def attend(x):
        return F.scaled_dot_product_attention(x, x, x)

    native = attend(x)
    with route(min_kv=0), record() as seen:
        routed = attend(x)
        traced = torch.jit.trace(attend, (x,), check_trace=False)
        again = attend(x)
    assert "scaled_dot_product_attention" in str(traced.graph)
    assert torch.equal(traced(x), native)
    assert torch.equal(again, routed)
    assert not torch.equal(routed, native)
    assert {reason for one in seen.records for reason in one["reasons"]} == {"functorch"}
