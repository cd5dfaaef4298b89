"""How docs/performance.md shows the tables of ``bench cp``: in short, beside the published figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..paths import data_dir
from .core import table_text
from .cp_cases import ARMS, BOUNDARIES, CpRow
from .cp_tables import PUBLISHED, Line, lines_of, read_published, rows_of, rows_told, sessions_of, summary_table

Json = dict[str, Any]

INTRO = (
    "Packs of two to six documents, 226,336 to 262,048 tokens, held by 2 to 16 ranks: the protocol of [FlashInfer's "
    "pull request 7176](https://github.com/flashinfer-ai/flashinfer/pull/7176). *B1* is the module's forward: halos, "
    "the three convolutions, the exchange of states, the recurrence. *B3* is that and a backward that replays from "
    "checkpoints. Times are the slowest rank's; arms are walks; *scaling* is the time on the fewest ranks over a "
    "row's. What others report of the same packs on a GB300 stands in parentheses: ratios can be compared, times not."
)


def body(name: str, report: Json, reports: dict[str, Json]) -> str:
    """Return what stands below a file's title; ``reports`` are all files, for what was recorded of other libraries."""
    rows = rows_of(report)
    if any(row.alone_ms is not None for row in rows):
        firsts = [row for row in rows if row.boundary not in BOUNDARIES]
        return real_body([row for row in rows if row.boundary in BOUNDARIES], firsts, reports)
    return _virtual(name, lines_of(rows))


def _virtual(name: str, lines: Sequence[Line]) -> str:
    path = Path(data_dir(), "docs", "measurements", PUBLISHED)
    published = read_published(path) if path.is_file() else []
    stem, sessions = name.removesuffix(".json"), sessions_of(lines)
    speedups = [[one.speedup(n) for one in lines if one.speedup(n) is not None] for n in sessions]
    told = "; ".join(
        f"session {n}: {min(found):.3f} to {max(found):.3f}, median {statistics.median(found):.3f}"
        for n, found in zip(sessions, speedups)
        if found
    )
    both = sum(all((one.speedup(n) or 0) > 1.02 for n in sessions) for one in lines)
    rows = lines[0].rows
    text = [
        f"{rows_told(lines)}. Sessions: {len(sessions)}, runs of each arm on each rank: {rows[0].ms.runs}. "
        "One device does the work of one rank after the other, each timed alone, and the slowest counts. Work is "
        "handed to the device ahead of time, so that the host's is not in it. What others would send is copied from "
        "noise within the device: the share of exchanges is that of such copies alone, and is larger over NVLink.",
        f"{ARMS[0]} / {ARMS[1]}, {told}; {both} of {len(lines)} rows above 1.02 in all sessions.",
        f"All rows: [table](measurements/{stem}.md), [CSV](measurements/{stem}.csv).",
        summary_table(lines, published).strip(),
        f"![Speedups, scaling, cost of layouts, exchanges, and the published ratios](measurements/{stem}.png)",
    ]
    return "\n\n".join(text)


def real_body(measured: Sequence[CpRow], firsts: Sequence[CpRow], reports: dict[str, Json]) -> str:
    """Return every row of ranks that are processes: there are few. ``firsts`` are first steps."""
    lines = lines_of(measured)
    scaled = {(line.pack, line.boundary): line.best for line in lines if line.cp == 1}
    rows = []
    for line in lines:
        if line.cp == 1:
            rows.append([line.pack, "1", "-", line.boundary, f"{line.best:.2f}", *["-"] * 5])
            continue
        best = min(line.rows, key=lambda row: row.ms.median)
        alone = scaled.get((line.pack, line.boundary))
        cells = [f"{line.median(arm):.2f}" if any(name == arm for name, _ in line.ms) else "-" for arm in ARMS]
        cells += ["-" if alone is None else f"{alone / line.best:.2f}", f"{best.exchange_ms:.2f}"]
        cells += [f"{max(best.ms.median - best.alone_ms, 0.0):.2f}", _recorded(line, reports)]
        rows.append([line.pack, str(line.cp), line.layout, line.boundary, *cells])
    told = [
        f"The first step of {row.pack} had ended after {row.ms.median / 1e3:.1f} s ({row.engine})." for row in firsts
    ]
    runs = sorted({row.ms.runs for row in measured})
    text = (
        f"{' or '.join(map(str, runs))} runs of each arm. *Exchanges* is the time of a row's messages with nothing "
        "beside them, the host's included. *Added* is what the faster arm takes longer than its slowest rank does with "
        "copies in place of messages: what no work hides of them, and waiting for a rank that has more to do. CP 1 is "
        "the same pack on one device, without an exchange; its one time stands in the first column of times. "
        + " ".join(told)
    )
    head = ["pack", "CP", "layout", "boundary", *ARMS, "scaling", "exchanges, ms", "added, ms", "FLA, recorded"]
    return f"{text.strip()}\n\n{table_text(head, rows).strip()}"


def _recorded(line: Line, reports: dict[str, Json]) -> str:
    """What another library took for the same row, from the files of recorded measurements."""
    case = f"{line.pack}, CP {line.cp}, {line.layout}, {line.boundary}, H {line.rows[0].heads}"
    found = [row for one in reports.values() for row in one["rows"] if row.get("case") == case]
    return f"{found[0]['ms']['median']:.1f}" if found else "-"
