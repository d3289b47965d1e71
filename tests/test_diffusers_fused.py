"""Fused norm, RoPE and quantisation against diffusers' own Wan, Flux, Qwen-Image and LTX blocks; enable(fuse_qk)."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch

pytest.importorskip("diffusers")

from diffusers.models.attention_processor import Attention
from diffusers.models.transformers import transformer_flux, transformer_ltx, transformer_qwenimage, transformer_wan
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import sdpa_router
from sdpa_router import disable, enable, record
from sdpa_router.backends.base import Backend, BackendLimits
from sdpa_router.integrations.diffusers_fused import fuse
from sdpa_router.integrations.fused_processors import FusedFlux, FusedLTX, FusedQwenImage, FusedWan
from sdpa_router.testing import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUDGET = 0.0135


@pytest.fixture(autouse=True)
def _no_gradients():
    sdpa_router.reset_stats()
    with torch.no_grad():
        yield


def with_weights(module):
    for name, parameter in module.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
    return module.to(DEVICE)


def wan(**options):
    """A Wan attention, hidden states and angles of 3 x 4 x 8 patches."""
    processor = transformer_wan.WanAttnProcessor()
    block = with_weights(transformer_wan.WanAttention(96, heads=3, dim_head=32, processor=processor, **options))
    rope = transformer_wan.WanRotaryPosEmbed(32, (1, 2, 2), 64)
    angles = tuple(t.to(DEVICE) for t in rope(torch.zeros(1, 4, 3, 8, 16)))
    return block, {"hidden_states": torch.randn(2, 96, 96, device=DEVICE), "rotary_emb": angles}


def flux(joint):
    """A Flux attention of a double-stream (joint) or of a single-stream block."""
    block = transformer_flux.FluxAttention(
        query_dim=64, heads=2, dim_head=32, out_dim=64, bias=True, eps=1e-6, context_pre_only=False, pre_only=not joint,
        added_kv_proj_dim=64 if joint else None, processor=transformer_flux.FluxAttnProcessor(),
    )  # fmt: skip
    ids = torch.randint(0, 20, (130, 3)).float()
    angles = tuple(t.to(DEVICE) for t in transformer_flux.FluxPosEmbed(10000, [8, 12, 12])(ids))
    image, text = torch.randn(2, 100 if joint else 130, 64, device=DEVICE), torch.randn(2, 30, 64, device=DEVICE)
    inputs = {"hidden_states": image, "image_rotary_emb": angles}
    return with_weights(block), inputs | ({"encoder_hidden_states": text} if joint else {})


def qwen():
    """A Qwen-Image attention: text before image, norms of each, complex angles."""
    block = Attention(
        query_dim=64, cross_attention_dim=None, added_kv_proj_dim=64, dim_head=32, heads=2, out_dim=64, bias=True,
        context_pre_only=False, processor=transformer_qwenimage.QwenDoubleStreamAttnProcessor2_0(), qk_norm="rms_norm",
        eps=1e-6,
    )  # fmt: skip
    image, text = (torch.randn(2, n, 64, device=DEVICE) for n in (100, 30))
    turns = [torch.rand(n, 16, device=DEVICE) * 6.3 for n in (100, 30)]
    angles = tuple(torch.polar(torch.ones_like(turn), turn) for turn in turns)
    return with_weights(block), {
        "hidden_states": image, "encoder_hidden_states": text, "image_rotary_emb": angles,
    }  # fmt: skip


def ltx(**options):
    """An LTX attention, hidden states and angles of 2 x 5 x 8 patches."""
    block = transformer_ltx.LTXAttention(query_dim=96, heads=3, kv_heads=3, dim_head=32, **options)
    states = torch.randn(2, 80, 96, device=DEVICE)
    angles = transformer_ltx.LTXVideoRotaryPosEmbed(96).to(DEVICE)(states, 2, 5, 8)
    return with_weights(block), {"hidden_states": states, "image_rotary_emb": angles}


def cast(inputs, dtype):
    hidden = ("hidden_states", "encoder_hidden_states")
    return {name: value.to(dtype) if name in hidden else value for name, value in inputs.items()}


def outputs(answer):
    return answer if isinstance(answer, tuple) else (answer,)


def exact_and_half(block, inputs):
    """The block's own answer in float64, the block in float16, and its inputs."""
    exact = outputs(copy.deepcopy(block).double()(**cast(inputs, torch.float64)))
    return exact, block.half(), cast(inputs, torch.float16)


