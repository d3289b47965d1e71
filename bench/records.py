"""Where a measurement was made, and its line in a JSON-lines file."""

from __future__ import annotations

import argparse
import json
import platform
import secrets
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Invocation:
    """One run of a benchmark: its id, machine and versions are part of every line it writes."""

    device: torch.device
    out: Path
    commit: str
    run: str = field(default_factory=lambda: f"{_now():%Y%m%dT%H%M%S}-{secrets.token_hex(2)}")

    def facts(self) -> dict[str, str]:
        """What every line ends with."""
        return {
            "device": device_name(self.device),
            "torch": torch.__version__,
            "triton": version("triton"),
            "commit": self.commit,
            "date": f"{_now():%Y-%m-%dT%H:%M:%SZ}",
        }

    def write(self, row: dict[str, Any]) -> dict[str, Any]:
        """Append one measurement at once, so that a later crash loses nothing; returns the whole line."""
        line = {"run": self.run, **row, **self.facts()}
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with self.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return line


def the_gpu(parser: argparse.ArgumentParser) -> torch.device:
    """The device of a benchmark that runs on no other; where there is none the program ends and says so."""
    if not torch.cuda.is_available():
        parser.error("this needs a GPU that torch can use; torch.cuda.is_available() is False")
    return torch.device("cuda")


def chosen(parser: argparse.ArgumentParser, text: str, known: Iterable[str], separator: str = ",") -> list[str]:
    """The names in `text`; of one that is not known the program ends and says which are."""
    names = text.split(separator)
    for name in names:
        if name not in known:
            parser.error(f"unknown name {name!r}; accepted: all, {', '.join(known)}")
    return names


def _now() -> datetime:
    return datetime.now(timezone.utc)


def version(package: str) -> str:
    """The installed version of a package, or `none`."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's with the number of threads torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    return f"{name}, {torch.get_num_threads()} threads"


def commit_here() -> str:
    """The checked-out commit, marked if files differ from it; `unknown` outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        here = Path(__file__).parent
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Plain text in columns: text to the left, numbers to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    columns = [[row[i] for row in cells] for i in range(len(header))]
    for column in columns:
        width = max(map(len, column))
        text = not all(cell[:1].isdigit() or cell == "-" for cell in column[1:])
        column[:] = [cell.ljust(width) if text else cell.rjust(width) for cell in column]
    return "\n".join("  ".join(column[i] for column in columns).rstrip() for i in range(len(cells)))
