"""Every reason code, from metadata alone: GPU calls are judged on fake tensors, so that no GPU is needed."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right

from sdpa_router import Code, Reason, Route, Settings, UnsupportedError, explain
from sdpa_router.choose import choose
from sdpa_router.decide import Call, decide, decide_kernel
from sdpa_router.decision import show
from sdpa_router.kernels.int8_attention import configs, limits
from sdpa_router.kernels.int8_attention.limits import Crossover

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """A process with an H200 and without the interpreter."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(configs, "_hopper_not_importable", lambda: None)
    monkeypatch.setattr(configs, "_descriptors", lambda: True)
    monkeypatch.setattr(configs, "_failures", [])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("SDPA_ROUTER", raising=False)


def fake(*shape, dtype=BF16, device="cuda", strides=None):
    with FakeTensorMode(allow_non_fake_inputs=True):
        if strides is not None:
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)
        return torch.empty(shape, dtype=dtype, device=device)


def call(q=(1, 4, 64, 64), k=(1, 4, 8192, 64), v=None, mask=None, dtype=BF16, device="cuda", **arguments):
    query, key, value = (fake(*shape, dtype=dtype, device=device) for shape in (q, k, v or k))
    return Call(query, key, value, mask, **arguments)


def key_mask(*shape, dtype=torch.bool):
    return fake(*(shape or (1, 1, 1, 8192)), dtype=dtype)


def codes(given, settings=None):
    """Without settings, those under which no call is short: what pays has tests of its own."""
    return [reason.code for reason in decide(given, settings or Settings(min_kv=0)).reasons]