CASES = {
    "wan": wan, "flux joint": lambda: flux(True), "flux single": lambda: flux(False), "qwen": qwen, "ltx": ltx,
}  # fmt: skip
FUSED = {"wan": FusedWan, "flux joint": FusedFlux, "flux single": FusedFlux, "qwen": FusedQwenImage, "ltx": FusedLTX}


@pytest.mark.parametrize("case", CASES)
def test_a_fused_block_answers_as_its_own_in_float64(case):
    exact, block, inputs = exact_and_half(*CASES[case]())
    native = outputs(block(**inputs))
    enable(block, min_kv=0, fuse_qk=True)
    assert type(block.processor) is FUSED[case]
    with record() as seen:
        fused = outputs(block(**inputs))
    assert [(r["backend"], r["count"]) for r in seen.records] == [("int8", 1)]
    for wanted, plain, got in zip(exact, native, fused, strict=True):
        assert relative_error(got, wanted) < BUDGET
        assert not torch.equal(got, plain)
        assert got.shape == plain.shape
    disable(block)
    assert all(torch.equal(a, b) for a, b in zip(outputs(block(**inputs)), native, strict=True))


def test_text_cross_attention_of_wan_has_a_norm_and_no_rope():
    block, inputs = wan(cross_attention_dim_head=32)
    del inputs["rotary_emb"]
    inputs["encoder_hidden_states"] = torch.randn(2, 40, 96, device=DEVICE)
    inputs["attention_mask"] = torch.rand(2, 1, 1, 40, device=DEVICE) > 0.3
    exact, block, inputs = exact_and_half(block, inputs)
    enable(block, min_kv=0, fuse_qk=True)
    with record() as seen:
        assert relative_error(block(**inputs), exact[0]) < BUDGET
    assert [r["backend"] for r in seen.records] == ["int8"]


def test_a_mask_of_the_text_of_qwen_image():
    block, inputs = qwen()
    keep = torch.arange(30, device=DEVICE)[None] < torch.tensor([[21], [30]], device=DEVICE)
    exact, block, inputs = exact_and_half(block, inputs | {"encoder_hidden_states_mask": keep})
    enable(block, min_kv=0, fuse_qk=True)
    with record() as seen:
        fused = block(**inputs)
    assert [(r["backend"], r["count"]) for r in seen.records] == [("int8", 1)]
    assert all(relative_error(got, wanted) < BUDGET for got, wanted in zip(fused, exact, strict=True))
    garbage = inputs["encoder_hidden_states"].clone()
    garbage[0, 21:] *= 50
    again = block(**inputs | {"encoder_hidden_states": garbage})
    assert torch.equal(again[0], fused[0])
    with pytest.raises(ValueError, match="attention_mask"):  # diffusers' own words
        block(**inputs, attention_mask=keep)


def test_text_cross_attention_of_ltx_has_a_mask_and_no_rope():
    block, inputs = ltx(cross_attention_dim=64)
    del inputs["image_rotary_emb"]
    inputs["encoder_hidden_states"] = torch.randn(2, 40, 64, device=DEVICE)
    inputs["attention_mask"] = -1e4 * (torch.rand(2, 1, 40, device=DEVICE) > 0.7).double()
    exact = outputs(copy.deepcopy(block).double()(**cast(inputs, torch.float64)))
    block, inputs = block.half(), cast(inputs, torch.float16)
    inputs["attention_mask"] = inputs["attention_mask"].half()
    enable(block, min_kv=0, fuse_qk=True)
    with record() as seen:
        assert relative_error(block(**inputs), exact[0]) < BUDGET
    assert [r["backend"] for r in seen.records] == ["int8"]


