"""audit(): the error of each attention call and of the output, and nothing left behind."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter

from sdpa_router import Audit, Settings, audit, disable, enable, int8_attention, record, route
from sdpa_router.audit import AuditRow
from sdpa_router.testing import relative_error


class Attention(nn.Module):
    """Self-attention of two heads of 16; `sharp` scales the scores."""

    def __init__(self, sharp=1.0):
        super().__init__()
        self.sharp = sharp
        self.qkv = nn.Linear(32, 96)

    def forward(self, x, mask=None):
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query * self.sharp, key, value, attn_mask=mask)
        return x + out.transpose(1, 2).flatten(-2)


class Model(nn.Module):
    def __init__(self, *sharp):
        super().__init__()
        self.blocks = nn.ModuleList(Attention(s) for s in sharp)

    def forward(self, x, *, mask=None):
        for block in self.blocks:
            x = block(x, mask)
        return {"sample": x, "count": len(self.blocks)}


@pytest.fixture
def model(device):
    with torch.device(device):
        return Model(1.0, 30.0, 3.0).half().eval()


@pytest.fixture
def x(device):
    return torch.randn(1, 40, 32, device=device, dtype=torch.float16)


EVERY = Settings(min_kv=0)


def native_calls(model, *args, **kwargs):
    """The arguments of each attention call of a native forward."""
    calls = []

    def spy(call):
        calls.append(call)
        return True

    with torch.no_grad(), route(skip=spy, log=False):
        model(*args, **kwargs)
    return calls


def test_errors_are_those_of_the_kernel_on_the_native_inputs(model, x):
    mask = (torch.arange(40, device=x.device) % 3 > 0).view(1, 1, 1, 40)
    found = audit(model, x, kwargs={"mask": mask}, settings=EVERY, show=False)
    assert [row.module for row in found.rows] == ["blocks.0", "blocks.1", "blocks.2"]
    assert [row.number for row in found.rows] == [0, 1, 2]
    for row, call in zip(found.rows, native_calls(model, x, mask=mask), strict=True):
        native = F.scaled_dot_product_attention(*call[:4])
        out = int8_attention(*call[:4])
        assert row.error == relative_error(out, native) > 0
        largest = (out.double() - native.double()).abs().max() / native.double().square().mean().sqrt()
        assert row.peak == pytest.approx(float(largest))
        assert (row.query, row.key, row.mask, row.reasons) == ((1, 2, 40, 16), (1, 2, 40, 16), "per_key", ())


def test_output_error_is_that_of_a_routed_forward(model, x):
    found = audit(model, x, settings=EVERY, show=False)
    with torch.no_grad():
        native = model(x)["sample"]
        enable(model, min_kv=0)
        routed = model(x)["sample"]
    assert found.output_error == relative_error(routed, native) > 0


def test_sharp_attention_is_worst_and_excluding_it_helps(model, x):
    found = audit(model, x, settings=EVERY, show=False)
    names = [name for name, _ in found.worst()]
    assert names[0] == "blocks.1"
    assert [name for name, _ in found.worst(1)] == names[:1]
    assert dict(found.worst())["blocks.1"] == found.rows[1].error
    better = audit(model, x, exclude="blocks.1", settings=EVERY, show=False)
    assert [row.module for row in better.rows] == ["blocks.0", "blocks.2"]
    assert better.rows[0] == found.rows[0]
    assert better.output_error < found.output_error
    only = audit(model, x, include="blocks.1", settings=EVERY, show=False)
    assert [row.error for row in only.rows] == [found.rows[1].error]


def test_a_call_that_is_not_finite_is_worst():
    errors = (0.5, math.nan, None, 0.1)
    rows = tuple(
        AuditRow(number, f"b{number}", (1,), (1,), "none", (), error, error) for number, error in enumerate(errors)
    )
    assert [name for name, _ in Audit(rows, None).worst()] == ["b1", "b0", "b3"]


def test_it_is_deterministic_and_prints(model, x, capsys):
    found = audit(model, x, settings=EVERY)
    printed = capsys.readouterr().out
    assert printed == found.table() + "\n"
    for row in found.rows:
        assert f"{row.error:.3g}" in printed
    assert "3 of 3 calls on int8" in printed
    assert f"  blocks.1: {found.rows[1].error:.3g}" in printed
    again = audit(model, x, settings=EVERY, show=False)
    assert again == found
    assert capsys.readouterr().out == ""


def test_calls_that_torch_answers_are_listed_with_their_reasons(model, x):
    full = torch.zeros(40, 40, device=x.device, dtype=x.dtype)
    found = audit(model, x, kwargs={"mask": full}, settings=EVERY, show=False)
    assert {row.reasons for row in found.rows} == {("full_mask",)}
    assert {(row.error, row.peak) for row in found.rows} == {(None, None)}
    assert found.output_error == 0
    assert found.worst() == []
    assert "0 of 3 calls" in found.table()


def test_settings_count(model, x):
    assert {row.reasons for row in audit(model, x, settings=Settings(min_kv=41), show=False).rows} == {("short",)}
    skip = Settings(min_kv=0, skip=lambda call: True, on_unsupported="raise")
    found = audit(model, x, settings=skip, show=False)
    assert {row.reasons for row in found.rows} == {("skipped",)}
    assert found.output_error == 0


def test_the_module_is_left_as_it_was(model, x):
    native = F.scaled_dot_product_attention
    enable(model, exclude="blocks.0", min_kv=0)
    before = [(dict(module.__dict__), len(module._forward_hooks)) for module in model.modules()]
    found = audit(model, x, settings=EVERY, show=False)
    assert len(found.rows) == 3  # its own choice is set aside
    assert [(dict(module.__dict__), len(module._forward_hooks)) for module in model.modules()] == before
    assert F.scaled_dot_product_attention is native
    with torch.no_grad(), record() as seen:
        model(x)
    assert sorted((entry["backend"], entry["count"]) for entry in seen.records) == [("int8", 2), ("sdpa", 1)]
    disable(model)


def test_an_exception_leaves_nothing_behind(model):
    enable(model, min_kv=0)
    with pytest.raises(RuntimeError):
        audit(model, torch.randn(1, 4, 5).half())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model._sdpa_router_scope.name != "off"


def test_both_runs_draw_the_same_random_numbers(device):
    class Noisy(Attention):
        def forward(self, x):
            return super().forward(x + torch.randn_like(x))

    with torch.device(device):
        model, x = Noisy().half(), torch.randn(1, 24, 32).half()
        torch.manual_seed(3)
        found = audit(model, x, settings=EVERY, show=False)
        after = torch.rand(4)
        torch.manual_seed(3)
        assert torch.equal(after, torch.rand(4))
    assert 0 < found.output_error < 0.0125


class Caching(Attention):
    """Keeps keys: in an object that grows, in a buffer of the caller, or both."""

    def forward(self, x, cache=None, buffer=None):
        if cache is not None:
            cache.append(x)
            x = torch.cat(cache, dim=1)
        if buffer is not None:
            x = buffer.add_(x)
        return super().forward(x)


def test_both_runs_find_the_inputs_as_they_were(x, device):
    model = Caching().half().to(device)
    cache, buffer = [x], torch.zeros_like(x)
    found = audit(model, x, kwargs={"cache": cache}, settings=EVERY, show=False)
    assert found.rows[0].key == (1, 2, 80, 16)
    assert 0 < found.output_error < 0.0125
    assert len(cache) == 1
    assert 0 < audit(model, x, None, buffer, settings=EVERY, show=False).output_error < 0.0125
    assert not buffer.any()
    leaf = x.detach().requires_grad_() * 1
    assert audit(model, leaf, settings=EVERY, show=False).rows[0].error > 0


def test_an_expanded_mask_stays_one_row(model, x):
    mask = (torch.arange(40, device=x.device) % 3 > 0).expand(1, 1, 40, 40)
    found = audit(model, x, kwargs={"mask": mask}, settings=EVERY, show=False)
    assert {row.mask for row in found.rows} == {"per_key"}


def test_outputs_of_all_kinds(x):
    @dataclasses.dataclass
    class Output:
        sample: torch.Tensor

    class Kinds(Attention):
        kind = staticmethod(lambda y: y)

        def forward(self, x):
            return self.kind(super().forward(x))

    model = Kinds().half().to(x.device)
    for kind in (lambda y: y, lambda y: (y, [y, None]), lambda y: {"a": {"b": y}}):
        model.kind = kind
        assert audit(model, x, settings=EVERY, show=False).output_error > 0
    for kind in (lambda y: y.argmax(), lambda y: None, Output):
        model.kind = kind
        found = audit(model, x, settings=EVERY, show=False)
        assert found.output_error is None
        assert "error of the output -;" in found.table()


def test_compiled_modules_run_eagerly(model, x):
    expected = audit(model, x, settings=EVERY, show=False)
    counter = CompileCounter()
    model.blocks[0].compile(backend=counter)
    compiled = torch.compile(model, backend=counter)
    assert audit(compiled, x, settings=EVERY, show=False) == expected
    assert counter.frame_count == 0
    compiled(x)
    assert counter.frame_count > 0


def test_what_cannot_be_audited():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module; given function"):
        audit(lambda: None)
    with pytest.raises(TypeError, match="kwargs is of type int; accepted: a mapping"):
        audit(Model(1.0), kwargs=3)
    with pytest.raises(TypeError, match=r"settings is of type dict; accepted: sdpa_router\.Settings"):
        audit(Model(1.0), settings={"min_kv": 0})
    with pytest.raises(ValueError, match=r"Linear made no call of .*scaled_dot_product_attention.*accepted"):
        audit(nn.Linear(3, 3), torch.randn(2, 3))
    with pytest.raises(ValueError, match="matches no submodule"):
        audit(Model(1.0), torch.randn(1, 4, 32), exclude="nothing")


@pytest.mark.parametrize(("choice", "routed"), [({}, 2), ({"exclude": "b"}, 0), ({"include": "b"}, 2)])
def test_a_module_with_two_names_is_measured_as_enable_routes_it(x, choice, routed):
    twice = nn.Sequential()
    attention = Attention().half().to(x.device).eval()
    twice.add_module("a", attention)
    twice.add_module("b", attention)
    enable(twice, min_kv=0, **choice)
    with record() as seen, torch.no_grad():
        twice(x)
    assert sum(entry["count"] for entry in seen.records if entry["backend"] == "int8") == routed
    if routed:
        assert len(audit(twice, x, settings=EVERY, show=False, **choice).rows) == routed
    else:
        with pytest.raises(ValueError, match="made no call"):
            audit(twice, x, settings=EVERY, show=False, **choice)


def test_parts_that_were_compiled_keep_their_names(model, x):
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    rows = audit(model, x, settings=EVERY, show=False).rows
    assert [row.module for row in rows] == ["blocks.0", "blocks.1", "blocks.2"]
    assert len(audit(model, x, exclude=rows[1].module, settings=EVERY, show=False).rows) == 2