TABLE = {
    "plain": ([], call()),
    "fp16": ([], call(dtype=FP16)),
    "gqa": ([], call(q=(1, 8, 64, 64), enable_gqa=True)),
    "causal": ([], call(is_causal=True)),
    "scale": ([], call(scale=-0.5)),
    "integer scale and dropout": ([], call(scale=1, dropout_p=0)),
    "bool key mask": ([], call(mask=key_mask())),
    "float32 key mask": ([], call(mask=key_mask(dtype=FP32))),
    "key mask in the query's dtype": ([], call(mask=key_mask(dtype=BF16))),
    "expanded key mask": ([], call(mask=key_mask().expand(1, 4, 64, 8192))),
    "odd head_dim": ([], call(q=(1, 4, 64, 40), k=(1, 4, 8192, 40))),
    "largest head_dim": ([], call(q=(1, 4, 64, 256), k=(1, 4, 8192, 256))),
    "permuted": ([], Call(*[fake(1, 8192, 4, 64).transpose(1, 2)] * 3)),
    "head_dim 1 has any stride": ([], Call(*[fake(1, 4, 8192, 1, strides=(8192 * 8, 8192 * 2, 2, 2))] * 3)),
    "cpu": ([Code.DEVICE], call(device="cpu")),
    "xpu": ([Code.DEVICE], call(device="xpu")),
    "float32": ([Code.DTYPE], call(dtype=FP32)),
    "mixed dtypes": ([Code.MIXED_DTYPE], call()._replace(key=fake(1, 4, 8192, 64, dtype=FP16))),
    "mixed devices": ([Code.MIXED_DEVICE], call()._replace(value=fake(1, 4, 8192, 64, device="cpu"))),
    "mask elsewhere": ([Code.MIXED_DEVICE], call(mask=fake(1, 1, 1, 8192, dtype=torch.bool, device="cpu"))),
    "three axes": ([Code.RANK], Call(*[fake(4, 8192, 64)] * 3)),
    "other batch": ([Code.SHAPE], call(q=(2, 4, 64, 64))),
    "as many heads as a grid has room for": ([], call(q=(257, 255, 64, 64), k=(257, 255, 8192, 64))),
    "a head more": ([Code.SHAPE], call(q=(256, 256, 64, 64), k=(256, 256, 8192, 64))),
    "other head_dim": ([Code.SHAPE], call(q=(1, 4, 64, 32), v=(1, 4, 8192, 32))),
    "other value length": ([Code.SHAPE], call(v=(1, 4, 4096, 64))),
    "heads without gqa": ([Code.HEADS], call(q=(1, 8, 64, 64))),
    "heads that don't divide": ([Code.HEADS], call(q=(1, 6, 64, 64), enable_gqa=True)),
    "value heads": ([Code.HEADS], call(v=(1, 2, 8192, 64))),
    "head_dim 384": ([Code.HEAD_DIM], call(q=(1, 4, 64, 384), k=(1, 4, 8192, 384))),
    "value head_dim": ([Code.VALUE_HEAD_DIM], call(v=(1, 4, 8192, 32))),
    "empty": ([Code.EMPTY], call(q=(0, 4, 64, 64), k=(0, 4, 8192, 64))),
    "no heads": ([Code.EMPTY], call(q=(1, 0, 64, 64), k=(1, 0, 8192, 64), enable_gqa=True)),
    "requires_grad": ([Code.REQUIRES_GRAD], call()._replace(value=fake(1, 4, 8192, 64).requires_grad_())),
    "mask requires_grad": ([Code.REQUIRES_GRAD], call(mask=key_mask(dtype=FP32).requires_grad_())),
    "causal bias": ([Code.TENSOR_SUBCLASS], call(mask=causal_lower_right(64, 8192))),
    "no tensor": ([Code.TENSOR_SUBCLASS], call()._replace(query=[1.0])),
    "sparse": ([Code.TENSOR_SUBCLASS], Call(*[torch.eye(2, dtype=BF16).to_sparse()] * 3)),
    "dropout": ([Code.DROPOUT], call(dropout_p=0.1)),
    "nan dropout": ([Code.DROPOUT], call(dropout_p=float("nan"))),
    "dropout tensor": ([Code.ARGUMENT], call(dropout_p=torch.tensor(0.0))),
    "scale tensor": ([Code.ARGUMENT], call(scale=torch.tensor(0.5))),
    "scale text": ([Code.ARGUMENT], call(scale="1")),
    "infinite scale": ([Code.ARGUMENT], call(scale=float("-inf"))),
    "nan scale": ([Code.ARGUMENT], call(scale=float("nan"))),
    "huge scale": ([Code.ARGUMENT], call(scale=1e38)),
    "scale of 400 digits": ([Code.ARGUMENT], call(scale=-(10**400))),
    "is_causal number": ([Code.ARGUMENT], call(is_causal=1)),
    "enable_gqa None": ([Code.ARGUMENT], call(enable_gqa=None)),
    "causal and mask": ([Code.CAUSAL_WITH_MASK], call(mask=key_mask(), is_causal=True)),
    "full mask": ([Code.FULL_MASK], call(mask=key_mask(1, 1, 64, 8192))),
    "mask of another length": ([Code.INVALID_MASK], call(mask=key_mask(1, 1, 1, 77))),
    "mask of one axis": ([Code.INVALID_MASK], call(mask=key_mask(8192))),
    "float16 mask": ([Code.MASK_DTYPE], call(mask=key_mask(dtype=FP16))),
    "integer mask": ([Code.MASK_DTYPE], call(mask=key_mask(dtype=torch.int32))),
    "last stride": ([Code.LAST_STRIDE], Call(*[fake(1, 4, 64, 8192).transpose(2, 3)] * 3)),
    "all at once": (
        [Code.DROPOUT, Code.CAUSAL_WITH_MASK, Code.DTYPE, Code.HEAD_DIM, Code.FULL_MASK],
        call((1, 1, 9, 512), (1, 1, 9, 512), dtype=FP32, mask=key_mask(9, 9), dropout_p=0.5, is_causal=True),
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_decision_table(name):
    expected, given = TABLE[name]
    decision = decide(given, Settings(min_kv=0))
    assert [reason.code for reason in decision.reasons] == expected
    assert decision.route is (Route.SDPA if expected else Route.INT8)
    assert decision.routed is not bool(expected)


def test_the_table_and_the_tests_name_every_code():
    here = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [code.name for code in Code if f"Code.{code.name}" not in here] == []


def test_kill_switch(monkeypatch):
    monkeypatch.setenv("SDPA_ROUTER", "0")
    assert codes(call()) == [Code.DISABLED]
    assert decide_kernel(call(), "auto", "auto").routed, "int8_attention() is not the router"


def test_skip_sees_the_call():
    seen = []
    assert codes(call(), Settings(min_kv=0, skip=lambda given: seen.append(given) or given.key.shape[2] > 8000)) == [
        Code.SKIPPED
    ]
    assert isinstance(seen[0], Call)
    assert codes(call(), Settings(min_kv=0, skip=lambda given: False)) == []


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), [Code.CAPABILITY]), ((8, 0), []), ((12, 1), [])])
def test_capability_is_asked_each_time(monkeypatch, capability, expected):
    assert codes(call()) == []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert codes(call()) == expected


