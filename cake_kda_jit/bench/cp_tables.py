"""The table of ``bench cp``: read from its JSON and from the published CSV, and written as CSV and Markdown."""

from __future__ import annotations

import csv
import json
import os
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from .core import Times, machine, table_text, write_report
from .cp_cases import ARMS, BOUNDARIES, LAYOUTS, PACKS, RANKS, CpRow

Json = dict[str, Any]

SCRIPT = "cake_kda_jit.bench cp"
PUBLISHED = "gb300_table.csv"
"""Beside our tables: the figures of FlashInfer's pull request 7176."""
NUM_LINES = len(PACKS) * len(RANKS) * len(LAYOUTS) * len(BOUNDARIES)


@dataclass(frozen=True)
class Line:
    """A line of the table: one pack, number of ranks, layout and boundary; ``ms`` by (arm, session)."""

    pack: str
    tokens: int
    documents: int
    cp: int
    layout: str
    boundary: str
    ms: dict[tuple[str, int], float]
    rows: tuple[CpRow, ...] = ()

    @property
    def key(self) -> tuple:
        """What tells lines apart, in the order of the table."""
        return self.pack, self.cp, LAYOUTS.index(self.layout), BOUNDARIES.index(self.boundary)

    def speedup(self, session: int) -> float | None:
        """Return the first arm's time over the second's in a session, None where one of them is missing."""
        first, second = (self.ms.get((arm, session)) for arm in ARMS)
        return None if first is None or second is None else first / second

    @property
    def best(self) -> float:
        """Milliseconds of the faster arm, the median of its sessions."""
        return min(self.median(arm) for arm in {arm for arm, _ in self.ms})

    def median(self, arm: str) -> float:
        """Return the median of an arm's sessions."""
        return statistics.median(value for (name, _), value in self.ms.items() if name == arm)


def lines_of(rows: Iterable[CpRow]) -> list[Line]:
    """Return the table of measured rows, in the order of packs, ranks, layouts and boundaries."""
    found: dict[tuple, list[CpRow]] = {}
    for row in rows:
        if row.boundary in BOUNDARIES:
            found.setdefault((row.pack, row.tokens, row.documents, row.cp, row.layout, row.boundary), []).append(row)
    lines = [
        Line(*key, {(row.arm, row.session): row.ms.median for row in some}, tuple(some)) for key, some in found.items()
    ]
    return sorted(lines, key=lambda line: line.key)


def rows_of(report: Json) -> list[CpRow]:
    """Return the rows of a report's JSON; raises ConfigError if they are of another kind."""
    names = {field.name for field in fields(CpRow)}
    for row in report["rows"]:
        if row.keys() != names:
            raise ConfigError(f"rows have {', '.join(row)}; `bench cp` writes {', '.join(sorted(names))}")
    return [CpRow(**{**row, "ms": Times(**row["ms"]), "rank_ms": tuple(row["rank_ms"])}) for row in report["rows"]]


def read_rows(path: Path) -> tuple[Json, list[CpRow]]:
    """Return a report that ``bench cp`` wrote, and its rows."""
    report = json.loads(path.read_text(encoding="utf-8"))
    return report, rows_of(report)


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file beside another and put it in its place, which is whole at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.part")
    write(beside)
    os.replace(beside, path)


class Table:
    """The rows so far, and the file that holds them."""

    def __init__(self, path: Path | None, device: torch.device, what: str) -> None:
        self.path, self.device, self.what = path, device, what
        self.rows: list[CpRow] = []

    def take_over(self, path: Path) -> None:
        """Begin with the rows of a file; raises ConfigError if they are of another device or of other sizes."""
        report, rows = read_rows(path)
        here = {"what": self.what, "device": machine(self.device)["device"]}
        there = {"what": report["what"], "device": report["machine"]["device"]}
        for name in here:
            if here[name] != there[name]:
                raise ConfigError(
                    f"--resume {path}: its {name} is {there[name]!r}, this run's {here[name]!r}; a table has one"
                )
        self.rows = rows

    @property
    def done(self) -> set[tuple]:
        """The keys of units that are in it. A first step is none."""
        return {(row.pack, row.cp, row.layout, row.session) for row in self.rows if row.boundary in BOUNDARIES}

    def add(self, rows: Sequence[CpRow]) -> None:
        """Take rows, and write the file, if there is one."""
        self.rows += rows
        if self.path is not None:
            write = partial(write_report, what=self.what, script=SCRIPT, device=self.device, rows=self.rows)
            replace_file(self.path, write)


