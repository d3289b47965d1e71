"""Pictures of masks by tile: kept, of one number, read and skipped. matplotlib is imported when one is drawn."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .banded import Window, bias_of, flatten, whole
from .decision import TileCounts
from .kernels.sparse_attention.limits import H200, estimate_ms, torch_ms
from .mask_summary import full_view
from .tile_mask import has_values

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TILE = 64
KEPT, CONSTANT, MIXED, SKIPPED = range(4)
_NAMES = ("kept", "one number", "read", "skipped")
_NAMES_OF_WINDOWS = ("kept", "one number", "at a border", "skipped")
_COLOURS = ("#0072b2", "#56b4e9", "#e69f00", "#f0f0f0")
_NEGLIGIBLE = -8192.0  # natural log: see kernels.sparse_attention.lists


def plot_mask(
    mask_or_windows: torch.Tensor | Sequence[Window],
    path: str | Path | None = None,
    *,
    heads: int = 1,
    head_dim: int = 128,
    tiles: bool = False,
) -> Figure:
    """Draw the tiles of a mask or of windows, with their density and the time that attention would take on an H200.

    mask_or_windows: a mask [Q, K] with up to two axes in front, of which the first row is drawn, bool (True = keep) or
    added; with tiles=True a bool mask of 64x64 tiles [nq, nk]; or windows as banded_attention() takes them.
    path: where to write the picture.  heads, head_dim: of the attention whose time is told; heads counts the batch too.
    Needs matplotlib. Returns the figure. Raises ValueError for what is none of these.

    >>> plot_mask(video_windows(52, 1560, 13, 4, prefix=840), "windows.png", heads=56)
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    if heads < 1 or not 1 <= head_dim <= 256:
        raise ValueError(f"heads is {heads!r} and head_dim {head_dim!r}; accepted: from 1, and 1 to 256")
    kinds, edge = tile_kinds(mask_or_windows, tiles=tiles)
    counts = count(kinds)
    of_mask = isinstance(mask_or_windows, torch.Tensor)
    # Not through pyplot, which would choose a backend for the whole process.
    figure = Figure(figsize=(8, 7.4), layout="constrained")
    axes: Any = figure.subplots()
    extent = (0, kinds.shape[1] * TILE, kinds.shape[0] * TILE, 0)
    axes.imshow(
        kinds.numpy(), cmap=ListedColormap(_COLOURS), vmin=-0.5, vmax=3.5, extent=extent, aspect="auto",
        interpolation="nearest",
    )  # fmt: skip
    axes.set(xlabel="key", ylabel="query", xlim=(0, edge[1]), ylim=(edge[0], 0))
    axes.set_title("\n".join(describe(counts, heads, head_dim, reads=of_mask)), fontsize=10)
    found = zip(_NAMES if of_mask else _NAMES_OF_WINDOWS, _COLOURS, counts, strict=True)
    handles: list[Any] = [Patch(color=colour, label=f"{name}: {number}") for name, colour, number in found]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    if path is not None:
        figure.savefig(path, dpi=130)
    return figure


def load(file: Path) -> torch.Tensor:
    """Read a tensor that torch.save() wrote; raises ValueError if the file holds anything else."""
    try:
        given = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch each raise their own
        raise ValueError(
            f"can't read {file} ({type(error).__name__}); accepted: a tensor that torch.save wrote"
        ) from None
    if not isinstance(given, torch.Tensor):
        raise ValueError(f"{file} holds a {type(given).__name__}; accepted: a tensor")
    if not has_values(given):
        kind = "nested" if given.is_nested else f"{given.layout} on {given.device}"
        raise ValueError(f"{file} holds a tensor that is {kind}; accepted: a dense one with its values")
    return given