def test_missing_triton(monkeypatch):
    reason = ("kernel", "Triton is not installed", "the triton package")
    monkeypatch.setattr("sdpa_router.decide.unavailable", lambda device: reason)
    assert codes(call()) == [Code.KERNEL]


def test_no_usable_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert codes(call()) == [Code.DEVICE]


def test_the_interpreter_takes_cpu_tensors_of_any_length(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    short = call(k=(1, 4, 7, 64), device="cpu")
    assert codes(short) == []
    assert codes(short, Settings(min_kv=8)) == [Code.SHORT]


def crossovers(monkeypatch, queries, masked, unmasked):
    pair = (Crossover(queries, masked, unmasked), Crossover(1, 1, 1))
    monkeypatch.setattr(limits, "_HOPPER", pair)
    monkeypatch.setattr(limits, "_hopper_kernel", lambda head_dim: True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (call(q=(1, 4, 100, 64), k=(1, 4, 200, 64)), []),
        (call(q=(1, 4, 99, 64), k=(1, 4, 200, 64)), [Code.SHORT]),
        (call(q=(1, 4, 100, 64), k=(1, 4, 199, 64)), [Code.SHORT]),
        (call(q=(1, 4, 100, 64), k=(1, 4, 150, 64), mask=key_mask(1, 1, 1, 150)), []),
        (call(q=(1, 4, 1, 96), k=(1, 4, 1, 96)), []),
    ],
)
def test_the_crossover_counts_queries_and_keys_by_head_dim_and_mask(monkeypatch, given, expected):
    crossovers(monkeypatch, 100, 150, 200)
    assert codes(given, Settings()) == expected


def test_hopper_without_its_kernel_has_a_crossover_of_its_own(monkeypatch):
    monkeypatch.setattr(limits, "_hopper_kernel", lambda head_dim: False)
    assert codes(call(q=(1, 4, 8192, 64), k=(1, 4, 8192, 64)), Settings()) == [Code.SHORT]
    assert codes(call(q=(1, 4, 8192, 64), k=(1, 4, 8192, 64), mask=key_mask()), Settings()) == []


def test_where_nothing_pays_the_reason_says_so(monkeypatch):
    crossovers(monkeypatch, 1, 1, None)
    reasons = decide(call(), Settings()).reasons
    assert [str(reason.code) for reason in reasons] == ["short"]
    assert "no size on this GPU" in reasons[0].detail
    assert codes(call(mask=key_mask()), Settings()) == []


def test_min_kv_replaces_the_crossover(monkeypatch):
    crossovers(monkeypatch, 10**6, None, None)
    assert codes(call(k=(1, 4, 77, 64)), Settings(min_kv=77)) == []
    assert codes(call(k=(1, 4, 77, 64)), Settings(min_kv=78)) == [Code.SHORT]


@pytest.mark.parametrize("grad_free", [torch.no_grad, torch.inference_mode])
def test_requires_grad_counts_only_in_grad_mode(grad_free):
    given = call()._replace(query=fake(1, 4, 64, 64).requires_grad_())
    with grad_free():
        assert codes(given) == []


