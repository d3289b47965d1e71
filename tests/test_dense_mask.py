"""Dense masks by tile against float64 attention, and what is remembered of a mask."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdpa_router import UnsupportedError, dense_mask_attention, int8_attention
from sdpa_router.decision import TileCounts
from sdpa_router.kernels.sparse_attention.configs import in_words
from sdpa_router.kernels.sparse_attention.forward import own_rows
from sdpa_router.mask_summary import forget, recall, summarised
from sdpa_router.testing import gaussian, lse_error, relative_error, sdpa_oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUDGET = 0.0135  # as in test_kernel_int8.py


def make_mask(kind, rows, q_len, kv_len, dtype):
    """A mask of random tiles: kept, of one number, masked, mixed; with an empty row and an empty column."""
    nq, nk = -(-q_len // 64), -(-kv_len // 64)
    shape = (*rows, q_len, kv_len)
    kinds = torch.randint(0, 4, (*rows, nq, nk)).repeat_interleave(64, 2)[:, :, :q_len]
    kinds = kinds.repeat_interleave(64, 3)[..., :kv_len]
    if kind == "bool":
        mask = (kinds == 0) | (kinds == 1) | ((kinds == 3) & (torch.rand(shape) < 0.5))
        mask[:, :, q_len // 2] = False
        mask[..., kv_len // 3] = False
        return mask.to(DEVICE)
    number = torch.randn(*rows, nq, nk).repeat_interleave(64, 2)[:, :, :q_len].repeat_interleave(64, 3)[..., :kv_len]
    mask = torch.where(kinds == 0, 0.0, number.to(dtype).float())
    mask = torch.where(kinds == 2, -math.inf, mask)
    mask = torch.where(kinds == 3, 2 * torch.randn(shape), mask)
    if kind == "lowest":  # as transformers masks
        mask = torch.where(mask == -math.inf, torch.finfo(dtype).min, mask)
    else:
        mask[:, :, q_len // 2] = -math.inf
    return mask.to(dtype).to(DEVICE)


def check(inputs, mask, answer):
    exact, exact_lse = sdpa_oracle(*inputs, mask, enable_gqa=True)
    out, lse = answer
    assert relative_error(out, exact) < BUDGET * (1 if out.numel() > 10_000 else 2)  # a row alone scatters
    assert lse_error(lse, exact_lse) < (1 if out.numel() > 10_000 else 2) * 0.01
    empty = exact_lse == -math.inf
    assert (out[empty] == 0).all()
    assert (lse[empty] == -math.inf).all()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(
    kind=st.sampled_from(["bool", "float", "lowest"]),
    rows=st.sampled_from([(1, 1), (2, 1), (1, 4), (2, 4)]),
    expanded=st.booleans(),
    q_len=st.integers(2, 200),
    kv_len=st.integers(2, 330),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    transposed=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_mask(kind, rows, expanded, q_len, kv_len, dtype, transposed, seed):
    torch.manual_seed(seed)
    inputs = gaussian(2, 4, q_len, kv_len, 64, kv_heads=2, device=DEVICE, seed=seed)
    mask = make_mask(kind, rows, q_len, kv_len, dtype)
    if transposed:
        mask = mask.transpose(2, 3).contiguous().transpose(2, 3)
    if expanded:
        mask = mask.expand(2, 4, -1, -1)
    if kind == "lowest":
        exact = sdpa_oracle(*inputs, mask, enable_gqa=True)[0]
        assert relative_error(dense_mask_attention(*inputs, mask), exact) < BUDGET
    else:
        check(inputs, mask, dense_mask_attention(*inputs, mask, return_lse=True))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("q_len", "kv_len"), [(190, 304), (129, 16)])
def test_masks_whose_rows_are_whole_words(dtype, q_len, kv_len):
    torch.manual_seed(0)
    inputs = gaussian(1, 2, q_len, kv_len, 64, kv_heads=1, device=DEVICE)
    if dtype == torch.bfloat16:
        inputs = tuple(t.bfloat16() for t in inputs)
    for rows in ((1, 1), (1, 2)):
        kind = "bool" if dtype == torch.bool else "float"
        mask = make_mask(kind, rows, q_len, kv_len, torch.float32 if dtype == torch.bool else dtype)
        assert in_words(mask)
        check(inputs, mask, dense_mask_attention(*inputs, mask, return_lse=True))
    assert not in_words(mask[..., 1:])
    assert not in_words(mask.transpose(2, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("density", [0.3, 1.0])
def test_masks_that_one_or_both_query_tiles_read(dtype, density):
    """Tiles of random numbers at random places, more than a ring of the Hopper kernel, and a last query tile alone."""
    torch.manual_seed(1)
    inputs = tuple(t.to(dtype) for t in gaussian(1, 4, 330, 1208, 128, kv_heads=2, device=DEVICE))
    for rows in ((1, 1), (1, 4)):
        kept = (torch.rand(*rows, 6, 19) < density).repeat_interleave(64, 2).repeat_interleave(64, 3)
        mask = torch.where(kept[:, :, :330, :1208], 2 * torch.randn(*rows, 330, 1208), -math.inf).to(dtype).to(DEVICE)
        assert in_words(mask)
        check(inputs, mask, dense_mask_attention(*inputs, mask, return_lse=True))


def test_biases_over_0_of_float16():
    """Scores that they raise to where a weight without its row's maximum would leave float16."""
    inputs = gaussian(1, 2, 190, 304, 64, device=DEVICE)
    mask = (torch.rand(1, 1, 190, 304, device=DEVICE) * 20 - 10).half()
    mask[:, :, 70] = 10.0
    check(inputs, mask, dense_mask_attention(*inputs, mask, return_lse=True))
    check(inputs, -mask, dense_mask_attention(*inputs, -mask, return_lse=True))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
