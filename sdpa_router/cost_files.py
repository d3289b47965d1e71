"""Where cost tables are kept: in the user's cache folder, and one that is shipped.

`sdpa-router tune` writes a table for this GPU, its driver and the installed versions. Where there is none and none is
shipped nothing is known, and rules decide.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import re
import warnings
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .costs import FORMAT, MASKS, Point, Size, Table

logger = logging.getLogger("sdpa_router.costs")

_SHIPPED = {"NVIDIA H200": Path(__file__).with_name("costs_nvidia_h200.json")}
_PACKAGES = ("torch", "triton", "sdpa-router", "comfy-kitchen", "sageattention", "fa3-fwd")


def read_table(path: Path) -> Table:
    """Read a table; raises OSError, or ValueError for a file that is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']}, accepted: {FORMAT}")
        points = tuple(_point(dict(point)) for point in found["points"])
        errors = {name: {kind: float(e) for kind, e in kinds.items()} for name, kinds in found["errors"].items()}
        host = {name: float(ms) for name, ms in found["host"].items()}
        known = [*host.values(), *(error for kinds in errors.values() for error in kinds.values())]
        if not all(map(math.isfinite, known)) or min(known, default=0.0) < 0 or not all(errors.values()):
            raise ValueError(f"given the errors {errors} and host {host} ms, accepted: numbers of at least 0")
        return Table(points, errors, dict(found["facts"]), str(path), host)
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _point(values: dict[str, Any]) -> Point:
    ms = {name: float(value) for name, value in values.pop("ms").items()}
    size = Size(**values)
    numbers = (size.batch, size.heads, size.q_len, size.kv_len, size.head_dim)
    if not all(type(n) is int and n > 0 for n in numbers) or size.mask not in MASKS or type(size.is_causal) is not bool:
        raise ValueError(f"given {size}, accepted: positive whole sizes, a mask of {', '.join(MASKS)}")
    if not all(math.isfinite(value) and value / size.operations > 0 for value in ms.values()):
        raise ValueError(f"given {ms} ms, accepted: positive numbers")
    return Point(size, ms)


def facts_of(device: torch.device) -> dict[str, str]:
    """Return what a table is keyed by: GPU, driver and the versions of what is measured."""
    versions = {name: version for name in _PACKAGES if (version := _version(name))}
    return {
        "device": torch.cuda.get_device_properties(device).name,
        "driver": _driver(),
        **versions,
        "torch": torch.__version__,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str:
    """Return the version of the NVIDIA driver, or what CUDA or ROCm it is for."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"\b(\d+\.\d+(\.\d+)?)\b", text)
    return found.group(1) if found else str(torch.version.hip or torch.version.cuda)


def folder() -> Path:
    """Return the user's cache folder, which tables are written to."""
    import platformdirs

    return Path(platformdirs.user_cache_path("sdpa-router", appauthor=False))


def table_path(facts: Mapping[str, str]) -> Path:
    """Return where the table of this GPU, driver and these versions is kept."""
    name = re.sub(r"[^a-z0-9]+", "-", facts["device"].lower()).strip("-")
    digest = hashlib.sha256(json.dumps(dict(sorted(facts.items()))).encode()).hexdigest()[:12]
    return folder() / f"costs-{name}-{digest}.json"


def write_table(table: Table) -> Path:
    """Write a table into the cache folder, in one piece, and use it from now on."""
    path = table_path(table.facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")  # another process may tune at the same time
    part.write_text(json.dumps(table.as_json(), indent=1), encoding="utf-8")
    part.replace(path)
    forget()
    return path


def table_for(device: torch.device) -> Table | None:
    """Return the table that holds on `device`: the user's own, or the shipped one, or None.

    A device that is no GPU (a meta tensor's) stands for the current GPU, if there is one.
    """
    tuned = tuned_table(device)
    if tuned is not None or not torch.cuda.is_available():
        return tuned
    index = torch.cuda.current_device() if device.index is None else device.index
    return shipped_table(torch.cuda.get_device_properties(index).name)


def tuned_table(device: torch.device) -> Table | None:
    """Return the table that `sdpa-router tune` wrote for `device`, or None."""
    if not _any_tuned() or not torch.cuda.is_available():
        return None
    return _tuned(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def shipped_table(device_name: str) -> Table | None:
    """Return the table that comes with this package for a GPU of this name, or None."""
    path = _SHIPPED.get(device_name)
    return None if path is None or not path.exists() else read_table(path)


@functools.cache
def _any_tuned() -> bool:
    try:
        return any(folder().glob("costs-*.json"))
    except (ImportError, OSError, RuntimeError):  # no home folder
        return False


@functools.cache
def _tuned(index: int) -> Table | None:
    facts = facts_of(torch.device("cuda", index))
    path = table_path(facts)
    try:
        table = read_table(path)
        if table.facts != facts:
            raise ValueError(f"it was measured with {dict(table.facts)}, here is {facts}")
        return table
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        complaint = f"the cost table {path} is ignored, `sdpa-router tune` rewrites it: {error}"
        try:
            warnings.warn(complaint, stacklevel=2)
        except Warning:  # warnings are errors here, which no attention call is to raise
            logger.warning("%s", complaint)
        return None


def forget() -> None:
    """Read the tables anew when they are next needed, and judge calls anew."""
    for cached in (_any_tuned, _tuned):
        cached.cache_clear()
    from .record import judge_anew  # record imports decide, which imports this module

    judge_anew()
