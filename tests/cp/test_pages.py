"""The pages about partitions and context parallelism show what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from cake_kda_jit import Partition
from cake_kda_jit.bench import exchanges
from cake_kda_jit.cp import maps

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_example_is_what_explain_prints():
    [text] = re.findall(r"^```text\n(.*?)^```$", (DOCS / "partitions.md").read_text(), re.MULTILINE | re.DOTALL)
    assert text == f"{Partition.per_document_zigzag([0, 13, 18, 20], 2).explain()}\n"
    assert (DOCS / "partition.png").read_bytes().startswith(b"\x89PNG")


def test_every_constructor_and_map_is_in_a_table():
    page = (DOCS / "partitions.md").read_text()
    makers = {name for name, value in vars(Partition).items() if isinstance(value, classmethod) and name[0] != "_"}
    assert set(re.findall(r"^\| `Partition\.(\w+)` \|", page, re.MULTILINE)) == makers
    page = (DOCS / "partition-a-megatron-pack.md").read_text()
    functions = {name for name, value in vars(maps).items() if getattr(value, "__module__", "") == maps.__name__}
    named = set(re.findall(r"^\| [^|]*\| `maps\.(\w+)\(", page, re.MULTILINE))
    assert named == {name for name in functions if name[0].islower()}


def test_the_tables_are_those_of_the_script():
    page = (DOCS / "context-parallelism.md").read_text()
    for name in exchanges.TABLES:
        assert page.count(f"<!-- {name}: written by `bench exchanges` -->") == page.count(f"<!-- /{name} -->") == 1
    assert exchanges.with_tables(page) == page, "run: python -m cake_kda_jit.bench exchanges --write"
    assert exchanges.main(["--check"]) == 0


def test_every_claim_names_tests_that_exist():
    named = re.findall(r"`(\w+\.py)::(\w+)`", (DOCS / "context-parallelism.md").read_text())
    assert len(named) > 20
    for file, test in named:
        [path] = (path for folder in ("cp", "gpu") if (path := Path(__file__).parents[1] / folder / file).exists())
        assert f"def {test}(" in path.read_text(), f"{file}::{test}"