def described(rows: Sequence[CpRow]) -> str:
    """Return a unit's rows in a line: its times by boundary, arm by arm."""
    name = rows[0].case.rpartition(",")[0]
    times = "; ".join(
        f"{boundary} " + " / ".join(f"{row.ms.median:.2f}" for row in rows if row.boundary == boundary)
        for boundary in BOUNDARIES
    )
    ahead = "" if rows[0].ahead is None else f"; ahead {rows[0].ahead:.0%}"
    return f"{name}, s{rows[0].session}: {times} ms{ahead}"


def read_published(path: Path) -> list[Line]:
    """Return the published table; lines that begin with # say where it comes from."""
    with path.open(encoding="utf-8", newline="") as file:
        found = []
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            ms = {(arm, session): float(row[f"{arm}_ms_s{session}"]) for arm in ARMS for session in (1, 2)}
            sizes = int(row["tokens"]), int(row["documents"]), int(row["cp"])
            found.append(Line(row["pack"], *sizes, row["layout"], row["boundary"], ms))
    return found


def write_csv(path: Path, lines: Sequence[Line]) -> None:
    """Write the columns of the published table, and behind them heads, spread, received bytes and exchange."""
    sessions = sessions_of(lines)
    columns = [(arm, session) for arm in arms_of(lines) for session in sessions]
    times = [f"{arm}_ms_s{session}" for arm, session in columns]
    head = ["pack", "tokens", "documents", "cp", "layout", "boundary", *times, *(f"speedup_s{n}" for n in sessions)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*head, "heads", "spread", "received_bytes", "exchange_ms", "ahead"])
        for line in lines:
            cells = [line.ms.get(column) for column in columns]
            found = [line.pack, line.tokens, line.documents, line.cp, line.layout, line.boundary]
            found += [_decimal(cell, 3) for cell in cells]
            found += [_decimal(line.speedup(session), 4) for session in sessions]
            row = line.rows[0]
            found += [row.heads, _decimal(spread_of(line), 3), row.bytes, _decimal(row.exchange_ms, 3)]
            writer.writerow([*found, _decimal(row.ahead, 2)])


