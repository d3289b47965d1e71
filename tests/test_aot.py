"""Ahead-of-time compilation of every kernel variant for every architecture: no GPU needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

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
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("aot_compile.py")
    command = [sys.executable, str(script), chip]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(rows) > 30
    spilled = [(row["variant"], row["spills"]) for row in rows if row["spills"]]
    assert not spilled
    assert not [(row["variant"], row["shared"]) for row in rows if row["shared"] > limit]
    for row in rows:
        if row["variant"].startswith("attention"):
            assert set(products) <= set(row["products"]), row
