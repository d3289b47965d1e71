"""Banded windows against float64 attention with each window's bias, the helper that makes windows, and bad input."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdpa_router import KeyRange, UnsupportedError, Window, banded_attention, int8_attention, video_windows
from sdpa_router.banded import bias_of
from sdpa_router.kernels.sparse_attention import configs
from sdpa_router.testing import banded_window, gaussian, lse_error, relative_error, sdpa_oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUDGET = 0.0135  # as in test_kernel_int8.py


def expand(windows, q_len, kv_len, floor=1e-4):
    mask = torch.full((1, 1, q_len, kv_len), -math.inf, device=DEVICE)
    for window in windows:
        mask[:, :, window.start : window.stop] = bias_of(window, kv_len, floor, DEVICE)
    return mask


def check(inputs, mask, answer):
    exact, exact_lse = sdpa_oracle(*inputs, mask, enable_gqa=True)
    out, lse = answer
    assert relative_error(out, exact) < BUDGET * (1 if out.numel() > 10_000 else 2)  # a row alone scatters
    assert lse_error(lse, exact_lse) < (1 if out.numel() > 10_000 else 2) * 0.01
    empty = exact_lse == -math.inf
    assert (out[empty] == 0).all()
    assert (lse[empty] == -math.inf).all()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("biased", [False, True])
def test_windows_of_a_video(head_dim, biased):
    windows = video_windows(5, 70, 2, 1, prefix=45)
    length = 45 + 5 * 70
    inputs = gaussian(1, 2, length, length, head_dim, kv_heads=1, device=DEVICE)
    bias = torch.randn(1, 2, 1, length, device=DEVICE) if biased else None
    mask = expand(windows, length, length)
    answer = banded_attention(*inputs, windows, bias, return_lse=True)
    check(inputs, mask if bias is None else mask + bias, answer)


@st.composite
def layouts(draw):
    """Windows with gaps between their queries and up to three ranges of keys each."""
    kv_len, windows, at = draw(st.integers(20, 300)), [], 0
    for _ in range(draw(st.integers(1, 3))):
        at += draw(st.integers(0, 30))
        stop = at + draw(st.integers(1, 90))
        edges = sorted(draw(st.sets(st.integers(0, kv_len), min_size=2, max_size=6)))
        ranges = []
        for first, last in zip(edges[::2], edges[1::2], strict=False):
            fade = draw(st.integers(0, (last - first) // 2))
            ranges.append(KeyRange(first, last, fade, draw(st.sampled_from([0, fade]))))
        windows.append(Window(at, stop, tuple(ranges)))
        at = stop
    return windows, at + draw(st.integers(0, 20)), kv_len


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(
    layout=layouts(),
    bias=st.sampled_from(["none", "bool", "float per head"]),
    floor=st.sampled_from([1e-4, 0.3]),
    seed=st.integers(0, 2**16),
)
def test_any_windows(layout, bias, floor, seed):
    torch.manual_seed(seed)
    windows, q_len, kv_len = layout
    inputs = gaussian(1, 2, q_len, kv_len, 64, device=DEVICE, seed=seed)
    mask, keys = expand(windows, q_len, kv_len, floor), None
    if bias == "bool":
        keys = torch.rand(1, 1, 1, kv_len, device=DEVICE) < 0.7
        mask = torch.where(keys, mask, -math.inf)
    elif bias != "none":
        keys = 2 * torch.randn(1, 2, 1, kv_len, device=DEVICE)
        mask = mask + keys
    check(inputs, mask, banded_attention(*inputs, windows, keys, floor=floor, return_lse=True))


def test_one_window_is_a_call_with_its_bias():
    window = banded_window(text=10, refs=5, audio=7, frame=50, core=2, skirt=1, device=DEVICE)
    inputs = gaussian(1, 2, 100, window.kv_len, 64, device=DEVICE)
    edge = window.parts["prefix"].stop
    keys = (KeyRange(0, edge), KeyRange(edge, window.kv_len, 50, 50))
    out = banded_attention(*inputs, [Window(0, 100, keys)])
    assert torch.allclose(bias_of(Window(0, 100, keys), window.kv_len, device=DEVICE), window.bias)
    assert relative_error(out, int8_attention(*inputs, window.bias)) < BUDGET


@pytest.mark.parametrize("biased", [False, True])
def test_heads_go_a_few_at_a_time_where_memory_is_short(biased, monkeypatch):
    windows = video_windows(3, 40, 2, 1, prefix=20)
    inputs = gaussian(2, 6, 140, 140, 64, kv_heads=3, device=DEVICE)
    bias = torch.randn(2, 6, 1, 140, device=DEVICE) if biased else None
    whole = banded_attention(*inputs, windows, bias, return_lse=True)
    monkeypatch.setattr(configs, "MEMORY_FREE", 0)
    parts = list(configs.heads_at_a_time(*inputs))
    assert parts == [(slice(2 * i, 2 * i + 2), slice(i, i + 1)) for i in range(3)]
    for got, wanted in zip(banded_attention(*inputs, windows, bias, return_lse=True), whole, strict=True):
        assert torch.equal(got, wanted)


def test_the_memory_besides_a_long_video_is_a_twentieth():
    query = torch.empty(1, 56, 266_040, 128, dtype=torch.bfloat16, device="meta")
    parts = list(configs.heads_at_a_time(query, query, query))
    assert [heads for heads, _ in parts] == [keys for _, keys in parts]
    assert [index for heads, _ in parts for index in range(heads.start, heads.stop)] == list(range(56))
    most = max(heads.stop - heads.start for heads, _ in parts)
    assert most * 266_040 * 2 * (128 + 8) < 0.055 * 4 * query.numel() * 2
    assert len(list(configs.heads_at_a_time(*[query[:, :, :4096]] * 3))) == 1


def test_video_windows_cover_each_row_once_and_end_where_the_video_does():
    windows = video_windows(170, 1560, 13, 4, prefix=840)
    total = 840 + 170 * 1560
    rows = [row for window in windows for row in (window.start, window.stop)]
    assert rows[0] == 0
    assert rows[-1] == total
    assert rows[1:-1:2] == rows[2::2]
    assert windows[0] == Window(0, 840, (KeyRange(0, total),))
    inner = windows[2]
    assert sum(key.stop - key.start for key in inner.keys) == 33600
    assert inner.keys[1][2:] == (6240, 6240)
    assert windows[1].keys[1][2:] == (0, 6240)
    assert windows[-1].keys[1].stop == total
    assert video_windows(4, 10, 4, 1) == [Window(0, 40, (KeyRange(0, 40),))]
    assert video_windows(4, 10, 4, 1, prefix=3, prefix_sees_all=False)[0] == Window(0, 3, (KeyRange(0, 3),))


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ([Window(0, 101, (KeyRange(0, 50),))], "queries 0 to 101; accepted: a range within 0 to 100"),
        ([Window(10, 10, (KeyRange(0, 50),))], "queries 10 to 10"),
        ([Window(0, 10, ())], "has no keys"),
        ([Window(0, 10, (KeyRange(0, 151),))], "keys 0 to 151; accepted: a range within 0 to 150"),
        ([Window(0, 10, (KeyRange(-1, 50),))], "keys -1 to 50"),
        ([Window(0, 10, (KeyRange(0, 50, 30, 30),))], "fade over 30 and 30; accepted: numbers from 0 .* at most 50"),
        ([Window(0, 10, (KeyRange(0, 50), KeyRange(49, 60)))], "keys of one window overlap: 0 to 50 and 49 to 60"),
        ([Window(0, 10, (KeyRange(0, 50),)), Window(9, 20, (KeyRange(0, 50),))], "queries of windows overlap"),
        ([Window(0.0, 10, (KeyRange(0, 50),))], r"windows are list; accepted: a list of Window\(start, stop, keys\)"),
        ([Window(0, 10, (KeyRange(0, 50.5),))], "accepted: a list of Window"),
        ([Window(0, 10, (0, 50))], "accepted: a list of Window"),
        ([(0, 10)], "accepted: a list of Window"),
        (Window(0, 10, (KeyRange(0, 50),)), "windows are Window; accepted: a list of Window"),
        (torch.ones(100, 150) > 0, "windows are Tensor; accepted: a list of Window"),
        (None, "windows are NoneType"),
    ],
)
def test_bad_windows(windows, message):
    inputs = gaussian(1, 1, 100, 150, 64, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        banded_attention(*inputs, windows)


def test_other_bad_input():
    inputs = gaussian(1, 1, 100, 150, 64, device=DEVICE)
    windows = [Window(0, 100, (KeyRange(0, 150),))]
    for floor in (0.0, 1.5, 1):
        with pytest.raises(ValueError, match=r"floor is .*; accepted: a weight over 0"):
            banded_attention(*inputs, windows, floor=floor)
    with pytest.raises(UnsupportedError, match="full_mask"):
        banded_attention(*inputs, windows, torch.zeros(100, 150, device=DEVICE))
    with pytest.raises(ValueError, match="given frames 0, skirt -1; accepted: whole numbers"):
        video_windows(0, 10, 4, -1)


def test_compiles_without_a_graph_break():
    inputs = gaussian(1, 1, 100, 150, 64, device=DEVICE)
    windows = [Window(10, 100, (KeyRange(0, 20), KeyRange(30, 150, 40, 0)))]
    with torch.no_grad():
        compiled = torch.compile(banded_attention, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*inputs, windows), banded_attention(*inputs, windows))
