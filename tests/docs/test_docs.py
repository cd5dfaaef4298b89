"""The documentation is true: links resolve, code runs, names exist, tables equal what they describe."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cake_kda_jit import arch, config, registry
from cake_kda_jit.bench.problems import BUDGETS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [README, *PAGES]
DECISIONS = sorted((DOCS / "decisions").glob("*.md"))

FENCE = re.compile(r"^```(\S*)[ \t]*(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
NEEDS_GPU = 'title="needs a GPU"'
LINK = re.compile(r"\]\(([^)\s]+)\)")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def prose(path: Path) -> str:
    """The text of a page without its code blocks."""
    return FENCE.sub("", read(path))


def code_blocks(path: Path, *, has_gpu: bool = False) -> list[tuple[int, str]]:
    """(first line, text) of each Python block; those titled ``NEEDS_GPU`` only with one."""
    text = read(path)
    return [
        (text[: match.start(3)].count("\n") + 1, match.group(3))
        for match in FENCE.finditer(text)
        if match.group(1) == "python" and (has_gpu or match.group(2) != NEEDS_GPU)
    ]


def run_blocks(path: Path, blocks: list[tuple[int, str]]) -> None:
    """Run blocks in order; they share their names, as a reader would type them."""
    names: dict[str, object] = {"__name__": "docs"}
    for line, text in blocks:
        exec(compile("\n" * (line - 1) + text, str(path), "exec"), names)


def anchors(path: Path) -> set[str]:
    """What the headings of a page can be linked by, formed as GitHub and mkdocs form them."""
    titles = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_links_resolve(path):
    for target in LINK.findall(prose(path)):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        assert linked.exists(), target
        if path != README:
            assert linked.is_relative_to(DOCS), f"{target} leaves docs/, so the site cannot show it"
        if anchor:
            assert anchor in anchors(linked), target


@pytest.mark.parametrize("path", [path for path in TEXTS if code_blocks(path)], ids=name_of)
def test_python_blocks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(path, code_blocks(path))


@pytest.mark.gpu
@pytest.mark.parametrize("path", [path for path in TEXTS if NEEDS_GPU in read(path)], ids=name_of)
def test_python_blocks_run_with_a_gpu(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(path, code_blocks(path, has_gpu=True))


# How many ranks each example starts; every one prints its error beside one device.
EXAMPLES = {"state_transfer.py": 3, "two_ranks.py": 2}


@pytest.mark.parametrize("path", sorted((DOCS / "examples").glob("*.py")), ids=name_of)
def test_examples_run(path):
    run = subprocess.run(
        [sys.executable, str(path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
        env=config.environment(PYTHONPATH=str(ROOT)),
    )
    # Ranks sum in another order than one device: a few units in the last place of fp32.
    errors = [float(value) for value in re.findall(r"\d\.\de[+-]\d+", run.stdout)]
    assert run.stdout.count("error ") == EXAMPLES[path.name] and max(errors) < 1e-6, run.stdout


def test_the_readme_has_the_two_commands():
    for command in ("pip install -e '.[demo]' && python -m cake_kda_jit demo", "pip install -e '.[test]' && pytest -q"):
        assert f"\n{command}\n" in read(README)


def test_the_site_lists_every_page():
    listed = re.findall(r"^\s+- .*: (\S+\.md)$", read(ROOT / "mkdocs.yml"), re.MULTILINE)
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in PAGES)


def test_the_overview_links_every_page():
    linked = set(LINK.findall(prose(DOCS / "index.md")))
    assert {str(path.relative_to(DOCS)) for path in PAGES} - {"index.md"} <= linked


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_pages_begin_with_a_title_and_a_summary_of_one_line(path):
    title, empty, summary, end = read(path).split("\n")[:4]
    assert title.startswith("# ") and not empty and not end
    assert summary.endswith(".") and len(summary) <= 120


def test_decisions_are_numbered_and_have_three_parts():
    assert [path.name[:5] for path in DECISIONS] == [f"{number:04d}-" for number in range(1, len(DECISIONS) + 1)]
    for path in DECISIONS:
        assert re.findall(r"^## (.*)$", read(path), re.MULTILINE) == ["Context", "Decision", "Consequence"], path.name


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_names_in_the_text_exist(path):
    text = read(path)
    for name in re.findall(r"\bCAKE_KDA_JIT_[A-Z_]*[A-Z]\b", text):
        assert name in {knob.name for knob in config.KNOBS}, name
    for target in re.findall(r"\bsm_\d+a?\b", text):
        assert target in arch.ARCHES, target
    for file in re.findall(r"`((?:cake_kda_jit|templates|tests|docs)/[\w./]+)`", text):
        assert (ROOT / file).exists(), file


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_verbs_exist(path):
    from cake_kda_jit.cli.command import VERBS

    for verb in re.findall(r"python -m cake_kda_jit ([a-z]+)", read(path)):
        assert verb in VERBS, verb


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_lines_are_short(path):
    """Prose only: a row of a table cannot be broken."""
    for number, line in enumerate(read(path).splitlines(), 1):
        assert line.startswith("|") or len(line) <= 120, number


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_rows_of_tables_are_whole(path):
    for number, line in enumerate(prose(path).splitlines(), 1):
        assert not line.startswith("|") or line.rstrip().endswith("|"), (number, line)


def test_the_programs_of_sm90_are_named():
    [listed] = re.findall(r"^\| `sm90` \| .* \| `sm_90a`; (.*) \|$", read(DOCS / "architecture.md"), re.MULTILINE)
    expected = {p.name for p in registry().programs if any(record.family == "sm90" for record in p.records)}
    assert set(re.findall(r"`(\w+)`", listed)) == expected


def test_the_records_that_may_spill_are_named():
    [text] = re.findall(r"^The limits of a record (?:.+\n)+", read(DOCS / "templates.md"), re.MULTILINE)
    named = dict(re.findall(r"`(\w+)`(?: of \w+)?(?: allows)? (\d+)", " ".join(text.split())))
    cuda = [record for record in registry().shipped() if record.family != "cpu" and record.limits.max_spill_bytes]
    assert named == {record.program: str(record.limits.max_spill_bytes) for record in cuda}


def test_every_program_stands_in_the_architecture_page():
    rows = re.findall(r"^\| `(\w+)` \| ([a-z0-9, ]+) \| ", read(DOCS / "architecture.md"), re.MULTILINE)
    expected = {p.name: {record.family for record in p.records} for p in registry().programs}
    assert {name: set(families.split(", ")) for name, families in rows} == expected


def test_every_module_stands_in_the_architecture_page():
    text = read(DOCS / "architecture.md")
    package = ROOT / "cake_kda_jit"
    names = {path.stem for path in package.glob("*.py")} | {path.parent.name for path in package.glob("*/__init__.py")}
    for name in sorted(names - {"__init__"}):
        assert f"`{name}`" in text, name


def test_the_budgets_are_those_of_the_tests():
    columns = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta")
    rows = [
        f"| {regime} | " + " | ".join(f"{1000 * budget[c]:.1f}" for c in columns) + " |"
        for regime, budget in BUDGETS.items()
    ]
    text = read(DOCS / "numerics.md")
    for row in ("| regime | " + " | ".join(columns) + " |", *rows):
        assert row in text, row


def test_the_walks_are_those_of_the_registry():
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) \| (yes|no)\b", read(DOCS / "mathematics.md"), re.MULTILINE)
    walks = {r.variant: r for r in registry().records() if r.program == "transfer_walk" and r.family != "sm90"}
    assert {name for name, _, _ in rows} == set(walks)
    for name, width, shipped in rows:
        assert (int(width), shipped == "yes") == (walks[name].constants["value_width"], walks[name].shipped), name


def test_the_unread_variables_are_named():
    """Knobs that no module asks for are listed as such, and no others."""
    sources = "\n".join(read(path) for path in (ROOT / "cake_kda_jit").rglob("*.py") if path.name != "config.py")
    unread = {k.name for k in config.KNOBS if f'"{k.name.removeprefix(config.PREFIX)}"' not in sources}
    [listed] = re.findall(r"package asks for these: (.*)\.\n", read(DOCS / "environment.md"))
    assert set(re.findall(r"`(\w+)`", listed)) == unread


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.svg")), ids=name_of)
def test_pictures_explain_themselves_and_follow_the_theme(path):
    text = read(path)
    assert "<title" in text and "<desc" in text
    assert "prefers-color-scheme: dark" in text
