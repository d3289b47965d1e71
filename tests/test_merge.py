"""Partial attention over disjoint keys, merged by its log-sum-exp, is attention over all of them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdpa_router import merge_attention
from sdpa_router.testing import sdpa_oracle

INF = math.inf


def parts(cuts, dtype=torch.float64, bias=None):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, n, 8, dtype=torch.float64, generator=generator) for n in (3, 16, 16))
    bias = torch.zeros(1, 1, 1, 16, dtype=torch.float64) if bias is None else bias
    edges = [0, *sorted(cuts), 16]
    found = [sdpa_oracle(q, k[:, :, a:b], v[:, :, a:b], bias[..., a:b]) for a, b in itertools.pairwise(edges)]
    outs, lses = zip(*found, strict=True)
    whole = sdpa_oracle(q, k, v, bias)
    return [out.to(dtype) for out in outs], [lse.to(dtype) for lse in lses], whole


@given(st.lists(st.integers(0, 16), max_size=5))
def test_any_split_equals_the_whole(cuts):
    outs, lses, (out, lse) = parts(cuts)
    merged, merged_lse = merge_attention(outs, lses)
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(merged_lse, lse)


def test_sixteen_bit_parts_are_summed_in_float32():
    outs, lses, (out, lse) = parts([5, 9])
    merged, merged_lse = merge_attention([part.half() for part in outs], [part.float() for part in lses])
    assert merged.dtype == torch.float16
    assert merged_lse.dtype == torch.float32
    torch.testing.assert_close(merged.double(), out, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(merged_lse.double(), lse, atol=1e-5, rtol=0)


def test_order_does_not_matter():
    outs, lses, _ = parts([4, 11])
    forth = merge_attention(outs, lses)
    back = merge_attention(outs[::-1], lses[::-1])
    for one, other in zip(forth, back, strict=True):
        torch.testing.assert_close(one, other)


def test_empty_parts_are_neutral_whatever_they_hold():
    outs, lses, (out, lse) = parts([7])
    empty, nothing = torch.full_like(outs[0], math.nan), torch.full_like(lses[0], -INF)
    merged, merged_lse = merge_attention([empty, *outs, empty], [nothing, *lses, nothing])
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(merged_lse, lse)


def test_a_row_without_any_key_is_zero():
    out, lse = torch.full((1, 1, 2, 4), 3.0), torch.full((1, 1, 2), -INF)
    merged, merged_lse = merge_attention([out, out], [lse, lse])
    assert torch.equal(merged, torch.zeros_like(out))
    assert torch.equal(merged_lse, lse)


def test_huge_and_tiny_sums_do_not_overflow():
    out = torch.tensor([1.0, 2.0]).view(2, 1, 1, 1, 1)
    merged, lse = merge_attention(list(out), [torch.full((1, 1, 1), 1000.0), torch.full((1, 1, 1), -1000.0)])
    assert merged.item() == 1.0
    assert lse.item() == 1000.0


def test_nan_propagates():
    outs, lses, _ = parts([7])
    lses[1][0, 0, 1] = math.nan
    merged, merged_lse = merge_attention(outs, lses)
    assert merged[0, 0, 1].isnan().all()
    assert merged_lse[0, 0, 1].isnan()
    assert not merged[0, 0, 0].isnan().any()


def test_inputs_are_not_changed_and_one_part_is_itself():
    outs, lses, _ = parts([])
    before = outs[0].clone(), lses[0].clone()
    merged, merged_lse = merge_attention(outs, lses)
    torch.testing.assert_close(merged, outs[0])
    torch.testing.assert_close(merged_lse, lses[0])
    assert torch.equal(outs[0], before[0])
    assert torch.equal(lses[0], before[1])


def test_gradients_flow():
    outs, lses, _ = parts([7])
    assert torch.autograd.gradcheck(
        lambda *given: merge_attention(given[:2], given[2:]), [part.requires_grad_() for part in (*outs, *lses)]
    )


@pytest.mark.parametrize(
    ("outs", "lses"),
    [
        ([], []),
        ([torch.zeros(1, 1, 2, 4)], []),
        ([torch.zeros(1, 1, 2, 4)], [torch.zeros(1, 1, 2, 4)]),
        ([torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 3, 4)], [torch.zeros(1, 1, 2), torch.zeros(1, 1, 3)]),
        ([torch.zeros(1, 1, 2, 4, dtype=torch.int8)], [torch.zeros(1, 1, 2)]),
        ([torch.tensor(0.0)], [torch.tensor(0.0)]),
        (3, 3),
        ([[1.0]], [torch.zeros(1, 1, 2)]),
        ([torch.zeros(1, 1, 2, 4)], [None]),
        ([torch.zeros(1, 1, 2, 4)], [torch.zeros(1, 1, 2, device="meta")]),
        ([torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4, device="meta")], [torch.zeros(1, 1, 2)] * 2),
        ([torch.zeros(1, 1, 2, 4).to_sparse()], [torch.zeros(1, 1, 2)]),
    ],
)
def test_parts_that_do_not_fit_are_refused(outs, lses):
    with pytest.raises(ValueError, match="merge_attention takes"):
        merge_attention(outs, lses)
