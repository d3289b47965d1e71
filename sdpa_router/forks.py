"""What a fork leaves out in the child: threads that would release a lock, and handlers that run at its end."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import util
from typing import Protocol, TypeVar


class _Lock(Protocol):
    def acquire(self) -> bool: ...

    def release(self) -> None: ...


_LockT = TypeVar("_LockT", bound=_Lock)


def free_after_fork(lock: _LockT) -> _LockT:
    """Return `lock`, which from now on is free in a forked child, whichever thread holds it in the parent."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


def after_fork(begin: Callable[[], None]) -> None:
    """Call `begin` in each forked child, first of all."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=begin)


def at_exit(write: Callable[[], None]) -> None:
    """Call `write` at the end of this process, and of every child that it forks; not where one is killed.

    The workers of multiprocessing leave by os._exit(): they run no handler of atexit, but finalizers, which a child
    must give itself anew.
    """
    _finalize_by(write)
    util.register_after_fork(write, _finalize_by)  # called after they have dropped all finalizers
    after_fork(lambda: _finalize_by(write))


def _finalize_by(write: Callable[[], None]) -> None:
    util.Finalize(None, write, exitpriority=0)
