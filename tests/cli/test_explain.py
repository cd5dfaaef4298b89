"""``explain``: pack files, layouts, JSON and what is wrong use."""

from __future__ import annotations

import json

import pytest

from cake_kda_jit import Partition
from cake_kda_jit.cli import main

CU = [0, 13, 18, 20]


@pytest.fixture
def explain(tmp_path, capsys):
    """Run ``explain`` on a pack file of this content; returns exit code, standard output and standard error."""

    def run(content, layout, *arguments, ranks=2):
        path = tmp_path / "pack.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        code = main(["explain", "--layout", layout, "--ranks", str(ranks), "--pack", str(path), *arguments])
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("content", [CU, {"cu_seqlens": CU}, {"lengths": [13, 5, 2]}])
def test_every_form_of_a_pack(explain, content):
    code, out, err = explain(content, "per_document_zigzag")
    assert (code, err) == (0, "")
    assert out == f"{Partition.per_document_zigzag(CU, 2).explain()}\n"


@pytest.mark.parametrize(
    "layout, content, arguments, partition",
    [
        ("contiguous", CU, (), Partition.contiguous(CU, 2)),
        ("zigzag", CU, (), Partition.zigzag(CU, 2)),
        ("balanced", CU, ("--whole-below", "6"), Partition.balanced(CU, 2, whole_below=6)),
        (
            "padded_per_document_zigzag",
            {"cu_seqlens": CU, "cu_seqlens_padded": [0, 16, 24, 28]},
            (),
            Partition.from_padded(CU, [0, 16, 24, 28], 2),
        ),
        (
            "custom",
            {"cu_seqlens": CU, "fragments": [[1, 5, 20], [0, 0, 5]]},
            (),
            Partition.from_fragments(CU, [(1, 5, 20), (0, 0, 5)]),
        ),
    ],
)
def test_every_layout(explain, layout, content, arguments, partition):
    code, out, _ = explain(content, layout, "--json", *arguments)
    assert code == 0
    assert json.loads(out) == partition.explain().as_json()


def test_sizes_and_plot(explain, tmp_path):
    sizes = ("--conv-width", "2", "--heads", "8", "--head-dim", "64")
    code, out, _ = explain(CU, "zigzag", *sizes, "--plot", str(tmp_path / "held.png"), "--json")
    expected = Partition.zigzag(CU, 2).explain(conv_width=2, num_value_heads=8, head_dim=64)
    assert code == 0 and json.loads(out) == expected.as_json()
    assert (tmp_path / "held.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "content, layout, arguments, words",
    [
        (CU, "ring", (), "invalid choice: 'ring'"),
        (CU, "balanced", (), "--whole-below N belongs to --layout balanced"),
        (CU, "zigzag", ("--whole-below", "5"), "--whole-below N belongs to --layout balanced"),
        (CU, "custom", (), "--layout custom needs fragments"),
        (CU, "padded_per_document_zigzag", (), "needs cu_seqlens_padded"),
        ("[0, 5", "zigzag", (), "is no JSON"),
        ("5", "zigzag", (), "is no object"),
        ({}, "zigzag", (), "has nothing"),
        ({"cu_seqlens": CU, "lengths": [20]}, "zigzag", (), "has cu_seqlens, lengths"),
        ({"cu_seqlens": CU, "length": [20]}, "zigzag", (), "has cu_seqlens, length"),
        ({"lengths": [3, -1]}, "zigzag", (), "lengths must be a list"),
        ({"cu_seqlens": CU, "fragments": 3}, "custom", (), "fragments is no list"),
    ],
)
def test_wrong_use_is_2(explain, content, layout, arguments, words):
    code, out, err = explain(content, layout, *arguments)
    assert code == 2 and words in err and out == ""


def test_sizes_below_1_are_2(explain):
    code, _, err = explain(CU, "zigzag", ranks=0)
    assert code == 2 and "--ranks 0 is not valid" in err
    code, _, err = explain(CU, "zigzag", "--head-dim", "-1")
    assert code == 2 and "--head-dim -1 is not valid" in err


def test_what_fails_is_1(explain, capsys):
    assert main(["explain", "--layout", "zigzag", "--ranks", "2", "--pack", "/nowhere.json"]) == 1
    assert "No such file or directory: /nowhere.json" in capsys.readouterr().err
    code, _, err = explain([0, 5, 3], "zigzag")
    assert code == 1 and "boundaries must never decrease" in err
    code, _, err = explain({"cu_seqlens": CU, "fragments": [[0, 0, 5]]}, "custom")
    assert code == 1 and "tokens [5, 20) of documents 0 to 2 are given to no rank" in err
