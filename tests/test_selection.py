"""enable(include=, exclude=): which submodules route, by qualified name."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sdpa_router
from sdpa_router import UnsupportedError, disable, enable, record, route

X = torch.randn(1, 2, 8, 16)


class Attention(nn.Module):
    """Attends; cross says whether over half of the keys."""

    def __init__(self, cross=False):
        super().__init__()
        self.cross = cross
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        key = x[:, :, :4] if self.cross else x
        return F.scaled_dot_product_attention(x, key, key) * self.scale.detach()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn1 = Attention()
        self.attn2 = Attention(cross=True)

    def forward(self, x):
        return self.attn2(self.attn1(x))


class Model(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Identity()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def judged(model):
    """Calls by what was decided about them: seen by the router, or skipped by it, or never seen."""
    with record() as seen:
        model(X)
    counts = {"routed": 0, "skipped": 0}
    for entry in seen.records:
        counts["skipped" if "skipped" in entry["reasons"] else "routed"] += entry["count"]
    return counts["routed"], counts["skipped"]


@pytest.mark.parametrize(
    ("include", "exclude", "routed", "skipped"),
    [
        (None, None, 6, 0),
        ("*", None, 6, 0),
        ("blocks", None, 6, 0),
        ("blocks.1", None, 2, 0),
        (["blocks.0", "blocks.2.attn1"], None, 3, 0),
        ("*.attn2", None, 3, 0),
        (("blocks.[01].attn1",), None, 2, 0),
        (None, "blocks.0", 4, 2),
        (None, ["blocks.0", "blocks.2"], 2, 4),
        (None, "*.attn1", 3, 3),
        (None, "blocks", 0, 6),
        (None, "*", 0, 6),
        ("*.attn1", "blocks.1", 2, 2),
        ("blocks.1", "*.attn2", 1, 3),
        ("blocks.1.attn1", "blocks.1", 0, 2),
        (iter(["head", "blocks.0"]), None, 2, 0),
    ],
)
def test_choice(include, exclude, routed, skipped):
    model = Model()
    enable(model, include=include, exclude=exclude)
    assert judged(model) == (routed, skipped)
    disable(model)
    assert judged(model) == (0, 0)
    assert not [m for m in model.modules() if "forward" in m.__dict__ or "_sdpa_router_scope" in m.__dict__]


def test_an_exclusion_holds_inside_a_surrounding_route():
    model = Model()
    enable(model, exclude="blocks.1")
    with route():
        assert judged(model) == (4, 2)


def test_an_exclusion_is_no_unsupported_call():
    model = Model()
    enable(model, exclude="*", on_unsupported="raise")
    model(X)
    enable(model, exclude="blocks.0", on_unsupported="raise")
    with pytest.raises(UnsupportedError):  # float32, in blocks.1
        model(X)


def test_a_predicate_on_the_call():
    model = Model()
    enable(model, skip=lambda call: call.query.shape[2] != call.key.shape[2])
    assert judged(model) == (3, 3)


def test_enabling_again_replaces_choice_and_settings():
    model = Model()
    enable(model, include="blocks.0", exclude="blocks.0.attn1")
    enable(model, exclude="blocks.2")
    assert judged(model) == (4, 2)
    enable(model)
    assert judged(model) == (6, 0)
    assert [name for name, module in model.named_modules() if "forward" in module.__dict__] == [""]


def test_what_was_enabled_by_itself_stays():
    model = Model()
    enable(model.blocks[1], skip=lambda call: True)
    enable(model)
    assert judged(model) == (4, 2)
    disable(model)
    assert judged(model) == (0, 2)
    disable(model.blocks[1])
    assert judged(model) == (0, 0)


def test_one_of_several_can_be_disabled():
    model = Model()
    enable(model, include=["blocks.0", "blocks.1"])
    disable(model.blocks[1])
    assert judged(model) == (2, 0)
    disable(model)
    assert judged(model) == (0, 0)


def test_a_module_with_two_names_is_excluded_by_either():
    model = Model(2)
    model.blocks[1].attn1 = model.blocks[0].attn1
    enable(model, include="blocks.0.attn1", exclude="blocks.1.attn1")
    assert judged(model) == (0, 2)
    disable(model)
    assert judged(model) == (0, 0)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_keeps_the_choice_and_runs_its_own_weights(clone):
    model = Model()
    enable(model, include="blocks.0", exclude="blocks.0.attn2")
    twin = clone(model)
    expected = model(X)
    with torch.no_grad():
        model.blocks[0].attn1.scale.fill_(100)
    assert torch.equal(twin(X), expected)
    assert judged(twin) == (1, 1)
    disable(twin)
    assert judged(twin) == (0, 0)
    assert judged(model) == (1, 1)


def test_names_of_a_compiled_module():
    model = torch.compile(Model(), backend="eager")
    enable(model, include="blocks.0")
    with torch.compiler.set_stance("force_eager"):
        assert judged(model) == (2, 0)


def test_compiled_with_a_choice():
    model = Model()
    enable(model, exclude="blocks.1")
    with sdpa_router.record() as seen:
        out = torch.compile(model, backend="aot_eager", fullgraph=True)(X)
    assert torch.allclose(out, model(X))
    skipped = [entry["count"] for entry in seen.records if "skipped" in entry["reasons"] and entry["phase"] == "trace"]
    assert sum(skipped) == 2


def test_a_pattern_that_matches_nothing():
    model = Model()
    enable(model, include="blocks.0")
    for arguments in ({"include": "blocks.7"}, {"exclude": ["blocks.0", "blocks.7"]}):
        with pytest.raises(ValueError, match=r"blocks\.7.*Model.*blocks\.0, .* and 3 more") as error:
            enable(model, **arguments)
        assert f"{next(iter(arguments))}=" in str(error.value)
    assert judged(model) == (2, 0)  # nothing has changed
    with pytest.raises(ValueError, match="Identity; it has none"):
        enable(nn.Identity(), include="attn")


def test_an_empty_include_is_refused_and_an_empty_exclude_excludes_nothing():
    model = Model()
    with pytest.raises(ValueError, match="include is empty; accepted: patterns, or None for the whole module"):
        enable(model, include=[])
    enable(model, exclude=[])
    assert judged(model) == (6, 0)


@pytest.mark.parametrize("patterns", [[3], [None], 3])
def test_patterns_are_strings(patterns):
    with pytest.raises(TypeError, match=r"include (holds|is) .*; accepted: glob patterns"):
        enable(Model(), include=patterns)


@pytest.mark.parametrize("change", ["compile", "compile a part", "drop a part", "put into another"])
def test_disable_finds_what_has_another_name_now(change):
    model = root = Model(2)
    enable(model, include=["blocks.1"])
    if change == "compile":
        root = torch.compile(model, backend="eager")
    elif change == "compile a part":
        model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    elif change == "drop a part":
        model.blocks = model.blocks[1:]
    else:
        model.add_module("inner", nn.Sequential(model.blocks))
        del model.blocks
        model.blocks = model.inner[0]
    disable(root)
    assert judged(model) == (0, 0)
    assert not [key for part in model.modules() for key in vars(part) if key.startswith("_sdpa")]


def test_a_module_that_was_compiled_since_is_enabled_anew():
    model = Model()
    enable(model)
    compiled = torch.compile(model, backend="eager")
    enable(compiled, include="blocks.0")
    assert judged(model) == (2, 0)
    disable(compiled)
    assert judged(model) == (0, 0)
