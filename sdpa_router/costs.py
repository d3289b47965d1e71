"""What a call costs on each backend: tables of measured calls, interpolated over the logarithms of lengths.

`sdpa-router tune` writes a table for this GPU, its driver and the installed versions into the user's cache folder. One
for the H200 is shipped. Elsewhere nothing is known, and rules decide.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .kernels.int8_attention.limits import Crossover

FORMAT = 1
MASKS = ("none", "key", "full")
_SHIPPED = {"NVIDIA H200": Path(__file__).with_name("costs_nvidia_h200.json")}
_PACKAGES = ("torch", "triton", "sdpa-router", "comfy-kitchen", "sageattention", "fa3-fwd")
# Octaves from a measured call, in rows or keys, up to which its time says something about another.
_REACH = 2.0
_SLOPE_PENALTY = 1e-3
# Square calls of this many heads stand for all where a crossover is looked for, by half octaves.
_HEADS = 24
_LENGTHS = tuple(round(2 ** (n / 2)) for n in range(16, 31))


class Size(NamedTuple):
    """What the time of a call depends on. mask: one of MASKS."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    head_dim: int
    mask: str = "none"
    is_causal: bool = False

    @property
    def operations(self) -> float:
        """4 B H Q K D, half of it for causal."""
        return 4.0 * self.batch * self.heads * self.q_len * self.kv_len * self.head_dim / (2 if self.is_causal else 1)

    @property
    def place(self) -> tuple[float, float]:
        """Octaves of query rows and of keys."""
        return math.log2(self.batch * self.heads * self.q_len), math.log2(self.kv_len)


class Point(NamedTuple):
    """A measured call: milliseconds by backend."""

    size: Size
    ms: Mapping[str, float]


@dataclass(frozen=True)
class Table:
    """Measured calls on one GPU, and the errors of the backends.

    facts: device, driver and versions it was measured with.  errors: relative errors by backend and kind of inputs.
    source: where the table is from.
    """

    points: tuple[Point, ...]
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    source: str = ""

    def error_class(self, backend: str) -> float | None:
        """Return the worst error that was measured of a backend, None if there is none."""
        return max(self.errors.get(backend, {}).values(), default=None)

    def estimate(self, size: Size) -> dict[str, float]:
        """Return estimated milliseconds by backend, of those that were measured near this size.

        The logarithm of the time of an operation is taken to be linear in the logarithms of rows and keys around the
        call: a fit to the measured calls of this kind, weighted by the inverse fourth power of their distance, within
        their range. A measured size gives what was measured. Larger calls than the largest measured one are as
        efficient as that. A head_dim in between counts as the next measured one.
        """
        place, near = self._near(size)
        fits: dict[str, list[_Weighed]] = {}
        for point in near:
            apart = point.size.place[0] - place[0], point.size.place[1] - place[1]
            for name, ms in point.ms.items():
                fits.setdefault(name, []).append(_Weighed(*apart, math.log(ms / point.size.operations)))
        head_dim = near[0].size.head_dim if near else size.head_dim
        operations = size._replace(head_dim=head_dim).operations
        return {name: math.exp(_value_at_origin(fit)) * operations for name, fit in fits.items()}

    def _near(self, size: Size) -> tuple[tuple[float, float], list[Point]]:
        """Return the place of a call, moved down to the largest measured ones, and the measured calls in reach."""
        alike = [p for p in self.points if (p.size.mask, p.size.is_causal) == (size.mask, size.is_causal)]
        head_dim = min((p.size.head_dim for p in alike if p.size.head_dim >= size.head_dim), default=None)
        alike = [p for p in alike if p.size.head_dim == head_dim]
        rows, keys = size.place
        if alike:
            rows = min(rows, max(p.size.place[0] for p in alike))
            keys = min(keys, max(p.size.place[1] for p in alike))
        near = [p for p in alike if max(abs(p.size.place[0] - rows), abs(p.size.place[1] - keys)) <= _REACH]
        return (rows, keys), near

    def crossover(self, head_dim: int) -> Crossover | None:
        """Return from how many queries and keys on int8 is not slower than torch; None if that was not measured."""
        least = {mask: self._pays_from(head_dim, mask) for mask in ("key", "none")}
        if "unknown" in least.values():
            return None
        known = [length for length in least.values() if isinstance(length, int)]
        masked, unmasked = (length if isinstance(length, int) else None for length in least.values())
        return Crossover(min(known, default=1), masked, unmasked)

    def _pays_from(self, head_dim: int, mask: str) -> int | str | None:
        """Return the least length from which on int8 pays at every longer one too, None if there is none."""
        pays: int | str | None = "unknown"
        for length in reversed(_LENGTHS):
            times = self.estimate(Size(1, _HEADS, length, length, head_dim, mask))
            if not {"int8", "torch"} <= times.keys():
                continue
            if times["int8"] > times["torch"]:
                return None if pays == "unknown" else pays
            pays = length
        return pays

    def as_json(self) -> dict[str, Any]:
        """Return the table as plain data, which read_table() takes."""
        points = [{**point.size._asdict(), "ms": dict(point.ms)} for point in self.points]
        errors = {name: dict(kinds) for name, kinds in self.errors.items()}
        return {"format": FORMAT, "facts": dict(self.facts), "errors": errors, "points": points}


