"""What a sparse call launches is all that it does: it can be written down, and repeated without Triton's binder."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from sdpa_router import KeyRange, Window, banded_attention, block_sparse_attention, dense_mask_attention
from sdpa_router.kernels.int8_attention import launch as launching
from sdpa_router.testing import gaussian

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QUANTISED = ["_key_shift", "_quantize"]
LISTS = ["_make_lists", "_make_pairs"]


@pytest.fixture
def plans(monkeypatch):
    """The plans that are made; without a GPU as if the interpreter had compiled what it ran."""
    monkeypatch.setattr(launching, "_plans", {})
    monkeypatch.setattr(launching, "_known", {})
    monkeypatch.setattr(launching, "_observed", lambda: False)
    if DEVICE == "cpu":
        add = launching.Tape.add
        compiled = SimpleNamespace(packed_metadata=())
        monkeypatch.setattr(
            launching.Tape, "add", lambda tape, kernel, _, *launch: add(tape, kernel, compiled, *launch)
        )
    return launching._plans


def names(plans):
    (plan,) = plans.values()
    found = [getattr(launched.kernel, "fn", launched.kernel).__name__ for launched in plan.launches]
    return ["lists" if name in LISTS else name for name in found]


@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32])
@pytest.mark.parametrize("kv_len", [192, 150])
def test_block_sparse(plans, mask, kv_len):
    inputs = gaussian(1, 4, 130, kv_len, 64, kv_heads=2, device=DEVICE)
    tiles = torch.tensor([[True, False, True]] * 3, device=DEVICE)
    keys = None if mask is None else torch.ones(1, 1, 1, kv_len, dtype=mask, device=DEVICE)
    block_sparse_attention(*inputs, tiles, attn_mask=keys, return_lse=kv_len == 150)
    if mask is None and kv_len == 192:
        unseen = ["_forget_unseen"] if "lists" in names(plans)[4:] else []  # norms are the Hopper kernel's
        assert names(plans) == ["_kept_keys", *QUANTISED, *unseen, "lists", "_attention"]
    else:
        assert names(plans) == ["_tile_bias", "lists", "_kept_keys", *QUANTISED, "_attention"]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("everything", [False, True])
def test_banded(plans, biased, everything):
    inputs = gaussian(1, 2, 100, 192, 64, device=DEVICE)
    windows = [Window(0, 100, (KeyRange(0, 192 if everything else 90, 20, 10),))]
    bias = torch.zeros(1, 1, 1, 192, device=DEVICE) if biased else None
    banded_attention(*inputs, windows, bias, return_lse=everything)
    table = ["_window_bias", "_kept_in_windows"] if biased else []
    assert names(plans) == [*table, *QUANTISED, "_attention"]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_dense_masks(plans, dtype):
    inputs = gaussian(1, 2, 100, 192, 64, device=DEVICE)
    mask = (torch.rand(1, 1, 100, 192, device=DEVICE) < 0.5).to(dtype)
    dense_mask_attention(*inputs, mask)
    assert names(plans) == ["_prepare_bias", *QUANTISED, "lists", "_attention"]
