"""Decide among several backends: in the user's order, or the fastest by measured costs. Pure, like decide().

Not traced by torch.compile: the operator in run.py asks here when it runs, with the sizes that it is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import NamedTuple

from .backends.base import TORCH, Backend, candidates, find_backend, said
from .call import Call, is_regular, mask_info
from .cost_files import table_for
from .costs import Size, Table, fastest
from .decide import decide, not_wanted, notes_of, short
from .decision import Code, Decision, MaskKind, Reason, Route
from .settings import FASTEST, Settings

__all__ = ["attach", "choose", "failure"]

Refused = Mapping[str, tuple[Reason, ...]]
Verdicts = dict[str, tuple[Reason, ...]]


def choose(call: Call, settings: Settings, refused: Refused | None = None) -> Decision:
    """Say who answers `call`, with every reason against everyone who was asked before.

    refused: more reasons by backend, which came up when it was run.
    """
    if settings.only_int8 and not refused:
        return decide(call, settings)
    names = candidates() if settings.backends == FASTEST else _before_torch(settings)
    unwanted = tuple(not_wanted(call, settings))
    by_cost = settings.backends == FASTEST or settings.max_error is not None
    table = table_for(call.query.device) if by_cost and is_regular(call) else None
    verdicts: Verdicts = {}
    for name in names:
        try:
            reasons = unwanted + _against(name, call, settings, table) + (refused or {}).get(name, ())
        except Exception as error:
            verdicts[name] = (*unwanted, failure(error))
            attach(error, _decision(call, TORCH, verdicts), "decided so far:")
            raise
        verdicts[name] = reasons
        if settings.backends != FASTEST and not reasons:
            return _decision(call, settings, name, verdicts)
    if settings.backends != FASTEST:
        return _decision(call, settings, TORCH, verdicts)
    choice = _fastest(call, settings, verdicts, table)
    return _decision(call, settings, choice.name, verdicts, choice.estimates)


def size_of(call: Call) -> Size:
    """Return what the costs of a regular call depend on."""
    batch, heads, q_len, head_dim = call.query.shape
    info = mask_info(call)
    kinds = {MaskKind.NONE: "none", MaskKind.PER_KEY: "padding" if info.is_bool else "key"}
    mask = kinds.get(info.kind, "full")
    return Size(batch, heads, q_len, call.key.shape[2], head_dim, mask, bool(call.is_causal))


def _before_torch(settings: Settings) -> tuple[str, ...]:
    names = tuple(settings.backends)
    return names[: names.index(TORCH)] if TORCH in names else names


def _against(name: str, call: Call, settings: Settings, table: Table | None) -> tuple[Reason, ...]:
    """Return every reason against a backend but its speed; int8 in a given order must pay too, as by default."""
    try:
        backend = find_backend(name)
    except KeyError:
        return (Reason(Code.PACKAGE, f"no backend {name!r}", "one that is registered"),)
    try:
        reasons = tuple(backend.reasons_against(call, settings))
    except Exception as raised:
        if settings.on_error == "raise":
            raise
        reasons = (failure(raised),)
    if name == "int8" and settings.backends != FASTEST:
        reasons += tuple(short(call, settings))
    if settings.max_error is not None:
        error = _error_class(backend, table)
        if error is None or error > settings.max_error:
            given = "not known" if error is None else f"{error:.4g}"
            reasons += (Reason(Code.ERROR_CLASS, given, f"at most {settings.max_error}"),)
    return reasons


def failure(error: Exception) -> Reason:
    """Return the reason that a backend raised `error`."""
    return Reason(Code.BACKEND_FAILED, said(error), "an answer")


def attach(error: Exception, decision: Decision, how: str = "chose") -> None:
    """Let the error of a backend tell which decision led there, as `.decision` and as a note."""
    with contextlib.suppress(Exception):  # a frozen dataclass takes neither, and is to surface all the same
        error.decision = decision  # type: ignore[attr-defined]
        notes = getattr(error, "__notes__", [])
        error.__notes__ = [*notes, f"sdpa_router {how} {decision}"]  # type: ignore[attr-defined]


def _error_class(backend: Backend, table: Table | None) -> float | None:
    measured = None if table is None else table.error_class(backend.name)
    return backend.limits.error if measured is None else measured


class _Choice(NamedTuple):
    name: str
    estimates: tuple[tuple[str, float], ...]


def _fastest(call: Call, settings: Settings, verdicts: Verdicts, table: Table | None) -> _Choice:
    """Choose by estimated time among those without a reason; adds the reason to those that are not chosen."""
    usable = [name for name, reasons in verdicts.items() if not reasons]
    if table is None or not usable:
        return _by_rule(call, settings, verdicts, usable)
    size = size_of(call)
    known = table.estimate(size)
    if TORCH not in known:
        return _by_rule(call, settings, verdicts, usable)
    if settings.min_kv is not None and "int8" in usable and (too_short := tuple(short(call, settings))):
        verdicts["int8"] = too_short
        usable.remove("int8")
    times = {name: known[name] for name in (*usable, TORCH) if name in known}
    tie = table.tie(size)
    best = fastest(times, TORCH, tie)
    for name in usable:
        if name not in times:
            verdicts[name] = (Reason(Code.NOT_MEASURED, f"{name} near this size", ", ".join(times)),)
        elif name != best:
            tied = f": less than {tie - 1:.0%} is no difference here" if times[name] < times[best] else ""
            verdicts[name] = (Reason(Code.SLOWER, _ms(times[name]), f"{best} with {_ms(times[best])}{tied}"),)
    return _Choice(best, tuple(times.items()))


def _by_rule(call: Call, settings: Settings, verdicts: Verdicts, usable: list[str]) -> _Choice:
    """Choose where nothing was measured: int8 from its crossover on, else torch."""
    on_gpu = call.query.device.type != "cpu"  # Triton's interpreter is for trying, not for speed
    for name in usable:
        if name == "int8" and on_gpu:
            verdicts[name] = tuple(short(call, settings))
        else:
            verdicts[name] = (Reason(Code.NOT_MEASURED, f"{name} near this size on this GPU", "nothing there"),)
    return _Choice(next((name for name in usable if not verdicts[name]), TORCH), ())


def _ms(value: float) -> str:
    return f"{value:.3g} ms"


def _decision(
    call: Call, settings: Settings, name: str, verdicts: Verdicts, estimates: tuple[tuple[str, float], ...] = ()
) -> Decision:
    passed = tuple((other, reasons) for other, reasons in verdicts.items() if other != name)
    reasons = tuple(reason for _, others in passed for reason in others)
    route = {"int8": Route.INT8, TORCH: Route.SDPA}.get(name, Route.PEER)
    notes = notes_of(route, call, settings)
    peer = name if route is Route.PEER else None
    return Decision(route, mask_info(call), reasons, notes, peer, passed, estimates)
