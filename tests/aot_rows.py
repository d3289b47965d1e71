"""Run a script that compiles kernels ahead of time, in a process of its own where Triton compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def rows_of(script: str, *arguments: str) -> list[dict]:
    """The JSON lines that a script beside this file prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]
