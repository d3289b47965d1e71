"""The ComfyUI attention function and node, against a stand-in for the parts of ComfyUI that they touch.

The stand-in has the signature of ComfyUI's attention functions, the order in which its wrap_attn() looks at containers,
at the model's override and at the attention itself, and a ModelPatcher's clone() and model_options.
"""

import copy
import functools
import importlib.util
import inspect
import sys
import types
import warnings

import pytest
import torch
import torch.nn.functional as F

import sdpa_router
from sdpa_router import cli, testing
from sdpa_router.integrations import comfyui

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, DIM, LENGTH = 4, 32, 48
OVERRIDE = "optimized_attention_override"
INSIDE = "_inside_attn_wrapper"
BUDGET = testing.BUDGET.gaussian


class Container:
    """A tensor that whoever attends takes over."""

    def __init__(self, tensor):
        self.tensor = tensor

    def take(self):
        assert self.tensor is not None, "taken twice"
        tensor, self.tensor = self.tensor, None
        return tensor


def wrap_attn(func):
    """Call the override of the model, once, or `func`; containers are opened for whoever has no use for them."""

    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        kwargs.pop("preferred_attention", None)
        outermost = INSIDE not in kwargs
        kwargs[INSIDE] = True
        options = kwargs.get("transformer_options") or {}
        override = options.get(OVERRIDE) if outermost else None
        if isinstance(args[0], Container):
            chosen = wrapper if override is None else override
            if getattr(chosen, "container_function", None) is not None:
                return chosen.container_function(*args, **kwargs)
            args = (*(container.take() for container in args[:3]), *args[3:])
        if override is not None:
            return override(func, *args, **kwargs)
        return func(*args, **kwargs)

    wrapper.container_function = None
    return wrapper


@wrap_attn
def attention_pytorch(
    q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs
):
    batch = q.shape[0]
    if not skip_reshape:
        head_dim = q.shape[-1] // heads
        q, k, v = (tensor.unflatten(-1, (-1, head_dim)).transpose(1, 2) for tensor in (q, k, v))
    if mask is not None and mask.ndim == 2:
        mask = mask[None]
    if mask is not None and mask.ndim == 3:
        mask = mask[:, None]
    extra = {name: kwargs[name] for name in ("scale", "enable_gqa") if name in kwargs}
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False, **extra)
    return out if skip_output_reshape else out.transpose(1, 2).reshape(batch, -1, out.shape[1] * out.shape[3])


@wrap_attn
def attention_default(
    q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs
):
    """What ComfyUI was started with, where that is not torch: recognisable by its answer."""
    return torch.full_like(q, 7)


class ModelPatcher:
    def __init__(self):
        self.model_options = {"transformer_options": {}}

    def clone(self):
        other = ModelPatcher()
        other.model_options = copy.deepcopy(self.model_options)
        return other

    def attend(self, q, k, v, *args, **kwargs):
        """The call that a model makes."""
        options = self.model_options["transformer_options"]
        return attention_default(q, k, v, HEADS, *args, transformer_options=options, **kwargs)

    @property
    def override(self):
        return self.model_options["transformer_options"].get(OVERRIDE)

    @override.setter
    def override(self, function):
        self.model_options["transformer_options"][OVERRIDE] = function


