"""Fused quantisation and int8 linear layers launch again what they launched before, on the tensors of the new call."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sdpa_router import int8_linear_qk, rms_rope_quantize
from sdpa_router.kernels.int8_attention import fused, linear
from sdpa_router.kernels.int8_attention import launch as launching
from sdpa_router.kernels.int8_attention.configs import config_for

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in for Triton's launcher is for the CPU")


@pytest.fixture
def replayed(monkeypatch):
    """What was launched from a plan: (name of the kernel, its arguments); Triton's launches are interpreted."""
    ran = []

    def launch(kernel, grid, *args, **options):
        kernel[grid](*args, **options)
        name = getattr(kernel, "__name__", None) or kernel.fn.__name__

        def run(*values):
            ran.append((name, values[9:]))

        compiled = SimpleNamespace(run=run, function=7, packed_metadata="packed")
        tape = getattr(launching._thread, "tape", None)
        if tape is not None:
            tape.add(kernel, compiled, grid, args, options)

    monkeypatch.setattr(launching, "_plans", {})
    monkeypatch.setattr(launching, "_known", {})
    monkeypatch.setattr(launching, "_observed", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=99))
    for module in (fused, linear):
        monkeypatch.setattr(module, "launch", launch)
    return ran


def check(replayed, make, tensors_of, kernels):
    """The second call of make() is replayed; its kernels get the addresses of its own tensors."""
    make()
    assert replayed == []
    made = make()
    assert [name for name, _ in replayed] == kernels
    addresses = {value for _, values in replayed for value in values if type(value) is int}
    assert {tensor.data_ptr() for tensor in tensors_of(made)} <= addresses


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_fused_calls(replayed, across, masked):
    cos, sin = torch.rand(40, 16), torch.rand(40, 16)
    mask = torch.rand(1, 1, 1, 40) > 0.4 if masked else None
    given = []

    def make():
        query, key = (torch.randn(1, 2, 40, 32).half() for _ in range(2))
        weights = [torch.rand(64 if across else 32) for _ in range(2)]
        given[:] = [query, key, *weights]
        options = {"interleaved": True, "eps": 1e-6, "attn_mask": mask, "lse": True}
        return rms_rope_quantize(query, key, *weights, cos, sin, **options)

    def tensors_of(made):
        return [*given, cos, sin, made.query, made.query_scale, made.key, made.key_scale, made.key_shift, made.lse_term]

    side = ["_rms_rope_quantize"]
    kernels = ["_row_rms"] * across + ["_rope_key_shift", *side, *side] + ["_finish_scales"] * across
    check(replayed, make, tensors_of, kernels)


@pytest.mark.parametrize("two", [False, True])
def test_fused_segments(replayed, two):
    def make():
        parts = [tuple(torch.randn(1, 2, n, 32).half() for n in ((30, 10) if two else (40,))) for _ in range(2)]
        query, key = parts if two else [part[0] for part in parts]
        weight = torch.rand(32)
        return rms_rope_quantize(query, key, weight, weight, None, None, interleaved=True, eps=1e-6)

    check(replayed, make, lambda made: [made.query, made.key], ["_rope_key_shift", *["_rms_rope_quantize"] * 2])


@pytest.mark.parametrize("role", ["query", "key"])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_calls(replayed, role, biased):
    weight, scale = torch.randint(-127, 128, (64, 48), dtype=torch.int8), torch.rand(64)
    bias = torch.rand(64) if biased else None

    def make():
        x = torch.randn(1, 70, 48).half()
        return int8_linear_qk(x, weight, scale, heads=2, role=role, bias=bias)

    kernels = {"query": ["_linear_qk"], "key": ["_mean_row", "_linear_shift", "_linear_qk"]}[role]
    extra = [] if bias is None else [bias]
    check(replayed, make, lambda made: [made.values, made.scale, *extra], ["_quantize_rows", *kernels])


@pytest.mark.parametrize(("length", "head_dim"), [(300_000, 256), (600_000, 128)])
def test_no_length_is_too_much_for_the_axes_of_a_grid(monkeypatch, length, head_dim):
    """CUDA counts to 2^31 - 1 on the first axis, and to 65535 on the others."""
    grids = []
    monkeypatch.setattr(fused, "launch", lambda kernel, grid, *args, **options: grids.append(grid))
    x = torch.empty((1, 40, length, head_dim), dtype=torch.bfloat16, device="meta")
    rows, norm, rope = fused.Rows(x), fused.Norm(1e-6, across=True), fused.Rope(0, interleaved=True)
    config = config_for(86, head_dim)
    monkeypatch.setattr(fused, "replay", lambda numbers, tensors, run: run())
    fused.rms_rope_quantize_pair(rows, rows, None, 1.0, config, norm, rope, lse=False)
    assert len(grids) == 5
    assert max(n for grid in grids for n in grid[1:]) <= 65535
