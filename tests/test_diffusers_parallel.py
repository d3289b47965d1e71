"""diffusers' context parallelism with our backend, on real processes (ranks_diffusers.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("diffusers.models._modeling_parallel")

from sdpa_router.integrations.diffusers_parallel import Arguments, attend_in_parallel  # noqa: E402
from sdpa_router.testing import BUDGET  # noqa: E402

SCRIPT = Path(__file__).with_name("ranks_diffusers.py")
NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="runs without a GPU, in Triton's interpreter")
WORLDS = [
    *(pytest.param((size, "gloo"), marks=ON_CPU, id=f"{size}-gloo") for size in (2, 4)),
    pytest.param((2, "nccl"), marks=[pytest.mark.gpu, NEEDS_TWO], id="2-nccl"),
]


@pytest.fixture(scope="module", params=WORLDS)
def found(request, tmp_path_factory):
    """What each rank of a world found."""
    size, backend = request.param
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if backend == "gloo":
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    meeting = str(tmp_path_factory.mktemp("diffusers") / "meeting")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(size), backend, meeting],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(out for out, _ in outputs), outputs[0][1][-3000:]
    return [json.loads(out) for out, _ in outputs]


def test_a_model_in_parallel_is_the_model(found):
    ways = [name for name in found[0] if name.startswith("model")]
    assert len(ways) == (2 if len(found) == 4 else 3)
    for rank in found:
        for way in ways:
            assert rank[way]["error"] < 0.005, way
            assert rank[way]["sdpa"] == 0, way
            # Two layers, each a call for every shard of the ring and one of cross-attention.
            calls = {"model: ring": 2 * (len(found) + 1), "model: both": 2 * 3}
            assert rank[way]["int8"] == calls.get(way, 4), way


def test_masks_and_the_lse(found):
    if len(found) == 4:
        pytest.skip("runs on another number of processes")
    for rank in found:
        calls = [name for name in rank if name.startswith("calls")]
        assert len(calls) == 8
        for call in calls:
            assert rank[call]["error"] <= BUDGET.gaussian, call
            assert rank[call]["lse"] <= BUDGET.lse, call
            assert rank[call]["dtype"] == "torch.float32", call
            assert rank[call]["shape"], call


def test_what_is_not_passed_on_is_refused_with_a_reason(found):
    if len(found) == 4:
        pytest.skip("runs on another number of processes")
    for rank in found:
        for way in ("ring", "ulysses"):
            assert "expected one row for all queries" in rank[f"refused: {way}, full"]
            assert "mask over 7 keys under context parallelism; expected 20" in rank[f"refused: {way}, short"]
            assert "Causal attention is not yet supported" in rank[f"refused: {way}, causal"]
        assert "require a gradient under ring" in rank["refused: ring, gradient"]
        assert "dropout_p=0.5" in rank["refused: ring, dropout"]
        assert rank["gradient"]


def test_a_mask_under_both_degrees_is_refused():
    q = torch.zeros(1, 8, 2, 32)
    call = Arguments(q, q, q, torch.zeros(1, 1, 1, 8), 0.0, False, None, False, False)
    config = SimpleNamespace(context_parallel_config=SimpleNamespace(ring_degree=2, ulysses_degree=2))
    with pytest.raises(ValueError, match="ring and Ulysses context parallelism together, which exchange no mask"):
        attend_in_parallel(None, None, None, call, config)