def test_blocks_that_do_not_match_stay_and_say_why(caplog):
    odd = torch.nn.ModuleDict(
        {"wan": wan()[0], "image": wan(added_kv_proj_dim=96)[0], "eps": flux(False)[0], "fused": wan()[0]}
    )
    odd["wan_eps"], odd["added"] = wan()[0], flux(True)[0]
    odd["eps"].norm_k.eps = odd["wan_eps"].norm_k.eps = odd["added"].norm_added_q.eps = 1e-3
    odd["fused"].fuse_projections()
    odd["other"] = Attention(query_dim=64, heads=2, dim_head=32)
    odd["ltx"], odd["qwen"] = ltx()[0], qwen()[0]
    odd["ltx"].inner_kv_dim = 64
    odd["qwen"].norm_added_k = torch.nn.LayerNorm(32)
    with caplog.at_level(logging.INFO, "sdpa_router.dispatch"):
        found = fuse(odd)
    assert found.pop("wan") is None
    assert {name: reason.split()[0] for name, reason in found.items()} == {
        "image": "it", "eps": "norm_k's", "fused": "its", "other": "Attention", "wan_eps": "norm_k's",
        "added": "norm_added_q's", "ltx": "its", "qwen": "norm_added_k",
    }  # fmt: skip
    assert "add_k_proj" in found["image"]
    assert all(f"fuse_qk leaves {name} as it is: {reason}" in caplog.text for name, reason in found.items())
    assert not isinstance(odd["image"].processor, FusedWan)
    caplog.clear()
    with caplog.at_level(logging.INFO, "sdpa_router.dispatch"):
        assert fuse(torch.nn.Linear(2, 2)) == {}
    assert "found no attention block" in caplog.text
    with pytest.raises(TypeError, match="fuse_qk is 'yes'; accepted: True or False"):
        enable(odd["wan"], fuse_qk="yes")


@pytest.mark.parametrize(
    ("settings", "reason"), [({"min_kv": 1000}, "short"), ({"skip": lambda call: True, "min_kv": 0}, "skipped")]
)
def test_what_is_not_routed_takes_the_plain_path(settings, reason):
    block, inputs = wan()
    block, inputs = block.half(), cast(inputs, torch.float16)
    native = block(**inputs)
    enable(block, fuse_qk=True, **settings)
    with record() as seen:
        assert torch.equal(block(**inputs), native)
    assert [(r["backend"], r["reasons"], r["count"]) for r in seen.records] == [("sdpa", [reason], 1)]


@pytest.fixture
def mine():
    """A backend named "mine" that takes every call."""
    limits = BackendLimits((torch.float16,))
    sdpa_router.register_backend(
        Backend("mine", limits, lambda *_: iter(()), lambda call, _, attention: attention(*call[:3]))
    )
    yield
    sdpa_router.unregister_backend("mine")


@pytest.mark.parametrize(
    "settings",
    [
        {"backends": ("mine", "int8")},
        {"backends": ("torch",)},
        {"max_error": 1e-4},
        {"on_error": "fallback"},
        {"pv": "fp8"},
    ],
)
def test_who_answers_is_chosen_as_for_the_plain_block(settings, mine):
    block, inputs = wan()
    block, inputs = block.half(), cast(inputs, torch.float16)
    enable(block, min_kv=0, **settings)
    with record() as seen:
        native = block(**inputs)
    enable(block, min_kv=0, fuse_qk=True, **settings)
    with record() as again:
        assert torch.equal(block(**inputs), native)
    assert [(r["backend"], r["count"]) for r in seen.records] == [(r["backend"], r["count"]) for r in again.records]


def test_a_skip_and_an_audit_see_the_tensors_of_the_call():
    block, inputs = wan()
    block, inputs = block.half(), cast(inputs, torch.float16)
    seen = []
    enable(block, min_kv=0, fuse_qk=True, skip=lambda call: seen.append(call.query.float().std().item()) or False)
    block(**inputs)
    assert len(seen) == 1
    assert 0.5 < seen[0] < 2
    enable(block, min_kv=0, fuse_qk=True)
    rows = sdpa_router.audit(block, kwargs=inputs, settings=sdpa_router.Settings(min_kv=0), show=False).rows
    assert len(rows) == 1
    assert 0 < rows[0].error < BUDGET


@pytest.mark.parametrize("case", CASES)
def test_what_changes_after_fuse_counts(case):
    block, inputs = CASES[case]()
    block, inputs = block.half(), cast(inputs, torch.float16)
    enable(block, min_kv=0, fuse_qk=True)
    before = outputs(block(**inputs))
    handle = block.norm_k.register_forward_hook(lambda module, given, out: 0 * out)
    hooked = outputs(block(**inputs))
    assert not torch.equal(hooked[0], before[0])
    handle.remove()
    assert torch.equal(outputs(block(**inputs))[0], before[0])
    block.fuse_projections()
    block.to_qkv.weight.zero_()
    assert not torch.equal(outputs(block(**inputs))[0], before[0])


def test_a_norm_of_wan_without_weights_is_one_across_heads():
    block, inputs = wan()
    block.norm_q, block.norm_k = (torch.nn.RMSNorm(96, eps=1e-6, elementwise_affine=False) for _ in range(2))
    block.to_q.weight[:32] *= 10
    exact, block, inputs = exact_and_half(block, inputs)
    enable(block, min_kv=0, fuse_qk=True)
    assert relative_error(block(**inputs), exact[0]) < 0.02


