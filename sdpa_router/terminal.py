"""What the commands share to print tables; the only module that imports rich, so import it late."""

from __future__ import annotations

import os
import sys

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

# Wide enough that no row of ours wraps: a pipe has no width of its own, and grep wants whole rows.
_PIPE_WIDTH = 200


def console() -> Console:
    """Return a console on stdout: as wide as the terminal, or wide enough for whole rows in a pipe."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=_PIPE_WIDTH if piped else None, highlight=False, markup=False)


def show(*parts: RenderableType) -> None:
    """Print tables and texts, one below the other; without the blanks that pad a table's rows if not on a terminal."""
    screen = console()
    if screen.is_terminal:
        screen.print(*parts, sep="\n")
        return
    with screen.capture() as captured:
        screen.print(*parts, sep="\n")
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)


class Stdout:
    """Standard output in the place of a file to write to; what is printed meanwhile should go elsewhere."""

    def __init__(self) -> None:
        self._stream = sys.stdout

    def __str__(self) -> str:
        return "standard output"

    def write_text(self, text: str) -> None:
        """Write `text`."""
        self._stream.write(text)


def table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Make an empty table; the columns named in `numbers` are aligned to the right."""
    result = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for name in columns:
        result.add_column(name, justify="right" if name in numbers else "left", no_wrap=name in numbers)
    return result


def facts(rows: list[tuple[str, str]]) -> Table:
    """Make a two-column grid of names and values; values wrap under themselves."""
    result = Table.grid(padding=(0, 2))
    result.add_column(style="bold", no_wrap=True)
    result.add_column(overflow="fold")
    for row in rows:
        result.add_row(*row)
    return result


def verdict(good: bool) -> Text:
    """Return a green `ok` or a red `OVER`."""
    return Text("ok", style="green") if good else Text("OVER", style="bold red")


def number(value: float) -> str:
    """Format a figure with three significant digits."""
    return f"{value:.3g}"


def milliseconds(value: float) -> str:
    """Format a time with two decimals, above 100 with one."""
    return f"{value:.{1 if value >= 100 else 2}f}"