def test_autocast_counts_where_it_would_cast():
    assert codes(call(dtype=FP16)) == []
    for device, expected in (("cuda", [Code.AUTOCAST]), ("cpu", [])):
        with torch.autocast(device, dtype=BF16, enabled=True) if device == "cpu" else _cuda_autocast():
            assert codes(call(dtype=BF16)) == []
            assert codes(call(dtype=FP16)) == expected
            assert codes(call(dtype=FP32)) == [*expected, Code.DTYPE]


@contextlib.contextmanager
def _cuda_autocast():
    """torch.autocast("cuda") disables itself where there is no GPU."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", BF16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", FP16)


def test_functorch_and_forward_mode_ad():
    x = torch.zeros(2, 1, 1, 8192, 8, dtype=BF16, device="meta")
    seen = []

    def attend(query):
        seen.append(codes(Call(query, query, query)))
        return query

    torch.vmap(attend)(x)
    torch.func.jvp(attend, (x[0],), (x[0],))
    with torch.autograd.forward_ad.dual_level():
        attend(x[0])
    assert seen == [[Code.FUNCTORCH]] * 3
    attend(x[0])
    assert seen[-1] == []


def test_nested_tensors_have_no_shape_to_ask_for():
    nested = torch.nested.nested_tensor([torch.zeros(2, 3, 8), torch.zeros(2, 4, 8)])
    jagged = torch.nested.nested_tensor([torch.zeros(3, 2, 8), torch.zeros(4, 2, 8)], layout=torch.jagged)
    for tensor in (nested, jagged):
        assert codes(Call(tensor, tensor, tensor)) == [Code.TENSOR_SUBCLASS]


def test_modes_are_asked_of_the_kernel():
    decision = decide_kernel(call(), "fp4", "low")
    assert [reason.code for reason in decision.reasons] == [Code.PV, Code.PRECISION]
    for word in ("fp4", "16bit", "low", "high"):
        assert word in str(decision)


@pytest.mark.parametrize(("capability", "has"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_fp8_is_refused_where_the_gpu_has_none(monkeypatch, capability, has):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    fp8 = Settings(min_kv=0, pv="fp8")
    assert codes(call(), fp8) == ([] if has else [Code.PV])
    assert codes(call(), Settings(min_kv=0, precision="high")) == []
    if not has:
        assert "sm_89" in str(decide(call(), fp8))


def test_a_float32_mask_is_cast_for_torch_on_a_gpu():
    full = decide(call(mask=key_mask(1, 1, 64, 8192, dtype=FP32)), Settings(min_kv=0))
    assert [note.code for note in full.notes] == [Code.MASK_CAST]
    assert "mask_cast: the float32 mask was cast to bfloat16" in str(full)
    assert decide(call(mask=key_mask(dtype=FP32)), Settings(min_kv=0)).notes == ()
    assert decide(call(mask=key_mask(1, 1, 64, 8192, dtype=BF16)), Settings(min_kv=0)).notes == ()
    on_cpu = call(mask=fake(1, 1, 64, 8192, dtype=FP32, device="cpu"), device="cpu")
    assert decide(on_cpu, Settings(min_kv=0)).notes == ()


PORTABLE = {
    "sm_80": ("needs sm_90, and this is sm_80", call()),
    "head_dim": ("head_dim 32 is not over 32", call(q=(1, 4, 64, 32), k=(1, 4, 8192, 32))),
    "one value for all": ("no stride of 0", call()._replace(value=fake(1, 1, 1, 64).expand(1, 4, 8192, 64))),
    "odd rows": ("whole 16 bytes", call()._replace(value=fake(1, 4, 8192, 64, strides=(1, 8192 * 66, 66, 1)))),
    "no Gluon": ("this Triton has no Gluon", call()),
    "does not compile": ("does not compile hopper.py: TypeError: no such argument", call()),
}


@pytest.mark.parametrize("backends", [("int8", "torch"), ("int8", "comfy")])
@pytest.mark.parametrize("name", PORTABLE)
def test_a_decision_says_why_not_the_hopper_kernel_answers(monkeypatch, name, backends):
    settings = Settings(min_kv=0, backends=backends)
    why, given = PORTABLE[name]
    assert choose(call(), settings).notes == ()
    if name == "sm_80":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    elif name == "no Gluon":
        monkeypatch.setattr(configs, "_hopper_not_importable", lambda: "this Triton has no Gluon")
    elif name == "does not compile":
        configs.give_up_hopper(TypeError("no such argument"))
    decision = choose(given, settings)
    assert decision.routed
    assert [note.code for note in decision.notes] == [Code.PORTABLE]
    assert "(portable: the portable kernel answers, because" in str(decision)
    assert why in str(decision)
    assert choose(given._replace(dropout_p=0.5), settings).notes == ()


def test_explain_judges_meta_tensors_as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    query = torch.empty(1, 24, 4096, 128, dtype=BF16, device="meta")
    key = torch.empty(1, 24, 33600, 128, dtype=BF16, device="meta")
    bias = torch.empty(1, 1, 1, 33600, device="meta")
    assert str(explain(query, key, key, bias)) == "int8 (mask: per key, float32 [1, 1, 1, 33600])"
    assert str(explain(query, key, key)) == "int8 (mask: none)"
    refused = explain(query, key, key, bias.expand(1, 1, 4096, 33600).contiguous(), 0.1)
    assert [reason.code for reason in refused.reasons] == ["dropout", "full_mask"]
    assert str(refused) == (
        "sdpa because dropout: dropout_p is 0.1; the kernel takes 0; full_mask: the mask [1, 1, 4096, 33600] has a "
        "row for each query; the kernel takes one row for all queries (size 1 or stride 0)"
    )


@pytest.mark.parametrize("name", [name for name, (expected, _) in TABLE.items() if expected])
def test_every_sentence_says_what_was_given_and_what_is_accepted(name):
    for reason in decide(TABLE[name][1], Settings(min_kv=0)).reasons:
        assert show(reason.given) in reason.detail
        assert show(reason.accepted) in reason.detail
        assert str(reason) == f"{reason.code.value}: {reason.detail}"


@pytest.mark.parametrize("code", Code)
def test_every_code_is_stable_and_has_texts(code):
    assert re.fullmatch("[a-z_]+", code)
    assert str(code) == code.value == code.name.lower()
    assert "{given}" in code.text
    assert "{accepted}" in code.text
    assert code.cure.endswith(".")
    assert pickle.loads(pickle.dumps(code)) is code


@pytest.mark.parametrize("code", Code)
def test_the_readme_table_has_every_code_with_its_cure(code):
    rows = [line for line in README.read_text().splitlines() if line.startswith(f"| `{code}` ")]
    assert len(rows) == 1
    assert code.cure in rows[0]


def test_decisions_are_frozen_hold_no_tensor_and_can_be_pickled():
    decision = decide(TABLE["all at once"][1], Settings(min_kv=0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        decision.route = Route.INT8
    assert pickle.loads(pickle.dumps(decision)) == decision
    error = pickle.loads(pickle.dumps(UnsupportedError(decision)))
    assert error.decision == decision
    assert str(error) == str(decision)


def test_details_are_formatted_only_when_read():
    class Size:
        def __str__(self):
            raise AssertionError

    Reason(Code.HEAD_DIM, Size(), "256")


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"on_unsupported": "ignore"}, ValueError),
        ({"min_kv": -1}, ValueError),
        ({"min_kv": 1.5}, ValueError),
        ({"min_kv": True}, ValueError),
        ({"pv": "fp4"}, ValueError),
        ({"precision": "low"}, ValueError),
        ({"skip": 3}, TypeError),
        ({"log": None}, TypeError),
    ],
)
def test_settings_that_do_not_exist(settings, error):
    ((name, value),) = settings.items()
    with pytest.raises(error, match=f"{name} is {value!r}; accepted"):
        Settings(**settings)