def test_what_tma_describes_of_a_mask(dtype):
    mask = torch.zeros(2, 1, 40, 96, dtype=dtype)
    for view, shape in ((mask, (2, 1, 40, 96)), (mask[:1].expand(2, 4, -1, -1), (1, 1, 40, 96))):
        described = own_rows(view)
        assert described.shape == shape
        assert described.data_ptr() == view.data_ptr()
        assert all(stride > 0 and stride * mask.element_size() % 16 == 0 for stride in described.stride()[:3])
    one = own_rows(mask[:1, :, :1, :90])
    assert one.stride()[3] == 1
    assert all(stride > 0 and stride * mask.element_size() % 16 == 0 for stride in one.stride()[:3])


@pytest.mark.gpu
def test_a_captured_call_and_one_on_another_stream_see_what_the_mask_holds():
    inputs = gaussian(1, 2, 130, 200, 64, device="cuda")
    mask = torch.rand(130, 200, device="cuda") < 0.5
    expected = [sdpa_oracle(*inputs, given)[0] for given in (mask, ~mask)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            beside = dense_mask_attention(*inputs, mask)
    torch.cuda.current_stream().wait_stream(side)
    assert relative_error(beside, expected[0]) < BUDGET
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dense_mask_attention(*inputs, mask)
    for i in range(2):
        graph.replay()
        assert relative_error(out, expected[i]) < BUDGET
        mask.logical_not_()


def test_rows_of_the_lowest_number_are_the_mean_of_the_values():
    inputs = gaussian(1, 2, 130, 200, 64, device=DEVICE)
    mask = torch.randn(1, 1, 130, 200, device=DEVICE)
    mask[:, :, 70] = torch.finfo(torch.float32).min
    out = dense_mask_attention(*inputs, mask)
    assert relative_error(out[:, :, 70], inputs[2].double().mean(2)) < BUDGET


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [(), (2, 1), (1, 2)])
def test_one_number_for_all_keys_of_a_row(rows, dtype):
    inputs = gaussian(2, 2, 130, 200, 64, device=DEVICE)
    mask = torch.randn(*rows, 130, 1, device=DEVICE)
    mask = mask > 0 if dtype == torch.bool else torch.where(mask > 1, -math.inf, mask).to(dtype)
    for treat_as in ("full", "key") if dtype == torch.bool else ("full",):
        out, lse = dense_mask_attention(*inputs, mask, return_lse=True, treat_as=treat_as)
        check(inputs, mask[(None,) * (4 - mask.dim())], (out, lse))
    shorter = (inputs[0], inputs[1][:, :, :70], inputs[2][:, :, :70])  # the same memory, for other keys
    check(shorter, mask[(None,) * (4 - mask.dim())], dense_mask_attention(*shorter, mask, return_lse=True))


def test_nan_and_infinity_stay_in_their_rows():
    inputs = gaussian(1, 2, 130, 200, 64, device=DEVICE)
    mask = torch.randn(1, 1, 130, 200, device=DEVICE)
    expected = dense_mask_attention(*inputs, mask.clone())
    mask[:, :, 3, 100] = math.nan
    mask[:, :, 70, 20] = math.inf
    out = dense_mask_attention(*inputs, mask)
    spoilt = torch.zeros(130, dtype=torch.bool, device=DEVICE)
    spoilt[[3, 70]] = True
    assert out[:, :, spoilt].isnan().all()
    assert relative_error(out[:, :, ~spoilt], expected[:, :, ~spoilt]) < BUDGET


def test_keys_that_no_query_sees_change_nothing():
    inputs = gaussian(1, 2, 130, 200, 64, device=DEVICE)
    mask = torch.rand(1, 1, 130, 200, device=DEVICE) < 0.7
    mask[..., 90:130] = False
    before = dense_mask_attention(*inputs, mask)
    inputs[1][:, :, 90:130] *= 1000
    inputs[2][:, :, 90:130] = 60000
    assert torch.equal(before, dense_mask_attention(*inputs, mask))


