"""Which text is read, and that it is read in the same order everywhere."""

from __future__ import annotations

import pytest

from cake_kda_jit.demo.corpus import (
    HELD_OUT_EVERY,
    STANDARD_LIBRARY_BYTES,
    cut_document,
    find_files,
    read_corpus,
    read_texts,
    standard_library_files,
)
from cake_kda_jit.demo.failures import WrongUse


def test_a_folder_is_read_in_sorted_order_without_hidden_and_binary_files(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/b/c.py", ".hidden/x.txt", "c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "a" / "picture").write_bytes(b"\xff\xfe\x00\x80")
    assert read_texts(find_files([str(tmp_path)])) == [b"a/b/c.py", b"a/z.txt", b"b.txt", b"c.txt"]
    named = find_files([str(tmp_path / "c.txt"), str(tmp_path / "a")])
    assert [path.name for path in named] == ["c.txt", "c.py", "picture", "z.txt"]


def test_the_standard_library_is_the_default_and_enough():
    files = standard_library_files()
    assert files == sorted(files) == standard_library_files()
    assert not any({"site-packages", "test", "tests", "idlelib"} & set(path.parts) for path in files)
    corpus = read_corpus([], max_length=1024)
    assert corpus.num_bytes >= STANDARD_LIBRARY_BYTES
    assert corpus == read_corpus([], max_length=1024)
    assert len(corpus.held_out) == (len(corpus.training) + len(corpus.held_out)) // HELD_OUT_EVERY


@pytest.mark.parametrize("length, expected", [(0, []), (1, []), (2, [2]), (5, [5]), (6, [5, 2]), (9, [5, 5])])
def test_long_documents_are_cut_without_losing_a_target(length, expected):
    text = bytes(range(length))
    pieces = cut_document(text, max_length=4)
    assert [len(piece) for piece in pieces] == expected
    assert [pair for piece in pieces for pair in zip(piece, piece[1:])] == list(zip(text, text[1:]))


def test_missing_paths_and_empty_text_are_wrong_use(tmp_path):
    with pytest.raises(WrongUse, match="'no/such/file' does not exist"):
        read_corpus(["no/such/file"], max_length=16)
    (tmp_path / "short.txt").write_text("x")
    with pytest.raises(WrongUse, match="no text found"):
        read_corpus([str(tmp_path)], max_length=16)
