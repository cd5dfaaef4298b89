"""Documents of any length become packs of a fixed number of tokens, the shape that the kernels train on."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Pack:
    """One row of whole documents, end to end: document n is ``[cu_seqlens[n], cu_seqlens[n + 1])``.

    ``targets[t]`` is the byte that follows ``inputs[t]`` in its document.
    """

    inputs: bytes
    targets: bytes
    cu_seqlens: tuple[int, ...]


def shuffled_forever(documents: Sequence[bytes], seed: int) -> Iterator[bytes]:
    """Yield all documents in a random order, again and again, each time in another order."""
    generator = random.Random(seed)
    while True:
        yield from generator.sample(documents, len(documents))


def pack_documents(documents: Iterable[bytes], tokens: int) -> Iterator[Pack]:
    """Yield packs of exactly ``tokens`` tokens, the last one shorter if the documents end.

    A document that does not fit is cut: its rest opens the next pack as a document of its own, so no target is lost,
    and none is ever the first byte of another document.
    """
    inputs, targets, cu_seqlens = bytearray(), bytearray(), [0]
    for document in documents:
        while len(document) > 1:
            room = tokens - len(inputs)
            piece = document[: room + 1]
            inputs += piece[:-1]
            targets += piece[1:]
            cu_seqlens.append(len(inputs))
            document = document[room:]
            if len(inputs) == tokens:
                yield Pack(bytes(inputs), bytes(targets), tuple(cu_seqlens))
                inputs, targets, cu_seqlens = bytearray(), bytearray(), [0]
    if inputs:
        yield Pack(bytes(inputs), bytes(targets), tuple(cu_seqlens))