class _Weighed(NamedTuple):
    """A measured value and how many octaves away it was measured."""

    rows: float
    keys: float
    value: float

    @property
    def weight(self) -> float:
        return 1.0 / max(math.hypot(self.rows, self.keys), 1e-6) ** 4


def _value_at_origin(points: list[_Weighed]) -> float:
    """Return the weighted least-squares plane through `points` at the origin, within their range.

    Slopes are held a little towards 0, so that points on a line, such as square calls, have an answer.
    """
    sums = [[0.0] * 4 for _ in range(3)]
    total = sum(point.weight for point in points)
    for point in points:
        terms = (1.0, point.rows, point.keys, point.value)
        for row in range(3):
            for column in range(4):
                sums[row][column] += point.weight / total * terms[row] * terms[column]
    for slope in (1, 2):
        sums[slope][slope] += _SLOPE_PENALTY * (1e-9 + sums[slope][slope])
    for pivot in (2, 1):  # eliminate the slopes, the intercept is left
        for row in range(pivot):
            factor = sums[row][pivot] / sums[pivot][pivot]
            for column in range(4):
                sums[row][column] -= factor * sums[pivot][column]
    values = [point.value for point in points]
    return min(max(sums[0][3] / sums[0][0], min(values)), max(values))


def read_table(path: Path) -> Table:
    """Read a table; raises OSError, or ValueError for a file that is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']}, accepted: {FORMAT}")
        points = tuple(_point(dict(point)) for point in found["points"])
        errors = {name: {kind: float(e) for kind, e in kinds.items()} for name, kinds in found["errors"].items()}
        known = [error for kinds in errors.values() for error in kinds.values()]
        if not all(map(math.isfinite, known)) or min(known, default=0.0) < 0 or not all(errors.values()):
            raise ValueError(f"given the errors {errors}, accepted: numbers of at least 0")
        return Table(points, errors, dict(found["facts"]), str(path))
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _point(values: dict[str, Any]) -> Point:
    ms = {name: float(value) for name, value in values.pop("ms").items()}
    size = Size(**values)
    numbers = (size.batch, size.heads, size.q_len, size.kv_len, size.head_dim)
    if not all(type(n) is int and n > 0 for n in numbers) or size.mask not in MASKS or type(size.is_causal) is not bool:
        raise ValueError(f"given {size}, accepted: positive whole sizes, a mask of {', '.join(MASKS)}")
    if not all(math.isfinite(value) and value > 0 for value in ms.values()):
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
    part = path.with_suffix(".part")
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
        warnings.warn(f"the cost table {path} is ignored, `sdpa-router tune` rewrites it: {error}", stacklevel=2)
        return None


def forget() -> None:
    """Read the tables anew when they are next needed, and judge calls anew."""
    for cached in (_any_tuned, _tuned):
        cached.cache_clear()
    from .record import judge_anew  # record imports decide, which imports this module

    judge_anew()
