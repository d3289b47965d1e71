"""Other backends: who answers and why not, each peer's hazards on stand-ins with its real signature."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import logging
import math
import sys
import threading
import types

import hypothesis
import peer_stand_ins as stand_ins
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import sdpa_router
from sdpa_router import (
    Backend,
    BackendLimits,
    Code,
    Reason,
    Route,
    Settings,
    asking,
    cli,
    explain,
    lse,
    route,
    run,
    stats,
)
from sdpa_router.backends import base, comfy, fa3, sage, torch_sdpa
from sdpa_router.backends.peers import entry_point, on_gpu
from sdpa_router.choose import choose
from sdpa_router.decide import Call, decide
from sdpa_router.integrations import comfyui, diffusers, transformers
from sdpa_router.settings import active_name, intern, settings_of
from sdpa_router.testing import relative_error, sdpa_oracle

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Made here because torch 2.7 looks for a driver at the first one, unless there is no GPU.
with FakeTensorMode():
    FAKES = torch.empty(1, 2, 64, 64, dtype=BF16, device="cuda"), torch.empty(1, 1, 64, 64, device="cuda")
    ONE_FOR_ALL_KEYS = torch.empty(1, 1, 1, 1, dtype=torch.bool, device="cuda")


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Let CPU tensors pass for those of a Hopper GPU where peers are asked."""
    for module in (fa3, comfy, sage):
        monkeypatch.setattr(module, "on_gpu", lambda *arguments: None)
    monkeypatch.setattr(comfy, "_driver", lambda: 13000)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: 0)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: 0)
    entry_point.cache_clear()
    fa3._build_flags.cache_clear()
    sdpa_router.reset_stats()
    yield
    entry_point.cache_clear()
    fa3._build_flags.cache_clear()


def draw(q_len=64, kv_len=128, head_dim=64, heads=2, kv_heads=None, dtype=BF16):
    query = torch.randn(1, heads, q_len, head_dim).to(dtype)
    key, value = (torch.randn(1, kv_heads or heads, kv_len, head_dim).to(dtype) for _ in range(2))
    return query, key, value


def codes(name, *tensors, settings=None, **arguments):
    """Codes of the reasons against one backend."""
    decision = choose(Call(*tensors, **arguments), settings or Settings(backends=(name,)))
    return [reason.code for other, reasons in decision.passed_over if other == name for reason in reasons]


def assert_right(out, query, key, value, mask=None, budget=0.01, **options):
    expected = sdpa_oracle(query, key, value, mask, **options)[0]
    assert out.dtype == query.dtype
    assert out.shape == expected.shape
    assert relative_error(out, expected) < budget


# --- the choice


def test_the_order_is_the_users_and_every_reason_is_told(monkeypatch):
    stand_ins.Comfy().module(monkeypatch)
    stand_ins.Fa3().module(monkeypatch)
    tensors = draw()
    order = Settings(backends=("comfy", "fa3", "int8", "torch"), min_kv=1000)
    decision = choose(Call(*tensors), order)
    assert (decision.route, decision.backend, decision.reasons) == (Route.PEER, "comfy", ())
    decision = choose(Call(*tensors, is_causal=True), order)
    assert decision.backend == "sdpa"
    told = {name: [reason.code for reason in reasons] for name, reasons in decision.passed_over}
    assert told["comfy"] == told["fa3"] == [Code.CAUSAL]
    assert told["int8"] == [Code.SHORT]
    assert "not comfy because causal: is_causal with" in str(decision)
    assert "not fa3 because causal" in str(decision)


def test_torch_ends_the_order():
    assert choose(Call(*draw()), Settings(backends=("torch", "int8"))) == choose(
        Call(*draw()), Settings(backends=("torch",))
    )
    decision = choose(Call(*draw()), Settings(backends=("torch", "int8")))
    assert (decision.backend, decision.reasons, decision.passed_over) == ("sdpa", (), ())


def test_the_default_decides_as_ever():
    decision = explain(*draw(dtype=FP32))
    assert decision.passed_over == ()
    assert str(decision).startswith("sdpa because")


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"backends": "int8"}, ValueError),
        ({"backends": ("int8", "nobody")}, ValueError),
        ({"backends": ("int8", "int8")}, ValueError),
        ({"backends": (3,)}, ValueError),
        ({"backends": ()}, ValueError),
        ({"backends": ""}, ValueError),
        ({"backends": None}, ValueError),
        ({"allow_mask_blind": 1}, TypeError),
        ({"max_error": -0.1}, ValueError),
        ({"max_error": "0.1"}, ValueError),
        ({"max_error": math.nan}, ValueError),
        ({"on_error": "ignore"}, ValueError),
    ],
)
def test_settings_that_do_not_exist(settings, error):
    (name,) = settings
    with pytest.raises(error, match=f"{name} is "):
        Settings(**settings)
    with route(backends=["int8"]):
        assert settings_of(active_name()).backends == ("int8",)


@pytest.mark.parametrize("backends", [None, 5, {"int8", "torch"}, {"int8": 1}, b"int8", "int8"])
def test_backends_without_an_order_are_refused(backends):
    with pytest.raises(ValueError, match="as a tuple in order"):
        route(backends=backends)
    with pytest.raises(ValueError, match="as a tuple in order"):
        sdpa_router.enable(torch.nn.MultiheadAttention(8, 2), backends=backends)


def test_not_wanted_holds_for_everyone(monkeypatch):
    peer = stand_ins.Fa3()
    peer.module(monkeypatch)
    tensors = draw()
    with route(backends=("fa3",), skip=lambda call: True):
        F.scaled_dot_product_attention(*tensors)
    assert peer.calls == []
    assert stats()["reasons"] == {"skipped": 1}
    monkeypatch.setenv("SDPA_ROUTER", "0")
    assert codes("fa3", *tensors) == [Code.DISABLED]


def test_the_log_sum_exp_comes_from_int8_only_where_it_is_named():
    call = Call(*draw(dtype=FP16))
    for backends, expected in ((("fa3",), [Code.NOT_NAMED]), (("torch", "int8"), []), ("fastest", [])):
        settings = Settings(backends=backends, min_kv=0)
        decided = lse.attention_with_lse(intern(settings), *call)
        assert_right(decided[0], *call[:3], budget=0.02)
        assert [reason.code for reason in decide(call, settings).reasons if reason.code is Code.NOT_NAMED] == expected


