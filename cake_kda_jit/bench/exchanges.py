"""The tables of docs/context-parallelism.md: what exchanges move, and what virtual ranks differ by.

Run ``python -m cake_kda_jit.bench exchanges [--write | --check]``; without either it prints the first, which needs no
device. The other is made of the file that ``bench virtual_ranks --json`` wrote.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from itertools import accumulate, product

from ..cp.partition import Partition
from ..cp.plan import ParallelPlan
from ..cp.schedule import EXCHANGES
from ..paths import data_dir
from .cp_cases import HEAD_DIM, LAYOUTS, PACKS
from .virtual_ranks import text_of

HEADS = 32
RANKS = (4, 16)
DOCUMENTS = {1: (262_144,), 6: PACKS["Q3"], 64: tuple(2000 + 977 * n % 4096 for n in range(64))}
"""Lengths by their number: packs of about 262,144 tokens."""
HEADER = ("documents", "ranks", "layout", "spans", *EXCHANGES)
ERRORS_FILE = "virtual_ranks_h200.json"


def rows() -> Iterator[list[str]]:
    """Yield a row per pack, number of ranks and layout: rounds and MiB of each exchange, the cheapest in bold."""
    for number, ranks, layout in product(DOCUMENTS, RANKS, LAYOUTS):
        boundaries = list(accumulate(DOCUMENTS[number], initial=0))
        plan = ParallelPlan(getattr(Partition, layout)(boundaries, ranks))
        taken = plan.choose("auto", HEADS, HEAD_DIM)
        cells = []
        for cost in plan.costs(HEADS, HEAD_DIM):
            cell = f"{sum(cost.rounds)}; {sum(cost.received_bytes) / 2**20:,.0f}"
            cells.append(f"**{cell}**" if cost.name == taken else cell)
        spans = sum(len(chain.ranks) for chain in plan.spans.chains)
        yield [str(number), str(ranks), layout, str(spans), *cells]


def exchange_table() -> str:
    """Return the table of what exchanges move, as Markdown."""
    lines = [HEADER, ["---"] * len(HEADER), *rows()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def error_table() -> str:
    """Return what virtual ranks differ by, from its file, and how it was measured."""
    path = data_dir() / "docs" / "measurements" / ERRORS_FILE
    what, table = text_of(json.loads(path.read_text(encoding="utf-8"))).split("\n\n", 1)
    return f"{textwrap.fill(what, 118)}\n\n{table}"


TABLES = {"exchanges": exchange_table, "virtual ranks": error_table}
"""What stands between ``<!-- NAME: written by `bench exchanges` -->`` and ``<!-- /NAME -->``."""


def with_tables(text: str) -> str:
    """Return the page with every table as it is now."""
    for name, make in TABLES.items():
        block = re.compile(rf"(<!-- {name}: written by `bench exchanges` -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text = block.sub(lambda found, make=make: f"{found.group(1)}\n{make()}\n\n{found.group(2)}", text)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Print, write or check; returns 1 if ``--check`` finds the page out of date."""
    parser = argparse.ArgumentParser(prog="cake-kda-jit bench exchanges", description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="write the page")
    what.add_argument("--check", action="store_true", help="exit with 1 if the page is not current")
    options = parser.parse_args(argv)
    page = data_dir() / "docs" / "context-parallelism.md"
    if not (options.write or options.check):
        print(exchange_table())
        return 0
    before = page.read_text(encoding="utf-8")
    after = with_tables(before)
    if options.check:
        return int(before != after)
    page.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