@pytest.fixture(autouse=True)
def comfy(monkeypatch):
    """ComfyUI, as far as it goes; the module of the attention functions."""
    for name in ("comfy", "comfy.ldm", "comfy.ldm.modules"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module = types.ModuleType("comfy.ldm.modules.attention")
    module.REGISTERED_ATTENTION_FUNCTIONS = {}
    module.register_attention_function = module.REGISTERED_ATTENTION_FUNCTIONS.setdefault
    module.wrap_attn, module.attention_pytorch = wrap_attn, attention_pytorch
    monkeypatch.setitem(sys.modules, module.__name__, module)
    sdpa_router.reset_stats()
    return module


def tensors(kv_heads=HEADS, dtype=torch.float16, heads_first=False):
    """Query, key, value as [B, S, H * D], or [B, H, S, D] with heads_first."""
    given = testing.gaussian(2, HEADS, LENGTH, LENGTH, DIM, kv_heads=kv_heads, dtype=dtype, device=DEVICE)
    return given if heads_first else tuple(tensor.transpose(1, 2).flatten(2) for tensor in given)


def key_mask(*shape):
    return (torch.arange(LENGTH, device=DEVICE) % 3 != 0).expand(*shape, LENGTH)


def patch(model=None, **settings):
    return comfyui.patch_model(model or ModelPatcher(), **{"min_kv": 1, "log": False} | settings)


def recorded(function, *args, **kwargs):
    """The answer, and (backend, reasons) of each signature that was decided about."""
    with sdpa_router.record() as seen:
        out = function(*args, **kwargs)
    return out, [(record["backend"], record["reasons"]) for record in seen.records]


def test_the_signature_is_comfyuis():
    ours, theirs = (inspect.signature(f).parameters for f in (comfyui.attention_function(), attention_pytorch))
    described = [[(name, p.kind, p.default) for name, p in parameters.items()] for parameters in (ours, theirs)]
    assert described[0] == described[1]


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize("mask", [None, key_mask(2, 1), key_mask(2, 1, 1)], ids=["none", "rank 3", "rank 4"])
def test_layouts_and_masks(heads_first, skip_output_reshape, mask):
    inputs = tensors(heads_first=heads_first)
    layout = {"skip_reshape": heads_first, "skip_output_reshape": skip_output_reshape}
    out, decisions = recorded(patch().attend, *inputs, mask, **layout)
    native = attention_pytorch(*inputs, HEADS, mask, **layout)
    assert decisions == [("int8", [])]
    assert out.shape == ((2, HEADS, LENGTH, DIM) if skip_output_reshape else (2, LENGTH, HEADS * DIM))
    assert testing.relative_error(out, native) < BUDGET


def test_a_full_mask_stays_with_torch_to_the_bit():
    mask = torch.randn(LENGTH, LENGTH, device=DEVICE).half()
    out, decisions = recorded(patch().attend, *tensors(), mask)
    assert decisions == [("sdpa", ["full_mask"])]
    assert torch.equal(out, attention_pytorch(*tensors(), HEADS, mask))


@pytest.mark.parametrize("extra", [{"scale": 0.5}, {"enable_gqa": True}, {"attn_precision": torch.float32}])
def test_keywords_reach_the_kernel(extra):
    inputs = tensors(kv_heads=2 if "enable_gqa" in extra else HEADS)
    out, decisions = recorded(patch().attend, *inputs, **extra)
    native = attention_pytorch(*inputs, HEADS, **extra)
    assert decisions == [("int8", [])]
    assert testing.relative_error(out, native) < 2 * BUDGET
    if "scale" in extra:
        assert testing.relative_error(out, attention_pytorch(*inputs, HEADS)) > 0.1


@pytest.mark.parametrize("settings", [{}, {"on_unsupported": "raise"}])
def test_low_precision_attention_false_stays_with_torch(settings):
    native = attention_pytorch(*tensors(), HEADS)
    with sdpa_router.route(min_kv=1, log=False):
        out, decisions = recorded(patch(**settings).attend, *tensors(), low_precision_attention=False)
    assert [(route, "skipped" in reasons) for route, reasons in decisions] == [("sdpa", True)]
    assert torch.equal(out, native)
    _, decisions = recorded(patch(**settings).attend, *tensors(), low_precision_attention=True)
    assert decisions == [("int8", [])]


def test_surrounding_settings_hold_but_not_over_low_precision_attention_false():
    attend, given = comfyui.attention_function(min_kv=1, log=False), tensors()
    native = attention_pytorch(*given, HEADS)
    with sdpa_router.route(backends=("torch",)):
        assert torch.equal(attend(*given, HEADS), native)
    with sdpa_router.route(min_kv=1):
        assert not torch.equal(attend(*given, HEADS), native)
        assert torch.equal(attend(*given, HEADS, low_precision_attention=False), native)


def test_backends_can_be_chosen(comfy):
    given = tensors()
    native = attention_pytorch(*given, HEADS)
    comfyui.register(min_kv=1, backends=("torch",))
    registered = comfy.REGISTERED_ATTENTION_FUNCTIONS["sdpa_router"]
    attends = (comfyui.attention_function(min_kv=1, backends=("torch",)), registered)
    assert all(torch.equal(attend(*given, HEADS), native) for attend in attends)
    assert torch.equal(patch(backends=("torch",)).attend(*given), native)


def test_only_the_clone_is_patched():
    torch_attention, model = F.scaled_dot_product_attention, ModelPatcher()
    patched = patch(model)
    assert model.override is None
    out, decisions = recorded(model.attend, *tensors())
    assert decisions == []
    assert torch.equal(out, torch.full_like(out, 7))
    _, decisions = recorded(patched.attend, *tensors())
    assert decisions == [("int8", [])]
    # A later clone, as every other node makes one, keeps it.
    _, decisions = recorded(patched.clone().attend, *tensors())
    assert decisions == [("int8", [])]
    assert F.scaled_dot_product_attention is torch_attention


def test_patching_again_replaces_the_settings():
    out, decisions = recorded(patch(patch(), skip=lambda call: True).attend, *tensors())
    assert decisions == [("sdpa", ["skipped"])]
    assert torch.equal(out, attention_pytorch(*tensors(), HEADS))


def test_an_override_that_changes_arguments_is_chained():
    model, seen = ModelPatcher(), []

    def hides_keys(func, q, k, v, heads, mask=None, **kwargs):
        seen.append(func)
        return func(q, k, v, heads, key_mask(1, 1), **kwargs)

    model.override = hides_keys
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        out, decisions = recorded(patch(patch(model)).attend, *tensors())
    assert len(seen) == 1
    assert decisions == [("int8", [])]
    assert testing.relative_error(out, attention_pytorch(*tensors(), HEADS, key_mask(1, 1))) < BUDGET


def test_an_override_that_answers_by_itself_wins_and_is_warned_of_once():
    model = ModelPatcher()

    def answers(func, q, *args, **kwargs):
        return torch.full_like(q, 3)

    model.override = answers
    patched = patch(model)
    with pytest.warns(UserWarning, match=r"answers, which the model had before SDPA Router, answers calls by itself"):
        out, decisions = recorded(patched.attend, *tensors())
    assert decisions == []
    assert torch.equal(out, torch.full_like(out, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        patched.attend(*tensors())


def test_an_override_that_forgets_where_it_is_does_not_recurse():
    model = ModelPatcher()
    model.override = lambda func, *args, _inside_attn_wrapper, **kwargs: func(*args, **kwargs)
    _, decisions = recorded(patch(model).attend, *tensors())
    assert decisions == [("int8", [])]


def test_a_later_override_wins():
    patched = patch()
    patched.override = lambda func, *args, **kwargs: func(*args, **kwargs)
    out, decisions = recorded(patched.attend, *tensors())
    assert decisions == []
    assert torch.equal(out, torch.full_like(out, 7))


def test_containers_are_taken_once():
    containers = [Container(tensor) for tensor in tensors()]
    out, decisions = recorded(patch().attend, *containers, preferred_attention=None)
    assert decisions == [("int8", [])]
    assert [container.tensor for container in containers] == [None] * 3
    assert testing.relative_error(out, attention_pytorch(*tensors(), HEADS)) < BUDGET


def test_registered_by_name(comfy):
    comfyui.register(min_kv=10**6, log=False)
    comfyui.register(min_kv=1, log=False)
    attention = comfy.REGISTERED_ATTENTION_FUNCTIONS["sdpa_router"]
    _, decisions = recorded(attention, *tensors(), HEADS, transformer_options={})
    assert decisions == [("int8", [])]
    comfyui.register(min_kv=1, log=False, backends=("torch", "int8"))
    _, decisions = recorded(comfy.REGISTERED_ATTENTION_FUNCTIONS["sdpa_router"], *tensors(), HEADS)
    assert decisions == [("sdpa", [])]
    # A model's own override is asked, as with every attention function of ComfyUI.
    options = {OVERRIDE: lambda func, q, *args, **kwargs: q}
    _, decisions = recorded(attention, *tensors(), HEADS, transformer_options=options)
    assert decisions == []
    # Nodes that choose by name make this override of it.
    model = ModelPatcher()
    model.override = lambda func, *args, **kwargs: attention(*args, **kwargs)
    _, decisions = recorded(model.attend, *tensors())
    assert decisions == [("int8", [])]
    comfyui.unregister()
    assert comfy.REGISTERED_ATTENTION_FUNCTIONS == {}


def test_what_int8_can_not_answer(caplog):
    inputs = tensors(dtype=torch.float32)
    out, decisions = recorded(patch().attend, *inputs)
    assert decisions == [("sdpa", ["dtype"])]
    assert torch.equal(out, attention_pytorch(*inputs, HEADS))
    with pytest.raises(sdpa_router.UnsupportedError, match="dtype"):
        patch(on_unsupported="raise").attend(*inputs)
    with pytest.warns(UserWarning, match="dtype"):
        patch(on_unsupported="warn").attend(*inputs)


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("mask", [None, key_mask(1, 1)], ids=["none", "per key"])
def test_compiled_in_one_graph(chained, mask):
    model = ModelPatcher()
    if chained:
        model.override = lambda func, *args, **kwargs: func(*args, **kwargs)
    patched = patch(model)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v, mask: patched.attend(q, k, v, mask) + 1, fullgraph=True)
    out, decisions = recorded(compiled, *tensors(), mask)
    assert decisions == [("int8", [])]
    assert testing.relative_error(out - 1, attention_pytorch(*tensors(), HEADS, mask)) < BUDGET


def test_compiled_with_low_precision_attention_false():
    patched = patch()
    torch._dynamo.reset()
    compiled = torch.compile(lambda *inputs: patched.attend(*inputs, low_precision_attention=False), fullgraph=True)
    out, decisions = recorded(compiled, *tensors())
    assert [(route, "skipped" in reasons) for route, reasons in decisions] == [("sdpa", True)]
    assert testing.relative_error(out, attention_pytorch(*tensors(), HEADS)) < testing.BUDGET.sdpa


def test_node():
    node = comfyui.NODE_CLASS_MAPPINGS["SDPARouter"]
    assert comfyui.NODE_DISPLAY_NAME_MAPPINGS == {"SDPARouter": "SDPA Router"}
    inputs = node.INPUT_TYPES()["required"]
    method = getattr(node(), node.FUNCTION)
    assert list(inputs) == list(inspect.signature(method).parameters)
    model = ModelPatcher()
    assert method(model, False, "fallback", 0) == (model,)
    (patched,) = method(model, True, "fallback", 1)
    assert patched is not model
    _, decisions = recorded(patched.attend, *tensors())
    assert decisions == [("int8", [])]
    (patched,) = method(model, True, "raise", 1000)
    with pytest.raises(sdpa_router.UnsupportedError, match="short"):
        patched.attend(*tensors())
    assert list(inputs["on_unsupported"][0]) == ["fallback", "warn", "raise"]


def test_what_is_not_a_model_is_refused():
    for given in (torch.nn.Linear(1, 1), None, object()):
        with pytest.raises(TypeError, match=rf"given {type(given).__name__}; accepted: .*ModelPatcher"):
            comfyui.patch_model(given)


def test_comfyui_missing_or_too_old(comfy, monkeypatch):
    monkeypatch.delattr(comfy, "wrap_attn")
    with pytest.raises(ImportError, match=r"found a ComfyUI without wrap_attn; supported: a ComfyUI whose"):
        comfyui.patch_model(ModelPatcher())
    monkeypatch.setitem(sys.modules, "comfy.ldm.modules.attention", None)
    with pytest.raises(ImportError, match=r"found no ComfyUI .*; supported: a ComfyUI whose"):
        comfyui.register()


def load(folder):
    """Import a custom-node folder the way ComfyUI does: by its path."""
    spec = importlib.util.spec_from_file_location("custom_node_under_test", folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_writes_a_folder_that_comfyui_loads(tmp_path, capsys):
    folder = tmp_path / "sdpa_router"
    for _ in range(2):  # an earlier folder is replaced
        assert cli.main(["comfyui-node", str(folder)]) == 0
    assert f"wrote {folder / '__init__.py'}" in capsys.readouterr().out
    assert [file.name for file in folder.iterdir()] == ["__init__.py"]
    module = load(folder)
    assert module.NODE_CLASS_MAPPINGS is comfyui.NODE_CLASS_MAPPINGS
    assert module.NODE_DISPLAY_NAME_MAPPINGS is comfyui.NODE_DISPLAY_NAME_MAPPINGS


def test_the_command_overwrites_nothing_else(tmp_path, capsys):
    (tmp_path / "custom_nodes" / "another_node").mkdir(parents=True)
    own = tmp_path / "own"
    own.mkdir()
    (own / "__init__.py").write_text("mine = True\n")
    file = tmp_path / "file"
    file.write_text("")
    refusals = {
        tmp_path / "custom_nodes": "holds another_node; accepted: a new or empty folder",
        own: "holds __init__.py; accepted",
        file: "a file; accepted: a new or empty folder",
        tmp_path / "missing" / "node": "accepted: a new folder inside one that exists",
    }
    for given, words in refusals.items():
        with pytest.raises(SystemExit) as stop:
            cli.main(["comfyui-node", str(given)])
        captured = capsys.readouterr()
        assert (stop.value.code, captured.out, captured.err.count("\n")) == (2, "", 1)
        assert words in captured.err
    assert (own / "__init__.py").read_text() == "mine = True\n"
    assert [entry.name for entry in (tmp_path / "custom_nodes").iterdir()] == ["another_node"]
