"""Real backends on a real GPU: right answers, whole graphs, CUDA graphs. What is not installed is skipped."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import sdpa_router
from sdpa_router import Settings, route, stats
from sdpa_router.choose import choose
from sdpa_router.decide import Call
from sdpa_router.testing import fade_bias, gaussian, relative_error, sdpa_oracle

pytestmark = pytest.mark.gpu

# Errors of N(0, 1) inputs with some room; SageAttention 2 has P @ V in e4m3.
BUDGET = {"int8": 0.0125, "fa3": 0.005, "comfy": 0.02, "sage": 0.045, "fastest": 0.045}
EXACT = ("torch-cudnn", "torch-flash", "torch-efficient", "torch-math")


@pytest.fixture(autouse=True)
def _fresh():
    sdpa_router.reset_stats()
    with torch.no_grad():
        yield


def draw(*shape, **options):
    return gaussian(*shape, dtype=torch.bfloat16, device="cuda", **options)


def settings(name):
    return {"backends": name if name == "fastest" else (name,), "allow_mask_blind": True, "min_kv": 0}


def attend(name, query, key, value, mask=None, **options):
    """Answer with one backend, or skip with its reasons."""
    decision = choose(Call(query, key, value, mask, **options), Settings(**settings(name)))
    if decision.backend == "sdpa" and name != "fastest":
        pytest.skip(str(decision)[:300])
    with route(**settings(name), on_unsupported="fallback" if name == "fastest" else "raise"):
        return F.scaled_dot_product_attention(query, key, value, mask, **options)


def assert_right(out, name, query, key, value, mask=None, **options):
    expected = sdpa_oracle(query, key, value, mask, **options)[0]
    assert relative_error(out, expected) < BUDGET.get(name, 0.005)


@pytest.mark.parametrize("name", [*BUDGET, *EXACT])
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_answers(name, permuted, head_dim):
    tensors = draw(2, 3, 200, 320, head_dim)
    if permuted:
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    before = [x.clone() for x in tensors]
    out = attend(name, *tensors)
    assert_right(out, name, *tensors)
    assert all(map(torch.equal, tensors, before))
    assert not permuted or out.stride(1) < out.stride(2)
    assert torch.equal(attend(name, *tensors), out)


@pytest.mark.parametrize("name", ["int8", "fa3", "sage"])
def test_grouped_causal_and_scaled(name):
    tensors = draw(1, 4, 256, 256, 64, kv_heads=2)
    out = attend(name, *tensors, is_causal=True, scale=0.1, enable_gqa=True)
    assert_right(out, name, *tensors, is_causal=True, scale=0.1, enable_gqa=True)


@pytest.mark.parametrize("name", ["comfy", "torch-cudnn", "torch-efficient", "torch-math"])
@pytest.mark.parametrize("least", [0.0, -40000.0, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("kv_len", [512, 2048])
def test_biases_of_any_size(name, least, kv_len):
    tensors = draw(1, 2, 128, kv_len, 64)
    mask = fade_bias(kv_len, device="cuda") + least
    if name != "comfy":
        if least < -1e30:
            pytest.skip("torch 2.11 answers 0 under cuDNN and efficient where every bias is finfo.min")
        mask = mask.bfloat16()
    assert_right(attend(name, *tensors, mask), name, *tensors, mask)


@pytest.mark.parametrize("name", ["int8", "comfy", "torch-efficient"])
@pytest.mark.parametrize("kv_len", [512, 2048])
@pytest.mark.parametrize("kind", ["one for all keys", "every second", "expanded"])
def test_however_a_key_mask_lies_in_memory(name, kv_len, kind):
    tensors = draw(1, 2, 128, kv_len, 64)
    kept = torch.rand(1, 1, 1, 2 * kv_len, device="cuda") < 0.7
    kept[..., 0] = True
    mask = {
        "one for all keys": kept[..., :1],
        "every second": kept[..., ::2],
        "expanded": kept[..., :1].expand(1, 2, 128, kv_len),
    }[kind]
    assert_right(attend(name, *tensors, mask), name, *tensors, mask)


@pytest.mark.parametrize("name", ["int8", "comfy", "torch-math"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_in_a_bias_shows(name, value):
    tensors = draw(1, 2, 128, 2048, 64)
    bias = torch.zeros(1, 2, 1, 2048, device="cuda", dtype=torch.bfloat16)
    bias[0, 1, 0, 77] = value
    out = attend(name, *tensors, bias)
    assert out[0, 1].isnan().all()
    assert out[0, 0].isfinite().all()


@pytest.mark.parametrize("name", ["int8", "fa3", "comfy", "sage"])
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_in_an_argument_shows(name, where, value):
    tensors = draw(1, 2, 128, 256, 128)
    tensors[where][0, 1, 70, 5] = value
    out = attend(name, *tensors)
    expected = sdpa_oracle(*tensors)[0]
    assert not out[~expected.isfinite()].isfinite().any()
    assert out[0, 0].isfinite().all()


@pytest.mark.parametrize("kv_len", [512, 2048])
def test_comfy_without_a_key_answers_zero(kv_len):
    tensors = draw(1, 2, 128, kv_len, 64)
    for mask in (torch.zeros(1, 1, 1, kv_len, dtype=torch.bool), torch.full((1, 1, 1, kv_len), -math.inf)):
        assert torch.count_nonzero(attend("comfy", *tensors, mask.cuda())) == 0


@pytest.mark.parametrize("name", ["fa3", "comfy", "sage"])
@pytest.mark.parametrize("size", [1e5, 1e-5])
def test_values_of_any_size(name, size):
    query, key, value = draw(1, 2, 128, 512, 128)
    out = attend(name, query, key, value * size)
    assert_right(out, name, query, key, value * size)


@pytest.mark.parametrize("name", ["fa3", "comfy", "sage", "fastest"])
@pytest.mark.parametrize("head_dim", [96, 128])
def test_whole_graphs_of_inductor(name, head_dim):
    torch._dynamo.reset()
    tensors = draw(1, 2, 128, 512, head_dim)
    attend(name, *tensors)
    compiled = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v) * 2, fullgraph=True)
    with route(**settings(name)):
        assert_right(compiled(*tensors) / 2, name, *tensors)


@pytest.mark.parametrize("name", ["fa3", "comfy", "sage", "fastest"])
def test_a_captured_graph_replays_right(name):
    tensors = draw(1, 2, 128, 512, 128)
    with route(**settings(name)):
        for _ in range(2):
            attend(name, *tensors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = F.scaled_dot_product_attention(*tensors)
    tensors[0].copy_(-tensors[0])
    graph.replay()
    assert_right(out, name, *tensors)
    assert torch.cuda.current_device() == 0


def test_fastest_decides_by_costs_on_a_gpu_that_was_measured():
    if sdpa_router.cost_files.table_for(torch.device("cuda")) is None:
        pytest.skip("nothing was measured on this GPU")
    tensors = draw(1, 24, 8192, 8192, 128)
    with route(backends="fastest"):
        F.scaled_dot_product_attention(*tensors)
    (signature,) = stats()["signatures"]
    assert signature["estimates"]["torch"] > 0
    assert min(signature["estimates"], key=signature["estimates"].get) == signature["backend"]
