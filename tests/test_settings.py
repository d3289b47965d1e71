"""Settings: the functions that take them one by one take all of them, with the same defaults, and hand them on."""

import dataclasses
import fractions
import inspect
import math
import re
import sys
import types

import numpy
import pytest
import torch
from torch import nn

from sdpa_router import BackendLimits, Settings, enable, route
from sdpa_router.integrations import comfyui, diffusers, transformers
from sdpa_router.settings import intern

FUNCTIONS = {
    "route": route,
    "enable": enable,
    "comfyui.attention_function": comfyui.attention_function,
    "comfyui.register": comfyui.register,
    "comfyui.patch_model": comfyui.patch_model,
    "diffusers.register": diffusers.register,
    "diffusers.patch": diffusers.patch,
    "transformers.register": transformers.register,
}
DEFAULTS = {field.name: field.default for field in dataclasses.fields(Settings)}


def never(call):
    return False


OTHERS = {
    "on_unsupported": "warn",
    "min_kv": 7,
    "pv": "16bit",
    "precision": "high",
    "skip": never,
    "log": False,
    "backends": ["torch", "int8"],
    "allow_mask_blind": True,
    "max_error": 0.5,
    "on_error": "fallback",
    "by_tile": False,
}


class Model(nn.Module):
    """Something that may attend, and looks like a ModelPatcher of ComfyUI."""

    def __init__(self):
        super().__init__()
        self.model_options = {}

    def clone(self):
        return Model()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_have_the_defaults_of_settings(name):
    parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert {field: keywords[field] for field in DEFAULTS} == DEFAULTS
    assert [field for field in keywords if field in DEFAULTS] == list(DEFAULTS)
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_setting_arrives(name, monkeypatch):
    assert list(OTHERS) == list(DEFAULTS)
    if "." in name:
        pytest.importorskip(name.partition(".")[0]) if not name.startswith("comfyui") else stand_in(monkeypatch)
    function, made = FUNCTIONS[name], []

    def settings(*args, **kwargs):
        made.append(Settings(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(sys.modules[function.__module__], "Settings", settings)
    given = (Model(),) if name in ("enable", "comfyui.patch_model") else ()
    function(*given, **OTHERS)
    for undo in {"diffusers.register": [diffusers.unregister], "diffusers.patch": [diffusers.unpatch]}.get(name, []):
        undo()
    assert made[0] == Settings(**OTHERS)
    assert made[0].backends == ("torch", "int8")


def stand_in(monkeypatch):
    """ComfyUI's module of attention functions, as far as it is looked at here."""
    module = types.ModuleType("comfy.ldm.modules.attention")
    module.attention_pytorch = module.wrap_attn = lambda function: function
    module.REGISTERED_ATTENTION_FUNCTIONS = {}
    module.register_attention_function = module.REGISTERED_ATTENTION_FUNCTIONS.setdefault
    for name in ("comfy", "comfy.ldm", "comfy.ldm.modules", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)


NUMPYS = {
    "min_kv": (numpy.int64(7), 7),
    "max_error": (numpy.float32(0.5), 0.5),
    "log": (numpy.bool_(False), False),
    "by_tile": (numpy.bool_(True), True),
}


def test_numbers_and_flags_of_numpy_are_pythons():
    given = Settings(**{name: value for name, (value, _) in NUMPYS.items()})
    assert given == Settings(**{name: value for name, (_, value) in NUMPYS.items()})
    assert intern(given) == intern(Settings(**{name: value for name, (_, value) in NUMPYS.items()}))
    assert [type(getattr(given, name)) for name in NUMPYS] == [int, float, bool, bool]
    assert Settings(max_error=fractions.Fraction(1, 50)).max_error == 0.02
    assert Settings(max_error=numpy.int8(1)).max_error == 1
    assert Settings(max_error=math.inf).max_error == math.inf
    limits = BackendLimits(max_head_dim=numpy.int32(64), error=numpy.float16(0.5), gqa=numpy.bool_(True))
    assert [type(value) for value in (limits.max_head_dim, limits.error, limits.gqa)] == [int, float, bool]


@pytest.mark.parametrize(
    "given",
    [
        *({"min_kv": True}, {"min_kv": numpy.bool_(True)}, {"min_kv": 64.0}, {"min_kv": numpy.float32(64)}),
        *({"min_kv": "64"}, {"min_kv": numpy.int64(-1)}, {"min_kv": torch.tensor(64)}, {"max_error": True}),
        *({"max_error": numpy.bool_(True)}, {"max_error": numpy.float32("nan")}, {"max_error": 1j}),
        *({"max_error": "0.02"}, {"max_error": 10**400}, {"max_error": numpy.float32(-1)}, {"log": 1}),
        *({"log": numpy.int64(1)}, {"by_tile": "yes"}, {"by_tile": None}, {"log": numpy.array([True])}),
    ],
)
def test_what_is_no_such_number_or_flag_is_refused(given):
    (name,) = given
    with pytest.raises((TypeError, ValueError), match=f"{name} is .*; accepted: "):
        Settings(**given)


@pytest.mark.parametrize("backends", [{"int8", "torch"}, iter(("int8",)), ("int8", "int8"), "int8", ["int8", "bogus"]])
def test_backends_without_an_order_or_unknown_are_refused(backends):
    with pytest.raises(ValueError, match=r"backends is .*; accepted: 'fastest' or different names out of int8"):
        route(backends=backends)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        *(("sage", "('sage',)"), ("INT8,torch", "('int8', 'torch')"), (("int8", "sagee"), "('int8', 'sage')")),
        *(("Fastest", "'fastest'"), (["fastest"], "'fastest'"), (("int8", "int8"), "('int8',)")),
        (("fastest", "int8"), "'fastest'"),
    ],
)
def test_who_was_meant_is_said(given, meant):
    with pytest.raises(ValueError, match=re.escape(f"; did you mean {meant}?")):
        Settings(backends=given)


@pytest.mark.parametrize("given", [(), "", None, 5, (None,), ([],), ("größe",), "xyzzy"])
def test_where_nobody_could_be_meant_nothing_is_guessed(given):
    with pytest.raises(ValueError, match=r"as a tuple in order$"):
        Settings(backends=given)


def test_backends_as_a_list_in_traced_code():
    def inside(x):
        with route(backends=["torch"]):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    x = torch.randn(1, 2, 8, 16)
    found = torch.compile(inside, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(found, nn.functional.scaled_dot_product_attention(x, x, x))