def test_outside_of_the_enabled_module_and_where_others_decide_it_is_plain():
    block, inputs = wan()
    block, inputs = block.half(), cast(inputs, torch.float16)
    native = block(**inputs)
    fuse(block)
    assert torch.equal(block(**inputs), native)  # no settings hold here
    enable(block, min_kv=0, fuse_qk=True)
    block.processor._attention_backend = "native"  # as set_attention_backend() does
    assert block.processor.plain._attention_backend == "native"
    block.processor._attention_backend = None
    with torch.enable_grad():
        block(**inputs).sum().backward()
    assert block.to_q.weight.grad is not None
    enable(block, min_kv=0)
    assert type(block.processor).__name__ == "WanAttnProcessor"


def test_copies_and_pickles_keep_the_processor():
    block, inputs = wan()
    block, inputs = block.half(), cast(inputs, torch.float16)
    enable(block, min_kv=0, fuse_qk=True)
    out = block(**inputs)
    for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert isinstance(twin.processor, FusedWan)
        assert torch.equal(twin(**inputs), out)


@pytest.mark.parametrize("case", CASES)
def test_a_function_mode_has_the_call_as_of_the_plain_block(case):
    layer_skip = pytest.importorskip("diffusers.hooks.layer_skip")  # perturbed attention guidance: SDPA gives value
    block, inputs = CASES[case]()
    block, inputs = block.half(), cast(inputs, torch.float16)
    with layer_skip.AttentionScoreSkipFunctionMode():
        native = outputs(block(**inputs))
        enable(block, min_kv=0, fuse_qk=True)
        got = outputs(block(**inputs))
    assert all(torch.equal(a, b) for a, b in zip(got, native, strict=True))


def gradient(block, inputs, name):
    """The gradient of what is named alone, with all weights frozen."""
    given = inputs[name]
    leaf = (given[0] if isinstance(given, tuple) else given).clone().requires_grad_()
    with torch.enable_grad():
        out = outputs(block(**inputs | {name: (leaf, *given[1:]) if isinstance(given, tuple) else leaf}))
        out[0].float().sum().backward()
    return leaf.grad


def test_gradients_of_the_text_or_of_the_angles_alone_are_those_of_the_plain_block():
    cases = {case: CASES[case]() for case in ("flux joint", "qwen")}
    cases["wan"] = wan()
    block, inputs = wan(cross_attention_dim_head=32)
    cases["wan text"] = (
        block,
        {k: v for k, v in inputs.items() if k != "rotary_emb"}
        | {"encoder_hidden_states": torch.randn(2, 40, 96, device=DEVICE)},
    )
    block, inputs = ltx(cross_attention_dim=64)
    cases["ltx text"] = (
        block,
        {k: v for k, v in inputs.items() if k != "image_rotary_emb"}
        | {"encoder_hidden_states": torch.randn(2, 40, 64, device=DEVICE)},
    )
    for case, (block, inputs) in cases.items():
        block, inputs = block.half().requires_grad_(False), cast(inputs, torch.float16)
        name = "rotary_emb" if case == "wan" else "encoder_hidden_states"
        wanted = gradient(block, inputs, name)
        enable(block, min_kv=0, fuse_qk=True)
        assert torch.equal(gradient(block, inputs, name), wanted), case


def test_a_trace_takes_the_plain_path():
    block, inputs = wan()
    block, inputs = block.half().requires_grad_(False), cast(inputs, torch.float16)
    states = inputs.pop("hidden_states")
    enable(block, min_kv=0, fuse_qk=True)

    def forward(states):
        return block(hidden_states=states, **inputs)

    for traced in (make_fx(forward)(states), torch.jit.trace(forward, (states,), check_trace=False)):
        assert traced(states).shape == states.shape
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert forward(mode.from_tensor(states)).shape == states.shape


def test_diffusers_meets_its_own_class_of_processor():
    processor = transformer_flux.FluxAttnProcessor
    block, inputs = CASES["flux single"]()
    block, inputs = block.half(), cast(inputs, torch.float16)
    native = block(**inputs)
    enable(block, min_kv=0, fuse_qk=True)
    assert block.processor.__class__ is processor  # what hooks that skip layers look up
    assert isinstance(block.processor, FusedFlux)
    block.set_processor(block.processor.__class__())  # as load_ip_adapter() does for single-stream blocks
    disable(block)
    assert torch.equal(block(**inputs), native)
