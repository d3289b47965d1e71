"""Launch kernels, and repeat what a call launched before at a fraction of the host time that Triton takes for it.

What a call launches depends on nothing but the metadata of its tensors and on its numbers. The first call with these
writes down the compiled kernels and their arguments; the next ones fill in where their tensors lie. Triton binds and
specialises each launch anew instead (40 us each on the host of an H200). Torch gives a loop the same addresses again:
what was filled in is kept for those.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from .alike import check_of
from .limits import interpreting, overlaps
from .plan import Plan, Tape

_MOST_PLANS = 512  # when there are more, all are forgotten and made anew
_MOST_ALIKE = 4  # calls whose first tensors have one size that are recognised by torch's test
_SPECIALISED = 16  # bytes: Triton compiles anew for an address that is no multiple

_thread = threading.local()  # .tape: what writes down the launches of this thread
_plans: dict[Hashable, Plan] = {}
_known: dict[Hashable, list[Known]] = {}
_interpreter = threading.Lock()  # Triton's keeps the program that runs, and what it patches, for all threads together


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for what one kernel of a call leaves to another."""
    return _own(torch.empty(shape, dtype=dtype, device=device), zeroed=False)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The same, filled with zeros before the first kernel of the call runs."""
    return _own(torch.zeros(shape, dtype=dtype, device=device), zeroed=True)


def _own(tensor: torch.Tensor, zeroed: bool) -> torch.Tensor:
    tape = getattr(_thread, "tape", None)
    if tape is not None:
        tape.own(tensor, zeroed)
    return tensor


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Do kernel[grid](*args, **options); arguments of the kernel first, then its constants and options by name."""
    with _interpreter if interpreting() else contextlib.nullcontext():
        compiled = kernel[grid](*args, **options)
    tape = getattr(_thread, "tape", None)
    if tape is not None:
        tape.add(kernel, compiled, grid, args, options)


def first(device: torch.device) -> dict[str, bool]:
    """Options of the first of launches that overlap where the GPU can do that; it begins when all before it is done.

    Its kernel lets the next one begin as soon as all its programs have begun. See early().
    """
    return {"PDL": overlaps(device)}


def early(device: torch.device) -> dict[str, bool]:
    """Options of a later one of these launches, which begins when all programs of the one before it have begun.

    Its kernel waits (gdc_wait) before it reads what the one before it wrote, and in any case before it ends: what comes
    next, and is no early launch, waits for the last kernel only. From the first launch to the last no memory may
    change its owner.
    """
    return {"PDL": True, "launch_pdl": True} if overlaps(device) else {"PDL": False}


class Known(NamedTuple):
    """A call that is recognised.

    check: whether tensors, all of them at multiples of _SPECIALISED, are like its own.  note: the caller's.
    """

    check: Callable[..., bool]
    plan: Plan
    note: Any


def recall(numbers: Hashable, tensors: Sequence[torch.Tensor | None]) -> tuple[Known | None, list[int]]:
    """Return what remember() was told of a call like this one, and the addresses of its tensors, 0 for None.

    A tenth of the time that comparing all the metadata takes.
    """
    given, addresses, low_bits = [], [], 0
    for tensor in tensors:
        address = 0
        if tensor is not None:
            given.append(tensor)
            address = tensor.data_ptr()
            low_bits |= address
        addresses.append(address)
    if low_bits % _SPECIALISED == 0 and not _observed():
        for known in _known.get((numbers, len(given), given[0].numel(), _settings()), ()):
            if known.check(*given):
                return known, addresses
    return None, addresses


def remember(numbers: Hashable, tensors: Sequence[torch.Tensor | None], plan: Plan, note: Any = None) -> None:
    """Let recall() know calls like this one; `plan` depends on nothing but `numbers` and the metadata of `tensors`."""
    given = [tensor for tensor in tensors if tensor is not None]
    group = (numbers, len(given), given[0].numel(), _settings())
    known = _known.setdefault(group, [])
    if len(known) < _MOST_ALIKE and not any(tensor.data_ptr() % _SPECIALISED for tensor in given):
        check = check_of(given)
        if check is not None:
            known.append(Known(check, plan, note))


def replay(numbers: Hashable, tensors: Sequence[torch.Tensor | None], run: Callable[[], None]) -> Plan | None:
    """Do run(), or again what it launched the last time; return the plan that was followed, if one was.

    run() may call kernels through launch() only, on `tensors` and on what empty() and zeros() made, and may depend on
    nothing but `numbers` and the metadata of `tensors`. Every tensor must be an argument of a kernel. The current
    device is that of the tensors.
    """
    known, addresses = recall(numbers, tensors)
    if known is not None:
        known.plan.run(addresses)
        return known.plan
    if _observed():
        run()
        return None
    key = (
        numbers, _settings(), *[address % _SPECIALISED == 0 for address in addresses],
        *[None if t is None else (t.device, t.dtype, t.shape, t.stride()) for t in tensors],
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is not None:
        remember(numbers, tensors, plan)
        plan.run(addresses)
    elif getattr(_thread, "tape", None) is not None:
        run()  # part of a call that is being written down
    else:
        _write_down(key, tensors, run)
    return plan


def _write_down(key: Hashable, tensors: Sequence[torch.Tensor | None], run: Callable[[], None]) -> None:
    _thread.tape = tape = Tape(tensors)
    try:
        run()
    finally:
        _thread.tape = None
    made = tape.plan()
    if made is not None:
        if len(_plans) >= _MOST_PLANS:
            forget()
        _plans[key] = made


def forget() -> None:
    """Forget what was launched, so that Triton is asked anew."""
    _plans.clear()
    _known.clear()


@functools.cache
def _knobs() -> Any:
    """Triton's settings of launches and of compilations, as attributes since Triton 3.4; None before."""
    try:
        from triton import knobs
    except ImportError:
        return None
    return knobs.runtime, knobs.compilation


def _settings() -> Hashable:
    """What Triton looks at in every launch besides the arguments."""
    knobs = _knobs()
    return None if knobs is None else (knobs[0].debug, knobs[1].instrumentation_mode)


def _observed() -> bool:
    """Whether a profiler wants to see launches, which Triton itself shows it."""
    knobs = _knobs()
    if knobs is None:
        from triton.compiler import CompiledKernel

        return _listens(CompiledKernel.launch_enter_hook) or _listens(CompiledKernel.launch_exit_hook)
    return _listens(knobs[0].launch_enter_hook) or _listens(knobs[0].launch_exit_hook)


def _listens(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))
