"""Where record.py writes: lines of JSON for `sdpa-router report`, and one line at the end of the program."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import time
from typing import Any

import torch

from .decision import Route

_TOP_REASONS = 3
# Whose lines these are: pids come again, in containers each time.
_BEGAN = time.time()
_IMPORTED_BY = os.getpid()
# Where relative paths lead from: a program that changes its folder has one record all the same.
_FOLDER = os.getcwd() if os.path.exists(".") else ""


def append(path: str, event: dict[str, Any]) -> None:
    """Append a line to the file `path`, which says whose it is; raises OSError, and ValueError for what is no JSON."""
    text = json.dumps({**event, "pid": os.getpid(), "began": _BEGAN}, allow_nan=False)
    path = os.path.join(_FOLDER, path)
    with open(path, "a", encoding="utf-8") as file:
        file.write("\n" * _cut_short(path) + text + "\n")


def _cut_short(path: str) -> bool:
    """Whether the last line of a file has no end: whoever wrote it was killed meanwhile, or the disk was full."""
    with contextlib.suppress(OSError):
        if os.path.isfile(path) and os.path.getsize(path):
            with open(path, "rb") as file:
                file.seek(-1, os.SEEK_END)
                return file.read(1) != b"\n"
    return False


def devices() -> list[str]:
    """Return the names of the GPUs, if any was used."""
    if not torch.cuda.is_initialized():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def tell(totals: dict[str, Any]) -> None:
    """Print the totals in one line if SDPA_ROUTER_LOG asks for it; of processes without calls only the first does."""
    asked = os.environ.get("SDPA_ROUTER_LOG", "").strip()
    first = os.getpid() == _IMPORTED_BY and multiprocessing.parent_process() is None
    if asked.lower() == "info" and (totals["calls"] or first):
        line = summary(totals)
    elif asked.lower() not in ("", "info") and first:
        line = f"sdpa_router: SDPA_ROUTER_LOG={asked} means nothing; accepted: info"
    else:
        return
    print(f"{line}\n", end="", file=sys.stderr)  # in one piece, as other processes write there too


def summary(totals: dict[str, Any]) -> str:
    """Return totals as one line: calls, how many of them were routed, and the most frequent reasons.

    >>> summary({"calls": 4, "routes": {"int8": 3, "sdpa": 1}, "reasons": {"short": 1}})
    'sdpa_router: 4 attention calls, 3 routed (75 %): int8 3, torch 1; reasons: short 1'
    """
    if not totals["calls"]:
        return "sdpa_router: no attention call came by; only those inside route() or of an enabled module do"
    calls, routes = totals["calls"], dict(totals["routes"])
    native = routes.pop(Route.SDPA.value)
    routed = calls - native
    share = f" ({routed / calls:.0%})".replace("%", " %")
    who = ", ".join(f"{name} {count}" for name, count in {**routes, "torch": native}.items() if count)
    top = sorted(totals["reasons"].items(), key=lambda item: -item[1])[:_TOP_REASONS]
    why = "; reasons: " + ", ".join(f"{code} {count}" for code, count in top) if top else ""
    return f"sdpa_router: {calls} attention calls, {routed} routed{share}: {who}{why}"
