"""What a call costs on each backend: measured calls, interpolated over the logarithms of lengths.

What a model waits for is the slower of the two: the device, whose time grows with the call, and the host, whose time
doesn't. They are measured apart, because a time that the host set says nothing about a larger call. Both vary from call
to call, so that where they are close a model waits for more than either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .kernels.int8_attention.limits import Crossover

FORMAT = 2
# A key mask of bool hides padding, which our kernel leaves out; what it hides is not known from its metadata. So it is
# measured with what prompts leave of their 512 tokens. A bias of keys hides nothing.
MASKS = ("none", "key", "padding", "full")
TIE = 1.02  # estimates that are so close are no difference
# An estimate errs the more, the farther from it was measured: on an H200 half an octave away, in rows, keys or both,
# torch's time over int8's by up to 2.5 %.
_TIE_PER_OCTAVE, _TIE_OCTAVES = 0.02, 1.0
# The power of the mean that stands for the slower of device and host: of 171 and 146 us alone a call took 198 us.
_SHARPNESS = 4
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
    """A measured call: milliseconds on the device by backend."""

    size: Size
    ms: Mapping[str, float]


@dataclass(frozen=True)
class Table:
    """Measured calls on one GPU, and the errors of the backends.

    errors: relative errors by backend and kind of inputs.  facts: device, driver and versions it was measured with.
    source: where the table is from.  host: milliseconds that the host takes for a call, whatever its size, by backend.
    """

    points: tuple[Point, ...]
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    host: Mapping[str, float] = field(default_factory=dict)

    def error_class(self, backend: str) -> float | None:
        """Return the worst error that was measured of a backend, None if there is none."""
        return max(self.errors.get(backend, {}).values(), default=None)

    def estimate(self, size: Size) -> dict[str, float]:
        """Return estimated milliseconds by backend, of those that were measured near this size.

        The logarithm of the device's time of an operation is taken to be linear in the logarithms of rows and keys
        around the call: a fit to the measured calls of this kind, weighted by the inverse fourth power of their
        distance, within their range. A measured size gives what was measured. Larger calls than the largest measured
        one are as efficient as that. A head_dim in between counts as the next measured one, padding as a bias if no
        longer one was measured near. No call takes less than the host does, and somewhat more where the device takes
        about as long.
        """
        place, near = self._near(size)
        if size.mask == "padding" and all(point.size.kv_len < size.kv_len for point in near):
            return self.estimate(size._replace(mask="key"))
        fits: dict[str, list[_Weighed]] = {}
        for point in near:
            apart = point.size.place[0] - place[0], point.size.place[1] - place[1]
            for name, ms in point.ms.items():
                fits.setdefault(name, []).append(_Weighed(*apart, math.log(ms / point.size.operations)))
        head_dim = near[0].size.head_dim if near else size.head_dim
        operations = size._replace(head_dim=head_dim).operations
        device = {name: math.exp(_value_at_origin(fit)) * operations for name, fit in fits.items()}
        return {name: _waited_for(ms, self.host.get(name, 0.0)) for name, ms in device.items()}

    def tie(self, size: Size) -> float:
        """Return the ratio up to which estimates of this size are no difference."""
        (rows, keys), near = self._near(size)
        apart = (math.dist((rows, keys), point.size.place) for point in near)
        return TIE + _TIE_PER_OCTAVE * min(_TIE_OCTAVES, min(apart, default=0.0))

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
        host = dict(self.host)
        return {"format": FORMAT, "facts": dict(self.facts), "errors": errors, "host": host, "points": points}


def fastest(times: Mapping[str, float], exact: str, tie: float = TIE) -> str:
    """Return the name with the least of the estimated `times`: `exact`, which rounds least, where that is a tie.

    tie: the ratio up to which two times are no difference.

    >>> fastest({"torch": 1.01, "int8": 1.0}, "torch")
    'torch'
    """
    best = min(times, key=lambda name: times[name])
    return exact if times[exact] <= times[best] * tie else best


def _waited_for(device: float, host: float) -> float:
    longer, share = max(device, host), min(device, host) / max(device, host)
    waited: float = longer * (1 + share**_SHARPNESS) ** (1 / _SHARPNESS)
    return waited


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
