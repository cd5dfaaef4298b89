"""docs/performance.md, the README's table and those of docs/numerics.md, made from the files in docs/measurements.

Run ``python -m cake_kda_jit.bench performance [--write | --check]``; without either it prints docs/performance.md.
Every number comes from a file, with its machine, versions, date, commit, runs and spread.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError
from ..paths import PACKAGE_DIR, data_dir
from .numerics import with_tables
from .performance_kinds import FACTORS, HIGHLIGHTS, KINDS, Json, Kind, number

BEGIN, END = "<!-- performance: written by `bench performance` -->\n", "<!-- /performance -->\n"
HEAD = """\
# Performance

What was measured, on which machine, with how many runs and which spread.

`python -m cake_kda_jit bench performance --write` makes this page from the files in `docs/measurements`, and
`python -m cake_kda_jit bench all` makes those on a machine; no number here is typed. A time is the median over all
runs, and *spread* is how far the slowest run lies from the fastest, as a share of it. On a GPU, times are those of CUDA
events around a call, the arms of a case in turn; a case that needs cold caches says so. A commit is where the tree
stood when it was measured: changes that were committed afterwards may be in the number. What was tried, predicted and
found on the way stands in the [performance log](performance-log.md).
"""


def script_of(report: Json) -> str:
    """Return the name of the measurement that wrote a file."""
    return re.split(r"[ .]", report["script"])[-1]


def read_reports(directory: Path) -> dict[str, Json]:
    """Return the reports by file name; raises ConfigError for a file that is none."""
    reports = {}
    for path in sorted(directory.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if report.get("schema") != 1 or not report.get("rows"):
            raise ConfigError(f"{path} is no measurement of schema 1 with rows; move it away")
        reports[path.name] = report
    return reports


def current_and_earlier(reports: dict[str, Json]) -> tuple[list[str], list[str]]:
    """Return the names of the files to show, and of those that another one replaces.

    Of files with the same script, subject and device the one with the shortest name is current: ``walk_h200.json``
    replaces ``walk_h200_first.json``.
    """
    current: dict[tuple, str] = {}
    for name in sorted(reports, key=lambda name: (len(name), name)):
        report = reports[name]
        current.setdefault((report["script"], report["what"], report["machine"]["device"]), name)
    kept = [name for name in current.values() if "ms" in reports[name]["rows"][0]]
    return sorted(kept), sorted(set(reports) - set(kept))


def section(script: str, reports: dict[str, Json], others: dict[str, Json] | None = None) -> str:
    """Return a section: a table per file of one script; ``others`` are all files, for what is shown beside."""
    kind = KINDS.get(script, Kind(script))
    parts = [f"## {kind.title}", *filter(None, ["\n".join(map(_wrapped, kind.intro.splitlines()))])]
    told = [report["what"] for report in reports.values()]
    for name, report in reports.items():
        heading = _heading(name, report, is_twin=told.count(report["what"]) > 1)
        if kind.body is not None:
            texts = kind.body(name, report, others or {}).split("\n\n")
            texts = [text if text.startswith("|") else _wrapped(text) for text in texts]
            parts += [*heading, *texts]
            continue
        rows = [row for row in report["rows"] if kind.shows(row)]
        head = ("case", "arm", f"median, {kind.unit}", "spread", "runs", *kind.columns)
        lines = [_cells(row, kind) + kind.cells(row, report) for row in rows]
        parts += [*heading, "\n".join(markdown_table(head, lines))]
    return "\n\n".join(parts)


def _cells(row: Json, kind: Kind) -> list[str]:
    return [
        row["case"],
        row["arm"],
        number(row["ms"]["median"] * FACTORS[kind.unit]),
        spread(row),
        str(row["ms"]["runs"]),
    ]


def spread(row: Json) -> str:
    """Return how far the slowest run lies above the fastest; one run has none, nor has a median recorded elsewhere."""
    ms = row["ms"]
    return "-" if ms["runs"] < 2 or ms.get("min") is None else f"{ms['max'] / ms['min'] - 1:.0%}"


def _heading(name: str, report: Json, *, is_twin: bool) -> list[str]:
    """Return a file's title, where it comes from, and what its ``notes`` say of it, if it has any.

    Of files that measured the same, the title names the device too.
    """
    title = f"{report['what']}, {report['machine']['device']}" if is_twin else report["what"]
    return [f"### {title}", *map(_wrapped, filter(None, (_origin(name, report), report.get("notes"))))]


def _origin(name: str, report: Json) -> str:
    machine, commit = report["machine"], report["commit"]
    versions = [machine["device"]]
    versions += [f"{what} {machine[what]}" for what in ("driver", "cuda", "torch") if machine[what] != "none"]
    at = "commit not recorded" if commit == "unknown" else f"commit {commit[:10]}"
    return f"{', '.join(versions)}; {report['date']}; {at}; [{name}](measurements/{name})."


def _wrapped(text: str, width: int = 118) -> str:
    """Break a line at its spaces; what follows the mark of a list is indented."""
    indent = "  " if text.startswith("- ") else ""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(indent + word)
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


def page(reports: dict[str, Json]) -> str:
    """Return docs/performance.md."""
    current, earlier = current_and_earlier(reports)
    parts = [HEAD.rstrip("\n")]
    scripts = {script_of(reports[name]): None for name in current}
    for script in sorted(scripts, key=lambda script: [*KINDS, script].index(script)):
        own = {name: reports[name] for name in current if script_of(reports[name]) == script}
        parts.append(section(script, own, reports))
    if earlier:
        found = ((f"[{name}](measurements/{name})", reports[name]) for name in earlier)
        rows = [[link, one["what"], one["machine"]["device"], one["date"]] for link, one in found]
        parts += ["## Other files", "Errors, and earlier measurements that the log names."]
        parts.append("\n".join(markdown_table(("file", "what", "machine", "date"), rows)))
    return "\n\n".join(parts) + "\n"


def readme_table(reports: dict[str, Json]) -> str:
    """Return the README's short table: the highlights that the files have, each with its machine and date."""
    current, lines = current_and_earlier(reports)[0], []
    # The newest file comes first, and of one day's a GPU's: a first step is measured on both.
    current.sort(key=lambda name: reports[name]["machine"]["driver"] == "none")
    current.sort(key=lambda name: reports[name]["date"], reverse=True)
    for one in HIGHLIGHTS:
        found = [
            (row, reports[name])
            for name in current
            if name.startswith(one.file)
            for row in reports[name]["rows"]
            if row["case"].startswith(one.case) and row["arm"] == one.arm
        ]
        for row, report in found[:1]:
            lines.append([one.what, _time(row), spread(row), _machine(row, report), report["date"]])
    return "\n".join(markdown_table(("what", "median", "spread", "machine", "date"), lines)) + "\n"


