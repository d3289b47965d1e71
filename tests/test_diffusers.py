"""diffusers: the backend "sdpa_router", enable(), patch(), and the real models with their masks."""

from __future__ import annotations

import copy
import gc
import importlib.util
import inspect
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

diffusers = pytest.importorskip("diffusers")

import sdpa_router  # noqa: E402
from sdpa_router import UnsupportedError, disable, enable, patch, record, route, stats  # noqa: E402
from sdpa_router.integrations import diffusers as integration  # noqa: E402
from sdpa_router.integrations import diffusers_parallel  # noqa: E402
from sdpa_router.testing import BUDGET, gaussian, lse_error, relative_error, sdpa_oracle  # noqa: E402

dispatching = pytest.importorskip("diffusers.models.attention_dispatch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")


def _pipelines():
    path = Path(__file__).parents[1] / "bench" / "pipelines.py"
    spec = importlib.util.spec_from_file_location("bench_pipelines", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


pipelines = _pipelines()


def state():
    """Everything of diffusers and torch that the integration may touch."""
    names, registry = dispatching.AttentionBackendName, dispatching._AttentionBackendRegistry
    return {
        "members": list(names.__members__.items()),
        "values": dict(names._value2member_map_),
        "attributes": set(vars(names)),
        "context parallel": set(registry._supports_context_parallel),
        "active": registry._active_backend,
        "torch's backends": {name: found for name, found in registry._backends.items() if name != "sdpa_router"},
        "call": diffusers.ModelMixin.__call__,
        "sdpa": F.scaled_dot_product_attention,
    }


@pytest.fixture(autouse=True)
def _undone():
    before = state()
    diffusers.utils.logging.set_verbosity_error()
    sdpa_router.reset_stats()
    torch._dynamo.reset()
    yield
    integration.unpatch()
    integration.unregister()
    after = state()
    if patch._stays:  # what torch.compile traced keeps the router in place, passing through
        before["sdpa"] = after["sdpa"]
    assert after == before


@pytest.fixture
def registered():
    integration.register(min_kv=0)


def attend(query, key, value, attn_mask=None, *, backend="sdpa_router", lse=False, config=None, **arguments):
    """Attend as diffusers' models do: [B, S, H, D] in and out."""
    asked = {"return_lse": True} if lse else None
    dispatch = dispatching.dispatch_attention_fn
    chosen = {"backend": backend, "parallel_config": config, "attention_kwargs": asked}
    return dispatch(query, key, value, attn_mask=attn_mask, **chosen, **arguments)


def inputs(device, batch=2, heads=2, q_len=40, kv_len=48, dim=32, kv_heads=None, dtype=torch.float16):
    """Queries, keys and values [B, S, H, D]; and the same for SDPA, as diffusers permutes them."""
    made = gaussian(batch, heads, q_len, kv_len, dim, kv_heads=kv_heads, dtype=dtype, device=device)
    ours = tuple(tensor.transpose(1, 2).contiguous() for tensor in made)
    return ours, tuple(tensor.permute(0, 2, 1, 3) for tensor in ours)


def reasons():
    return {code for entry in stats()["signatures"] for code in entry["reasons"]}


def wan(device, dtype=torch.float16, seed=0):
    """A small Wan transformer and a forward of it."""
    torch.manual_seed(seed)
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=32, text_dim=32, freq_dim=32, ffn_dim=64, num_layers=2
    )
    model = model.to(device, dtype).eval().requires_grad_(False)
    latents, text = torch.randn(1, 16, 1, 8, 8), torch.randn(1, 20, 32)
    given = {"hidden_states": latents.to(device, dtype), "encoder_hidden_states": text.to(device, dtype)}
    timestep = torch.tensor([500], device=device)
    return model, lambda m=model: m(**given, timestep=timestep, return_dict=False)[0]


# The backend's answers


def test_case_02_a_mask_through_diffusers(registered, device):
    query = torch.randn(1, 64, 2, 64, device=device).half()
    value = torch.ones_like(query)
    value[:, :32] = 0
    mask = (torch.arange(64, device=device) < 32).view(1, 1, 1, 64)
    with dispatching.attention_backend("sdpa_router"), record() as seen:
        out = dispatching.dispatch_attention_fn(query, torch.randn_like(query), value, attn_mask=mask)
    assert torch.equal(out, torch.zeros_like(out))
    assert [(entry["backend"], entry["count"]) for entry in seen.records] == [("int8", 1)]


