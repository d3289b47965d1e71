"""Settings: the functions that take them one by one take all of them, with the same defaults, and hand them on."""

import dataclasses
import inspect
import sys
import types

import pytest
import torch
from torch import nn

from sdpa_router import Settings, enable, route
from sdpa_router.integrations import comfyui, diffusers, transformers

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


@pytest.mark.parametrize("backends", [{"int8", "torch"}, iter(("int8",)), ("int8", "int8"), "int8", ["int8", "bogus"]])
def test_backends_without_an_order_or_unknown_are_refused(backends):
    with pytest.raises(ValueError, match=r"backends is .*; accepted: 'fastest' or different names out of int8"):
        route(backends=backends)


def test_backends_as_a_list_in_traced_code():
    def inside(x):
        with route(backends=["torch"]):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    x = torch.randn(1, 2, 8, 16)
    found = torch.compile(inside, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(found, nn.functional.scaled_dot_product_attention(x, x, x))