def _decimal(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def arms_of(lines: Iterable[Line]) -> list[str]:
    """Return the two walks, and what else any line has."""
    return list(dict.fromkeys([*ARMS, *(arm for line in lines for arm, _ in line.ms)]))


def sessions_of(lines: Iterable[Line]) -> list[int]:
    """Return the sessions that any line has."""
    return sorted({session for line in lines for _, session in line.ms})


def rows_told(lines: Sequence[Line]) -> str:
    """Return how many of all rows there are, and of which packs where some are missing."""
    packs = sorted({line.pack for line in lines})
    missing = [pack for pack in PACKS if pack not in packs]
    told = f", of {', '.join(packs)} alone; {', '.join(missing)} are not measured yet" if missing else ""
    return f"{len(lines)} of {NUM_LINES} rows{told}"


def spread_of(line: Line) -> float:
    """Return how far the slowest run of a line's slowest ranks lies above the fastest, of any arm and session."""
    return max(row.ms.max / row.ms.min - 1 for row in line.rows)


def full_table(lines: Sequence[Line]) -> str:
    """Return all lines as Markdown: a column per arm and session."""
    sessions = sessions_of(lines)
    columns = [(arm, session) for arm in arms_of(lines) for session in sessions]
    head = ["pack", "CP", "layout", "boundary", *(f"{arm}, s{n}" for arm, n in columns)]
    head += [f"speedup, s{n}" for n in sessions]
    rows = []
    for line in lines:
        cells = [_decimal(line.ms.get(column), 2) or "-" for column in columns]
        cells += [_decimal(line.speedup(session), 3) or "-" for session in sessions]
        rows.append([line.pack, str(line.cp), line.layout, line.boundary, *cells])
    return table_text(head, rows)


def layout_costs(lines: Sequence[Line]) -> dict[tuple[int, str, str], list[float]]:
    """Return each layout's time over that of the contiguous one, by (CP, boundary, layout), a value per pack."""
    base = {(line.pack, line.cp, line.boundary): line.best for line in lines if line.layout == LAYOUTS[0]}
    found: dict[tuple[int, str, str], list[float]] = {}
    for line in lines:
        contiguous = base.get((line.pack, line.cp, line.boundary))
        if contiguous is not None:
            found.setdefault((line.cp, line.boundary, line.layout), []).append(line.best / contiguous)
    return found


def scalings(lines: Sequence[Line]) -> dict[tuple[str, str, int], list[float]]:
    """Return the time at the fewest ranks over that at others, by (layout, boundary, CP), a value per pack.

    One rank has no layout: its time is that of all.
    """
    fewest = min((line.cp for line in lines), default=1)

    def base_of(line: Line) -> tuple[str, str, str]:
        return line.pack, line.boundary, "" if fewest == 1 else line.layout

    base = {base_of(line): line.best for line in lines if line.cp == fewest}
    found: dict[tuple[str, str, int], list[float]] = {}
    for line in lines:
        first = base.get(base_of(line))
        if first is not None:
            found.setdefault((line.layout, line.boundary, line.cp), []).append(first / line.best)
    return found


def summary_table(lines: Sequence[Line], published: Sequence[Line] = ()) -> str:
    """Return medians over the packs as Markdown, a line per CP, boundary and layout; published ones in parentheses.

    Columns: the faster walk's time; how much longer the other takes; the time over that of the contiguous layout; how
    much faster it is than at the fewest ranks; what share of it the exchanges take alone.
    """
    keys = {line.key for line in lines}
    ours, theirs = _ratios(lines), _ratios([line for line in published if line.key in keys])
    groups: dict[tuple[int, str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.cp, line.boundary, line.layout), []).append(line)
    rows = []
    for key, some in sorted(groups.items(), key=lambda item: _place(*item[0])):
        shares = [row.exchange_ms / row.ms.median for line in some for row in line.rows]
        cells = [_beside(own.get(key), other.get(key)) for own, other in zip(ours, theirs)]
        time = f"{statistics.median(line.best for line in some):#.3g}"
        rows.append([str(key[0]), *key[1:], time, *cells, f"{statistics.median(shares):.1%}"])
    head = ["CP", "boundary", "layout", "ms", f"{ARMS[0]} / {ARMS[1]}", "over contiguous", "scaling", "exchanges"]
    return table_text(head, rows)


def _place(cp: int, boundary: str, layout: str) -> tuple[int, int, int]:
    return cp, BOUNDARIES.index(boundary), LAYOUTS.index(layout)


def _ratios(lines: Sequence[Line]) -> list[dict[tuple[int, str, str], list[float]]]:
    """Speedups, layout costs and scalings, each by (CP, boundary, layout)."""
    speedups: dict[tuple[int, str, str], list[float]] = {}
    for line in lines:
        found = [line.speedup(session) for session in sessions_of([line])]
        speedups.setdefault((line.cp, line.boundary, line.layout), []).extend(x for x in found if x is not None)
    scaled = {(cp, boundary, layout): x for (layout, boundary, cp), x in scalings(lines).items()}
    return [speedups, layout_costs(lines), scaled]


def _beside(ours: Sequence[float] | None, theirs: Sequence[float] | None) -> str:
    own, other = (f"{statistics.median(values):.2f}" if values else "" for values in (ours, theirs))
    return f"{own or '-'} ({other})" if other else own or "-"


def full_page(report: Json, lines: Sequence[Line]) -> str:
    """Return the page of the whole table."""
    machine = report["machine"]
    origin = (
        f"{machine['device']}, driver {machine['driver']}, CUDA {machine['cuda']}, torch {machine['torch']}; "
        f"{report['date']}. s1 and s2 are sessions. [Performance](../performance.md) says what is measured, and shows "
        "medians beside the published ones."
    )
    told = [f"{report['what']}. {rows_told(lines)}.", *filter(None, [report.get("notes")]), origin]
    head = "# Context parallel, all rows\n\nMilliseconds of the slowest rank, arm by arm and session by session."
    return f"{head}\n\n{textwrap.fill(' '.join(told), 118, break_on_hyphens=False)}\n\n{full_table(lines)}"