@pytest.mark.parametrize("lse", [False, True])
def test_a_mask_of_two_axes_is_a_padding_mask(registered, device, lse):
    ours, plain = inputs(device, kv_len=48)
    keep = torch.rand(2, 48, device=device) > 0.3
    out = attend(*ours, keep, lse=lse)
    out = out[0] if lse else out
    expected, _ = sdpa_oracle(*plain, keep[:, None, None])
    assert relative_error(out.transpose(1, 2), expected) < BUDGET.gaussian
    assert torch.equal(out, attend(*ours, keep[:, None, None]))
    assert stats()["routes"] == {"int8": 2, "sdpa": 0}


@pytest.mark.parametrize("lse", [False, True])
def test_a_mask_of_two_axes_that_is_none(registered, device, lse):
    # [Q, K], where B is not Q: for each query a row.
    ours, plain = inputs(device, q_len=40, kv_len=48)
    bias = torch.randn(40, 48, device=device).half()
    out = attend(*ours, bias, lse=lse)
    assert relative_error((out[0] if lse else out).transpose(1, 2), sdpa_oracle(*plain, bias)[0]) < BUDGET.sdpa
    assert reasons() == {"full_mask"}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"dtype": torch.float32}, "dtype"),
        ({"dim": 320}, "head_dim"),
        ({"full": True}, "full_mask"),
        ({"grad": True}, "requires_grad"),
    ],
)
def test_what_cannot_be_routed_is_answered_by_native_bit_for_bit(registered, device, change, code):
    shapes = {name: change[name] for name in ("dtype", "dim") if name in change}
    ours, _ = inputs(device, batch=1, q_len=16, kv_len=24, **shapes)
    ours = tuple(tensor.requires_grad_("grad" in change) for tensor in ours)
    mask = torch.randn(1, 1, 16, 24, device=device).half() if "full" in change else None
    out = attend(*ours, mask)
    assert torch.equal(out, attend(*ours, mask, backend="native"))
    assert out.requires_grad == ("grad" in change)
    assert reasons() == {code}


def test_an_invalid_call_raises_what_native_raises(registered, device):
    (query, key, value), _ = inputs(device)
    mask = torch.zeros(7, 48, device=device).half()
    # Torch 2.11 on an H200 refuses a key of another head_dim once, and the second time it crashes.
    narrow = [(query, key[..., :16], value)] if device.type == "cpu" else []
    for wrong in (*narrow, (query, key, value, mask), (query, key.float(), value)):
        with pytest.raises(RuntimeError) as theirs:
            attend(*wrong, backend="native")
        with pytest.raises(RuntimeError) as ours:
            attend(*wrong)
        assert str(ours.value) == str(theirs.value)


def test_grouped_queries_scale_and_causality(registered, device):
    ours, plain = inputs(device, heads=4, kv_heads=2)
    out = attend(*ours, scale=0.15, enable_gqa=True)
    assert relative_error(out.transpose(1, 2), sdpa_oracle(*plain, scale=0.15, enable_gqa=True)[0]) < BUDGET.gaussian
    ours, plain = inputs(device, q_len=48)
    out = attend(*ours, is_causal=True)
    assert relative_error(out.transpose(1, 2), sdpa_oracle(*plain, is_causal=True)[0]) < BUDGET.gaussian
    assert stats()["routes"] == {"int8": 2, "sdpa": 0}


