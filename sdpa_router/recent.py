"""Recognise a call that was made before, without its signature: all of this is on the way of every attention call.

What takes a microsecond when it is called in a loop takes twenty in a model, whose layers have pushed it out of the
processor's caches meanwhile. So it touches little memory, and looks first where the call probably is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from .decide import Call
from .kernels.int8_attention.alike import check_of

if TYPE_CHECKING:
    from .sighting import Sighting

# Calls that are kept for one size of keys, of which a model has few kinds, and sizes.
_KEPT, _MOST = 4, 4096


class Recent:
    """A call, and the decision about it.

    check: torch's own test in C++ of all that its tensors are but their data; it fails in another dispatch state: under
    autocast, inference mode or a torch.func transform.  grad: whether gradients were on, None if that doesn't matter.
    as_given, tick: those of the sighting.  next: the call that followed it the last time.
    """

    __slots__ = (
        *("as_given", "check", "dropout_p", "enable_gqa", "grad", "is_causal", "name", "next"),
        *("scale", "sighting", "tick", "unmasked"),
    )

    def __init__(
        self, name: str, call: Call, check: Callable[..., bool], grad: bool | None, sighting: Sighting
    ) -> None:
        self.name = name
        self.unmasked = call.attn_mask is None
        self.dropout_p, self.is_causal, self.scale, self.enable_gqa = call[4:]
        self.check = check
        self.grad = grad
        self.sighting = sighting
        self.as_given = sighting.as_given
        self.tick = sighting.tick
        self.next = self


class _Nothing:
    """Comes before the first call."""

    name = ""
    next: Any

    def __init__(self) -> None:
        self.next = self


class Latest:
    """The call that was recognised last, in whatever thread: what followed it the last time is a good guess."""

    __slots__ = ("call",)

    def __init__(self) -> None:
        self.call: Any = _Nothing()


latest = Latest()
_by_size: dict[int, list[Recent]] = {}
# Of calls of int8_attention() that the kernel can answer, by the size of their key: their numbers and their check.
_answered: dict[int, list[tuple[tuple[Any, ...], Callable[..., bool]]]] = {}
_compiling = torch.compiler.is_dynamo_compiling


def with_key_of_size(key: torch.Tensor, attn_mask: torch.Tensor | None) -> Iterator[Recent]:
    """Yield the calls, masked or not, whose key had as many elements."""
    if type(key) is torch.Tensor:
        yield from _by_size.get(_size(key, attn_mask), ())


def remember(name: str, call: Call, sighting: Sighting) -> None:
    """Keep a call under the settings `name`, so that one alike is recognised."""
    kept = _by_size.setdefault(_size(call.key, call.attn_mask), [])
    check = check_of(_tensors(call)) if len(kept) < _KEPT else None
    if check is not None:
        grad = torch.is_grad_enabled() if any(tensor.requires_grad for tensor in _tensors(call)) else None
        kept.append(Recent(name, call, check, grad, sighting))


def answered_before(call: Call, pv: str, precision: str) -> bool:
    """Whether the int8 kernel could answer a call of int8_attention() like this one, so that nothing is against it."""
    if _compiling():
        return False
    key, mask = call.key, call.attn_mask
    if type(key) is not torch.Tensor or forward_ad._current_level >= 0 or not _judged_by_value(call):
        return False
    state = (pv, precision, mask is None, call.is_causal, call.scale, call.enable_gqa, torch.is_grad_enabled())
    for known_state, check in _answered.get(key.numel(), ()):
        if known_state == state and (check(*call[:3]) if mask is None else check(*call[:4])):
            return True
    return False


def _judged_by_value(call: Call) -> bool:
    """Whether equal numbers are alike to the kernel: 1 equals True, and a tensor or an array equals anything."""
    flags = type(call.is_causal) is bool and type(call.enable_gqa) is bool
    return flags and isinstance(call.scale, (float, int, type(None)))


def remember_answered(call: Call, pv: str, precision: str) -> None:
    """Let answered_before() know of a call that nothing was against."""
    if _compiling() or torch._C._is_any_autocast_enabled() or not _judged_by_value(call):
        return
    if len(_answered) >= _MOST:
        _answered.clear()
    kept, mask = _answered.setdefault(call.key.numel(), []), call.attn_mask
    check = check_of(_tensors(call)) if len(kept) < _KEPT else None
    if check is not None:
        state = (pv, precision, mask is None, call.is_causal, call.scale, call.enable_gqa, torch.is_grad_enabled())
        kept.append((state, check))


def forget() -> None:
    """Recognise none of the calls again, not even where another thread holds one."""
    for call in itertools.chain.from_iterable(_by_size.values()):
        call.check = _never
    _by_size.clear()
    _answered.clear()


def _tensors(call: Call) -> list[torch.Tensor]:
    return [call.query, call.key, call.value, *([] if call.attn_mask is None else [call.attn_mask])]


def _never(*tensors: torch.Tensor) -> bool:
    return False


def _size(key: torch.Tensor, attn_mask: torch.Tensor | None) -> int:
    return key.numel() if attn_mask is None else ~key.numel()