def describe(counts: TileCounts, heads: int, head_dim: int, *, reads: bool = True) -> list[str]:
    """Two lines: how many tiles are visited, and the time of a call over `heads` heads.

    reads: whether mixed tiles are read from a mask; the borders of windows cost nothing besides.
    """
    visited = counts.total - counts.skipped
    read = counts.mixed if reads else 0
    ours = estimate_ms(H200, heads * (visited - read), heads * read, head_dim)
    theirs = torch_ms(H200, heads * counts.total, head_dim)
    return [
        f"{visited} of {counts.total} tiles of 64x64 are visited: density {visited / max(1, counts.total):.3f}",
        f"estimated for {heads} head{'s' * (heads != 1)} of {head_dim} on an H200: {ours:.2f} ms, "
        f"torch with a dense mask {theirs:.2f} ms",
    ]


def count(kinds: torch.Tensor) -> TileCounts:
    """Count the tiles of each kind."""
    return TileCounts(*torch.bincount(kinds.flatten().long(), minlength=4).tolist())


def tile_kinds(
    mask_or_windows: torch.Tensor | Sequence[Window], *, tiles: bool = False
) -> tuple[torch.Tensor, tuple[int, int]]:
    """Kind of each tile, uint8 [nq, nk] on the CPU, and the numbers of queries and keys."""
    if isinstance(mask_or_windows, torch.Tensor):
        mask = mask_or_windows
        if not has_values(mask):
            raise ValueError("the mask is sparse, nested or without values; accepted: a dense tensor")
        if not 2 <= mask.dim() <= 4 or not (mask.dtype == torch.bool or mask.is_floating_point()) or not mask.numel():
            raise ValueError(f"the mask is {mask.dtype} {list(mask.shape)}; accepted: bool or floating, [.., Q, K]")
        mask = full_view(mask.detach(), mask.shape[-1])[0, 0].cpu()
        if tiles:
            if mask.dtype != torch.bool:
                raise ValueError(f"the tile mask is {mask.dtype}; accepted: bool, True where a tile is attended")
            return torch.where(mask, KEPT, SKIPPED).to(torch.uint8), (mask.shape[0] * TILE, mask.shape[1] * TILE)
        return _of_mask(mask), (mask.shape[0], mask.shape[1])
    windows: list[Window] = []
    if isinstance(mask_or_windows, Sequence) and not isinstance(mask_or_windows, str):
        with contextlib.suppress(ValueError):
            windows = whole(mask_or_windows)
    if not windows:
        raise ValueError("given neither a tensor nor windows; accepted: a mask, or a list of Window of at least one")
    return _of_windows(windows)


def _of_mask(mask: torch.Tensor) -> torch.Tensor:
    added = torch.where(mask, 0.0, -torch.inf) if mask.dtype == torch.bool else mask.float()
    rows = []
    for part in added.split(TILE):
        padded = torch.nn.functional.pad(part, (0, -part.shape[1] % TILE), value=-torch.inf)
        by_tile = padded.view(len(part), -1, TILE)
        low, high = by_tile.amin((0, 2)), by_tile.amax((0, 2))
        peaks = padded.nan_to_num(torch.inf, torch.inf, -torch.inf).amax(1)
        finite = peaks[peaks.isfinite()]  # a row with NaN or +inf answers NaN whatever is left out
        floor = finite.min() if len(finite) else torch.tensor(-torch.inf)
        kind = torch.full(low.shape, MIXED, dtype=torch.uint8)
        kind[low == high] = CONSTANT
        kind[(low == high) & (high == 0)] = KEPT
        kind[(high == -torch.inf) | (high < floor + _NEGLIGIBLE)] = SKIPPED
        rows.append(kind)
    return torch.stack(rows)


def _of_windows(windows: list[Window]) -> tuple[torch.Tensor, tuple[int, int]]:
    q_len = max(window.stop for window in windows)
    kv_len = max((last for window in windows for _, last, *_ in window.keys), default=0)
    flatten(windows, q_len, kv_len)  # raises ValueError for ranges that are none
    kinds = torch.full((-(-q_len // TILE), -(-kv_len // TILE)), SKIPPED, dtype=torch.uint8)
    for window in windows:
        row = _of_mask(bias_of(window, kv_len)[0, 0])[0]
        # A tile of rows that two windows share is one block in either: what is drawn there is the later one's.
        kinds[window.start // TILE : -(-window.stop // TILE)] = row
    return kinds, (q_len, kv_len)
