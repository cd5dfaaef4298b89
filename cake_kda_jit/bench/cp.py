"""Context parallel: six packs, 2 to 16 ranks, three layouts, forward and training step, two walks.

Run ``python -m cake_kda_jit.bench cp [--json FILE] [--resume FILE] [--seconds N]`` on one device: ranks are virtual,
each one's work is timed alone, and exchanges are copies within the device. Under ``torchrun --nproc_per_node N -m
cake_kda_jit.bench cp --real`` each process is a rank. A table is written after each unit, and ``--resume`` goes on with
it. ``--tables FILE`` measures nothing: it writes FILE's CSV, Markdown and picture beside it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from . import cp_cases as cases
from .cp_plots import draw
from .cp_tables import (
    PUBLISHED,
    Table,
    described,
    full_page,
    lines_of,
    read_published,
    read_rows,
    replace_file,
    summary_table,
    write_csv,
)
from .cp_timing import make_clock, measure_virtual, warm_up
from .cp_work import make_inputs

VIRTUAL = "Virtual ranks"
NOTE = "Ranks are virtual: each one's work is timed alone on one device, and an exchange is a copy within it"


def write_tables(path: Path) -> list[Path]:
    """Write the CSV, the Markdown and the picture of a file of rows beside it; returns their paths."""
    report, rows = read_rows(path)
    lines = lines_of(rows)
    published = path.with_name(PUBLISHED)
    text = full_page(report, lines)
    writers = {
        ".csv": lambda one: write_csv(one, lines),
        ".md": lambda one: one.write_text(text, encoding="utf-8"),
        ".png": lambda one: draw(lines, read_published(published) if published.is_file() else [], one),
    }
    for suffix, write in writers.items():
        replace_file(path.with_suffix(suffix), write)
    return [path.with_suffix(suffix) for suffix in writers]


def run_units(table: Table, units: Sequence[cases.Unit], sizes: cases.Sizes, options: argparse.Namespace) -> int:
    """Measure units in turn, while there is time for the next; returns how many are left."""
    began = time.perf_counter()
    inputs = make_inputs(sizes.most_tokens(units), sizes.heads, sizes.head_dim, table.device)
    warm_up(sizes, inputs, options.arms)
    clock = make_clock(table.device)
    estimate = cases.Estimate(sizes.seconds(unit, len(options.arms), options.runs) for unit in units)
    print(f"{len(units)} units; started in {time.perf_counter() - began:.1f} s", flush=True)
    for number, unit in enumerate(units):
        started = time.perf_counter()
        if options.seconds is not None and started - began + estimate.following > options.seconds:
            print(f"{len(units) - number} units are left, which take about {estimate.left:.0f} s; go on with --resume")
            return len(units) - number
        rows = measure_virtual(unit, sizes, inputs, options.arms, options.runs, clock)
        table.add(rows)
        estimate.finished(time.perf_counter() - started)
        print(f"[{number + 1}/{len(units)}] {described(rows)}; about {estimate.left:.0f} s left", flush=True)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="cake-kda-jit bench cp", description=__doc__.splitlines()[0])
    parser.add_argument("--packs", nargs="+", choices=tuple(cases.PACKS), default=list(cases.PACKS))
    parser.add_argument("--cp", type=int, nargs="+", help="numbers of ranks; default: 2 4 8 16, --real: all, and 1")
    parser.add_argument("--layouts", nargs="+", choices=cases.LAYOUTS, default=list(cases.LAYOUTS))
    parser.add_argument("--arms", nargs="+", choices=cases.ARMS, default=list(cases.ARMS), help="transfer walks")
    parser.add_argument("--sessions", type=int, nargs="+", default=list(cases.SESSIONS))
    parser.add_argument("--heads", type=int, default=cases.HEADS)
    parser.add_argument("--head-dim", type=int, default=cases.HEAD_DIM)
    parser.add_argument("--tokens", type=int, help="shorten every pack to so many tokens")
    parser.add_argument("--workspace-limit", type=float, metavar="BYTES", help="as in KdaOptions")
    parser.add_argument("--runs", type=int, default=3, help="per rank, arm and boundary, after one that is not timed")
    parser.add_argument("--device", help="default: cuda if there is one")
    parser.add_argument("--json", type=Path, help="write the rows here after each unit; default: --resume's file")
    parser.add_argument("--resume", type=Path, help="begin with the rows of this file")
    parser.add_argument("--seconds", type=float, help="begin no unit that would end later")
    parser.add_argument("--real", action="store_true", help="under torchrun: each process is a rank")
    parser.add_argument("--tables", type=Path, help="write this file's CSV, Markdown and picture, measure nothing")
    return parser


def main(argv: list[str]) -> int:
    """Measure what is not in the table yet; returns 0, also where time ran out."""
    options = make_parser().parse_args(argv)
    if options.tables is not None:
        for path in write_tables(options.tables):
            print(f"wrote {path}")
        return 0
    limit = None if options.workspace_limit is None else int(options.workspace_limit)
    sizes = cases.Sizes(options.heads, options.head_dim, options.tokens, limit)
    if options.real:
        from .cp_real import measure_real

        return measure_real(sizes, options)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    table = Table(options.json or options.resume, device, f"{VIRTUAL}, {sizes.name}")
    if options.resume is not None:
        table.take_over(options.resume)
    units = cases.units_in_order(options.packs, options.cp or cases.RANKS, options.layouts, options.sessions)
    units = [unit for unit in units if unit.key not in table.done]
    if units:
        run_units(table, units, sizes, options)
    print(f"\n{NOTE}; medians over packs, of the faster walk.\n")
    print(summary_table(lines_of(table.rows)))
    return 0
