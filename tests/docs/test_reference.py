"""Generated pages and pictures equal what the code says."""

from __future__ import annotations

from cake_kda_jit import registry
from cake_kda_jit.arch import ARCHES

from . import pictures, reference
from .test_docs import DOCS, README, read


def test_the_reference_is_current():
    assert not reference.outdated(), "run `python -m tests.docs.reference --write`"


def test_the_pictures_are_current():
    assert not pictures.outdated(), "run `python -m tests.docs.pictures --write`"


def test_every_public_name_has_a_section_or_stands_among_the_errors():
    import cake_kda_jit

    text = read(DOCS / "reference-api.md") + read(DOCS / "reference-errors.md")
    for name in cake_kda_jit.__all__:
        assert f"### {name}\n" in text or f"`{name}` |" in text, name


def test_signatures_are_shown_as_they_are_written():
    text = read(DOCS / "reference-api.md")
    assert "    cu_seqlens: Tensor | None = None,\n    cu_seqlens_cpu: Tensor | None = None,\n" in text
    assert "``" not in text.replace("```", ""), "literals stand in single backticks"


def test_the_readme_says_which_operations_cuda_has():
    """In its table "not yet" means that no CUDA record of the program is shipped."""
    programs = {"all gradients |": "chunk_grad", "forward, K": "chunk_scan", "`segment_summary`": "segment_summary"}
    rows = [line for line in read(README).splitlines() if line.startswith("| `")]
    for mark, program in programs.items():
        [row] = [line for line in rows if mark in line and "causal_conv1d" not in line]
        records = [one for one in registry().shipped() if one.program == program]
        has_cuda = any(ARCHES[arch].is_cuda for one in records for arch in one.archs)
        assert ("not yet" in row) == (not has_cuda), row
