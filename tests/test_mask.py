"""Masks are classified by shape, strides and dtype alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from sdpa_router import MaskKind, classify_mask
from sdpa_router.mask import key_view

B, H, Q, K = 2, 3, 4, 5


def meta(*shape: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("mask", "kind", "per_batch", "per_head"),
    [
        (None, MaskKind.NONE, False, False),
        (meta(1, K), MaskKind.PER_KEY, False, False),
        (meta(H, 1, K), MaskKind.PER_KEY, False, True),
        (meta(1, 1, 1, K), MaskKind.PER_KEY, False, False),
        (meta(B, 1, 1, K), MaskKind.PER_KEY, True, False),
        (meta(1, H, 1, K), MaskKind.PER_KEY, False, True),
        (meta(B, H, 1, K), MaskKind.PER_KEY, True, True),
        (meta(B, 1, 1, K).expand(B, H, Q, K), MaskKind.PER_KEY, True, False),
        (meta(1, 1, 1, K).expand(B, H, Q, K), MaskKind.PER_KEY, False, False),
        (meta(B, H, 1, 1), MaskKind.PER_KEY, True, True),
        (meta(1, 1, 1, 1), MaskKind.PER_KEY, False, False),
        (meta(B, H, K, Q).transpose(2, 3)[:, :, :1], MaskKind.PER_KEY, True, True),
        (meta(Q, K), MaskKind.FULL, False, False),
        (meta(H, Q, K), MaskKind.FULL, False, True),
        (meta(B, H, Q, K), MaskKind.FULL, True, True),
        (meta(1, 1, Q, 1), MaskKind.FULL, False, False),
        (meta(1, 1, Q, 1).expand(1, 1, Q, K), MaskKind.FULL, False, False),
        (meta(), MaskKind.INVALID, False, False),
        (meta(K), MaskKind.INVALID, False, False),
        (meta(1, 1, 1, 1, K), MaskKind.INVALID, False, False),
        (meta(1, 1, 1, K + 1), MaskKind.INVALID, False, False),
        (meta(1, 1, Q + 1, K), MaskKind.INVALID, False, False),
        (meta(B + 1, 1, 1, K), MaskKind.INVALID, False, False),
        (meta(B, 1, K), MaskKind.INVALID, False, False),
        ([[True] * K], MaskKind.INVALID, False, False),
        (torch.zeros(1, 1, 1, K).to_sparse(), MaskKind.INVALID, False, False),
        (torch.nested.nested_tensor([torch.zeros(1, K)], layout=torch.jagged), MaskKind.INVALID, False, False),
        (torch.nested.nested_tensor([torch.zeros(1, K)]), MaskKind.INVALID, False, False),
    ],
)
def test_kind_and_axes(mask, kind, per_batch, per_head):
    info = classify_mask(mask, B, H, Q, K)
    assert (info.kind, info.per_batch, info.per_head) == (kind, per_batch, per_head)
    assert info.why


def test_one_query_makes_any_row_mask_per_key():
    assert classify_mask(meta(B, H, 1, K), B, H, 1, K).kind is MaskKind.PER_KEY


def test_equal_rows_in_memory_stay_full_because_finding_out_is_a_read():
    mask = torch.zeros(1, 1, 1, K).repeat(1, 1, Q, 1)
    info = classify_mask(mask, 1, 1, Q, K)
    assert info.kind is MaskKind.FULL
    assert "[..., :1, :]" in info.why


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.int64])
def test_dtype_is_reported_and_not_judged(dtype):
    info = classify_mask(meta(1, 1, 1, K, dtype=dtype), B, H, Q, K)
    assert info.kind is MaskKind.PER_KEY
    assert info.is_bool is (dtype is torch.bool)


def test_one_line():
    info = classify_mask(meta(1, 1, 1, K, dtype=torch.float32), B, H, Q, K)
    assert str(info) == "per key, float32 [1, 1, 1, 5]"
    assert str(classify_mask(None, B, H, Q, K)) == "none"


@pytest.mark.parametrize(
    "mask",
    [torch.randn(1, K), torch.randn(H, 1, K), torch.randn(B, 1, 1, K).expand(B, H, Q, K), torch.randn(B, H, 1, 1)],
)
def test_key_view_is_compact_and_shares_memory(mask):
    row = key_view(mask)
    assert row.dim() == 4
    assert row.shape[2] == 1
    assert row.data_ptr() == mask.data_ptr()
    assert torch.equal(row.expand(B, H, Q, K), mask.expand(B, H, Q, K))


sizes = st.tuples(*(st.sampled_from([1, size]) for size in (B, H, Q, K)))


@given(sizes, sizes, st.integers(2, 4))
def test_per_key_means_equal_rows_and_invalid_means_that_torch_refuses(stored, expanded, rank):
    shape = stored[4 - rank :]
    mask = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    wide = [max(pair) for pair in zip(shape, expanded[4 - rank :], strict=True)]
    mask = mask.expand(wide)
    info = classify_mask(mask, B, H, Q, K)
    rows = mask.expand(B, H, Q, K)
    assert (info.kind is MaskKind.PER_KEY) == bool((rows == rows[:, :, :1]).all())
    assert info.per_head == bool((rows != rows[:, :1]).any())
    assert info.per_batch == bool((rows != rows[:1]).any())


@given(st.lists(st.sampled_from([1, 2, 3, 4, 5]), max_size=5))
def test_what_is_invalid_here_torch_refuses(shape):
    mask = torch.zeros(shape)
    refused = False
    try:
        F.scaled_dot_product_attention(torch.zeros(B, H, Q, 8), torch.zeros(B, H, K, 8), torch.zeros(B, H, K, 8), mask)
    except (RuntimeError, IndexError):
        refused = True
    assert (classify_mask(mask, B, H, Q, K).kind is MaskKind.INVALID) == refused