def test_max_error_leaves_out_rough_backends(monkeypatch):
    stand_ins.Comfy().module(monkeypatch)
    stand_ins.Fa3().module(monkeypatch)
    tensors = draw()
    strict = Settings(backends=("comfy", "fa3"), max_error=0.01)
    decision = choose(Call(*tensors), strict)
    assert decision.backend == "fa3"
    assert [reason.code for reason in decision.reasons] == [Code.ERROR_CLASS]
    assert "0.02" in str(decision)
    assert choose(Call(*tensors), Settings(backends=("comfy", "fa3"), max_error=0.02)).backend == "comfy"


def test_a_small_error_is_not_told_as_none(registered):
    registered(dataclasses.replace(mine(), limits=BackendLimits(error=1e-6)))
    decision = choose(Call(*draw()), Settings(backends=("mine",), max_error=1e-9))
    assert "the error class is 1e-06; max_error accepts at most 1e-09" in str(decision)


def test_the_command_explains_any_order(capsys):
    shapes = ["--q", "1,24,4096,128", "--k", "1,24,512,128", "--mask", "full", "--json"]
    assert cli.main(["explain", *shapes, "--backends", "comfy,fa3,torch"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["backend"] == "sdpa"
    told = {name: [reason["code"] for reason in reasons] for name, reasons in found["passed_over"].items()}
    assert told == {"comfy": ["full_mask", "mask_blind"], "fa3": ["mask"]}
    assert cli.main(["explain", *shapes[:4], "--backends", "comfy,fa3,torch"]) == 0
    assert capsys.readouterr().out.startswith("comfy (mask: none)")
    assert cli.main(["explain", *shapes[:4], "--backends", "comfy, fa3, torch"]) == 0
    assert capsys.readouterr().out.startswith("comfy (mask: none)")
    assert cli.main(["explain", *shapes[:4], "--backends", " fastest "]) == 0
    assert "not fa3 because not_measured" in capsys.readouterr().out
    for names, answers in {"torch-flash,torch-cudnn": "torch-cudnn", "torch-flash": "sdpa"}.items():
        assert cli.main(["explain", *shapes, "--backends", names]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["backend"] == answers, "by shape alone, which torch's own checks can't be asked about"
        assert [reason["code"] for reason in found["passed_over"]["torch-flash"]] == ["mask"]
    with pytest.raises(SystemExit):
        cli.main(["explain", *shapes, "--backends", "nobody"])
    assert "accepted: 'fastest' or different names" in capsys.readouterr().err


@pytest.mark.parametrize(
    "function",
    [
        *(sdpa_router.enable, diffusers.register, diffusers.patch, transformers.register),
        *(comfyui.register, comfyui.attention_function, comfyui.patch_model),
    ],
    ids=lambda function: f"{function.__module__}.{function.__name__}",
)
def test_whoever_routes_takes_the_settings_of_route(function):
    wanted, found = (inspect.signature(taker).parameters for taker in (route, function))
    assert {name: found[name].default for name in wanted} == {name: wanted[name].default for name in wanted}


# --- third parties


def mine(name="mine", reasons=(), run=None, now=None):
    def attend(call, settings, attention):
        return attention(call.query, call.key, call.value)

    return Backend(name, BackendLimits(error=0.0), lambda call, settings: iter(reasons), run or attend, now)


@pytest.fixture
def registered():
    names = []

    def register(backend):
        base.register_backend(backend)
        names.append(backend.name)

    yield register
    for name in names:
        if name in base._registered:
            base.unregister_backend(name)


def test_a_registered_backend_answers_and_is_counted(registered):
    registered(mine())
    tensors = draw()
    with route(backends=("mine", "torch")):
        out = F.scaled_dot_product_attention(*tensors)
    assert_right(out, *tensors)
    assert stats()["routes"] == {"int8": 0, "sdpa": 0, "mine": 1}
    assert stats()["signatures"][0]["backend"] == "mine"


def test_what_can_not_be_registered(registered):
    registered(mine())
    for name in ("mine", "int8", "torch", "sdpa", "fastest", "Mine", "", "a b"):
        with pytest.raises(ValueError, match=r"accepted|there already"):
            base.register_backend(mine(name))
    with pytest.raises(TypeError, match="given str"):
        base.register_backend("mine")
    with pytest.raises(TypeError, match="two functions"):
        base.register_backend(Backend("other", BackendLimits(), None, None))
    for broken in (dataclasses.replace(mine("other"), limits=None), mine("other", now=5)):
        with pytest.raises(TypeError, match="accepted"):
            base.register_backend(broken)
    with pytest.raises(KeyError, match=r"given 'int8', accepted: what was registered \(mine\)"):
        base.unregister_backend("int8")


def test_an_unregistered_backend_is_a_reason(registered):
    registered(mine())
    settings = Settings(backends=("mine",))
    base.unregister_backend("mine")
    decision = choose(Call(*draw()), settings)
    assert decision.backend == "sdpa"
    assert [reason.code for reason in decision.reasons] == [Code.PACKAGE]


def test_who_is_registered_again_answers_again(registered):
    registered(mine())
    tensors = draw()
    with route(backends=("mine",)):
        for here in (True, False, True):
            if not here:
                base.unregister_backend("mine")
            elif "mine" not in base._registered:
                registered(mine())
            with sdpa_router.record() as seen:
                F.scaled_dot_product_attention(*tensors)
            assert [record["backend"] for record in seen.records] == ["mine" if here else "sdpa"]


def test_who_is_unregistered_by_another_thread_just_now_is_a_reason(registered):
    registered(mine())
    tensors = draw()
    with route(backends=("mine",)):
        F.scaled_dot_product_attention(*tensors)
        del base._registered["mine"]  # the decision is known still
        assert_right(F.scaled_dot_product_attention(*tensors), *tensors)
    assert stats()["routes"] == {"int8": 0, "sdpa": 1, "mine": 1}


def test_calls_that_a_backend_makes_itself_are_torchs(registered):
    registered(mine(run=lambda call, settings, attention: F.scaled_dot_product_attention(*call[:3])))
    tensors = draw()
    with route(backends=("mine",)):
        assert_right(F.scaled_dot_product_attention(*tensors), *tensors)
        F.scaled_dot_product_attention(*tensors)
    assert stats()["routes"] == {"int8": 0, "sdpa": 0, "mine": 2}


def test_reasons_of_now_are_asked_at_every_call(registered):
    busy = []
    registered(mine(now=lambda call: iter([Reason(Code.STREAM, "another", "the default")] if busy else [])))
    tensors = draw()
    with route(backends=("mine",)):
        for busy[:] in ([], [1], [1], []):
            F.scaled_dot_product_attention(*tensors)
    assert stats()["routes"] == {"int8": 0, "sdpa": 2, "mine": 2}
    assert stats()["reasons"] == {"stream": 2}


@pytest.mark.parametrize("on_error", ["raise", "fallback"])
def test_a_call_during_which_all_is_judged_anew_counts(registered, on_error):
    def run(call, settings, attention):
        registered(mine(f"other{len(base._registered)}"))
        return attention(*call[:3])

    registered(mine(run=run))
    with route(backends=("mine",), on_error=on_error):
        for _ in range(3):
            F.scaled_dot_product_attention(*draw())
    assert stats()["routes"] == {"int8": 0, "sdpa": 0, "mine": 3}


def test_a_reason_that_can_not_be_shown_is_shown_as_what_it_is(registered):
    class Mute:
        def __str__(self):
            raise RuntimeError

    registered(mine(reasons=(Reason(Code.HEAD_DIM, Mute(), 8),)))
    with route(backends=("mine",)):
        assert_right(F.scaled_dot_product_attention(*(tensors := draw())), *tensors)
    assert "head_dim is a Mute" in stats()["signatures"][0]["detail"]


def test_the_limits_of_a_registered_backend_hold(registered):
    """What it doesn't take never reaches it, though it names no reason of its own."""
    narrow = BackendLimits(dtypes=(BF16,), max_head_dim=64, causal="none", gqa=False, max_scale=2.0)
    registered(dataclasses.replace(mine(), limits=narrow))
    query, key, value = draw()
    mask = torch.ones(1, 1, 1, 128, dtype=torch.bool)
    told = {
        Code.MASK: codes("mine", query, key, value, attn_mask=mask),
        Code.CAUSAL: codes("mine", query, key, value, is_causal=True),
        Code.DROPOUT: codes("mine", query, key, value, dropout_p=0.5),
        Code.ARGUMENT: codes("mine", query, key, value, scale=3.0),
        Code.HEAD_DIM: codes("mine", *draw(head_dim=96)),
        Code.DTYPE: codes("mine", *draw(dtype=FP16)),
        Code.HEADS: codes("mine", *draw(heads=4, kv_heads=2), enable_gqa=True),
        Code.RANK: codes("mine", query[0], key[0], value[0]),
        Code.REQUIRES_GRAD: codes("mine", query.clone().requires_grad_(), key, value),
    }
    assert told == {code: [code] for code in told}
    assert codes("mine", query, key, value, scale=1.0) == []


def test_a_registered_backend_that_is_blind_needs_consent(registered):
    registered(dataclasses.replace(mine(), limits=BackendLimits(masks=(sdpa_router.MaskKind.PER_KEY,), blind=True)))
    masked = (*draw(), torch.ones(1, 1, 1, 128, dtype=torch.bool))
    assert codes("mine", *masked) == [Code.MASK_BLIND]
    assert codes("mine", *masked, settings=Settings(backends=("mine",), allow_mask_blind=True)) == []


@pytest.mark.parametrize("given", ["too small", None, Reason("mine", 1, 2)])
@pytest.mark.parametrize("where", ["reasons_against", "reasons_now"])
def test_what_is_no_reason_is_an_error_of_the_backend(registered, where, given):
    registered(dataclasses.replace(mine(), **{where: lambda *arguments: given and iter([given])}))
    tensors = draw()
    with route(backends=("mine",)), pytest.raises(TypeError, match=r"backend 'mine' gives .*; accepted"):
        F.scaled_dot_product_attention(*tensors)
    with route(backends=("mine",), on_error="fallback"):
        assert_right(F.scaled_dot_product_attention(*tensors), *tensors)
    assert stats()["reasons"] == {Code.BACKEND_FAILED: 1}, "counted and shown as any reason"


@pytest.mark.parametrize(
    "limits",
    [
        *({"dtypes": BF16}, {"head_dims": 64}, {"masks": ("per key",)}, {"causal": True}),
        *({"error": "small"}, {"error": -1}, {"max_head_dim": "64"}, {"max_head_dim": 0}, {"gqa": None}),
        *({"lse": "yes"}, {"blind": 0}, {"positive_scale": 1}, {"max_scale": "1"}, {"max_scale": float("nan")}),
    ],
)
def test_limits_that_say_nothing(limits):
    with pytest.raises((TypeError, ValueError), match="accepted"):
        BackendLimits(**limits)


# --- a backend that fails


def failing(registered, error=RuntimeError):
    """Register a backend that fails; returns its calls, and the errors that it raises, none where they are gone."""
    calls, errors = [], [error("too large for me")]

    def run(call, settings, attention):
        calls.append(call)
        for raised in errors:
            raise raised
        return attention(*call[:3])

    registered(mine(run=run))
    return calls, errors


def test_an_error_that_takes_no_decision_surfaces(registered):
    @dataclasses.dataclass(frozen=True)
    class FrozenError(Exception):
        size: int

    def run(call, settings, attention):
        raise FrozenError(3)

    registered(mine(run=run))
    with route(backends=("mine",)), pytest.raises(FrozenError):
        F.scaled_dot_product_attention(*draw())


def test_an_error_surfaces_with_the_decision(registered):
    failing(registered)
    with route(backends=("mine",)), pytest.raises(RuntimeError, match="too large") as caught:
        F.scaled_dot_product_attention(*draw())
    assert caught.value.decision.backend == "mine"
    assert "sdpa_router chose mine" in caught.value.__notes__[0]
    assert stats()["calls"] == 1


@pytest.mark.parametrize("on_error", ["raise", "fallback"])
def test_so_does_one_of_our_own_kernel(monkeypatch, on_error):
    def int8(*arguments, **options):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(run, "int8", int8)
    monkeypatch.setattr("sdpa_router.decide.unavailable", lambda device: None)
    tensors = draw()
    with route(min_kv=0, on_error=on_error):
        if on_error == "fallback":
            assert_right(F.scaled_dot_product_attention(*tensors), *tensors)
            return
        with pytest.raises(RuntimeError, match="no kernel image") as caught:
            F.scaled_dot_product_attention(*tensors)
    assert caught.value.decision.routed
    assert "sdpa_router chose int8" in caught.value.__notes__[0]


def test_a_fallback_is_logged_once_and_stays(registered, caplog):
    calls, _ = failing(registered)
    tensors = draw()
    with caplog.at_level(logging.WARNING), route(backends=("mine",), on_error="fallback"):
        for _ in range(3):
            assert_right(F.scaled_dot_product_attention(*tensors), *tensors)
    assert len(calls) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "too large" in caplog.text
    assert stats()["routes"] == {"int8": 0, "sdpa": 3}
    assert stats()["reasons"] == {Code.BACKEND_FAILED: 3}
    assert "RuntimeError: too large for me" in stats()["signatures"][-1]["detail"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_who_ran_out_of_memory_is_asked_again_later(registered, caplog, monkeypatch, error):
    clock = [100.0]
    monkeypatch.setattr(asking, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    calls, errors = failing(registered, error)
    tensors = draw()

    def attend(times, seconds):
        for _ in range(times):
            assert_right(F.scaled_dot_product_attention(*tensors), *tensors)
        clock[0] += seconds
        return len(calls)

    with caplog.at_level(logging.WARNING), route(backends=("mine",), on_error="fallback"):
        assert attend(3, seconds=10) == 1
        assert attend(2, seconds=0) == 2, "asked again, and failed again"
        errors.clear()
        assert attend(2, seconds=10) == 2, "not yet"
        assert attend(2, seconds=0) == 4
    assert stats()["routes"] == {"int8": 0, "sdpa": 7, "mine": 2}
    assert stats()["reasons"] == {Code.BACKEND_FAILED: 7}
    assert [record.levelname for record in caplog.records] == ["WARNING"], "once, however often it fails"


def test_an_error_after_one_of_memory_is_told_and_stays(registered, caplog, monkeypatch):
    monkeypatch.setattr(asking, "_PAUSE_S", 0.0)
    calls, errors = failing(registered, torch.OutOfMemoryError)
    tensors = draw()
    with caplog.at_level(logging.WARNING), route(backends=("mine",), on_error="fallback"):
        F.scaled_dot_product_attention(*tensors)
        errors[:] = [RuntimeError("broken")]
        for _ in range(3):
            F.scaled_dot_product_attention(*tensors)
    assert len(calls) == 2
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "OutOfMemoryError: too large for me" in caplog.messages[0]
    assert "RuntimeError: broken" in caplog.messages[1]


def test_long_words_of_an_error_are_cut(registered):
    class MuteError(Exception):
        def __str__(self):
            raise ValueError

    assert base.said(MuteError()) == "MuteError"
    assert base.said(RuntimeError("\n\n  no such\n symbol\n")) == "RuntimeError: no such symbol"
    assert len(base.said(RuntimeError("_ZN3c10" * 10**5))) < 400
    assert base.said(RuntimeError("_ZN3c10" * 10**5)).endswith("...")


ALIASES = {
    "the query": lambda query, key, value: query,
    "a view of it": lambda query, key, value: query.view(query.shape),
    "keys": lambda query, key, value: key[:, :, -64:],
    "one value for all": lambda query, key, value: value[:, :, -1:].expand(query.shape),
    "in inference mode": lambda query, key, value: torch.inference_mode()(lambda: query[:])(),
}


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("kind", ALIASES)
def test_an_answer_shares_no_memory_with_an_argument(registered, kind, permuted):
    registered(mine(run=lambda call, settings, attention: ALIASES[kind](*call[:3])))
    tensors = draw()
    if permuted:
        tensors = tuple(tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors)
    kept = [tensor.clone() for tensor in tensors]
    expected = ALIASES[kind](*kept).clone()
    with route(backends=("mine",)):
        for _ in range(3):
            out = F.scaled_dot_product_attention(*tensors)
            torch.testing.assert_close(out, expected)
            out.zero_()
            assert all(map(torch.equal, tensors, kept))


def test_every_answer_is_looked_at_again_where_it_lies_otherwise(registered):
    answers = []
    registered(mine(run=lambda call, settings, attention: answers.pop(0)))
    tensors = draw()
    good, heads_last = torch.randn(1, 2, 64, 64).to(BF16), torch.randn(1, 64, 2, 64).to(BF16).transpose(1, 2)
    with route(backends=("mine",)):
        for answer in (good, heads_last, good):
            answers[:] = [answer]
            assert F.scaled_dot_product_attention(*tensors) is answer
        for answer in (good.double(), good[:, :, 1:], good.transpose(2, 3), None):
            answers[:] = [answer]
            with pytest.raises(TypeError, match="answered with"):
                F.scaled_dot_product_attention(*tensors)
        answers[:] = [tensors[0]]
        assert F.scaled_dot_product_attention(*tensors) is not tensors[0]


WRONG_ANSWERS = {
    "nothing": lambda query: None,
    "a pair": lambda query: (query, query),
    "rank": lambda query: query[0],
    "length": lambda query: query[:, :, 1:],
    "dtype": lambda query: query.double(),
    "device": lambda query: query.to("meta"),
    "last stride": lambda query: query.transpose(2, 3).contiguous().transpose(2, 3),
    "nested": lambda query: torch.nested.nested_tensor([query[0]]),
    "sparse": lambda query: query.to_sparse(),
}


@pytest.mark.parametrize("kind", WRONG_ANSWERS)
@pytest.mark.parametrize("on_error", ["raise", "fallback"])
def test_what_is_no_answer_is_an_error_of_the_backend(registered, kind, on_error):
    registered(mine(run=lambda call, settings, attention: WRONG_ANSWERS[kind](call.query)))
    tensors = draw()
    with route(backends=("mine",), on_error=on_error):
        if on_error == "fallback":
            assert_right(F.scaled_dot_product_attention(*tensors), *tensors)
        else:
            with pytest.raises(TypeError, match=r"backend 'mine' answered with .*; accepted: a tensor") as caught:
                F.scaled_dot_product_attention(*tensors)
            assert caught.value.decision.backend == "mine"


def test_an_answer_with_a_graph_leaves_it_behind(registered):
    weight = torch.nn.Parameter(torch.randn(1, 2, 64, 64).to(BF16))
    answers = [weight, weight * 2, weight.detach()]
    registered(mine(run=lambda call, settings, attention: answers[0]))
    with route(backends=("mine",)):
        while answers:
            out = F.scaled_dot_product_attention(*draw())
            assert torch.equal(out, answers.pop(0))
            assert (type(out), out.requires_grad) == (torch.Tensor, False)


@pytest.mark.parametrize("where", ["reasons_against", "reasons_now"])
def test_reasons_that_raise_are_errors_of_the_backend(registered, where):
    def broken(*arguments):
        raise LookupError("no such table")

    registered(dataclasses.replace(mine(), **{where: broken}))
    tensors = draw()
    with route(backends=("mine",), on_error="fallback"):
        assert_right(F.scaled_dot_product_attention(*tensors), *tensors)
    assert stats()["reasons"] == {Code.BACKEND_FAILED: 1}
    assert "LookupError: no such table" in stats()["signatures"][-1]["detail"]
    with route(backends=("mine",)), pytest.raises(LookupError, match="no such table") as caught:
        F.scaled_dot_product_attention(*tensors)
    assert "sdpa_router" in caught.value.__notes__[0]
    assert caught.value.decision.mask.kind is sdpa_router.MaskKind.NONE


def test_an_error_in_reasons_tells_the_decision_so_far(registered):
    def broken(call, settings):
        raise LookupError("no such table")

    registered(mine("narrow", reasons=(Reason(Code.HEAD_DIM, 64, 8),)))
    registered(dataclasses.replace(mine("second"), reasons_against=broken))
    registered(mine("now", now=lambda call: iter([Reason(Code.STREAM, "another", "the default")])))
    tensors = draw()
    for ask in (lambda *given: F.scaled_dot_product_attention(*given), explain):
        with route(backends=("narrow", "second")), pytest.raises(LookupError) as caught:
            ask(*tensors)
        told = {name: [reason.code for reason in reasons] for name, reasons in caught.value.decision.passed_over}
        assert told == {"narrow": [Code.HEAD_DIM], "second": [Code.BACKEND_FAILED]}
        assert caught.value.__notes__[-1].startswith("sdpa_router decided so far: sdpa (mask: none), not narrow")
    with route(backends=("now", "second")), pytest.raises(LookupError) as caught:
        F.scaled_dot_product_attention(*tensors)
    assert [name for name, _ in caught.value.decision.passed_over] == ["now", "second"]


def test_reasons_that_raise_are_logged_once(registered, caplog):
    def broken(call, settings):
        raise LookupError("no such table")

    failing(registered)
    registered(dataclasses.replace(mine("second"), reasons_against=broken))
    tensors = draw()
    with caplog.at_level(logging.WARNING), route(backends=("second", "mine"), on_error="fallback"):
        for _ in range(3):
            F.scaled_dot_product_attention(*tensors)
    assert [message.partition(" failed")[0] for message in caplog.messages] == ["second", "mine"]
    assert "LookupError: no such table" in caplog.messages[0]
    caplog.clear()
    with caplog.at_level(logging.WARNING), route(backends=("mine", "second"), on_error="fallback"):
        F.scaled_dot_product_attention(*tensors)
    assert [message.partition(" failed")[0] for message in caplog.messages] == ["mine", "second"]


@pytest.mark.parametrize("where", ["reasons_against", "reasons_now", "run"])
def test_what_fails_in_two_threads_at_once_is_logged_once(registered, caplog, where):
    both = threading.Barrier(2, timeout=60)

    def broken(*arguments):
        both.wait()
        raise LookupError("no such table")

    def asked(call, settings):
        both.wait()
        yield Reason(Code.HEAD_DIM, 64, 8)

    def work():
        with route(backends=("mine", "next"), on_error="fallback"):
            F.scaled_dot_product_attention(*tensors)

    registered(dataclasses.replace(mine(), **{where: broken}))
    registered(dataclasses.replace(mine("next"), reasons_against=asked))
    tensors = draw()
    with caplog.at_level(logging.WARNING):
        threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(caplog.messages) == 1
    assert stats()["routes"] == {"int8": 0, "sdpa": 2}


def test_raise_on_unsupported_counts_every_backend(registered):
    registered(mine(reasons=(Reason(Code.HEAD_DIM, 64, 8),)))
    with route(backends=("mine",), on_unsupported="raise"), pytest.raises(sdpa_router.UnsupportedError) as caught:
        F.scaled_dot_product_attention(*draw())
    assert [reason.code for reason in caught.value.decision.reasons] == [Code.HEAD_DIM]
    with route(backends=("torch",), on_unsupported="raise"):
        F.scaled_dot_product_attention(*draw())


# --- packages


def test_a_missing_package_is_a_reason(monkeypatch):
    for name, module in (("sage", "sageattention"), ("comfy", "comfy_kitchen"), ("fa3", "fa3_fwd_interface")):
        monkeypatch.setitem(sys.modules, module, None)
        entry_point.cache_clear()
        decision = choose(Call(*draw()), Settings(backends=(name,)))
        (reason,) = decision.reasons
        assert reason.code is Code.PACKAGE
        assert module in reason.detail


def test_a_broken_package_says_so_in_its_own_words(monkeypatch, tmp_path):
    (tmp_path / "sageattention.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sageattention", raising=False)
    (reason,) = choose(Call(*draw()), Settings(backends=("sage",))).reasons
    assert reason.code is Code.PACKAGE
    assert "OSError: libcudart.so.13: cannot open shared object file" in reason.detail


_MUTE = "class Mute(Exception):\n    def __str__(self):\n        raise ValueError\n\nraise Mute"


@pytest.mark.parametrize("body", ["import sys; sys.exit(3)", "raise RuntimeError", "sageattn = 5", "x =", _MUTE])
def test_however_a_package_breaks_it_is_a_reason(monkeypatch, tmp_path, body):
    (tmp_path / "sageattention.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sageattention", raising=False)
    (reason,) = choose(Call(*draw()), Settings(backends=("sage",))).reasons
    assert reason.code is Code.PACKAGE
    assert "sageattention can't be used" in reason.detail
    assert ": ;" not in reason.detail


@pytest.mark.parametrize("name", ["fa3", "comfy", "sage"])
@pytest.mark.parametrize("body", [None, "raise OSError('libcudart.so.13: cannot open shared object file')"])
def test_the_words_of_an_import_are_told_where_the_device_is_wrong_too(monkeypatch, tmp_path, capsys, name, body):
    module = {"fa3": "flash_attn_interface", "comfy": "comfy_kitchen", "sage": "sageattention"}[name]
    if body is None:
        monkeypatch.setitem(sys.modules, module, None)
    else:
        (tmp_path / f"{module}.py").write_text(body)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr({"fa3": fa3, "comfy": comfy, "sage": sage}[name], "on_gpu", on_gpu)
    with route(backends=(name,)):
        package, device = explain(*draw()).reasons
    assert (package.code, device.code) == (Code.PACKAGE, Code.DEVICE)
    words = "is not installed" if body is None else f"{module} can't be used: OSError: libcudart.so.13: cannot open"
    assert words in package.detail
    assert "cpu tensors" in device.detail
    assert cli.main(["info", "--json"]) == 0
    why = json.loads(capsys.readouterr().out)["backends"][name]
    assert why == f"no, {package.detail}, and {device.detail}"


def test_what_a_package_prints_when_it_is_imported_is_no_part_of_info(monkeypatch, tmp_path, capsys):
    (tmp_path / "sageattention.py").write_text("print('hello')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sageattention", raising=False)
    assert cli.main(["info", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["backends"]["sage"].startswith("no, sageattention can't be used: AttributeError")
    assert told.err == "hello\n"


def test_what_a_package_says_when_it_is_asked_is_a_reason_too(monkeypatch):
    stand_ins.Comfy().module(monkeypatch).int8_attention_is_available = lambda device: 1 / 0
    (reason,) = choose(Call(*draw()), Settings(backends=("comfy",))).reasons
    assert reason.code is Code.PACKAGE
    assert "comfy_kitchen can't be used: ZeroDivisionError: division by zero" in reason.detail


def test_a_rocm_gpu_is_no_cuda_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert on_gpu(torch.device("cuda"), (8, 0)).code is Code.CAPABILITY, "whose advice is not to move to a GPU"


def test_the_advice_on_a_device_holds_for_every_backend():
    """Triton's interpreter is for our own kernel alone, whose sentence names it."""
    assert "TRITON_INTERPRET" not in Code.DEVICE.cure
    with route(backends=("torch-cudnn", "torch-math")):
        assert "TRITON_INTERPRET" not in str(explain(*draw()))


def test_a_function_of_another_signature_is_a_reason(monkeypatch):
    stand_ins.install(monkeypatch, "sageattention", sageattn=lambda q, k, v, **kwargs: q)
    (reason,) = choose(Call(*draw()), Settings(backends=("sage",))).reasons
    assert reason.code is Code.PACKAGE
    assert "sm_scale" in reason.detail


def test_no_peer_is_imported_before_it_is_named(monkeypatch, tmp_path):
    for name in ("sageattention", "comfy_kitchen", "fa3_fwd_interface"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError\n")
    monkeypatch.syspath_prepend(tmp_path)
    with route():
        F.scaled_dot_product_attention(*draw())


@pytest.mark.parametrize("capability", [(7, 5), (10, 0)])
def test_capabilities(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert on_gpu(torch.device("cuda"), (9, 0), ((9, 0),)).code is Code.CAPABILITY
    assert (on_gpu(torch.device("cuda"), (8, 0)) is None) == (capability > (8, 0))
    assert on_gpu(torch.device("cpu"), (8, 0)).code is Code.DEVICE


# --- SageAttention 1.0.6


@pytest.fixture
def sage1(monkeypatch):
    peer = stand_ins.Sage1()
    peer.module(monkeypatch)
    return peer


def through(name, *tensors, **arguments):
    with route(backends=(name,), on_unsupported="raise"):
        return F.scaled_dot_product_attention(*tensors, **arguments)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_sage_1_answers_with_the_scale_and_leaves_the_keys(sage1, dtype, scale):
    query, key, value = draw(dtype=dtype)
    key += 3
    before = key.clone()
    out = through("sage", query, key, value, scale=scale)
    assert torch.equal(key, before)
    assert torch.equal(through("sage", query, key, value, scale=scale), out)
    assert_right(out, query, key, value, scale=scale)
    assert {*sage1.calls[0]} == {"layout", "is_causal", "sm_scale"}, "nothing that it would swallow"


def test_sage_1_refuses_what_it_gets_wrong(sage1):
    tensors = draw()
    mask = torch.ones(1, 1, 1, 128, dtype=torch.bool)
    assert codes("sage", *tensors, mask) == [Code.MASK]
    assert codes("sage", *tensors, mask, settings=Settings(backends=("sage",), allow_mask_blind=True)) == [Code.MASK]
    assert codes("sage", *tensors, dropout_p=0.1) == [Code.DROPOUT]
    assert codes("sage", *tensors, scale=-0.5) == [Code.SCALE]
    assert codes("sage", *tensors, is_causal=True) == [Code.CAUSAL]
    assert codes("sage", *draw(128, 128), is_causal=True) == []
    assert codes("sage", *draw(kv_len=77)) == [Code.KV_LENGTH]
    assert codes("sage", *draw(head_dim=80)) == [Code.HEAD_DIM]
    assert codes("sage", *draw(head_dim=160)) == [Code.HEAD_DIM]
    assert codes("sage", *draw(dtype=FP32)) == [Code.DTYPE]
    assert codes("sage", *draw(heads=4, kv_heads=2)) == [Code.HEADS]
    assert codes("sage", *draw(heads=3, kv_heads=2), enable_gqa=True) == [Code.HEADS]
    assert codes("sage", *draw(heads=4, kv_heads=2), enable_gqa=True) == []


@pytest.mark.parametrize(("dtype", "size"), [(BF16, 1e5), (BF16, 1e-6), (FP16, 3e4)])
def test_values_of_any_size_pass_through_float16(sage1, dtype, size):
    query, key, value = draw(dtype=dtype, heads=4, kv_heads=2)
    value = (value.float() / value.abs().max() * size).to(dtype)
    out = through("sage", query, key, value, enable_gqa=True)
    assert_right(out, query, key, value, enable_gqa=True)


def test_heads_last_in_and_out(sage1):
    query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw())
    out = through("sage", query, key, value)
    assert out.stride() == query.stride()
    assert sage1.calls[0]["layout"] == "NHD"
    assert_right(out, query, key, value)


def test_offsets_of_more_than_31_bits_are_refused(sage1):
    with FakeTensorMode():
        long = torch.empty(1, 200, 2**18, 64, dtype=BF16)
    assert codes("sage", long, long, long) == [Code.SHAPE]


# --- SageAttention 2


def test_sage_2_is_seen_from_its_signature_and_restores_the_device(monkeypatch):
    peer = stand_ins.Sage2()
    peer.module(monkeypatch)
    current = [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.__setitem__(0, device))
    assert codes("sage", *draw(kv_len=77)) == []
    assert codes("sage", *draw(head_dim=80)) == []
    query, key, value = draw(kv_len=77)
    assert_right(through("sage", query, key, value), query, key, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
    assert current[0] != 0, "SageAttention itself leaves another one"
    current[0] = 0
    base.find_backend("sage").run(Call(query, key, value), Settings(), F.scaled_dot_product_attention)
    assert current[0] == 0


def test_sage_2_answers_on_the_default_stream_only(monkeypatch):
    peer = stand_ins.Sage2()
    peer.module(monkeypatch)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    tensors = draw()
    with route(backends=("sage",)):
        F.scaled_dot_product_attention(*tensors)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: 7)
        out = F.scaled_dot_product_attention(*tensors)
    assert_right(out, *tensors)
    assert len(peer.calls) == 1
    assert stats()["routes"] == {"int8": 0, "sdpa": 1, "sage": 1}
    assert stats()["reasons"] == {"stream": 1}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("peer", [stand_ins.Comfy, stand_ins.Sage1, stand_ins.Sage2])
def test_what_is_no_number_in_an_argument_shows(monkeypatch, peer, where, value):
    """Where torch answers it: their kernels take the largest number and lose NaN."""
    peer().module(monkeypatch)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    name = "comfy" if peer is stand_ins.Comfy else "sage"
    tensors = draw(heads=4, kv_heads=2)
    tensors[where][0, 1, 5, 3] = value
    with route(backends=(name,), on_unsupported="raise"):
        out = F.scaled_dot_product_attention(*tensors, enable_gqa=True)
    expected = sdpa_oracle(*tensors, enable_gqa=True)[0]
    assert not out[~expected.isfinite()].isfinite().any()
    others = [head for head in range(4) if head != 1] if where == 0 else [0, 1]
    assert relative_error(out[:, others], expected[:, others]) < 0.01


@pytest.mark.parametrize("peer", [stand_ins.Comfy, stand_ins.Sage1, stand_ins.Sage2])
def test_large_numbers_are_numbers(monkeypatch, peer):
    """Also where key and value together are more than float16 holds."""
    peer().module(monkeypatch)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    query, key, value = draw(dtype=FP16)
    key[..., 0], value = key[..., 0] + 100, torch.full_like(value, 65000.0)
    value[:, :, 3, 5] = 65472.0
    with route(backends=("comfy" if peer is stand_ins.Comfy else "sage",), on_unsupported="raise"):
        out = F.scaled_dot_product_attention(query, key, value)
    assert_right(out, query, key, value)


# --- comfy-kitchen


@pytest.fixture
def kitchen(monkeypatch):
    peer = stand_ins.Comfy()
    peer.module(monkeypatch)
    return peer


def test_comfy_refuses_masks_unless_they_are_accepted(kitchen):
    tensors = draw()
    blind = Settings(backends=("comfy",), allow_mask_blind=True)
    mask = torch.arange(128).view(1, 1, 1, -1) < 100
    assert codes("comfy", *tensors, mask) == [Code.MASK_BLIND]
    assert codes("comfy", *tensors, mask, settings=blind) == []
    assert codes("comfy", *tensors, mask.expand(1, 1, 64, 128).contiguous(), settings=blind) == [Code.FULL_MASK]
    assert codes("comfy", *tensors, is_causal=True) == [Code.CAUSAL]
    assert codes("comfy", *tensors, scale=0.0) == [Code.SCALE]


@pytest.mark.parametrize("least", [0.0, -6.0, -40000.0, torch.finfo(FP32).min])
def test_biases_of_any_size_are_biases(kitchen, least):
    """comfy-kitchen itself answers 0 where all of them are under -34657."""
    query, key, value = draw()
    mask = torch.linspace(-6, 0, 128).view(1, 1, 1, -1) + least
    with route(backends=("comfy",), allow_mask_blind=True, on_unsupported="raise"):
        out = F.scaled_dot_product_attention(query, key, value, mask)
        assert_right(out, query, key, value, mask)
        nothing = torch.full((1, 1, 1, 128), -math.inf)
        assert torch.equal(F.scaled_dot_product_attention(query, key, value, nothing), torch.zeros_like(query))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_what_is_no_number_in_a_bias_shows(kitchen, value, dtype):
    """comfy-kitchen itself answers 0 in such a row."""
    tensors = draw()
    bias = torch.linspace(-6, 0, 128).repeat(1, 2, 1, 1).to(dtype)
    bias[0, 1, 0, 77] = value
    with route(backends=("comfy",), allow_mask_blind=True, on_unsupported="raise"):
        out = F.scaled_dot_product_attention(*tensors, bias)
    assert out[:, 1].isnan().all()
    expected = sdpa_oracle(*tensors, bias)[0]
    assert relative_error(out[:, 0], expected[:, 0]) < 0.01


@pytest.mark.parametrize("dtype", [torch.bool, FP32])
@pytest.mark.parametrize("kind", ["one for all keys", "every second", "expanded", "by head"])
def test_however_a_key_mask_lies_in_memory_it_is_read_right(kitchen, dtype, kind):
    query, key, value = draw()
    kept = torch.rand(1, 2, 1, 256) < 0.7
    kept[..., 0] = True
    values = kept if dtype is torch.bool else torch.where(kept, torch.randn(1, 2, 1, 256), -math.inf)
    mask = {
        "one for all keys": values[:, :, :, :1],
        "every second": values[:, :, :, ::2],
        "expanded": values[:, :1, :, :1].expand(1, 2, 64, 128),
        "by head": values[:, :, :, :128],
    }[kind]
    with route(backends=("comfy",), allow_mask_blind=True, on_unsupported="raise"):
        assert_right(F.scaled_dot_product_attention(query, key, value, mask), query, key, value, mask)


@pytest.mark.parametrize("stride", [0, 65, 66])
def test_comfy_wants_strides_in_fours(kitchen, stride):
    query, key, value = draw()
    odd = torch.empty_strided((1, 2, 128, 64), (2 * 128 * 66, 128 * 66, 66, 1), dtype=BF16).copy_(key)
    if stride == 65:
        odd = torch.empty_strided((1, 2, 128, 64), (2 * 128 * 65, 128 * 65, 65, 1), dtype=BF16).copy_(key)
    if stride == 0:
        odd = key[:, :1].expand(1, 2, 128, 64)
    assert codes("comfy", query, odd, value) == [Code.STRIDES]
    assert codes("comfy", query, key, value) == []


def test_comfy_wants_a_driver_and_its_extension(kitchen, monkeypatch):
    monkeypatch.setattr(comfy, "_driver", lambda: 12040)
    (reason,) = choose(Call(*draw()), Settings(backends=("comfy",))).reasons
    assert reason.code is Code.DRIVER
    assert "12.4" in reason.detail
    monkeypatch.setattr(comfy, "_driver", lambda: 13000)
    kitchen.available = False
    assert codes("comfy", *draw()) == [Code.PACKAGE]


def test_where_the_driver_can_not_be_asked_nothing_is_said(kitchen, monkeypatch):
    def nothing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.undo()
    monkeypatch.setattr(comfy.ctypes, "CDLL", nothing)
    comfy._driver.cache_clear()
    assert comfy._driver() is None
    comfy._driver.cache_clear()


def test_comfy_output_lies_as_the_query(kitchen):
    query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw())
    out = through("comfy", query, key, value)
    assert out.stride() == query.stride()
    assert_right(out, query, key, value)


# --- FlashAttention-3


@pytest.mark.parametrize("returns_lse", [False, True])
def test_fa3_answers(monkeypatch, returns_lse):
    stand_ins.Fa3(returns_lse).module(monkeypatch)
    query, key, value = draw(128, 128, heads=4, kv_heads=2)
    out = through("fa3", query, key, value, is_causal=True, scale=0.3, enable_gqa=True)
    assert_right(out, query, key, value, is_causal=True, scale=0.3, enable_gqa=True)


def test_fa3_refuses_what_it_gets_wrong(monkeypatch):
    stand_ins.Fa3().module(monkeypatch)
    tensors = draw()
    assert codes("fa3", *tensors, torch.ones(1, 1, 1, 128, dtype=torch.bool)) == [Code.MASK]
    assert codes("fa3", *tensors, is_causal=True) == [Code.CAUSAL], "bottom right, where torch aligns top left"
    assert codes("fa3", *tensors, scale=-1.0) == [Code.SCALE]
    assert codes("fa3", *draw(head_dim=36)) == [Code.HEAD_DIM, Code.STRIDES]
    assert codes("fa3", *draw(dtype=FP16)) == [Code.DTYPE]
    query, key, value = tensors
    assert codes("fa3", query, key[:, :1].expand_as(key), value) == [Code.STRIDES]


def test_fa3_is_not_given_rows_it_can_not_read_in_one_piece(monkeypatch):
    peer = stand_ins.Fa3()
    peer.module(monkeypatch)
    query, key, value = draw()
    shifted = torch.empty(query.numel() + 4, dtype=BF16)[4:].view_as(query).copy_(query)
    with route(backends=("fa3",)):
        F.scaled_dot_product_attention(query, key, value)
        out = F.scaled_dot_product_attention(shifted, key, value)
    assert_right(out, query, key, value)
    assert len(peer.calls) == 1
    assert stats()["reasons"] == {"strides": 1}


# --- torch's own


def test_torchs_own_backends_are_asked_by_torchs_own_checks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = []
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *given: given)
    for name in torch_sdpa._CAN_USE.values():
        usable = name != "can_use_flash_attention"
        monkeypatch.setattr(torch.backends.cuda, name, lambda params, debug, u=usable: asked.append(params) or u)
    query, mask = FAKES
    assert codes("torch-flash", query, query, query) == [Code.TORCH_REFUSES]
    assert codes("torch-cudnn", query, query, query, mask) == []
    assert asked[-1][3].dtype == BF16, "judged with the mask that it will get"
    assert codes("torch-efficient", query, query, query, ONE_FOR_ALL_KEYS) == []
    assert (asked[-1][3].shape[3], asked[-1][3].stride(3)) == (64, 0), "as torch's kernel will get it"
    assert codes("torch-math", query, query, query) == []
    assert codes("torch-math", *draw()) == [Code.DEVICE]
    decision = choose(Call(query, query, query), Settings(backends=("torch-flash", "torch-cudnn")))
    assert decision.backend == "torch-cudnn"


def test_the_named_one_comes_first_and_the_others_stay_allowed(monkeypatch):
    seen = []
    monkeypatch.setattr(
        torch_sdpa, "sdpa_kernel", lambda order, set_priority: seen.append(order) or contextlib.nullcontext()
    )
    tensors = draw()
    asked = []
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *tensors, **options: asked.append(seen[:]))
    torch_sdpa._settle_order.cache_clear()
    found = base.find_backend("torch-efficient").run(Call(*tensors), Settings(), F.scaled_dot_product_attention)
    assert_right(found, *tensors)
    assert seen[0][0] is torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION
    assert len(seen[0]) == 4
    base.find_backend("torch-math").run(Call(*tensors), Settings(), F.scaled_dot_product_attention)
    assert asked == [[]], "torch sets its own order at its first choice, which must come before ours"


# --- torch.compile


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("permuted", [False, True])
def test_peers_answer_in_a_whole_graph(monkeypatch, backend, permuted):
    peer = stand_ins.Fa3()
    peer.module(monkeypatch)
    torch._dynamo.reset()
    query, key, value = draw()
    if permuted:
        query = query.transpose(1, 2).contiguous().transpose(1, 2)

    def attend(query, key, value):
        return F.scaled_dot_product_attention(query, key, value) * 2

    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    with torch.no_grad(), route(backends=("fa3", "torch")):
        assert_right(compiled(query, key, value) / 2, query, key, value)
        compiled(query, key, value)
    assert len(peer.calls) == 2
    assert stats()["routes"] == {"int8": 0, "sdpa": 0, "fa3": 2}, "decided and counted when it runs"


def test_lengths_are_judged_when_a_graph_runs(monkeypatch):
    stand_ins.Sage1().module(monkeypatch)
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v), backend=backend, fullgraph=True, dynamic=True
    )
    with torch.no_grad(), route(backends=("sage", "torch")):
        for length in (64, 77, 128, 192):
            tensors = draw(kv_len=length)
            assert_right(compiled(*tensors), *tensors)
    assert len(graphs) <= 2
    assert stats()["routes"] == {"int8": 0, "sdpa": 1, "sage": 3}


def test_gradients_are_torchs_in_a_graph_too(monkeypatch):
    stand_ins.Fa3().module(monkeypatch)
    torch._dynamo.reset()
    query, key, value = (x.requires_grad_() for x in draw())
    compiled = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v), backend="aot_eager", fullgraph=True
    )
    with route(backends=("fa3",)):
        compiled(query, key, value).sum().backward()
    assert query.grad is not None
    assert stats()["reasons"] == {"requires_grad": 1}


# --- properties


@hypothesis.settings(deadline=None)
@given(
    st.sampled_from(["fa3", "comfy", "sage"]),
    st.integers(1, 200),
    st.integers(1, 200),
    st.sampled_from([8, 16, 36, 64, 80, 96, 128, 192, 256]),
    st.booleans(),
    st.sampled_from([None, 0.1, -0.1, 0.0]),
    st.sampled_from([FP16, BF16, FP32]),
)
def test_whatever_is_chosen_the_answer_is_right(name, q_len, kv_len, head_dim, is_causal, scale, dtype):
    with pytest.MonkeyPatch.context() as monkeypatch:
        for stand_in in (stand_ins.Sage1(), stand_ins.Comfy(), stand_ins.Fa3()):
            stand_in.module(monkeypatch)
        tensors = draw(q_len, kv_len, head_dim, heads=1, dtype=dtype)
        if is_causal and scale is not None and scale <= 0:
            return  # torch 2.13 itself answers NaN on the CPU
        with torch.no_grad(), route(backends=(name,), log=False):
            out = F.scaled_dot_product_attention(*tensors, is_causal=is_causal, scale=scale)
        assert_right(out, *tensors, is_causal=is_causal, scale=scale)
    entry_point.cache_clear()
