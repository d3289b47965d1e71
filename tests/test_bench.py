"""The scripts of bench/: what they say where they can't run, and that their README has them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[1] / "bench"
NEEDS_A_GPU = ("bench_hopper.py", "bench_launch.py", "bench_quantise_stage.py", "bench_configs.py")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=BENCH, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
@pytest.mark.parametrize("script", NEEDS_A_GPU)
def test_a_missing_gpu_is_named(script):
    if script == "bench_hopper.py":
        pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper", reason="this Triton has no Gluon")
    done = run(script)
    assert done.returncode == 2
    assert "this needs a GPU" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("script", ["bench_linear_qk.py", "bench_quantise.py", "bench_attention.py"])
def test_an_unknown_case_is_named_with_those_that_are_known(script):
    done = run(script, "--cases", "blue")
    assert done.returncode == 2
    assert "'blue'; accepted: " in done.stderr
    assert "smoke" in done.stderr


def test_the_readme_has_every_script():
    told = (BENCH / "README.md").read_text() + (BENCH / "short_calls.sh").read_text()
    assert [script.name for script in BENCH.glob("bench_*.py") if script.name not in told] == []
