"""Banded windows as lists: which key tiles a window's queries see, and what is added to keys at its borders."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from .lists import TILE, Lists

_LOG2E = math.log2(math.e)


class Range(NamedTuple):
    """Keys [start, stop); the bias rises from log(floor) to 0 over the first fade_in keys, and falls over the last."""

    start: int
    stop: int
    fade_in: int
    fade_out: int


class Plan(NamedTuple):
    """Lists of windows, and what their bias table is made of.

    table: float32 [1, 1, R, 64], log2 units; row 0 is 0 everywhere, row 1 -inf.  row_of: int32 [L, nk], the row of the
    table that list l has for each key tile, -1 for none; with own_rows alone, else None.
    kept: float32 [1, 1, N], 0 for keys that lie in a window and -inf for others; None if all do, or with own_rows.
    """

    lists: Lists
    table: torch.Tensor
    row_of: torch.Tensor | None
    kept: torch.Tensor | None


def parse(windows: tuple[int, ...]) -> list[tuple[int, int, list[Range]]]:
    """Windows out of plain numbers: first query, end of queries, number of ranges, and four numbers for each range."""
    found, at = [], 0
    while at < len(windows):
        first, stop, count = windows[at : at + 3]
        numbers = windows[at + 3 : at + 3 + 4 * count]
        found.append((first, stop, [Range(*numbers[i : i + 4]) for i in range(0, 4 * count, 4)]))
        at += 3 + 4 * count
    return found


@functools.lru_cache(maxsize=64)
def plan(
    windows: tuple[int, ...],
    floor: float,
    q_len: int,
    kv_len: int,
    *,
    own_rows: bool,
    paired: bool,
    device: torch.device,
) -> Plan:
    """Lists and bias table of `windows` (see parse) on `device`; queries of no window get an empty list.

    own_rows: a row of the table for every entry, for a bias of the keys that is to be added to it.
    paired: for the Hopper kernel.
    """
    parsed = parse(windows)
    tables, entries, rows = [torch.zeros(1, TILE), torch.full((1, TILE), -math.inf)], [], 2
    row_of = torch.full((len(parsed) + 1, -(-kv_len // TILE)), -1, dtype=torch.int32)
    for i, (_, _, ranges) in enumerate(parsed):
        tiles, biases = _tiles(ranges, floor)
        own = torch.ones(len(tiles), dtype=torch.bool) if own_rows else (biases != 0).any(1)
        at = torch.zeros(len(tiles), dtype=torch.int64)
        at[own] = rows + torch.arange(int(own.sum()))
        rows += int(own.sum())
        tables.append(biases[own])
        row_of[i, tiles] = at.int()
        order = (at == 0).to(torch.int8).argsort(stable=True)  # what needs the table comes first
        entries.append((tiles[order], at[order], biases.max().item()))
    entries.append((torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 0.0))
    blocks = _blocks(parsed, q_len, 2 * TILE if paired else TILE)
    lists = _lists(entries, torch.tensor(blocks, dtype=torch.int32), paired)
    parts: list[Any] = [part.to(device) if isinstance(part, torch.Tensor) else part for part in lists]
    kept = torch.full((1, 1, row_of.shape[1] * TILE), -math.inf)
    for start, stop, _, _ in (r for _, _, ranges in parsed for r in ranges):
        kept[..., start:stop] = 0.0
    some = own_rows or bool((kept[..., :kv_len] == 0).all())
    return Plan(
        Lists(*parts),
        torch.cat(tables)[None, None].to(device),
        row_of.to(device) if own_rows else None,
        None if some else kept.to(device),
    )


def _tiles(ranges: list[Range], floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Key tiles [n] that the ranges touch, in order, and the bias [n, 64] of their keys in log2 units."""
    first = min(r.start for r in ranges) // TILE
    last = -(-max(r.stop for r in ranges) // TILE)
    bias = torch.full(((last - first) * TILE,), -math.inf, dtype=torch.float64)
    for start, stop, fade_in, fade_out in ranges:
        part = bias[start - first * TILE : stop - first * TILE]
        part[:] = 0.0
        part[:fade_in] = _fade(fade_in, floor).flip(0)
        part[len(part) - fade_out :] = _fade(fade_out, floor)
    rows = bias.view(-1, TILE)
    seen = (rows != -math.inf).any(1)
    return seen.nonzero().flatten() + first, (rows[seen] * _LOG2E).float()


def _fade(length: int, floor: float) -> torch.Tensor:
    """Half a cosine from 0 down to log(floor), as testing.raised_cosine()."""
    position = (torch.arange(length, dtype=torch.float64) + 0.5) / max(1, length)
    return math.log(floor) * (1 - torch.cos(math.pi * position)) / 2


def _blocks(parsed: list[tuple[int, int, list[Range]]], q_len: int, size: int) -> list[list[int]]:
    """First row, end and list of each block of at most `size` query rows; the list past the last is the empty one."""
    spans = sorted((first, stop, i) for i, (first, stop, _) in enumerate(parsed))
    blocks, at = [], 0
    for first, stop, i in [*spans, (q_len, q_len, -1)]:
        for start, end, which in ((at, first, len(parsed)), (first, stop, i)):
            blocks += [[row, end, which] for row in range(start, end, size)]
        at = stop
    return blocks


def _lists(entries: list[tuple[torch.Tensor, torch.Tensor, float]], blocks: torch.Tensor, paired: bool) -> Lists:
    counts = torch.tensor([len(tiles) for tiles, _, _ in entries], dtype=torch.int32)
    width = int(counts.max()) + 6
    if not paired:
        tiles = torch.zeros(len(entries), width, dtype=torch.int32)
        bias_rows = torch.zeros(len(entries), width, dtype=torch.int32)
        for i, (its_tiles, at, _) in enumerate(entries):
            tiles[i, : len(at)], bias_rows[i, : len(at)] = its_tiles, at
        anchor = torch.tensor([0.0, 1.0]).repeat(len(entries), 1)
        return Lists(tiles, counts, None, bias_rows, None, anchor, 0, blocks, 0, 0, False)
    slots = (counts + 1) // 2
    tiles = torch.full((len(entries), width // 2 + 3, 4), -1, dtype=torch.int32)
    bias_rows = torch.ones(len(entries), width // 2 + 3, 2, dtype=torch.int32)
    for i, (its_tiles, at, _) in enumerate(entries):
        n = int(slots[i])
        if n == 0:
            continue
        odd = len(at) % 2  # the second half of the last slot is the same tile again, and left out
        two = torch.cat([its_tiles, its_tiles[len(at) - odd :][:odd]]).view(n, 2)
        bias_rows[i, :n] = torch.cat([at, torch.ones(odd, dtype=torch.int64)]).view(n, 2)
        tiles[i, :n, :2] = two
        tiles[i, 1 : n + 1, 2:] = two
        tiles[i, n + 1, 2:] = two[-1]  # the last values once for each warpgroup
    counted = torch.zeros(len(entries), 8, dtype=torch.int32)
    counted[:, 0] = slots
    counted[:, 1:3] = (slots > 0)[:, None]
    counted[:, 3:5] = (counts % 2)[:, None]
    counted[:, 5] = torch.tensor([(int((at != 0).sum()) + 1) // 2 for _, at, _ in entries])
    floor = torch.tensor([[top, top] for _, _, top in entries])
    anchor = torch.tensor([0.0, 1.0]).repeat(len(entries), 2, 1)
    return Lists(tiles, counted, None, bias_rows, floor, anchor, 0, blocks, 0, 0, True)
