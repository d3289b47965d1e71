"""Kernels of the quantisation that begin before the one before them is done answer as they do one by one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from sdpa_router.kernels.int8_attention import bias, fused, quantize
from sdpa_router.kernels.int8_attention import launch as launching
from sdpa_router.kernels.int8_attention.configs import config_of, hopper_config
from sdpa_router.kernels.int8_attention.fused import Norm, Rope, Rows, rms_rope_quantize_pair
from sdpa_router.kernels.int8_attention.launch import forget
from sdpa_router.kernels.int8_attention.limits import overlaps, triton_overlaps
from sdpa_router.kernels.int8_attention.quantize import quantize_pair

# Heads of queries and of keys, their lengths, head_dim.
SHAPES = [(16, 16, 4096, 4096, 128), (24, 24, 4608, 4608, 128), (8, 2, 300, 1111, 64), (3, 3, 70, 40, 256)]
# "plain": the quantiser without norm and RoPE.
KINDS = ["head", "across", "lse", "masked", "two", "plain", "plain lse", "plain masked"]


def draw(shape, kind, device, dtype=torch.bfloat16):
    """Arguments of a call: heads lie inside the sequence, as projections give them."""
    heads, kv_heads, q_len, kv_len, head_dim = shape
    across = kind == "across"
    sides = []
    for count, length in ((heads, q_len), (kv_heads, kv_len)):
        x = torch.randn(1, length, count, head_dim, device=device).to(dtype).transpose(1, 2)
        weight = torch.rand(count * head_dim if across else head_dim, device=device).to(dtype) + 0.5
        turn = 6.3 * torch.rand(1, 1, length, head_dim // 2, device=device)
        parts = (x[:, :, :13], x[:, :, 13:]) if kind == "two" else (x, None)
        other = None if parts[1] is None else weight.flip(0)
        sides.append(Rows(parts[0], weight, turn.cos(), turn.sin(), parts[1], other))
    mask = torch.rand(1, 1, 1, kv_len, device=device) > 0.3 if "masked" in kind else None
    return *sides, mask, None if "plain" in kind else Norm(1e-6, across), "lse" in kind


def quantized(call, config=None):
    """The tensors that a call gives."""
    query, key, mask, norm, lse = call
    config = config or config_of(query.x, key.x)
    rope = Rope(query.x.shape[3], interleaved=True)
    if norm is None:
        made = quantize_pair(query.x, key.x, mask, 0.1, config, lse=lse)
    else:
        made = rms_rope_quantize_pair(query, key, mask, 0.1, config, norm, rope, lse=lse)
    return [tensor for side in made for tensor in side if isinstance(tensor, torch.Tensor)]


@pytest.fixture
def one_by_one(monkeypatch):
    """A function that answers a call with kernels of which each waits for the one before it."""

    def answer(call):
        forget()
        with monkeypatch.context() as patch:
            patch.setattr(launching, "overlaps", lambda device: False)
            made = quantized(call)
        forget()
        return made

    return answer


@pytest.mark.parametrize("kind", KINDS)
def test_no_memory_changes_its_owner_while_kernels_overlap(monkeypatch, kind):
    """All of it is there before the first launch; that one is no early one, and all others are."""
    noted = []
    monkeypatch.setattr(launching, "overlaps", lambda device: True)
    monkeypatch.setattr(fused, "replay", lambda numbers, tensors, run: run())
    monkeypatch.setattr(bias, "launch", lambda *arguments, **options: None)  # of prepare(), before all others
    for module in (fused, quantize):
        monkeypatch.setattr(module, "launch", lambda kernel, grid, *args, **options: noted.append(options))
        for name in ("empty", "prepare"):
            usual = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *a, _usual=usual, _name=name: noted.append(_name) or _usual(*a))
    quantized(draw(SHAPES[2], kind, torch.device("cpu")), hopper_config(64))
    launches = noted[noted.index(next(options for options in noted if isinstance(options, dict))) :]
    assert len(launches) == (5 if kind == "across" else 2 if "plain" in kind else 3)
    assert [options.get("launch_pdl", False) for options in launches] == [False] + [True] * (len(launches) - 1)
    assert all(options["PDL"] for options in launches)


@pytest.mark.parametrize("name", ["fused_kernels", "fused_norm", "fused_shift", "quantize_kernels"])
def test_no_kernel_waits_in_a_loop(name):
    """Triton moves loads of a loop in front of it, over whatever stands between."""
    path = Path(fused.__file__).with_name(f"{name}.py")
    loops = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.For)]
    assert "gdc_wait" in path.read_text()
    assert not [loop.lineno for loop in loops if "gdc_wait" in ast.unparse(loop)]


def test_nothing_overlaps_on_a_cpu():
    assert not overlaps(torch.device("cpu"))
    assert launching.early(torch.device("cpu")) == launching.first(torch.device("cpu")) == {"PDL": False}


@pytest.mark.gpu
def test_they_overlap_here(device):
    hopper = torch.cuda.get_device_capability(device) >= (9, 0) and torch.version.cuda >= "12.8"
    if not (hopper and triton_overlaps()):
        pytest.skip("an older GPU, CUDA or Triton")
    assert overlaps(device)
    assert launching.early(device) == {"PDL": True, "launch_pdl": True}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_answers_as_one_by_one(device, one_by_one, shape, kind):
    call = draw(shape, kind, device)
    expected = one_by_one(call)
    for _ in range(10):
        assert all(map(torch.equal, quantized(call), expected))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["head", "across", "lse", "plain"])
def test_calls_that_follow_each_other(device, one_by_one, kind):
    """What a call read and what it made is overwritten as soon as the next kernels may run."""
    calls = [draw(SHAPES[i % 2], kind, device) for i in range(6)]
    expected = [one_by_one(call) for call in calls]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for turn in range(1000):
        call, answer = calls[turn % 6], expected[turn % 6]
        read = [Rows(*[None if t is None else t.clone() for t in side.tensors()]) for side in call[:2]]
        made = quantized((*read, *call[2:]))
        if turn % 3:
            for side in read:
                side.x.fill_(float("nan"))
        del read
        torch.full((1, 16, 4096, 128), float("nan"), dtype=torch.bfloat16, device=device)
        if turn % 2:
            for one, other in zip(made, answer, strict=True):
                wrong += (one != other).sum()
        del made
    assert wrong.item() == 0


@pytest.mark.gpu
def test_calls_on_two_streams(device, one_by_one):
    calls = [draw(SHAPES[i], "head", device) for i in range(2)]
    expected = [one_by_one(call) for call in calls]
    streams = [torch.cuda.Stream(device) for _ in calls]
    torch.cuda.synchronize(device)
    wrong = [torch.zeros((), dtype=torch.int64, device=device) for _ in calls]
    for _ in range(300):
        for stream, call, answer, count in zip(streams, calls, expected, wrong, strict=True):
            with torch.cuda.stream(stream):
                for one, other in zip(quantized(call), answer, strict=True):
                    count += (one != other).sum()
    torch.cuda.synchronize(device)
    assert [count.item() for count in wrong] == [0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["head", "across", "plain"])
def test_a_captured_graph(device, one_by_one, kind):
    """Each replay reads what was written just before, and its calls follow each other without a gap."""
    calls = [draw(SHAPES[0], kind, device) for _ in range(3)]
    expected = [one_by_one(call) for call in calls]
    quantized(calls[0])
    inputs = draw(SHAPES[0], kind, device)
    graph, made = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(4):
            made.append(quantized(inputs))
    for turn in range(60):
        for side, given in zip(inputs[:2], calls[turn % 3][:2], strict=True):
            for to, source in zip(side.tensors(), given.tensors(), strict=True):
                if to is not None:
                    to.copy_(source)
        for tensors in made:
            for tensor in tensors:
                tensor.zero_()
        graph.replay()
        assert all(all(map(torch.equal, one, expected[turn % 3])) for one in made)