def test_a_mask_of_outer_product():
    inputs = gaussian(2, 2, 200, 200, 64, device=DEVICE)
    valid = torch.arange(200, device=DEVICE) < torch.tensor([[150], [64]], device=DEVICE)
    mask = (valid[:, :, None] & valid[:, None, :])[:, None]
    check(inputs, mask, dense_mask_attention(*inputs, mask, return_lse=True))
    check(inputs, mask, dense_mask_attention(*inputs, mask, return_lse=True, treat_as="key"))
    added = torch.where(mask, 0.5, -math.inf).half()
    check(inputs, added, dense_mask_attention(*inputs, added, return_lse=True, treat_as="key"))
    counts = summarised(mask).counts()
    assert counts == TileCounts(kept=4 + 1, constant=0, mixed=5, skipped=7 + 15)


@pytest.mark.parametrize("pair", [(1.9e38, 2.1e38), (-2.1e38, -1.9e38), (-3.4e38, -3.3e38), (0.9e38, 1.1e38)])
def test_biases_near_the_end_of_float32_keep_their_order(pair):
    inputs = gaussian(1, 1, 64, 130, 64, device=DEVICE)
    mask = torch.tensor(pair, device=DEVICE)[torch.randint(0, 2, (64, 130), device=DEVICE)]
    weights = (mask == mask.max()).float()
    means = weights @ inputs[2][0, 0].float() / weights.sum(1, keepdim=True)  # such biases absorb the scores
    assert relative_error(dense_mask_attention(*inputs, mask)[0, 0], means) < BUDGET


def test_counts_are_of_the_tiles():
    mask = torch.zeros(128, 256, device=DEVICE)
    mask[:64, :64] = 3.5
    mask[:64, 64:128] = -math.inf
    mask[64:, 200] = 1.0
    mask[64:, :64] = torch.finfo(torch.float32).min  # nothing beside the zeros of its rows
    counts = summarised(mask).counts()
    assert counts == TileCounts(kept=4, constant=1, mixed=1, skipped=2)
    assert str(counts) == "8 tiles: 4 kept, 1 of one number, 1 read, 2 skipped"


def test_a_summary_is_made_once_for_a_mask_and_again_when_it_changes():
    forget()
    mask = torch.zeros(1, 1, 128, 128, dtype=torch.bool, device=DEVICE)
    first = summarised(mask)
    assert summarised(mask) is first
    assert summarised(mask.view(1, 1, 128, 128)) is first
    assert recall(mask[..., :64]) is None
    inputs = gaussian(1, 1, 128, 128, 64, device=DEVICE)
    assert (dense_mask_attention(*inputs, mask) == 0).all()
    mask[..., 5] = True
    assert recall(mask) is None
    exact = sdpa_oracle(*inputs, mask)[0]
    assert relative_error(dense_mask_attention(*inputs, mask), exact) < BUDGET
    del mask
    gc.collect()
    summarised(torch.ones(64, 64, dtype=torch.bool, device=DEVICE))
    from sdpa_router import mask_summary

    assert len(mask_summary._known) == 1


def test_each_stream_and_each_graph_makes_a_summary_of_its_own(monkeypatch):
    """Nothing waits for another stream; and a graph that is replayed after a write finds out what the mask holds."""
    from sdpa_router import mask_summary

    mask = torch.ones(64, 64, dtype=torch.bool, device=DEVICE)
    summaries = []
    for stream in (7, 7, 8, None, None, 7):  # None: under capture
        monkeypatch.setattr(mask_summary, "stream_of", lambda device, stream=stream: stream)
        summaries.append(summarised(mask))
    assert summaries[0] is summaries[1] is summaries[5]
    assert len(set(map(id, summaries))) == 4


def test_masks_made_in_inference_mode_are_not_remembered():
    with torch.inference_mode():
        mask = torch.ones(64, 64, dtype=torch.bool, device=DEVICE)
        summarised(mask)
        assert recall(mask) is None


def test_a_graph_of_torch_compile_sees_what_the_mask_holds_now():
    inputs = gaussian(1, 2, 130, 200, 64, device=DEVICE)
    mask = torch.rand(130, 200, device=DEVICE) < 0.5
    compiled = torch.compile(dense_mask_attention, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(*inputs, mask), dense_mask_attention(*inputs, mask))
        mask.logical_not_()


def test_other_masks_and_what_is_refused():
    inputs = gaussian(1, 2, 130, 200, 64, device=DEVICE)
    keys = torch.randn(1, 1, 1, 200, device=DEVICE)
    assert torch.equal(dense_mask_attention(*inputs, keys), int8_attention(*inputs, keys))
    with pytest.raises(UnsupportedError, match="invalid_mask"):
        dense_mask_attention(*inputs, torch.zeros(130, 199, device=DEVICE))
    with pytest.raises(UnsupportedError, match="mask_dtype"):
        dense_mask_attention(*inputs, torch.zeros(130, 200, device=DEVICE, dtype=torch.float64))
    with pytest.raises(UnsupportedError, match="invalid_mask"):
        dense_mask_attention(*inputs, None)
    with pytest.raises(ValueError, match="treat_as is 'keys'; accepted: full or key"):
        dense_mask_attention(*inputs, keys, treat_as="keys")
