"""The fused quantisation kernels compiled ahead of time: no spills, and shared memory that the chip has."""

from __future__ import annotations

import pytest
from aot_rows import rows_of

from sdpa_router.kernels.int8_attention.limits import triton_overlaps

pytest.importorskip("triton")


# All variants of all head_dims: `python aot_fused.py sm_90`, which takes minutes.
@pytest.mark.parametrize("mode", ["head", "across"])
@pytest.mark.parametrize(("chip", "shared"), [("sm_86", 101_376), ("sm_90", 232_448)])
def test_the_usual_variants_fit_the_chip(chip, shared, mode):
    rows = rows_of("aot_fused.py", chip, f"D128 {mode}")
    assert {row["variant"].split()[0] for row in rows} == {"query", "key", "shift"}
    assert not [row for row in rows if row["spills"] or row["shared"] > shared]
    overlapping = chip == "sm_90" and triton_overlaps()
    assert {row["lets_next"] for row in rows} == {int(overlapping)}
    for row in rows if overlapping else []:
        side, ahead = row["variant"].split()[0], mode == "head"
        assert row["waits"] == (side != "shift" or mode == "across"), row
        assert row["loads_before"] >= {"key": 8 * ahead, "query": 16, "shift": 12 * (mode == "across")}[side], row
    if chip == "sm_90":
        # The rotation is written once, 8 stores of a thread, and peaks of keys go round among warps: no tile does.
        for row in rows:
            if row["variant"].startswith(("query", "key")):
                assert row["shared"] < 32_768 + 1024, row
                assert row["exchanges"] <= 24, row
                assert row["barriers"] <= 6, row
