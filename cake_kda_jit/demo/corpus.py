"""Where the text comes from: the standard library's own source, or the user's files. The order is always the same."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .failures import WrongUse

STANDARD_LIBRARY_BYTES = 1_000_000
HELD_OUT_EVERY = 40

# Installed packages differ between machines; tests and tables read unlike the rest of the library.
_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idlelib",
    "turtledemo",
    "lib2to3",
    "encodings",
    "pydoc_data",
}


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents held out, as bytes; ``name`` says where they are from."""

    name: str
    num_files: int
    training: tuple[bytes, ...]
    held_out: tuple[bytes, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all documents."""
        return sum(len(document) for document in self.training + self.held_out)


def read_corpus(paths: Iterable[str], max_length: int) -> Corpus:
    """Read the files and folders named, or the standard library if none is, cut into documents for the demo.

    Documents have at most ``max_length`` next-byte targets; every 40th is held out. Raises WrongUse for a path that
    is missing or cannot be read, and where no text is found.
    """
    paths = list(paths)
    if paths:
        name, texts = ", ".join(paths), read_texts(find_files(paths))
    else:
        name, texts = "the standard library", read_texts(standard_library_files(), STANDARD_LIBRARY_BYTES)
    documents = [piece for text in texts for piece in cut_document(text, max_length)]
    if not documents:
        raise WrongUse(f"no text found in {name}: give files or folders with UTF-8 text of at least 2 bytes")
    held_out = documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    del documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return Corpus(name, len(texts), tuple(documents), tuple(held_out))


def standard_library_files() -> list[Path]:
    """Return the standard library's Python files, sorted by their path inside it."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    return [root / path for path in sorted(files) if not _SKIPPED_FOLDERS.intersection(path.parts)]


def find_files(paths: Iterable[str]) -> list[Path]:
    """Return the files named and, sorted, all files below the folders named; hidden ones are left out."""
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            below = (found.relative_to(path) for found in path.rglob("*") if found.is_file())
            files += [path / found for found in sorted(below) if not any(part.startswith(".") for part in found.parts)]
        else:
            raise WrongUse(f"text path {str(path)!r} does not exist: give files or folders")
    return files


def read_texts(files: Iterable[Path], max_bytes: int | None = None) -> list[bytes]:
    """Return the contents of the files that are UTF-8 text, in order, until ``max_bytes`` are read."""
    texts: list[bytes] = []
    size = 0
    for file in files:
        if max_bytes is not None and size >= max_bytes:
            break
        try:
            text = file.read_bytes()
            text.decode()
        except UnicodeDecodeError:
            continue
        except OSError as error:
            raise WrongUse(f"text file {str(file)!r} cannot be read: {error.strerror}") from None
        texts.append(text)
        size += len(text)
    return texts


def cut_document(text: bytes, max_length: int) -> list[bytes]:
    """Cut a text into pieces with at most ``max_length`` next-byte targets each; every target stays in one piece.

    A piece of n bytes has n - 1 targets, so neighbours share one byte: the last target of one begins the next.
    """
    return [text[start : start + max_length + 1] for start in range(0, len(text) - 1, max_length)]
