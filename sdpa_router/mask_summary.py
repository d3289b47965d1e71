"""Dense masks by tile: a mask is summarised once, and attention then reads only the tiles that must be read.

A summary belongs to a piece of memory: its storage, offset, shape, strides, dtype and version, so that views made anew
for each layer share it and a mask that was written to is summarised again. It lives as long as the mask's storage. It
belongs to a stream, too, for nothing waits for what another stream still has to do; a CUDA graph makes its own.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .decision import TileCounts
from .forks import free_after_fork

if TYPE_CHECKING:
    from .kernels.sparse_attention.summary import Summary

_MOST = 64  # masks remembered; the oldest is forgotten first


class Summarised:
    """A mask's summary on its device, and its counts once they were asked for."""

    def __init__(self, mask: torch.Tensor) -> None:
        from .kernels.sparse_attention.summary import summarise

        with torch.cuda.device_of(mask):  # Triton launches on the current device
            self.summary: Summary = summarise(mask)
        self.storage = StorageWeakRef(mask.untyped_storage())
        self._counts: TileCounts | None = None

    def counts(self) -> TileCounts:
        """Count the tiles of each kind; the first time that waits for the device."""
        if self._counts is None:
            from .kernels.sparse_attention.summary import count_kinds

            self._counts = TileCounts(*count_kinds(self.summary))
        return self._counts

    @property
    def counted(self) -> TileCounts | None:
        """The counts if they are known already."""
        return self._counts


_known: dict[Hashable, Summarised] = {}
_lock = free_after_fork(threading.Lock())


def full_view(mask: torch.Tensor, kv_len: int) -> torch.Tensor:
    """View a mask of rank 2 to 4 as [1 or B, 1 or H, Q, K]; one number for all keys of a row gets stride 0."""
    view = mask if mask.dim() == 4 else mask[(None,) * (4 - mask.dim())]
    return view if view.shape[3] == kv_len else view.expand(-1, -1, -1, kv_len)


def stream_of(device: torch.device) -> int | None:
    """Return what tells the current stream of a device; None while it is captured.

    A graph that is replayed after a write to the mask must find out again, and what it finds is there in replays only.
    """
    if device.type != "cuda":
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None
    # As Triton asks: torch.cuda.current_stream() makes an object, which takes as long as a launch.
    return torch._C._cuda_getCurrentRawStream(device.index)


def _identity(mask: torch.Tensor) -> Hashable | None:
    """What tells a mask's memory and state, and the stream; None where writes to it leave no trace, or come later."""
    stream = None if mask.is_inference() else stream_of(mask.device)
    if stream is None:
        return None  # tensors of inference mode count no versions
    storage: Any = mask.untyped_storage()
    return (
        storage._cdata, mask.storage_offset(), mask.shape, mask.stride(), mask.dtype, mask._version, stream,
    )  # fmt: skip


def trace(mask: torch.Tensor) -> tuple[Hashable, StorageWeakRef] | None:
    """What tells this mask, as it is now, from another one in the same memory; None where nothing does."""
    identity = _identity(mask)
    return None if identity is None else (identity, StorageWeakRef(mask.untyped_storage()))


def is_same(mask: torch.Tensor, seen: tuple[Hashable, StorageWeakRef] | None) -> bool:
    """Whether `mask` is the one that left this trace."""
    return seen is not None and not seen[1].expired() and _identity(mask) == seen[0]


def recall(mask: torch.Tensor) -> Summarised | None:
    """Return the summary of `mask` if it was made before and the mask was not written to; nothing is launched."""
    identity = _identity(mask)
    found = None if identity is None else _known.get(identity)
    return None if found is None or found.storage.expired() else found


def summarised(mask: torch.Tensor) -> Summarised:
    """Return the summary of `mask`, [Q, K] with up to two axes in front; one pass over it the first time.

    The last axis must be as long as the keys are: full_view() sees to that.
    """
    found = recall(mask)
    if found is not None:
        return found
    made = Summarised(full_view(mask, mask.shape[-1]))
    identity = _identity(mask)
    if identity is not None:
        with _lock:
            for old in [key for key, kept in _known.items() if kept.storage.expired()]:
                del _known[old]
            while len(_known) >= _MOST:
                del _known[next(iter(_known))]
            _known[identity] = made
    return made


def summary_of(mask: torch.Tensor) -> Summary:
    """Return the tensors of summarised()."""
    return summarised(mask).summary


def forget() -> None:
    """Forget all summaries."""
    with _lock:
        _known.clear()
