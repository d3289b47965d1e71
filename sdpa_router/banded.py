"""Banded windows: blocks of queries that attend ranges of keys, with a fade at the borders, in one launch."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Literal, NamedTuple, overload

import torch

from . import run
from .decide import Call
from .mask import key_view
from .traced import require_kernel


class KeyRange(NamedTuple):
    """Keys [start, stop), with a bias that fades along half a cosine at its borders.

    fade_in: the first keys, over which the bias rises from log(floor) to 0.  fade_out: the last, over which it falls.
    """

    start: int
    stop: int
    fade_in: int = 0
    fade_out: int = 0


class Window(NamedTuple):
    """Queries [start, stop), and the ranges of keys that all of them attend; ranges don't overlap."""

    start: int
    stop: int
    keys: tuple[KeyRange, ...]


def video_windows(
    frames: int, rows_per_frame: int, length: int, skirt: int, *, prefix: int = 0, prefix_sees_all: bool = True
) -> list[Window]:
    """Cut a packed sequence [prefix | frames * rows_per_frame] into windows of `length` frames.

    The rows of a window attend the prefix (text, references, audio), their own frames, and up to `skirt` frames on
    either side, the less the farther away. At the ends of the video the skirt is cut and fades over what is left.
    prefix_sees_all: whether the rows of the prefix attend everything, or the prefix alone.
    Raises ValueError for sizes that make no window.

    >>> video_windows(26, 1560, 13, 4, prefix=840)[1].keys[1]
    KeyRange(start=840, stop=27960, fade_in=0, fade_out=6240)
    """
    sizes = {"frames": frames, "rows_per_frame": rows_per_frame, "length": length}
    wrong = [f"{name} {size!r}" for name, size in sizes.items() if type(size) is not int or size < 1]
    wrong += [f"{n} {s!r}" for n, s in (("skirt", skirt), ("prefix", prefix)) if type(s) is not int or s < 0]
    if wrong:
        raise ValueError(f"given {', '.join(wrong)}; accepted: whole numbers, skirt and prefix from 0, others from 1")
    always = (KeyRange(0, prefix),) if prefix else ()
    total = prefix + frames * rows_per_frame
    windows = [Window(0, prefix, (KeyRange(0, total if prefix_sees_all else prefix),))] if prefix else []
    for first in range(0, frames, length):
        last = min(first + length, frames)
        before, after = min(skirt, first), min(skirt, frames - last)
        start, stop = (prefix + frame * rows_per_frame for frame in (first, last))
        fades = before * rows_per_frame, after * rows_per_frame
        windows.append(Window(start, stop, (*always, KeyRange(start - fades[0], stop + fades[1], *fades))))
    return windows


@overload
def banded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    windows: Sequence[Window],
    bias: torch.Tensor | None = None,
    *,
    floor: float = 1e-4,
    scale: float | None = None,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def banded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    windows: Sequence[Window],
    bias: torch.Tensor | None = None,
    *,
    floor: float = 1e-4,
    scale: float | None = None,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def banded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    windows: Sequence[Window],
    bias: torch.Tensor | None = None,
    *,
    floor: float = 1e-4,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend windows of a long sequence in one launch: no keys are gathered, no mask of Q * K elements is made.

    query [B, H, Q, D], key and value [B, Hkv, K, D] with H a multiple of Hkv, fp16 or bf16, D up to 256.
    windows: disjoint ranges of queries and what each attends, see Window and video_windows(); queries of no window get
    out 0 and lse -inf.  floor: the weight that a faded key at the outermost end of its range keeps, over 0 to 1.
    bias: besides, a mask with one row for all queries, as int8_attention() takes it.
    Returns out [B, H, Q, D], or with return_lse (out, lse): lse float32 [B, H, Q], natural logarithm.
    One launch is for all windows, and for all heads unless their int8 copies would take more than a twentieth of the
    memory of query, key, value and answer (and over 256 MiB): then a few heads at a time.
    Lists of tiles are made at the first call with these windows and kept; do that before capturing a CUDA graph.
    Raises ValueError for windows out of range or overlapping, UnsupportedError for what the kernel can't do.

    >>> windows = video_windows(frames=170, rows_per_frame=1560, length=13, skirt=4, prefix=840)
    >>> out = banded_attention(q, k, v, windows)
    """
    call = Call(query, key, value, bias, 0.0, False, scale, True)
    require_kernel(call, "auto", "auto")
    if not isinstance(floor, float) or not 0 < floor <= 1:
        raise ValueError(f"floor is {floor!r}; accepted: a weight over 0 and up to 1.0")
    numbers = flatten(windows, query.shape[2], key.shape[2])
    mask = None if bias is None else key_view(bias)
    answer = run.banded(query, key, value, numbers, floor, mask, scale, return_lse)
    return answer if return_lse else answer[0]


def flatten(windows: Sequence[Window], q_len: int, kv_len: int) -> tuple[int, ...]:
    """Windows as plain numbers (kernels.sparse_attention.windows.parse() reads them); raises ValueError if wrong."""
    numbers: list[int] = []
    windows = whole(windows)
    for start, stop, keys in windows:
        if not 0 <= start < stop <= q_len:
            raise ValueError(f"a window has queries {start} to {stop}; accepted: a range within 0 to {q_len}")
        if not keys:
            raise ValueError(f"the window of queries {start} to {stop} has no keys; accepted: at least one range")
        numbers += [start, stop, len(keys)]
        for first, last, fade_in, fade_out in keys:
            if not 0 <= first < last <= kv_len:
                raise ValueError(f"a window has keys {first} to {last}; accepted: a range within 0 to {kv_len}")
            if min(fade_in, fade_out) < 0 or fade_in + fade_out > last - first:
                raise ValueError(
                    f"keys {first} to {last} fade over {fade_in} and {fade_out}; accepted: numbers from 0 that "
                    f"together are at most {last - first}"
                )
            numbers += [first, last, fade_in, fade_out]
        _disjoint("keys of one window", [(r[0], r[1]) for r in keys])
    _disjoint("queries of windows", [(window[0], window[1]) for window in windows])
    return tuple(numbers)


def whole(windows: Sequence[Window]) -> list[Window]:
    """Windows of plain integers; raises ValueError for anything else, says nothing about ranges."""
    index = operator.index
    try:
        return [
            Window(index(start), index(stop), tuple(KeyRange(*[index(number) for number in given]) for given in keys))
            for start, stop, keys in windows
        ]
    except (TypeError, ValueError):
        raise ValueError(
            f"windows are {type(windows).__name__}; accepted: a list of Window(start, stop, keys) of whole numbers, "
            "where keys is a tuple of KeyRange(start, stop, fade_in, fade_out)"
        ) from None


def _disjoint(what: str, ranges: list[tuple[int, int]]) -> None:
    ranges = sorted(ranges)
    for (first, stop), (start, end) in itertools.pairwise(ranges):
        if start < stop:
            raise ValueError(f"the {what} overlap: {first} to {stop} and {start} to {end}; accepted: disjoint ranges")


def bias_of(window: Window, kv_len: int, floor: float = 1e-4, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return what a window adds to the scores of each key, float32 [1, 1, 1, K], -inf outside it."""
    from .testing import raised_cosine

    bias = torch.full((kv_len,), -torch.inf, device=device)
    for start, stop, fade_in, fade_out in window.keys:
        bias[start:stop] = 0.0
        bias[start : start + fade_in] = raised_cosine(fade_in, floor, device).flip(0)
        bias[stop - fade_out : stop] = raised_cosine(fade_out, floor, device)
    return bias.view(1, 1, 1, -1)
