"""Who holds what, as two columns: the first token and the rank of every fragment, in the order of the pack.

Fragments without tokens do not exist, so they tile the pack: each ends where the next one starts. Everything here is
plain integers, and long packs are filled range by range: a loop's body never stands for a single token or chunk.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from ..errors import UnsupportedProblemError
from ..ops.pack import find_integer

Columns = tuple[list[int], list[int]]


def is_count(value: object) -> bool:
    """Whether a value is an integer, of Python, NumPy or torch, that is not negative."""
    found = find_integer(value)
    return found is not None and found >= 0


def check_world_size(world_size: object) -> None:
    """Raise UnsupportedProblemError unless there is at least one rank."""
    if not is_count(world_size) or world_size < 1:
        raise UnsupportedProblemError(f"world_size={world_size!r}; give the number of ranks, at least 1")


def zigzag_ranks(world_size: int) -> list[int]:
    """Return which rank holds each of 2W chunks in a row: rank r has chunk r and chunk 2W - 1 - r."""
    return [*range(world_size), *reversed(range(world_size))]


def spans(cu_seqlens: Sequence[int], holders: Sequence[int]) -> Columns:
    """Cut the pack, documents or not, in ``len(holders)`` spans; span i, from floor(iT/n) on, is at ``holders[i]``."""
    tokens = cu_seqlens[-1]
    bounds = [index * tokens // len(holders) for index in range(len(holders))]
    starts = sorted({*cu_seqlens, *bounds} - {tokens})
    # Of several spans that begin at a token the last one has it; the others are empty.
    return starts, [holders[bisect_right(bounds, start) - 1] for start in starts]


def per_document_zigzag(cu_seqlens: Sequence[int], world_size: int) -> Columns:
    """Cut each document in 2W chunks, the first L mod 2W of them one token longer."""
    holders = zigzag_ranks(world_size)
    starts: list[int] = []
    ranks: list[int] = []
    for start, end in zip(cu_seqlens, cu_seqlens[1:]):
        short, num_longer = divmod(end - start, len(holders))
        turn = start + num_longer * (short + 1)
        starts += range(start, turn, short + 1)
        if short:
            starts += range(turn, end, short)
        ranks += holders if short else holders[:num_longer]
    return starts, ranks


def padded_zigzag(cu_seqlens: Sequence[int], chunk_tokens: Sequence[int], world_size: int) -> Columns:
    """Cut document n every ``chunk_tokens[n]`` tokens, in at most 2W chunks; the padding would fill up the rest."""
    holders = zigzag_ranks(world_size)
    starts: list[int] = []
    ranks: list[int] = []
    for start, end, tokens in zip(cu_seqlens, cu_seqlens[1:], chunk_tokens):
        if end > start:
            chunks = range(start, end, tokens)
            starts += chunks
            ranks += holders[: len(chunks)]
    return starts, ranks


def balanced(cu_seqlens: Sequence[int], world_size: int, whole_below: int) -> Columns:
    """Keep documents of less than ``whole_below`` tokens whole, and fill the ranks up with the longer ones.

    The whole ones go, longest first, to the rank with the fewest tokens. The long ones are then laid end to end and
    cut at most W - 1 times, so that all ranks that they reach hold equally many tokens, give or take one.
    """
    documents = [(start, end) for start, end in zip(cu_seqlens, cu_seqlens[1:]) if end > start]
    loads = [(0, rank) for rank in range(world_size)]
    pieces: list[tuple[int, int]] = []
    # Python's sort is stable and ties of the heap go to the lower rank: every rank computes the same.
    for start, end in sorted(documents, key=lambda document: document[0] - document[1]):
        if end - start < whole_below:
            load, rank = loads[0]
            heapq.heapreplace(loads, (load + end - start, rank))
            pieces.append((start, rank))
    long = [(start, end) for start, end in documents if end - start >= whole_below]
    rooms = _rooms([load for load, _ in sorted(loads, key=lambda load: load[1])], sum(e - s for s, e in long))
    pieces += _poured(long, rooms)
    pieces.sort()
    return [start for start, _ in pieces], [rank for _, rank in pieces]


def _rooms(loads: list[int], tokens: int) -> list[int]:
    """Return how many of ``tokens`` each rank takes so that those that take any end up level, lower ranks first."""
    order = sorted(range(len(loads)), key=loads.__getitem__)
    count, total = 0, tokens
    for rank in order:
        if count and total <= loads[rank] * count:
            break
        count, total = count + 1, total + loads[rank]
    level, num_higher = divmod(total, count)
    rooms = [0] * len(loads)
    for position, rank in enumerate(sorted(order[:count])):
        rooms[rank] = level + (position < num_higher) - loads[rank]
    return rooms


def _poured(documents: list[tuple[int, int]], rooms: list[int]) -> list[tuple[int, int]]:
    """Return (start, rank) of each piece when the documents fill the ranks' rooms one after the other."""
    pieces = []
    rank, room = -1, 0
    for start, end in documents:
        while start < end:
            while not room:
                rank += 1
                room = rooms[rank]
            pieces.append((start, rank))
            taken = min(room, end - start)
            start, room = start + taken, room - taken
    return pieces