def test_dropout_reaches_torch(registered, device):
    ours, _ = inputs(device)
    torch.manual_seed(1)
    out = attend(*ours, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(out, attend(*ours, dropout_p=0.5, backend="native"))
    assert reasons() == {"dropout"}


def test_every_argument_of_native_is_declared(registered):
    registry = dispatching._AttentionBackendRegistry
    native = registry._backends[dispatching.AttentionBackendName.NATIVE]
    ours = registry._backends["sdpa_router"]
    assert list(inspect.signature(native).parameters) == list(inspect.signature(ours).parameters)


@pytest.mark.parametrize(
    "case",
    [
        {"route": "int8"},
        {"route": "int8", "mask": "padding"},
        {"route": "int8", "mask": "bias"},
        {"route": "int8", "heads": 4, "kv_heads": 2},
        {"route": "int8", "scale": -0.15},
        {"route": "int8", "causal": True},
        {"route": "sdpa", "mask": "full"},
        {"route": "sdpa", "mask": "full bool"},
        {"route": "sdpa", "dtype": torch.float32, "mask": "padding"},
        {"route": "sdpa", "dtype": torch.float32, "heads": 4, "kv_heads": 2},
        {"route": "sdpa", "dtype": torch.float32, "scale": -0.15},
        {"route": "sdpa", "dtype": torch.float32, "causal": True},
    ],
)
@pytest.mark.parametrize("blocks", [1, 3])
def test_log_sum_exp_in_diffusers_layout(registered, device, monkeypatch, case, blocks):
    shapes = {name: case[name] for name in ("heads", "kv_heads", "dtype") if name in case}
    ours, plain = inputs(device, q_len=40, kv_len=48, **shapes)
    heads = case.get("heads", 2)
    # Few scores at once: several blocks of queries.
    monkeypatch.setattr("sdpa_router.lse._SCORES", 2 * heads * 48 * (40 // blocks + 1))
    masks = {
        "padding": torch.rand(2, 1, 1, 48, device=device) > 0.3,
        "bias": 3 * torch.randn(2, heads, 1, 48, device=device).to(ours[0].dtype),
        "full": torch.randn(1, 1, 40, 48, device=device).to(ours[0].dtype),
        "full bool": torch.rand(2, 1, 40, 48, device=device) > 0.3,
    }
    mask = masks.get(case.get("mask"))
    if case.get("mask") == "padding":
        mask[0] = False  # nothing to attend to: -inf
    arguments = {"scale": case.get("scale"), "is_causal": case.get("causal", False), "enable_gqa": "kv_heads" in case}
    out, lse = attend(*ours, mask, lse=True, **arguments)
    expected, expected_lse = sdpa_oracle(*plain, mask, **arguments)
    assert (out.shape, out.dtype) == (ours[0].shape, ours[0].dtype)
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((2, 40, heads), torch.float32, True)
    assert relative_error(out.transpose(1, 2), expected) < BUDGET.gaussian
    assert lse_error(lse.transpose(1, 2), expected_lse) < (BUDGET.lse if case["route"] == "int8" else 1e-4)
    if case.get("mask") == "padding":
        assert (lse[0] == -math.inf).all()
    assert stats()["routes"][case["route"]] == stats()["calls"] == 1


def test_log_sum_exp_under_grad(registered, device):
    ours, _ = inputs(device, batch=1, dtype=torch.float32)
    query = ours[0].requires_grad_()
    out, lse = attend(*ours, lse=True)
    (gradient,) = torch.autograd.grad(lse.sum() + out.sum(), query)
    assert gradient.abs().sum() > 0
    assert reasons() == {"requires_grad", "dtype"}


def test_log_sum_exp_raises_where_that_was_asked_for(device):
    integration.register(on_unsupported="raise")
    ours, _ = inputs(device, dtype=torch.float32)
    with pytest.raises(UnsupportedError):
        attend(*ours, lse=True)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
def test_block_masks_go_to_flex_attention(registered, device):
    ours, plain = inputs(device, batch=1, q_len=130, kv_len=200, dtype=torch.float32)
    visible = torch.arange(200, device=device) - torch.arange(130, device=device)[:, None] < 40
    block_mask = flex.create_block_mask(lambda b, h, q, kv: kv - q < 40, None, None, 130, 200, device=device)
    expected, expected_lse = sdpa_oracle(*plain, visible)
    assert relative_error(attend(*ours, block_mask).transpose(1, 2), expected) < 1e-5
    out, lse = attend(*ours, block_mask, lse=True)
    assert relative_error(out.transpose(1, 2), expected) < 1e-5
    assert lse_error(lse.transpose(1, 2), expected_lse) < 1e-4
    assert stats()["routes"] == {"int8": 0, "sdpa": 2}
    assert reasons() == {"tensor_subclass"}
    integration.register(on_unsupported="raise")
    with pytest.raises(UnsupportedError, match="BlockMask"):
        attend(*ours, block_mask)


def test_context_parallelism_is_diffusers_own(registered, device, monkeypatch):
    """Everything reaches what diffusers' own native backend would call, and its answer comes back."""
    ours, _ = inputs(device)
    seen = []

    def templated(*args, forward_op, backward_op, **kwargs):
        seen.append((args, kwargs))
        return "answer"

    monkeypatch.setattr(dispatching, "_templated_context_parallel_attention", templated)
    monkeypatch.setattr(diffusers_parallel, "_agreed", diffusers_parallel._judged)  # there are no other ranks
    parallel = SimpleNamespace(ring_degree=1, ulysses_degree=2, ulysses_anything=False, ring_anything=False)
    config, mask = SimpleNamespace(context_parallel_config=parallel), torch.rand(2, 48, device=device) > 0.5
    integration.register(min_kv=0)  # the function is looked up here
    for backend in ("native", "sdpa_router"):
        assert attend(*ours, mask, backend=backend, config=config, scale=0.2, dropout_p=0.1) == "answer"
    (native_args, native_kwargs), (args, kwargs) = seen
    assert kwargs == native_kwargs
    assert kwargs["_parallel_config"] is config
    assert all(a is b or a == b for a, b in zip(args[4:], native_args[4:], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(args[:4], native_args[:4], strict=True))
    assert dispatching._AttentionBackendRegistry._is_context_parallel_available(
        dispatching.AttentionBackendName("sdpa_router")
    )


# The switch


def test_a_model_is_switched(registered, device):
    model, forward = wan(device)
    native = forward()
    model.set_attention_backend("sdpa_router")
    routed = forward()
    assert stats()["routes"] == {"int8": 4, "sdpa": 0}
    assert 0 < relative_error(routed, native) < BUDGET.gaussian
    model.set_attention_backend("native")
    assert torch.equal(forward(), native)
    assert stats()["calls"] == 4


def test_the_member_is_like_the_others(registered):
    names = dispatching.AttentionBackendName
    member = names("sdpa_router")
    assert member is names.SDPA_ROUTER is names["SDPA_ROUTER"] is list(names)[-1]
    assert (member.name, member.value, str.__str__(member)) == ("SDPA_ROUTER", "sdpa_router", "sdpa_router")
    assert isinstance(member, names)
    assert copy.deepcopy(member) is member
    assert repr(member) == "<AttentionBackendName.SDPA_ROUTER: 'sdpa_router'>"


def test_registering_again_replaces_the_settings(registered, device):
    ours, _ = inputs(device)
    integration.register(skip=lambda call: True, min_kv=0)
    attend(*ours)
    assert reasons() == {"skipped"}
    integration.register(min_kv=0)
    attend(*ours)
    assert stats()["routes"] == {"int8": 1, "sdpa": 1}
    with pytest.raises(ValueError, match="on_unsupported"):
        integration.register(on_unsupported="never")


def test_unregistering_makes_a_switched_model_native(registered, device):
    model, forward = wan(device)
    _, other_forward = wan(device, seed=1)
    native, other_native = forward(), other_forward()
    model.set_attention_backend("sdpa_router")  # since 0.37 makes it the default of the other model, too
    dispatching._AttentionBackendRegistry._active_backend = dispatching.AttentionBackendName("sdpa_router")
    assert not torch.equal(other_forward(), other_native)
    integration.unregister()
    sdpa_router.reset_stats()
    assert torch.equal(forward(), native)
    assert torch.equal(other_forward(), other_native)
    assert stats()["calls"] == 0
    for unknown in (
        lambda: dispatching.attention_backend("sdpa_router").__enter__(),
        lambda: model.set_attention_backend("sdpa_router"),
    ):
        with pytest.raises(ValueError, match="sdpa_router"):
            unknown()
    integration.register(min_kv=0)
    assert not torch.equal(forward(), native)


def test_an_unknown_backend_is_named(registered):
    model, _ = wan("cpu")
    with pytest.raises(ValueError, match=r"sdpa_ruter.*sdpa_router"):
        model.set_attention_backend("sdpa_ruter")


def test_surrounding_settings_hold(registered, device):
    model, forward = wan(device)
    model.set_attention_backend("sdpa_router")
    enable(model, exclude="blocks.0", min_kv=0)
    forward()
    assert stats()["routes"] == {"int8": 2, "sdpa": 2}
    disable(model)
    with route(skip=lambda call: call.query.shape[2] != call.key.shape[2], min_kv=0):
        forward()
        attend(*inputs(device)[0], lse=True)  # 40 queries and 48 keys
    assert stats()["routes"] == {"int8": 4, "sdpa": 5}
    assert reasons() == {"skipped"}


def test_the_switch_of_the_environment_is_followed(registered, device, monkeypatch):
    ours, given = inputs(device)
    monkeypatch.delenv("SDPA_ROUTER", raising=False)
    native = F.scaled_dot_product_attention(*given).permute(0, 2, 1, 3)
    for value, routed in (("1", True), ("0", False), ("1", True)):
        monkeypatch.setenv("SDPA_ROUTER", value)
        assert torch.equal(attend(*ours), native) is not routed


def test_backends_can_be_chosen(device):
    model, forward = wan(device)
    native = forward()
    integration.patch(min_kv=0, backends=("torch",))
    with record() as seen:
        assert torch.equal(forward(), native)
    assert {entry["backend"] for entry in seen.records} == {"sdpa"}
    integration.unpatch()
    integration.register(min_kv=0, backends=["torch"])
    model.set_attention_backend("sdpa_router")
    assert torch.equal(forward(), native)
    integration.register(
        min_kv=0, backends=("torch", "int8"), max_error=1.0, on_error="fallback", allow_mask_blind=True
    )
    assert torch.equal(forward(), native)
    integration.register(min_kv=0)
    assert not torch.equal(forward(), native)


def test_unsupported_versions_are_named(monkeypatch):
    monkeypatch.delattr(dispatching, "_AttentionBackendRegistry")
    for call in (integration.register, integration.patch):
        with pytest.raises(ImportError, match=rf"found diffusers {diffusers.__version__}; supported: 0\.36"):
            call()
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ImportError, match="found no diffusers; supported:"):
        integration.register()


# enable() and patch()


def test_case_30_enable_touches_one_model_and_nothing_global(device):
    before = state()
    model, forward = wan(device)
    other, other_forward = wan(device)
    native = other_forward()
    enable(model, min_kv=0)
    inside = []
    model.blocks[0].register_forward_pre_hook(lambda *_: inside.append(state()))
    assert not torch.equal(forward(), native)
    assert {name for name in before if inside[0][name] != before[name]} <= {"sdpa"}
    assert state() == before
    calls = stats()["calls"]
    assert torch.equal(other_forward(), native)
    assert torch.equal(forward(other), native)
    assert stats()["calls"] == calls == 4
    handle = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forward()
    handle.remove()
    calls = stats()["calls"]
    assert torch.equal(other_forward(), native)
    assert stats()["calls"] == calls
    disable(model)
    assert torch.equal(forward(), native)
    assert state() == before


def test_context_parallelism_is_served_as_long_as_somebody_is_enabled(device, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    before = state()
    first, second = wan(device)[0], wan(device)[0]
    enable(first)
    enable(second)
    integration.patch()
    disable(first)
    integration.unpatch()
    assert state() != before
    copied = copy.deepcopy(second)
    disable(second)
    assert state() != before
    del copied  # nobody disables it
    gc.collect()
    assert state() == before


def test_patch_covers_every_model_but_autoencoders(device):
    _, forward = wan(device)
    native = forward()
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4).to(device, torch.float16)
    image = torch.randn(1, 3, 8, 8, device=device).half()
    integration.patch(min_kv=0)
    _, later_forward = wan(device)
    with torch.no_grad():
        assert not torch.equal(forward(), native)
        assert torch.equal(later_forward(), forward())
        assert stats()["routes"] == {"int8": 12, "sdpa": 0}
        vae(image)
        vae.decode(torch.randn(1, 4, 8, 8, device=device).half())
        assert stats()["calls"] == 12
    integration.patch(skip=lambda call: True, min_kv=0)
    forward()
    assert reasons() == {"skipped"}
    with route(min_kv=0):
        forward()
    assert stats()["routes"] == {"int8": 16, "sdpa": 4}
    integration.unpatch()
    assert torch.equal(forward(), native)
    assert stats()["calls"] == 20


def test_patches_of_others_survive(device, monkeypatch):
    model, forward = wan(device)
    native = forward()
    count = []

    def theirs(self, *args, **kwargs):
        count.append(self)
        return torch.nn.Module.__call__(self, *args, **kwargs)

    monkeypatch.setattr(diffusers.ModelMixin, "__call__", theirs, raising=False)
    integration.patch(min_kv=0)
    assert not torch.equal(forward(), native)
    assert count == [model]
    ours = diffusers.ModelMixin.__call__
    monkeypatch.setattr(diffusers.ModelMixin, "__call__", lambda self, *a, **k: ours(self, *a, **k))
    integration.unpatch()
    assert torch.equal(forward(), native)
    assert len(count) == 2
    monkeypatch.setattr(diffusers.ModelMixin, "__call__", ours)
    integration.unpatch()
    assert diffusers.ModelMixin.__call__ is theirs
    monkeypatch.undo()


# torch.compile


def test_a_switched_model_compiles_whole_and_follows_the_registration(registered, device):
    model, forward = wan(device)
    native = forward()
    model.set_attention_backend("sdpa_router")
    eager = forward()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert relative_error(forward(compiled), eager) < 1e-3
    assert {entry["phase"] for entry in stats()["signatures"]} == {"eager", "trace"}
    assert stats()["routes"]["int8"] == 8
    integration.register(skip=_always, min_kv=0)
    assert relative_error(forward(compiled), native) < 1e-3
    assert reasons() == {"skipped"}
    integration.unregister()
    sdpa_router.reset_stats()
    assert relative_error(forward(compiled), native) < 1e-3
    assert stats()["calls"] == 0


def _always(call):
    return True


def test_patched_models_compile_whole(device):
    model, forward = wan(device)
    native = forward()
    integration.patch(min_kv=0)
    eager = forward()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert relative_error(forward(compiled), eager) < 1e-3
    assert stats()["routes"]["int8"] == 8
    integration.unpatch()
    assert relative_error(forward(compiled), native) < 1e-3
    assert stats()["routes"]["int8"] == 8


def test_log_sum_exp_compiles(registered, device):
    ours, _ = inputs(device)
    full = torch.randn(40, 48, device=device).half()

    def both(query, key, value):
        return attend(query, key, value, lse=True), attend(query, key, value, full, lse=True)

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)(*ours)
    for (out, lse), (eager_out, eager_lse) in zip(compiled, both(*ours), strict=True):
        assert relative_error(out, eager_out) < 1e-3
        assert lse_error(lse, eager_lse) < 1e-3
    assert stats()["routes"] == {"int8": 2, "sdpa": 2}
    assert {entry["phase"] for entry in stats()["signatures"]} == {"eager", "trace"}


# Real models


@pytest.mark.parametrize("name", list(pipelines.BUILDS))
def test_pipelines(name, device):
    small = pipelines.build(name, device=device)
    native = pipelines.images(small)
    args, kwargs = pipelines.first_inputs(small)
    settings = sdpa_router.Settings(min_kv=0)
    found = sdpa_router.audit(small.model, *args, kwargs=kwargs, settings=settings, show=False)
    assert found.output_error < BUDGET.gaussian
    assert all(row.error is None or row.error < BUDGET.gaussian for row in found.rows)
    decode, in_vae = small.pipe.vae.decode, []

    def counted(*args, **kwargs):
        with record() as seen:
            out = decode(*args, **kwargs)
        in_vae.append(len(seen.records))
        return out

    small.pipe.vae.decode = counted
    enable(small.model, min_kv=0)
    with record() as seen:
        routed = pipelines.images(small)
    assert in_vae == [0]
    assert 0 < relative_error(routed, native) < 0.02
    left = {entry["mask"]["kind"] for entry in seen.records if entry["backend"] == "sdpa"}
    assert left == ({"full"} if name == "HunyuanVideo" else set())  # its token refiner
    assert sum(entry["count"] for entry in seen.records) == len(found.rows)
    disable(small.model)
    assert torch.equal(pipelines.images(small), native)


def test_the_joint_mask_of_qwen_image_has_a_gap(device):
    small = pipelines.build("Qwen-Image", device=device)
    masks = []
    enable(small.model, skip=lambda call: masks.append(call.attn_mask) or False, min_kv=0)
    with record() as seen:
        pipelines.images(small)
    kept = masks[0].flatten().tolist()
    assert kept == [True] * 15 + [False] * 9 + [True] * 16
    assert {(entry["backend"], entry["mask"]["kind"]) for entry in seen.records} == {("int8", "per_key")}


def test_the_table_of_models(tmp_path):
    script, out = Path(pipelines.__file__).with_name("bench_models.py"), tmp_path / "models.jsonl"
    command = [sys.executable, script, "--table", "--models", "Qwen-Image,HunyuanVideo", "--out", out]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    header, _, *rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert header.startswith("| model | routed calls | native calls |")
    assert rows[0].startswith("| Qwen-Image | 2 | 0 | per key bool [1, 1, 1, 40] | 0.00")
    assert rows[1].startswith(
        "| HunyuanVideo | 2 | 1 (full_mask) | full bool [1, 2, 24, 24]; per key bool [1, 1, 1, 56]"
    )
    assert all(row.endswith("| 1 native, 0 routed |") for row in rows)
    assert [json.loads(line)["model"] for line in out.read_text().splitlines()] == ["Qwen-Image", "HunyuanVideo"]
