"""The fused quantisation kernels compiled ahead of time: no spills, and shared memory that the chip has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

KNOWN_SPILLS = {"sm_86": 24}  # bytes of the queries' kernel with Triton 3.9, not mended yet


# All variants of all head_dims: `python aot_fused.py sm_90`, which takes minutes.
@pytest.mark.parametrize(("chip", "shared"), [("sm_86", 101_376), ("sm_90", 232_448)])
def test_the_usual_variants_fit_the_chip(chip, shared):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("aot_fused.py")), chip, "D128 head"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert {row["variant"].split()[0] for row in rows} == {"query", "key", "shift"}
    assert not [row for row in rows if row["spills"] > KNOWN_SPILLS.get(chip, 0) or row["shared"] > shared]