def checked_ranges(fragments: Iterable[Sequence[int]], tokens: int) -> list[tuple[int, int, int]]:
    """Return ``(rank, start, end)`` ranges that have tokens; raises UnsupportedProblemError for what is no range."""
    given_ranges = fragments.tolist() if hasattr(fragments, "tolist") else fragments
    if not isinstance(given_ranges, Iterable):
        raise UnsupportedProblemError(f"fragments is {type(fragments).__name__}; give a list of (rank, start, end)")
    ranges = []
    for index, given in enumerate(given_ranges):
        values = given if isinstance(given, (tuple, list)) else (given,)
        if len(values) != 3 or not all(is_count(value) for value in values):
            raise UnsupportedProblemError(
                f"fragments[{index}] = {given!r}; give (rank, start, end), three integers that are not negative"
            )
        rank, start, end = (int(value) for value in values)
        if not start <= end <= tokens:
            raise UnsupportedProblemError(
                f"fragments[{index}] = {given!r}; start to end must lie in the pack's {tokens} tokens, start <= end"
            )
        if start < end:
            ranges.append((rank, start, end))
    return ranges


def custom(
    cu_seqlens: Sequence[int], ranges: Sequence[tuple[int, int, int]], world_size: int
) -> tuple[list[int], list[int], list[int]]:
    """Return starts, ranks and order of ranges that tile the pack once; raises UnsupportedProblemError otherwise."""
    by_start = sorted(range(len(ranges)), key=lambda index: ranges[index][1])
    _check_tiling(cu_seqlens, [ranges[index] for index in by_start], world_size)
    starts: list[int] = []
    ranks: list[int] = []
    numbers = {}
    for index in by_start:
        rank, start, end = ranges[index]
        first, last = bisect_right(cu_seqlens, start), bisect_left(cu_seqlens, end)
        cuts = [start, *sorted(set(cu_seqlens[first:last]))]
        numbers[index] = range(len(starts), len(starts) + len(cuts))
        starts += cuts
        ranks += [rank] * len(cuts)
    return starts, ranks, [number for index in range(len(ranges)) for number in numbers[index]]


def _check_tiling(cu_seqlens: Sequence[int], ranges: Sequence[tuple[int, int, int]], world_size: int) -> None:
    reached, holder = 0, None
    for rank, start, end in ranges:
        if rank >= world_size:
            raise UnsupportedProblemError(
                f"tokens [{start}, {end}) are given to rank {rank}, but there are {world_size} ranks, counted from 0"
            )
        if start > reached:
            raise _gap(cu_seqlens, reached, start)
        if start < reached:
            raise UnsupportedProblemError(
                f"{_tokens(cu_seqlens, start, min(end, reached))} are given twice, to rank {holder} and to rank "
                f"{rank}; give every token to one rank"
            )
        reached, holder = end, rank
    if reached < cu_seqlens[-1]:
        raise _gap(cu_seqlens, reached, cu_seqlens[-1])


def _gap(cu_seqlens: Sequence[int], start: int, end: int) -> UnsupportedProblemError:
    return UnsupportedProblemError(
        f"{_tokens(cu_seqlens, start, end)} are given to no rank; give every token to one rank"
    )


def _tokens(cu_seqlens: Sequence[int], start: int, end: int) -> str:
    first, last = bisect_right(cu_seqlens, start) - 1, bisect_left(cu_seqlens, end) - 1
    documents = f"document {first}" if first == last else f"documents {first} to {last}"
    return f"tokens [{start}, {end}) of {documents}"


def padded_chunk_tokens(cu_seqlens: Sequence[int], padded: Sequence[int], world_size: int) -> list[int]:
    """Return the tokens of one of the 2W chunks of each padded document.

    Raises UnsupportedProblemError, naming the document, where the padded lengths do not fit.
    """
    if len(padded) != len(cu_seqlens):
        raise UnsupportedProblemError(
            f"cu_seqlens_padded has {len(padded)} entries and cu_seqlens {len(cu_seqlens)}; give both for the same "
            "documents"
        )
    chunks = []
    for document in range(len(padded) - 1):
        length = cu_seqlens[document + 1] - cu_seqlens[document]
        room = padded[document + 1] - padded[document]
        if length > room or room % (2 * world_size):
            raise UnsupportedProblemError(
                f"document {document} has {length} tokens, padded to {room}; the padded length must hold them and be "
                f"a multiple of 2 * {world_size} = {2 * world_size}: pad it to "
                f"{-(-max(length, room) // (2 * world_size)) * 2 * world_size}"
            )
        chunks.append(room // (2 * world_size))
    return chunks
