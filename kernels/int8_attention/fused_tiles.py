"""Launches of the fused quantisation kernel: tables, by what is quantised and for which attention kernel."""

from __future__ import annotations

from typing import NamedTuple

from .configs import Config
from .fused_parts import LAST_FIRST


class Tile(NamedTuple):
    """Launch of the quantising kernel: rows and heads of a tile, warps.

    num_stages: of its loop; where products are mma.sync two of them take fewer registers than one.
    max_registers: of a thread, where the compiler would take a few more than let another program run beside it.
    held: whether angles and weights stay in registers from head to head.  ahead: whether the values of the next head
    are loaded before this one is done.  beside: programs that an SM runs at once.
    """

    rows: int
    together: int
    num_warps: int
    max_registers: int | None = None
    held: bool = True
    ahead: bool = False
    beside: int = 1
    num_stages: int = 1
    fp16: bool = False


# On an H200. Rows are those of a tile up to head_dim 128. Eight make all of a thread's queries heads of one row, with
# the same angles. Keys of one scale belong to one head, and a tile of theirs is the block of keys that attention reads.
_QUERIES = Tile(8, 8, 4, 128, held=False, beside=4)
_KEYS = Tile(128, 1, 8, held=True, ahead=True)
# The same where what follows a norm of each head is computed in fp16, two values in an instruction and a register.
_QUERIES_FP16: Tile | None = Tile(8, 8, 4, 128, held=True, ahead=True, beside=4)
_KEYS_FP16: Tile | None = Tile(128, 1, 8, 128, held=True, ahead=True, beside=2)
if LAST_FIRST.value:
    # With the other order of axes they would spill. Compiled, but not measured: the H200 had an older Triton.
    _QUERIES = _QUERIES._replace(max_registers=160, beside=3)
    _QUERIES_FP16 = Tile(8, 8, 4, 160, held=True, ahead=True, beside=3)
    _KEYS_FP16 = Tile(128, 1, 8, held=True, ahead=True)
_PORTABLE = 2  # as many more warps: elsewhere, with products by mma.sync, 64 channels a thread don't fit its registers
_PROCESSORS = 132  # of a large GPU
_START = 2  # tiles that the start of a program costs: its angles, weights and the rotation


def query_tile(padded: int, config: Config, *, lse: bool, normed: bool = False) -> Tile:
    """The launch for queries of this padded head_dim; lse: whether they get their part of the LSE.

    normed: whether each head has a norm of its own.
    """
    tile = _QUERIES
    if normed and _QUERIES_FP16 is not None and config.gluon and not lse:
        tile = _QUERIES_FP16._replace(fp16=True)
    return tile._replace(
        rows=min(tile.rows, tile.rows * 128 // padded),
        num_warps=tile.num_warps * (1 if config.gluon else _PORTABLE),
        held=tile.held if config.gluon else padded <= 128,
        ahead=tile.ahead and config.gluon,
        max_registers=tile.max_registers if config.gluon and not lse and padded <= 128 else None,
    )


def key_tile(padded: int, config: Config, *, normed: bool = False) -> Tile:
    """The launch for keys of this padded head_dim; normed: as for queries."""
    tile = _KEYS
    if normed and _KEYS_FP16 is not None and config.gluon:
        tile = _KEYS_FP16._replace(fp16=True)
    elements = config.block_n * padded * (1 if config.gluon else _PORTABLE)
    num_warps = max(1, min(tile.num_warps, tile.num_warps * elements // (tile.rows * 128)))
    return tile._replace(
        rows=config.block_n,
        num_warps=num_warps,
        max_registers=tile.max_registers if config.gluon and padded == 128 else None,
        held=tile.held or not config.gluon,
        ahead=tile.ahead and config.gluon and padded == 128,
        num_stages=1 if config.gluon else min(2, config.num_stages),
    )


def heads_of_program(tile: Tile, heads: int, blocks: int, processors: int) -> int:
    """Heads of a program, so that those of `blocks` blocks of rows are done soonest by all processors together.

    processors: of the GPU, 0 where that is not known.  Programs run in rounds, and each costs its tiles and a start.
    """
    slots = (processors or _PROCESSORS) * tile.beside
    tiles = -(-heads // tile.together)

    def rounds_cost(each: int) -> int:
        programs = blocks * -(-tiles // each)
        return -(-programs // slots) * (each + _START)

    return tile.together * min(range(1, tiles + 1), key=rounds_cost)
