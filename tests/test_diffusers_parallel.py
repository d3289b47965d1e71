"""diffusers' context parallelism with our backend, on real processes (ranks_diffusers.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from worlds import start

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("diffusers.models._modeling_parallel")

from sdpa_router.testing import BUDGET  # noqa: E402

SCRIPT = Path(__file__).with_name("ranks_diffusers.py")
NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="runs without a GPU, in Triton's interpreter")
WORLDS = [
    *(pytest.param((size, "gloo"), marks=ON_CPU, id=f"{size}-gloo") for size in (2, 4)),
    pytest.param((2, "nccl"), marks=[pytest.mark.gpu, NEEDS_TWO], id="2-nccl"),
]


@pytest.fixture(scope="module")
def by_size(tmp_path_factory):
    """What each rank found, by size of its world: one process starts all."""
    backend, sizes = ("nccl", [2]) if torch.cuda.is_available() else ("gloo", [2, 4])
    return start(SCRIPT, backend, tmp_path_factory.mktemp("diffusers"), sizes)


@pytest.fixture(params=WORLDS)
def found(request, by_size):
    """What each rank of a world found."""
    return by_size[request.param[0]]


@pytest.fixture(params=[world for world in WORLDS if world.values[0][0] == 2])
def two(request, by_size):
    """What each of two ranks found."""
    return by_size[request.param[0]]


# int8 calls of a layer: self-attention, in a ring for every shard, and cross-attention.
CALLS = {"ring": 3, "ulysses": 2, "both": 3, "cudnn": 2}


def test_a_model_in_parallel_is_the_model(found):
    """By the name of the backend, and by enable() alone, before enable_parallelism() or after it."""
    ways = ["both"] if len(found) == 4 else ["ring", "ulysses"]
    names = [*ways, *(f"{way}, enabled" for way in ways), *(["cudnn, enabled"] if len(found) == 2 else [])]
    for rank in found:
        for name in names:
            step = rank[f"model: {name}"]
            assert step["error"] < 0.005, name
            assert (step["int8"], step["sdpa"]) == (CALLS[name.split(",")[0]], 0), name


def test_what_is_excluded_or_disabled_stays_with_torch(two):
    for rank in two:
        assert rank["model: excluded"]["skipped"] == rank["model: excluded"]["sdpa"] == 2
        assert (
            rank["model: excluded ring"]["skipped"] == 3
        )  # diffusers' own ring refuses: torch attends, the router merges
        assert rank["model: excluded ring"]["error"] < 0.001
        assert rank["model: disabled"]["int8"] == rank["model: disabled"]["sdpa"] == 0
        assert rank["model: disabled"]["error"] < 0.001
        assert "does not support return_lse" in rank["native ring"]


def test_masks_and_the_lse(two):
    for rank in two:
        calls = [name for name in rank if name.startswith("calls")]
        assert len(calls) == 8
        for call in calls:
            assert rank[call]["error"] <= BUDGET.gaussian, call
            assert rank[call]["lse"] <= BUDGET.lse, call
            assert rank[call]["dtype"] == "torch.float32", call
            assert rank[call]["shape"], call


def test_what_is_not_passed_on_is_refused_with_a_reason(two):
    for rank in two:
        for way in ("ring", "ulysses"):
            assert "expected one row for all queries" in rank[f"refused: {way}, full"]
            assert "mask over 7 keys under context parallelism; expected 20" in rank[f"refused: {way}, short"]
            assert "given is_causal=True and enable_gqa=False" in rank[f"refused: {way}, causal"]
        assert "require a gradient under ring" in rank["refused: ring, gradient"]
        assert "dropout_p=0.5" in rank["refused: ring, dropout"]
        assert rank["gradient"]


ON_ONE = {
    "mask on one": "rank 1 gives mask 'a mask of bool [1, 1, 1] over its keys', expected 'no mask' as on rank 0",
    "short on one": "rank 1 refuses: given a mask over 7 keys under context parallelism; expected 20 (this",
    "full on one": "rank 1 refuses: given the mask [1, 4, 8, 20] under context parallelism; expected one row for all",
    "length on one": "rank 1 gives 8 queries and 12 keys, expected 8 and 8 as on rank 0",
    "dtype on one": "rank 1 gives dtype 'bfloat16', expected 'float16' as on rank 0",
    "causal on one": "rank 1 refuses: given is_causal=True",
}


@pytest.mark.parametrize("way", ["ring", "ulysses"])
@pytest.mark.parametrize("case", ON_ONE)
def test_what_is_wrong_on_one_rank_raises_on_both_at_once(two, way, case):
    for number, rank in enumerate(two):
        error = rank[f"refused: {way}, {case}"]
        assert error["text"].startswith(f"diffusers' context parallelism on rank {number} of 2: {ON_ONE[case]}")
        assert error["seconds"] < 30


@ON_CPU
def test_a_mask_under_both_degrees_is_refused(by_size):
    for rank in by_size[4]:
        assert (
            "rank 1 refuses: given a mask under ring and Ulysses context parallelism together" in rank["refused: both"]
        )
