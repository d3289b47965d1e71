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
from sdpa_router.kernels.sparse_attention.lists import Tiles, make_lists, seen_keys
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
                    got[tile] = found.table[row]
            assert torch.allclose(got.flatten(), bias, atol=1e-5)
    rows = sorted((first, end) for first, end, _ in found.lists.blocks.tolist())
    assert [end for _, end in rows] == sorted(end for _, end in rows)
    assert max(end - first for first, end in rows) > 0


def test_keys_that_are_seen():
    keep = torch.tensor([[True, False, False], [False, False, True]], device=DEVICE)[None, None]
    seen = seen_keys(keep, 150)
    assert seen.shape == (1, 1, 1, 150)
    assert seen.flatten().nonzero().flatten().tolist() == [*range(64), *range(128, 150)]
