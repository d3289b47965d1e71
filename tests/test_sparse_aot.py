"""Ahead-of-time compilation of the sparse kernels for every architecture: no GPU needed."""

from __future__ import annotations

import pytest
from aot_rows import rows_of

triton = pytest.importorskip("triton")
# Bytes of spills: none where the tables were made, a few registers with later compilers.
SOME = 0 if triton.__version__.startswith("3.6.") else 32

# Bytes of shared memory that one block may use, and the matrix instructions that must be there (int8, 16-bit).
CHIPS = {
    "sm_80": (166_912, ("IMMA", "HMMA")),
    "sm_86": (101_376, ("IMMA", "HMMA")),
    "sm_89": (101_376, ("IMMA", "HMMA")),
    "sm_90": (232_448, ("IGMMA", "HGMMA")),
    "sm_120": (101_376, ("IMMA", "HMMA")),
    "gfx942": (65_536, ("mfma_i32", "mfma_f32")),
    "gfx1100": (65_536, ("wmma_i32", "wmma_f32")),
}


@pytest.mark.parametrize("chip", CHIPS)
def test_every_variant_compiles_within_the_chip(chip):
    limit, products = CHIPS[chip]
    rows = rows_of("aot_sparse.py", chip)
    assert len(rows) > 12
    spilled = [(row["variant"], row["spills"]) for row in rows if row["spills"] > SOME]
    assert not spilled
    assert not [(row["variant"], row["shared"]) for row in rows if row["shared"] > limit]
    for row in rows:
        if row["variant"].startswith("attention"):
            assert set(products) <= set(row["products"]), row


# Instructions a step of two key tiles: what Triton 3.6 and 3.9 give, + 5 %; where there are two kinds of them, both.
ISSUE_SLOTS = {"": 450, "HAS_TABLE": 930, "HAS_BIAS": 545, "HAS_MASK": 1200, "WORDS": 1470}


def test_the_hopper_kernel_keeps_its_schedule():
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper", reason="this Triton has no Gluon")
    rows = rows_of("aot_sparse_hopper.py")
    assert len(rows) >= 4
    for row in rows:
        kind = next((flag for flag in ("WORDS", "HAS_TABLE", "HAS_BIAS", "HAS_MASK") if flag in row["variant"]), "")
        assert row["instructions"] == ["HGMMA", "IGMMA", "USETMAXREG", "UTMALDG"], row
        assert row["shared"] <= 232_448, row
        if kind == "HAS_MASK":  # a few registers, before the loop and where the row maximum is kept
            assert row["spills"] <= 100 + 10 * SOME, row
        elif kind != "WORDS":  # which holds a tile of the mask in registers
            assert row["spills"] <= SOME, row
        if kind in ("", "HAS_BIAS"):
            assert row["under_product"] >= 0.9, row
        assert row["loops"][0] <= ISSUE_SLOTS[kind], row