def _time(row: Json) -> str:
    unit = "s" if row["ms"]["median"] >= 1000 else "ms" if row["ms"]["median"] >= 1 else "us"
    return f"{number(row['ms']['median'] * FACTORS[unit])} {unit}"


def _machine(row: Json, report: Json) -> str:
    jobs = f", {row['jobs']} compilations at a time" if row.get("jobs") else ""
    beside = f", beside a load of {row['load']:.0f} per core" if row.get("load", 0) >= 1.5 else ""
    return report["machine"]["device"].removeprefix("NVIDIA ") + jobs + beside


def with_table(text: str, table: str) -> str:
    """Return the README with the table between its marks; raises ConfigError where they are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"README.md has no place for the table: {BEGIN.strip()} and {END.strip()}")
    return f"{before}{begin}\n{table}\n{end}{after}"


def outdated(root: Path) -> dict[Path, str]:
    """Return what the pages and the README should be, for those of them that are not."""
    measurements = root / "docs" / "measurements"
    reports = read_reports(measurements)
    readme, numerics = root / "README.md", root / "docs" / "numerics.md"
    texts = {
        root / "docs" / "performance.md": page(reports),
        readme: with_table(readme.read_text(encoding="utf-8"), readme_table(reports)),
        numerics: with_tables(numerics.read_text(encoding="utf-8"), measurements),
    }
    return {path: text for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text}


def main(argv: list[str]) -> int:
    """Print, write or check; returns 1 if ``--check`` finds one that is not current."""
    parser = argparse.ArgumentParser(prog="cake-kda-jit bench performance", description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="write the pages and the README's table")
    what.add_argument("--check", action="store_true", help="exit with 1 if one of them is not current")
    options = parser.parse_args(argv)
    root = data_dir()
    if root.is_relative_to(PACKAGE_DIR):
        raise ConfigError("an installed package has no docs/measurements; run this in a checkout")
    if not (options.write or options.check):
        print(page(read_reports(root / "docs" / "measurements")), end="")
        return 0
    found = outdated(root)
    for path, text in found.items():
        if options.write:
            path.write_text(text, encoding="utf-8")
        print(f"wrote {path}" if options.write else f"{path} is not current; run `bench performance --write`")
    return 1 if options.check and found else 0
