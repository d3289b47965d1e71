"""The lines that SDPA_ROUTER_JSONL wrote, checked: whoever reads them meets the types that record.py writes."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]
Check = Callable[[Any], bool]
# By name, and whether it must be there.
Checks = Mapping[str, tuple[Check, bool]]

_MOST = 2**63
_LARGEST = 1e15  # of milliseconds or seconds; sums of such are numbers still
# Control characters, which a terminal obeys, marks that turn a line around, and the bytes of a path that is no UTF-8,
# which no page can hold.
_UNSHOWABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a recorded run; raises OSError, and ValueError with the number of a line that is none.

    A line that is no JSON was cut short, as its process was killed while it wrote: it is skipped, with one warning at
    the end of the file. Of a last line without its end nothing is said: its process may write still.
    """
    broken: list[ValueError] = []
    found = 0
    with path.open("rb") as lines:  # of bytes, so that the number is right where one is no UTF-8
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                event = json.loads(line)
            except (ValueError, RecursionError) as error:
                if line.endswith(b"\n"):
                    broken.append(_no_record(number, path, error))
                continue
            try:
                yield _checked(event)
            except (ValueError, RecursionError) as error:
                raise _no_record(number, path, error) from error
            found += 1
    if broken and not found:
        raise broken[0]
    if broken:
        more = f" and so are {len(broken) - 1} more" if broken[1:] else ""
        warnings.warn(f"{broken[0]}; it is skipped{more}", stacklevel=1)


def _no_record(number: int, path: Path, error: Exception) -> ValueError:
    why = "nested too deep" if isinstance(error, RecursionError) else str(error)
    return ValueError(f"line {number} of {path} is no record of a call: {why}")


def _checked(event: Any) -> Event:
    """Return `event` if it is one, with texts that any page and terminal shows; else raise ValueError."""
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise ValueError("given no event, accepted: what SDPA_ROUTER_JSONL wrote")
    _require(event, _FIRST if event["event"] == "first" else _TOTALS)
    shown: Event = _showable(event)
    return shown


def _showable(value: Any) -> Any:
    if isinstance(value, str):
        return _UNSHOWABLE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_showable(item) for item in value]
    if isinstance(value, dict):
        return {_showable(name): _showable(item) for name, item in value.items()}
    return value


def _require(found: Mapping[str, Any], checks: Checks) -> None:
    """Raise ValueError for a value that is missing or of another type."""
    for name, (check, needed) in checks.items():
        if name not in found and needed:
            raise ValueError(f"{name!r} is missing")
        if name in found and not check(found[name]):
            raise ValueError(f"{name!r} is not of the type that SDPA_ROUTER_JSONL writes")


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < _LARGEST


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _dict_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _fields(checks: Checks) -> Check:
    def check(value: Any) -> bool:
        return isinstance(value, dict) and all(
            test(value[name]) if name in value else not needed for name, (test, needed) in checks.items()
        )

    return check


_SIZES = _list_of(lambda value: value is None or _whole(value))  # None: a size that its trace did not know
_TENSOR = _fields({"shape": (_SIZES, False), "dtype": (_text, False), "type": (_text, False)})
# Of a value, dropout_p, scale and enable_gqa nobody reads more than whether they are True.
_SIGNATURE = _fields({"query": (_TENSOR, True), "key": (_TENSOR, True), "is_causal": (lambda value: True, True)})
_FIRST: Checks = {
    **dict.fromkeys(("backend", "phase", "detail", "caller"), (_text, True)),
    **dict.fromkeys(("reasons", "notes"), (_list_of(_text), True)),
    **dict.fromkeys(("pid", "number"), (_whole, False)),
    "began": (_positive, False),
    "estimates": (_dict_of(_positive), False),
    "signature": (_SIGNATURE, True),
    "mask": (_fields({"kind": (_text, True), "dtype": (_text, False), "shape": (_SIZES, False)}), True),
}
_TOTALS: Checks = {
    "pid": (_whole, False),
    "began": (_positive, False),
    "counts": (_dict_of(_whole), False),
    "devices": (_list_of(_text), False),
}
