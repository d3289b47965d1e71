"""The launches of a call, written down to be repeated: which arguments are addresses, and into what they point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .direct import Call, Passing, passing_of

_MOST_FILLED = 128  # address lists that a plan is kept ready for: more than a model has layers; 4 KB each
_ALIGNMENT = 256  # of what lies in a workspace, in bytes: TMA and vectors need less
_CONSTANTS = (int, float, str, type(None))

# Private to torch, but what Triton and inductor ask as well: torch.cuda.current_stream() takes 7 us.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
# A tensor for the workspace takes 6 us.
_raw_alloc = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", None)
_raw_delete = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", None)


class _Address:
    """Stands for a tensor of which a launcher reads the address only."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class _Launch(NamedTuple):
    """One launch.

    passing: of its launcher.  values: the arguments in order; those at `pointers` (place, base, offset) and at
    `descriptors` (place, base, offset, descriptor) are to be filled in.
    """

    kernel: Any
    compiled: Any
    passing: Passing | None
    grid: tuple[int, ...]
    values: list[Any]
    pointers: list[tuple[int, int, int]]
    descriptors: list[tuple[int, int, int, Any]]

    def filled(self, stream: int, bases: Sequence[int]) -> Call:
        """What launches it."""
        args = self.values.copy()
        for place, base, offset in self.pointers:
            args[place] = bases[base] + offset
        for place, base, offset, descriptor in self.descriptors:
            args[place] = _moved(descriptor, bases[base] + offset)
        compiled = self.compiled
        given = (*self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)
        return (self.passing and self.passing.call(given)) or (compiled.run, given)


class Plan(NamedTuple):
    """The launches of a call, and the bytes of workspace that they need: zeroed ones first.

    filled: launches that are ready, by stream and addresses.
    """

    launches: list[_Launch]
    zeroed: int
    size: int
    device: torch.device
    filled: dict[tuple[int, ...], list[Call]]

    def run(self, addresses: list[int]) -> None:
        """Launch on tensors that lie at these addresses, 0 for None."""
        if self.device.type == "cuda" and _raw_stream is not None:
            stream = _raw_stream(self.device.index)
        else:
            stream = torch.cuda.current_stream(self.device).cuda_stream
        if not self.size:
            return self._launch((stream, *addresses))
        if self.zeroed or self.device.type != "cuda" or _raw_alloc is None or _raw_delete is None:
            workspace = torch.empty(self.size, dtype=torch.uint8, device=self.device)
            if self.zeroed:
                workspace[: self.zeroed].zero_()
            return self._launch((stream, *addresses, workspace.data_ptr()))
        start = _raw_alloc(self.size, stream)
        try:
            self._launch((stream, *addresses, start))
        finally:
            _raw_delete(start)  # to whatever comes next on this stream, as with a tensor

    def _launch(self, addresses: tuple[int, ...]) -> None:
        ready = self.filled.get(addresses)
        if ready is None:
            stream, *bases = addresses
            if self.size:
                bases.append(bases[-1] + self.zeroed)
            ready = [launch.filled(stream, bases) for launch in self.launches]
            if len(self.filled) >= _MOST_FILLED:
                self.filled.clear()
            self.filled[addresses] = ready
        for function, args in ready:
            function(*args)


def _moved(descriptor: Any, address: int) -> Any:
    """A copy of a TMA descriptor for another address, without the checks of its constructor."""
    moved = object.__new__(type(descriptor))
    moved.__dict__.update(descriptor.__dict__)
    moved.base = _Address(address)
    return moved


class Tape:
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
        passing = passing_of(getattr(compiled, "run", None))
        launched = _Launch(kernel, compiled, passing, (*grid, 1, 1)[:3], values, [], [])
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

    def plan(self) -> Plan | None:
        """What was written down, or None where something remained unknown."""
        given = {i for i, tensor in enumerate(self._tensors) if tensor is not None}
        if not self._complete or self._seen != given:
            return None
        devices = {tensor.device for tensor in self._tensors if tensor is not None}
        # Bases are numbered after all tensors; the two of the workspace follow one another.
        if len(devices) != 1:
            return None
        return Plan(self._launches, self._sizes[0], sum(self._sizes), devices.pop(), {})
