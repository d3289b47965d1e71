"""Numbers and flags as users give them, NumPy's among them, made Python's in the fields of a frozen dataclass."""

from __future__ import annotations

import contextlib
import numbers
import operator
import sys
from typing import Any


def is_whole(given: object) -> bool:
    """Whether it is a whole number; a bool is none."""
    return isinstance(given, numbers.Integral) and not isinstance(given, bool)


def is_real(given: object) -> bool:
    """Whether it is a real number; a bool is none."""
    return isinstance(given, numbers.Real) and not isinstance(given, bool)


def flags(record: Any, *names: str) -> None:
    """Make fields of `record` True or False; raises TypeError for anything but bools: numbers are no flags."""
    numpy = sys.modules.get("numpy")
    kinds = (bool,) if numpy is None else (bool, numpy.bool_)
    for name in names:
        given = getattr(record, name)
        if not isinstance(given, kinds):
            raise TypeError(f"{name} is {given!r}; accepted: True or False")
        object.__setattr__(record, name, bool(given))


def whole(record: Any, name: str, least: int, *, or_none: bool = False) -> None:
    """Make a field of `record` an int of at least `least`; raises ValueError for others, for bools and floats too."""
    given = getattr(record, name)
    if given is None and or_none:
        return
    if not is_whole(given) or given < least:
        raise ValueError(f"{name} is {given!r}; accepted: {'None or ' * or_none}an int of at least {least}")
    object.__setattr__(record, name, operator.index(given))


def real(record: Any, name: str, *, positive: bool = False, or_none: bool = False) -> None:
    """Make a field of `record` a float of at least 0, or above; raises ValueError for others, for bools and NaN too."""
    given = getattr(record, name)
    if given is None and or_none:
        return
    number = float("nan")
    if is_real(given):
        with contextlib.suppress(OverflowError):
            number = float(given)
    if not (number > 0 if positive else number >= 0):
        accepted = f"{'None or ' * or_none}a number {'above' if positive else 'of at least'} 0"
        raise ValueError(f"{name} is {given!r}; accepted: {accepted}")
    object.__setattr__(record, name, number)
