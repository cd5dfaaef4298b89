"""Tables: with rules and folded cells on a terminal, aligned plain text everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str] = ()) -> None:
    """Print rows of text under their heads; the columns named in ``right`` hold numbers."""
    if sys.stdout.isatty():
        _print_on_terminal(head, rows, right)
        return
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        cells = zip(head, line, widths)
        text = "  ".join(cell.rjust(width) if name in right else cell.ljust(width) for name, cell, width in cells)
        print(text.rstrip())


def _print_on_terminal(head: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str]) -> None:
    # Here alone, because importing it takes as long as all the rest of `list`.
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in head:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold", no_wrap=name == head[0])
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # a path may hold what rich takes for markup
    Console(file=sys.stdout).print(table)
