"""Block-sparse attention against float64 attention with the expanded mask, its inputs, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdpa_router import (
    UnsupportedError,
    block_sparse_attention,
    int8_attention,
    merge_attention,
    sparse_sm89_attention,
)
from sdpa_router.testing import gaussian, lse_error, relative_error, sdpa_oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUDGET = 0.0135  # as in test_kernel_int8.py
LSE_BUDGET = 0.01


def draw(q_len, kv_len, head_dim=64, heads=2, kv_heads=None, batch=1, dtype=torch.float16):
    return gaussian(batch, heads, q_len, kv_len, head_dim, kv_heads=kv_heads, dtype=dtype, device=DEVICE)


def random_tiles(density, q_len, kv_len, batch=1, heads=1, block=64):
    return torch.rand(batch, heads, -(-q_len // block), -(-kv_len // block), device=DEVICE) < density


def expand(tiles, q_len, kv_len, block=64):
    return tiles.repeat_interleave(block, -2).repeat_interleave(block, -1)[..., :q_len, :kv_len]


def check(query, key, value, mask, answer, scale=None):
    exact, exact_lse = sdpa_oracle(query, key, value, mask, scale=scale, enable_gqa=True)
    out, lse = answer
    assert out.dtype == query.dtype
    assert out.shape == query.shape
    assert lse.dtype == torch.float32
    assert relative_error(out, exact) < BUDGET * (1 if out.numel() > 10_000 else 2)  # a row alone scatters
    assert lse_error(lse, exact_lse) < (1 if out.numel() > 10_000 else 2) * LSE_BUDGET
    empty = exact_lse == -math.inf
    assert (out[empty] == 0).all()
    assert (lse[empty] == -math.inf).all()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 2),
    q_len=st.integers(1, 260),
    kv_len=st.integers(1, 330),
    head_dim=st.sampled_from([8, 64, 96, 128, 256]),
    density=st.sampled_from([0.0, 0.2, 0.6, 1.0]),
    shared=st.sampled_from(["batch and heads", "batch", "nothing"]),
    bias=st.sampled_from(["none", "bool", "float"]),
    sizes=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_tiles(batch, kv_heads, group, q_len, kv_len, head_dim, density, shared, bias, sizes, seed):
    torch.manual_seed(seed)
    heads = kv_heads * group
    query, key, value = draw(q_len, kv_len, head_dim, heads, kv_heads, batch)
    rows = {"batch and heads": (1, 1), "batch": (1, heads), "nothing": (batch, heads)}[shared]
    tiles = random_tiles(density, q_len, kv_len, *rows)
    keys = None
    if bias == "bool":
        keys = torch.rand(batch, 1, 1, kv_len, device=DEVICE) < 0.7
    elif bias == "float":
        keys = 2 * torch.randn(1, heads, 1, kv_len, device=DEVICE)
    valid = torch.randint(0, 65, (-(-kv_len // 64),)) if sizes else None
    mask = expand(tiles, q_len, kv_len)
    if valid is not None:
        mask = mask & (torch.arange(64) < valid[:, None]).flatten()[:kv_len].to(DEVICE)
    if keys is not None:
        mask = mask & keys if bias == "bool" else torch.where(mask, keys, -math.inf)
    answer = block_sparse_attention(query, key, value, tiles, valid_sizes=valid, attn_mask=keys, return_lse=True)
    check(query, key, value, mask, answer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_empty_rows_columns_and_a_full_mask(dtype):
    query, key, value = draw(200, 200, dtype=dtype)
    tiles = random_tiles(0.6, 200, 200)
    tiles[:, :, 1] = False
    tiles[..., 2] = False
    check(query, key, value, expand(tiles, 200, 200), block_sparse_attention(query, key, value, tiles, return_lse=True))
    everything = torch.ones_like(tiles)
    out = block_sparse_attention(query, key, value, everything)
    assert relative_error(out, int8_attention(query, key, value)) < BUDGET


def test_strided_inputs_and_tiles():
    query, key, value = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in draw(130, 200, heads=3))
    tiles = random_tiles(0.5, 130, 200, heads=3).transpose(2, 3).contiguous().transpose(2, 3)
    answer = block_sparse_attention(query, key, value, tiles, return_lse=True)
    check(query, key, value, expand(tiles, 130, 200), answer)
    assert answer[0].stride() == query.stride()
    one = tiles[:, :1].expand(1, 3, -1, -1)
    again = block_sparse_attention(query, key, value, one)
    assert torch.equal(again, block_sparse_attention(query, key, value, tiles[:, :1]))


def test_the_parts_of_a_mask_merge_to_the_whole():
    query, key, value = draw(150, 330)
    tiles = random_tiles(0.5, 150, 330)
    tiles[..., :2] = True  # a dense part in front
    dense = int8_attention(query, key[:, :, :128], value[:, :, :128], return_lse=True)
    rest = block_sparse_attention(query, key[:, :, 128:], value[:, :, 128:], tiles[..., 2:], return_lse=True)
    check(query, key, value, expand(tiles, 150, 330), merge_attention(*zip(dense, rest, strict=True)))


def test_what_nobody_attends_changes_nothing():
    query, key, value = draw(128, 320)
    tiles = random_tiles(0.7, 128, 320)
    tiles[..., 1] = False
    sizes = [64, 64, 64, 20, 64]
    before = block_sparse_attention(query, key, value, tiles, valid_sizes=sizes)
    for hidden in (slice(64, 128), slice(192 + 20, 256)):
        key[:, :, hidden] *= 1000
        value[:, :, hidden] = 60000
    assert torch.equal(before, block_sparse_attention(query, key, value, tiles, valid_sizes=sizes))


def test_an_error_would_be_seen():
    query, key, value = draw(64, 320)
    tiles = torch.tensor([[True, False, True, True, True]], device=DEVICE)
    exact = sdpa_oracle(query, key, value, expand(tiles, 64, 320))[0]
    for wrong in ([[True, True, True, True, True]], [[True, False, True, True, False]]):
        out = block_sparse_attention(query, key, value, torch.tensor(wrong, device=DEVICE))
        assert relative_error(out, exact) > 2 * BUDGET


def lists_of(tiles):
    counts = tiles.sum(-1, dtype=torch.int32)
    return torch.argsort(~tiles, dim=-1, stable=True).to(torch.int32), counts


@pytest.mark.parametrize("block", [64, 128])
def test_lists_and_block_masks_are_the_tiles_they_name(block):
    query, key, value = draw(200, 330)
    tiles = random_tiles(0.5, 200, 330, heads=2, block=block)
    expected = block_sparse_attention(query, key, value, tiles, block=block)
    indices, counts = lists_of(tiles)
    assert torch.equal(expected, block_sparse_attention(query, key, value, (indices, counts), block=block))
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    made = flex.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=block)
    for _ in range(2):  # converted, then recalled
        assert torch.equal(expected, block_sparse_attention(query, key, value, made))
    none, full = torch.zeros_like(counts), (counts, indices)
    made = flex.BlockMask.from_kv_blocks(none, indices, *full, BLOCK_SIZE=block, mask_mod=lambda b, h, q, k: q >= k)
    assert torch.equal(expected, block_sparse_attention(query, key, value, made))
    check(query, key, value, expand(tiles, 200, 330, block), (expected, sdpa_oracle(
        query, key, value, expand(tiles, 200, 330, block))[1].float()))  # fmt: skip


def test_a_mask_mod_that_masks_in_part_is_refused():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    query, key, value = draw(200, 200)
    indices, counts = lists_of(random_tiles(1.0, 200, 200, block=128).tril())
    made = flex.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=128, mask_mod=causal)
    with pytest.raises(ValueError, match="mask_mod \\(causal\\) masks in part; accepted: blocks that are full"):
        block_sparse_attention(query, key, value, made)
    made = flex.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=(128, 64))
    with pytest.raises(ValueError, match="square blocks of a multiple of 64"):
        block_sparse_attention(query, key, value, made)


def flex_mask(rows, columns):
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    indices, counts = lists_of(torch.ones(1, 1, rows, columns, dtype=torch.bool, device=DEVICE))
    return flex.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=128)


@pytest.mark.parametrize("blocks", [(1, 2), (2, 1), (3, 2), (2, 3)])
def test_a_block_mask_of_another_size_is_refused(blocks):
    inputs = draw(200, 256)
    match = rf"the BlockMask has {blocks[0]} by {blocks[1]} blocks of 128; accepted: 2 by 2"
    with pytest.raises(ValueError, match=match):
        block_sparse_attention(*inputs, flex_mask(*blocks))


def test_what_is_not_finite_stays_with_those_who_see_its_tile():
    query, key, value = draw(200, 200)
    key[:, :, 70] = math.nan
    tiles = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 1, 0]], device=DEVICE).bool()[None, None]
    out = block_sparse_attention(query, key, value, tiles)
    key[:, :, 70] = 0
    exact = sdpa_oracle(query, key, value, expand(tiles, 200, 200))[0]
    seen = torch.arange(200, device=DEVICE) // 64 == 1
    assert out[:, :, seen].isnan().all()
    assert relative_error(out[:, :, ~seen], exact[:, :, ~seen]) < BUDGET


def test_a_block_mask_that_is_written_to_is_converted_again():
    inputs, block_mask = draw(256, 256), flex_mask(2, 2)
    block_sparse_attention(*inputs, block_mask)
    block_mask.kv_num_blocks[0, 0, 0] = 0
    tiles = torch.tensor([[False, False], [True, True]], device=DEVICE)
    again = block_sparse_attention(*inputs, block_mask, return_lse=True)
    check(*inputs, expand(tiles, 256, 256, 128)[None, None], again)


def test_a_block_mask_is_converted_on_each_stream_but_not_under_capture(monkeypatch):
    from sdpa_router import tile_mask

    def convert(block_mask, stream):
        monkeypatch.setattr(tile_mask, "stream_of", lambda device: stream)
        return tile_mask.tile_mask(block_mask, 1, 1, 256, 256, torch.device(DEVICE), 64, False).data_ptr()

    block_mask, captured = flex_mask(2, 2), flex_mask(2, 2)
    first = convert(block_mask, 7)
    assert convert(block_mask, 7) == convert(block_mask, None) == first
    assert convert(block_mask, 8) != first
    convert(captured, None)
    assert id(captured) not in tile_mask._converted


def test_the_stand_in_for_fastvideo():
    query, key, value = draw(256, 256, 128, dtype=torch.bfloat16)
    sizes = torch.tensor([64, 7, 31, 64], device=DEVICE)
    tiles = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]], device=DEVICE).bool()
    tiles = tiles.expand(1, 2, 4, 4)
    valid = (torch.arange(64, device=DEVICE) < sizes[:, None]).flatten()
    with torch.no_grad():
        out = sparse_sm89_attention(query, key, value, tiles, sizes)
        exact = sdpa_oracle(query, key, value, expand(tiles, 256, 256) & valid)[0]
        assert relative_error(out, exact) < BUDGET
        for wrong in (
            {"mask": tiles[..., :3]},
            {"vbs": sizes[:3]},
            {"vbs": sizes.tolist()},
            {"k": key[:, :, :128]},
            {"q": query[0]},
            {"q": None},
            {"int8_qk": False},
        ):
            arguments = {"q": query, "k": key, "v": value, "mask": tiles, "vbs": sizes} | wrong
            with pytest.raises(ValueError, match="accepted"):
                sparse_sm89_attention(**arguments)
    with pytest.raises(ValueError, match="no_grad"):
        sparse_sm89_attention(query, key, value, tiles, sizes)


TILES = torch.ones(2, 3, dtype=torch.bool)
INDICES, COUNTS = lists_of(TILES)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block_mask": TILES[:, :2]}, r"bool \[\.\., 2, 3\]"),
        ({"block_mask": TILES.float()}, r"is torch.float32 \[2, 3\]; accepted: bool"),
        ({"block_mask": TILES[None, None].expand(1, 3, 2, 3)}, r"batch and heads; accepted: 1 or 1, and 1 or 2"),
        ({"block_mask": "all"}, "block_mask is str; accepted: a bool tensor"),
        ({"block_mask": (INDICES, COUNTS[:1])}, r"\[2, 3\] on cpu and \[1\]"),
        ({"block_mask": (INDICES.float(), COUNTS)}, "indices are torch.float32"),
        ({"block_mask": (INDICES + 1, COUNTS)}, "indices reach from 1 to 3; accepted: 0 to 2"),
        ({"block_mask": (INDICES, COUNTS + 1)}, "counts reach from 4 to 4; accepted: 0 to 3"),
        ({"valid_sizes": [64, 65, 64]}, "valid_sizes reach from 64 to 65; accepted: 0 to 64"),
        ({"valid_sizes": [64, 64]}, r"accepted: integers \[3\]"),
        ({"valid_sizes": [1.0, 2.0, 3.0]}, "valid_sizes is torch.float32"),
        ({"valid_sizes": "abc"}, r"valid_sizes is str; accepted: integers \[3\]"),
        ({"valid_sizes": [[64], [64, 2], [1]]}, r"valid_sizes is list; accepted: integers \[3\]"),
        ({"valid_sizes": [1j, 2j, 3j]}, r"valid_sizes is torch.complex64 \[3\]; accepted: integers \[3\]"),
        ({"valid_sizes": torch.ones(3, dtype=torch.int64).to_sparse()}, "valid_sizes is sparse or nested"),
        ({"valid_sizes": torch.ones(3, dtype=torch.int64, device="meta")}, "valid_sizes is meta torch.int64"),
        ({"block_mask": TILES.to_sparse()}, "block_mask is sparse or nested torch.bool"),
        ({"block_mask": TILES.to("meta")}, "block_mask is meta torch.bool"),
        ({"block_mask": (INDICES.to("meta"), COUNTS)}, "indices are meta torch.int32"),
        ({"block": 32}, "block is 32; accepted: a multiple of 64"),
    ],
)
def test_bad_input(wrong, message):
    query, key, value = draw(100, 150)
    arguments = {"block_mask": TILES.to(DEVICE)} | wrong
    with pytest.raises(ValueError, match=message):
        block_sparse_attention(query, key, value, arguments.pop("block_mask"), **arguments)


@pytest.mark.gpu
def test_lists_on_a_device_are_checked_on_request_and_never_followed_out_of_range():
    query, key, value = draw(100, 150)
    lists = (INDICES + 1).to(DEVICE), COUNTS.to(DEVICE)
    kept = torch.tensor([[False, True, True]] * 2, device=DEVICE)
    out = block_sparse_attention(query, key, value, lists)
    assert torch.equal(out, block_sparse_attention(query, key, value, kept))
    with pytest.raises(ValueError, match="indices reach"):
        block_sparse_attention(query, key, value, lists, validate=True)


def test_what_the_kernel_cannot_do_is_refused_with_every_reason():
    query, key, value = draw(100, 150)
    with pytest.raises(UnsupportedError, match="full_mask"):
        block_sparse_attention(query, key, value, TILES, attn_mask=torch.zeros(100, 150, device=DEVICE))
    with pytest.raises(UnsupportedError, match="dtype"):
        block_sparse_attention(query.float(), key.float(), value.float(), TILES)
    with pytest.raises(UnsupportedError, match="heads"):
        block_sparse_attention(query, key.repeat(1, 3, 1, 1), value.repeat(1, 3, 1, 1), TILES)


def test_compiles_without_a_graph_break():
    query, key, value = draw(100, 150)
    tiles = TILES.to(DEVICE)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(query, key, value, tiles):
        return block_sparse_attention(query, key, value, tiles, return_lse=True)

    with torch.no_grad():
        for got, wanted in zip(
            compiled(query, key, value, tiles),
            block_sparse_attention(query, key, value, tiles, return_lse=True),
            strict=True,
        ):
            assert torch.equal(got, wanted)
