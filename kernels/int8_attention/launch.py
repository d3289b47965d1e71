"""Launch kernels, and repeat what a call launched before at a fraction of the host time that Triton takes for it.

What a call launches depends on nothing but the metadata of its tensors and on its numbers. The first call with these
writes down the compiled kernels and their arguments; the next ones fill in where their tensors lie. Triton binds and
specialises each launch anew instead (40 us each on the host of an H200).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from .limits import interpreting

_MOST_PLANS = 512  # when there are more, all are forgotten and made anew
_ALIGNMENT = 256  # of what lies in a workspace, in bytes: TMA and vectors need less
_CONSTANTS = (int, float, str, type(None))

_thread = threading.local()  # .tape: what writes down the launches of this thread
_plans: dict[Hashable, _Plan] = {}
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


def replay(numbers: Hashable, tensors: Sequence[torch.Tensor | None], run: Callable[[], None]) -> None:
    """Do run(), or again what it launched the last time.

    run() may call kernels through launch() only, on `tensors` and on what empty() and zeros() made, and may depend on
    nothing but `numbers` and the metadata of `tensors`. Every tensor must be an argument of a kernel. The current
    device is that of the tensors.
    """
    if _observed():
        return run()
    key = (
        numbers, _settings(),
        *[None if t is None else (t.device, t.dtype, t.shape, t.stride(), t.data_ptr() % 16 == 0) for t in tensors],
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is not None:
        return plan.run(tensors)
    if getattr(_thread, "tape", None) is not None:
        return run()  # part of a call that is being written down
    _thread.tape = tape = _Tape(tensors)
    try:
        run()
    finally:
        _thread.tape = None
    made = tape.plan()
    if made is not None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[key] = made


def forget() -> None:
    """Forget what was launched, so that Triton is asked anew."""
    _plans.clear()


@functools.cache
def _knobs() -> Any:
    """Triton's settings, as attributes since Triton 3.4."""
    try:
        from triton import knobs
    except ImportError:
        return None
    return knobs


def _settings() -> Hashable:
    """What Triton looks at in every launch besides the arguments."""
    knobs = _knobs()
    return None if knobs is None else (knobs.runtime.debug, knobs.compilation.instrumentation_mode)


def _observed() -> bool:
    """Whether a profiler wants to see launches, which Triton itself shows it."""
    knobs = _knobs()
    if knobs is None:
        from triton.compiler import CompiledKernel

        hooks = (CompiledKernel.launch_enter_hook, CompiledKernel.launch_exit_hook)
    else:
        hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


class _Address:
    """Stands for a tensor of which a launcher reads the address only."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class _Launch(NamedTuple):
    """One launch.

    values: the arguments in order; those at `pointers` (place, base, offset) and at `descriptors` (place, base, offset,
    descriptor) are to be filled in.
    """

    kernel: Any
    compiled: Any
    grid: tuple[int, ...]
    values: list[Any]
    pointers: list[tuple[int, int, int]]
    descriptors: list[tuple[int, int, int, Any]]


class _Plan(NamedTuple):
    """The launches of a call, and the bytes of workspace that they need: zeroed ones first."""

    launches: list[_Launch]
    zeroed: int
    size: int
    device: torch.device

    def run(self, tensors: Sequence[torch.Tensor | None]) -> None:
        bases = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        if self.size:
            workspace = torch.empty(self.size, dtype=torch.uint8, device=self.device)
            start = workspace.data_ptr()
            bases += (start, start + self.zeroed)
            if self.zeroed:
                workspace[: self.zeroed].zero_()
        stream = torch.cuda.current_stream(self.device).cuda_stream
        for _, compiled, grid, values, pointers, descriptors in self.launches:
            args = values.copy()
            for place, base, offset in pointers:
                args[place] = bases[base] + offset
            for place, base, offset, descriptor in descriptors:
                args[place] = _moved(descriptor, bases[base] + offset)
            compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)


def _moved(descriptor: Any, address: int) -> Any:
    """A copy of a TMA descriptor for another address, without the checks of its constructor."""
    moved = object.__new__(type(descriptor))
    moved.__dict__.update(descriptor.__dict__)
    moved.base = _Address(address)
    return moved


class _Tape:
    """Writes down the launches of one call."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self._tensors = tensors
        self._seen: set[int] = set()
        self._kept: list[torch.Tensor] = []  # so that no address comes twice
        self._places: dict[int, tuple[int, int]] = {}  # by address of a storage: base, offset
        self._sizes = [0, 0]  # bytes of workspace, zeroed and not
        self._launches: list[_Launch] = []
        self._complete = True

    def own(self, tensor: torch.Tensor, zeroed: bool) -> None:
        """Note a tensor of the workspace."""
        region = 0 if zeroed else 1
        size = -(-tensor.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT
        self._kept.append(tensor)
        self._places[tensor.untyped_storage().data_ptr()] = (len(self._tensors) + region, self._sizes[region])
        self._sizes[region] += size

    def add(self, kernel: Any, compiled: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: Any) -> None:
        """Note a launch that was done."""
        names = getattr(kernel, "arg_names", ())[len(args) :]
        if not hasattr(compiled, "packed_metadata") or any(name not in options for name in names):
            self._complete = False  # the interpreter, or a Triton that works otherwise
            return
        values = [*args, *(options[name] for name in names)]
        fixed = [param.is_constexpr for param in getattr(kernel, "params", ())] or [False] * len(values)
        launched = _Launch(kernel, compiled, (*grid, 1, 1)[:3], values, [], [])
        for place, value in enumerate(values):
            if fixed[place]:
                continue
            base = value if isinstance(value, torch.Tensor) else getattr(value, "base", None)
            if isinstance(base, torch.Tensor):
                found = self._place(base)
                if found is None:
                    self._complete = False
                elif base is value:
                    values[place] = None
                    launched.pointers.append((place, *found))
                else:
                    values[place] = None
                    launched.descriptors.append((place, *found, _moved(value, 0)))
            elif not isinstance(value, _CONSTANTS):
                self._complete = False
        self._launches.append(launched)

    def _place(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Where a tensor lies: its base and how many bytes after that, or None if nothing is known of it."""
        address = tensor.data_ptr()
        same = [i for i, given in enumerate(self._tensors) if given is tensor] or [
            i for i, given in enumerate(self._tensors) if given is not None and given.data_ptr() == address
        ]
        if len(same) == 1:
            self._seen.add(same[0])
            return same[0], 0
        storage = tensor.untyped_storage().data_ptr()
        if same or storage not in self._places:
            return None
        base, offset = self._places[storage]
        return base, offset + address - storage

    def plan(self) -> _Plan | None:
        """What was written down, or None where something remained unknown."""
        given = {i for i, tensor in enumerate(self._tensors) if tensor is not None}
        if not self._complete or self._seen != given:
            return None
        devices = {tensor.device for tensor in self._tensors if tensor is not None}
        # Bases are numbered after all tensors; the two of the workspace follow one another.
        return _Plan(self._launches, self._sizes[0], sum(self._sizes), devices.pop()) if len(devices) == 1 else None
