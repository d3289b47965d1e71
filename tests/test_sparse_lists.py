"""Lists for the Hopper kernel, read as its warpgroups read them, against the tiles that they were made of."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from sdpa_router import video_windows
from sdpa_router.banded import bias_of, flatten
from sdpa_router.kernels.sparse_attention.key_bias import kept_keys, key_bias
from sdpa_router.kernels.sparse_attention.lists import Tiles, make_lists
from sdpa_router.kernels.sparse_attention.windows import plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def walk(tiles, counts, warpgroup):
    """Positions and key tiles of a warpgroup's steps; checks that the values of a step come with the step after."""
    shared, *slots = counts[:3].tolist()
    own, both, odd = slots[warpgroup], min(slots), int(counts[3 + warpgroup])
    steps, previous, found = (shared + own - 1 if own else 0), [-1, -1], []
    for t in range(steps + 1 if own else 0):
        j = max(t - shared, 0)
        position = t if t < shared else shared + j + min(j + warpgroup, both)
        keys, values = tiles[position, :2].tolist(), tiles[position, 2:].tolist()
        assert values == previous
        assert (min(keys) >= 0) == (t < steps)
        previous = keys
        if t < steps:
            found.append((position, keys[:1] if odd and t == steps - 1 else keys))
            assert keys[0] == keys[1] if odd and t == steps - 1 else keys[0] != keys[1]
    return found


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(
    nq=st.integers(1, 5),
    nk=st.integers(1, 40),
    density=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    masked=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_pairs_hold_the_tiles_of_both(nq, nk, density, masked, seed):
    torch.manual_seed(seed)
    keep = torch.rand(1, 2, nq, nk, device=DEVICE) < density
    tiles, offset = Tiles(keep), None
    if masked:  # the summary of a dense mask: a number, or NaN where it must be read
        offset = torch.where(torch.rand(1, 2, nq, nk) < 0.3, math.nan, torch.randn(1, 2, nq, nk)).to(DEVICE)
        high = torch.where(keep, offset.nan_to_num(5.0), -math.inf)
        tiles = Tiles(None, torch.where(keep, offset, -math.inf), high, torch.zeros(1, 2, nq, device=DEVICE))
    lists = make_lists(tiles, None, paired=True)
    pairs = (nq + 1) // 2
    for row in range(2 * pairs):
        head, pair = divmod(row, pairs)
        users = {}
        for warpgroup in range(2):
            q = 2 * pair + warpgroup
            wanted = keep[0, head, q].nonzero().flatten().tolist() if q < nq else []
            steps = walk(lists.tiles[row], lists.counts[row], warpgroup)
            assert sorted(tile for _, found in steps for tile in found) == wanted
            for t, (position, found) in enumerate(steps):
                users.setdefault(position, set()).add(warpgroup)
                if offset is not None:
                    expected = offset[0, head, q, found].tolist() + [-math.inf] * (2 - len(found))
                    got = lists.offsets[row, warpgroup, t].tolist()
                    assert str(got) == str(expected)
        shared = int(lists.counts[row, 0])
        assert all((users[position] == {0, 1}) == (position < shared) for position in users)


def test_biases_over_0_are_in_what_bounds_the_scores():
    """Where that is small the kernel takes no maximum: exp2(score + bias) must not leave float16."""
    high = torch.tensor([[[[9.0, 0.0], [-3.0, -math.inf], [math.inf, 1.0]]]], device=DEVICE)
    floor = torch.tensor([[[2.0, -7.0, 0.0]]], device=DEVICE)
    lists = make_lists(Tiles(None, high, high, floor), None, paired=True)
    assert lists.floor.tolist() == [[-9.0, -7.0], [-math.inf, 0.0]]


def test_pairs_of_windows_hold_their_tiles_and_biases():
    windows = video_windows(5, 70, 2, 1, prefix=45)
    total = 45 + 5 * 70
    found = plan(
        flatten(windows, total, total), 1e-4, total, total, own_rows=False, paired=True, device=torch.device("cpu")
    )  # fmt: skip
    padded = -(-total // 64) * 64
    for i, window in enumerate(windows):
        bias = torch.full((padded,), -math.inf)
        bias[:total] = bias_of(window, total)[0, 0, 0] * math.log2(math.e)
        for warpgroup in range(2):
            got = torch.full((padded // 64, 64), -math.inf)
            for t, (position, tiles) in enumerate(walk(found.lists.tiles[i], found.lists.counts[i], warpgroup)):
                rows = found.lists.bias_rows[i, position]
                assert t < int(found.lists.counts[i, 5]) or rows[: len(tiles)].tolist() == [0] * len(tiles)
                for tile, row in zip(tiles, rows, strict=False):
                    got[tile] = found.table[0, 0, row]
            assert torch.allclose(got.flatten(), bias, atol=1e-5)
    rows = sorted((first, end) for first, end, _ in found.lists.blocks.tolist())
    assert [end for _, end in rows] == sorted(end for _, end in rows)
    assert max(end - first for first, end in rows) > 0


def test_keys_that_are_seen():
    keep = torch.tensor([[True, False, False], [False, False, True]], device=DEVICE)[None, None]
    kept = kept_keys(keep, None, None)
    assert kept.shape == (1, 1, 192)
    assert (kept == 0).flatten().nonzero().flatten().tolist() == [*range(64), *range(128, 192)]
    bias = torch.zeros(1, 1, 1, 150, device=DEVICE)
    bias[..., :64] = -1.0e5  # far below the others, but all that the first query tile sees
    bias[..., 5] = -2.0e5
    bias[..., 130:140] = -math.inf
    table = key_bias(bias, 150, bias)
    for paired in (False, True):
        kept = kept_keys(keep, table, make_lists(Tiles(keep), table.top, paired=paired))
        wanted = [n for n in [*range(64), *range(128, 150)] if n != 5 and not 130 <= n < 140]
        assert (kept == 0).flatten().nonzero().flatten().tolist() == wanted


def test_tiles_whose_rows_lie_past_2_to_the_31():
    """Each stride fits 32 bits, and a row times it does not; of the memory only what is written is touched."""
    stride = 1_200_000_000
    keep = torch.empty(2 * stride + 2, dtype=torch.bool, device=DEVICE).as_strided((1, 1, 3, 2), (0, 0, stride, 1))
    keep[:] = torch.tensor([[False, False], [False, False], [False, True]], device=DEVICE)
    assert (kept_keys(keep, None, None) == 0).flatten().nonzero().flatten().tolist() == [*range(64, 128)]
    assert make_lists(Tiles(keep), None, paired=False).counts.tolist() == [0, 0, 1]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(nq=st.integers(1, 5), nk=st.integers(1, 20), density=st.sampled_from([0.2, 0.6, 1.0]), seed=st.integers(0, 999))
def test_pairs_take_the_largest_bias_of_their_own_tiles_off(nq, nk, density, seed):
    torch.manual_seed(seed)
    keep = torch.rand(1, 2, nq, nk, device=DEVICE) < density
    top = torch.tensor([0.0, 3.0, -9000.0, -1.0e6, math.inf, -math.inf])[torch.randint(0, 6, (1, 2, nk))].to(DEVICE)
    lists = make_lists(Tiles(keep), top, paired=True)
    pairs = (nq + 1) // 2
    for row in range(2 * pairs):
        head, pair = divmod(row, pairs)
        for warpgroup in range(min(2, nq - 2 * pair)):
            seen = torch.where(keep[0, head, 2 * pair + warpgroup], top[0, head], -math.inf)
            finite = seen[seen.isfinite()]
            least = float(finite.max()) if len(finite) else 0.0
            assert lists.anchor[row, warpgroup].tolist() == [least, 1.0]
            wanted = {
                t: min(0.0, (v - least) / math.log(2)) for t, v in enumerate(seen.tolist()) if v >= least - 8191.6
            }
            found = {}
            for t, (_, tiles) in enumerate(walk(lists.tiles[row], lists.counts[row], warpgroup)):
                offsets = lists.offsets[row, warpgroup, t].tolist()
                found |= dict(zip(tiles, offsets, strict=False))
                assert offsets[len(tiles) :] == [-math.inf] * (2 - len(tiles))
            assert found == pytest.approx(wanted, rel=1e-6)
