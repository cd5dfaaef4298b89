"""Explanations: what each fragment needs, against a search token by token; and the picture."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cake_kda_jit import CakeKdaError, Fragment, Partition, UnsupportedProblemError
from cake_kda_jit.cp.schedule import EXCHANGES

from .packs import LAYOUTS, custom_partitions, packs, tokens_of_ranks

SETTINGS = settings(max_examples=100, derandomize=True, deadline=None)
RAGGED = (0, 13, 18, 20)


def notes(partition, **options):
    explanation = partition.explain(**options)
    return [note for rank in range(partition.world_size) for note in explanation.notes(rank)]


def test_halos_of_the_ragged_example():
    """A fragment shorter than the halo makes it span ranks."""
    found = {(n.fragment.start, n.fragment.end): n for n in notes(Partition.per_document_zigzag(RAGGED, 2))}
    assert found[15, 16].halo == ((13, 0), (14, 0)), "clipped at the document's start"
    assert found[16, 17].halo == ((13, 0), (14, 0), (15, 1))
    assert found[17, 18].halo == ((14, 0), (15, 1), (16, 1))
    assert found[10, 13].halo == ((7, 1), (8, 1), (9, 1))
    assert found[13, 15].halo == () and found[13, 15].predecessor is None
    assert found[17, 18].predecessor == Fragment(document=1, start=16, end=17, rank=1)
    assert found[17, 18].local_start == 9


@SETTINGS
@given(packs(), st.integers(1, 9), st.sampled_from(LAYOUTS), st.integers(1, 5))
def test_notes_follow_from_the_tokens(cu, world_size, layout, width):
    check(getattr(Partition, layout)(cu, world_size), tokens_of_ranks(layout, cu, world_size), width)


@SETTINGS
@given(custom_partitions(), st.integers(1, 5))
def test_notes_of_custom_fragments(drawn, width):
    partition, ranges = drawn
    size = range(partition.world_size)
    held = [[t for r, start, end in ranges if r == rank for t in range(start, end)] for rank in size]
    check(partition, held, width)


def check(partition, held, width):
    """Raise unless the notes are those of the tokens that each rank holds, in its order."""
    holder = {token: rank for rank, tokens in enumerate(held) for token in tokens}
    for (document, start, end, rank), local_start, predecessor, halo in notes(partition, conv_width=width):
        first = partition.cu_seqlens[document]
        assert halo == tuple((t, holder[t]) for t in range(max(first, start - width + 1), start))
        assert held[rank][local_start : local_start + end - start] == list(range(start, end))
        if start == first:
            assert predecessor is None
        else:
            assert (predecessor.document, predecessor.end) == (document, start)
            assert predecessor.rank == holder[start - 1]
    tokens = [len(one) for one in held]
    explanation = partition.explain(conv_width=width)
    assert explanation.tokens_per_rank == tuple(tokens)
    even = max(tokens) * partition.world_size == sum(tokens)
    assert (explanation.imbalance == 1.0) == even and explanation.imbalance >= 1.0


def test_text_of_a_ragged_pack():
    text = str(Partition.per_document_zigzag(RAGGED, 2).explain())
    assert "20 tokens in 3 documents on 2 ranks, 10 fragments" in text
    assert "imbalance 1.100: the fullest rank holds 11 tokens, the emptiest 9, the mean 10" in text
    assert re.search(r"^1 +\[7, 8\) +\[16, 17\) +1 +\[15, 16\)@1 +13@0 14@0 15@1$", text, re.MULTILINE)
    assert re.search(r"^0 +\[7, 9\) +\[13, 15\) +1 +the initial state +-$", text, re.MULTILINE)


def test_text_of_a_long_pack_says_what_it_leaves_out():
    partition = Partition.per_document_zigzag(range_boundaries(100), 8)
    text = str(partition.explain())
    assert len(text.splitlines()) < 100 and "... and 1536 more fragments; as_json() has all" in text
    assert sum(map(len, partition.explain().as_json()["ranks"])) == 1600


def range_boundaries(documents):
    return list(range(0, documents * 50 + 1, 50))


def test_an_empty_pack_is_even():
    explanation = Partition.zigzag([0, 0], 2).explain()
    assert explanation.imbalance == 1.0 and explanation.tokens_per_rank == (0, 0)
    assert "0 tokens in 1 document on 2 ranks, 0 fragments" in str(explanation)


def test_json_is_plain():
    partition = Partition.per_document_zigzag(RAGGED, 2)
    content = partition.explain().as_json()
    assert json.loads(json.dumps(content)) == content
    assert content["digest"] == partition.digest() and content["tokens_per_rank"] == [11, 9]
    assert content["ranks"][1][3] == {
        "document": 1, "start": 16, "end": 17, "rank": 1, "local_start": 7,
        "predecessor": {"document": 1, "start": 15, "end": 16, "rank": 1}, "halo": [[13, 0], [14, 0], [15, 1]],
    }  # fmt: skip


def test_exchanges_are_those_of_the_plan():
    """64 documents on 16 ranks in 31 spans each, 32 heads of 128 x 128: 30 rounds of a state if states are relayed."""
    partition = Partition.per_document_zigzag([8192 * n for n in range(65)], 16)
    explanation = partition.explain()
    content = explanation.as_json()["exchange"]
    assert (content["num_value_heads"], content["head_dim"], content["num_chains"]) == (32, 128, 64)
    assert [one["name"] for one in content["exchanges"]] == list(EXCHANGES)
    assert content["taken"] == explanation.plan.choose("auto", 32, 128)
    assert explanation.plan.explain(32, 128) in str(explanation)
    relay = explanation.plan.traffic("relay", 32, backward=False)
    assert max(relay.received) * 4 * 128 * 128 == 256 << 20
    assert partition.explain(num_value_heads=8, head_dim=64).as_json()["exchange"]["head_dim"] == 64


def test_plot(tmp_path):
    partition = Partition.per_document_zigzag(RAGGED, 2)
    partition.plot(tmp_path / "held.svg")
    # One drawn shape for each fragment: bars alone are filled and have a white edge.
    styles = [element.get("style", "") for element in ElementTree.parse(tmp_path / "held.svg").iter()]
    bars = [style for style in styles if style.startswith("fill: ") and "stroke: #ffffff; stroke-width: 0.5" in style]
    assert len(bars) == partition.num_fragments
    partition.plot(str(tmp_path / "held.png"))
    assert (tmp_path / "held.png").read_bytes().startswith(b"\x89PNG")
    Partition.zigzag([0], 3).plot(tmp_path / "empty.png")


def test_a_large_plot_says_that_it_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr("cake_kda_jit.cp.plot.MOST_FRAGMENTS", 4)
    monkeypatch.setitem(__import__("matplotlib").rcParams, "svg.fonttype", "none")
    Partition.per_document_zigzag(RAGGED, 2).plot(tmp_path / "held.svg")
    assert "only the first 4 of 10 fragments" in (tmp_path / "held.svg").read_text()


def test_plot_says_what_is_missing(tmp_path, monkeypatch):
    partition = Partition.zigzag(RAGGED, 2)
    with pytest.raises(UnsupportedProblemError, match="'held.txt' is no picture; let it end in one of .*png"):
        partition.plot("held.txt")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(CakeKdaError, match=r"pip install 'cake_kda_jit\[plot\]'"):
        partition.plot(tmp_path / "held.png")
