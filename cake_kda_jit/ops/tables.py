"""The tables of a pack on its device: how many rows they need, and the launch that writes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from .. import config
from ..runtime.device import arch_of_device
from ..runtime.launch import launch
from .operators import define, untraced
from .problem import CHUNK_TOKENS
from .select import SegmentRule, select_plain


class Rows(NamedTuple):
    """Rows of ``chunk_table`` and ``segment_table``, and summary rows."""

    chunks: int
    segments: int
    summaries: int


class Tables(NamedTuple):
    """chunk_table ``[chunks, 4]`` and segment_table ``[segments, 4]`` int32, summary_offsets ``[N + 1]`` int64."""

    chunk_table: torch.Tensor
    segment_table: torch.Tensor
    summary_offsets: torch.Tensor


def rows_of_lengths(lengths: Iterable[int], rule: SegmentRule, summarize_all: bool) -> Rows:
    """Return the rows of documents of known lengths."""
    chunks = segments = summaries = 0
    for length in lengths:
        own = rule.num_segments(length)
        chunks += -(-length // CHUNK_TOKENS)
        segments += own
        summaries += own if own > 1 or summarize_all else 0
    return Rows(chunks, segments, summaries)


def rows_of_batch(batch: int, tokens: int, rule: SegmentRule) -> Rows:
    """Return the rows of ``batch`` documents of ``tokens`` tokens each."""
    own = rule.num_segments(tokens)
    return Rows(batch * -(-tokens // CHUNK_TOKENS), batch * own, batch * own if own > 1 else 0)


def most_rows(documents: int, tokens: int, rule: SegmentRule) -> Rows:
    """Return the rows that suffice for every pack of at most so many documents and tokens.

    A document's last chunk may hold a single token, and a document of n segments has more than (n - 1) times the
    tokens of a segment.
    """
    chunks = (tokens + (CHUNK_TOKENS - 1) * min(documents, tokens)) // CHUNK_TOKENS
    if rule.segment_tokens == 0:
        return Rows(chunks, documents, 0)
    cut_documents = min(documents, tokens // max(rule.minimum_tokens, rule.segment_tokens + 1))
    later_segments = tokens // rule.segment_tokens if cut_documents else 0
    return Rows(chunks, documents + later_segments, cut_documents + later_segments)


def empty_tables(rows: Rows, num_documents: int, device: torch.device) -> Tables:
    """Return tables to be written. Without documents nothing is, and ``summary_offsets`` is the single 0."""
    make = torch.empty if num_documents else torch.zeros
    return Tables(
        torch.empty((rows.chunks, 4), dtype=torch.int32, device=device),
        torch.empty((rows.segments, 4), dtype=torch.int32, device=device),
        make(num_documents + 1, dtype=torch.int64, device=device),
    )


def write_tables(tables: Tables, cu_seqlens: torch.Tensor, rule: SegmentRule, summarize_all: bool) -> None:
    """Launch ``pack_tables`` for the documents of ``cu_seqlens``, int64 ``[N + 1]`` on the tables' device."""
    device = cu_seqlens.device
    num_documents = cu_seqlens.shape[0] - 1
    if num_documents == 0:
        return
    chosen = select_plain("pack_tables", "int64", arch_of_device(device).name, config.read("FAMILY"))
    values = {
        "cu_seqlens": cu_seqlens.data_ptr(),
        **{name: table.data_ptr() for name, table in tables._asdict().items()},
        "num_documents": num_documents,
        "max_chunks": tables.chunk_table.shape[0],
        "max_segments": tables.segment_table.shape[0],
        "segment_tokens": rule.segment_tokens,
        "segment_minimum": rule.minimum_tokens,
        "most_segments": rule.most_segments,
        "summarize_all": int(summarize_all),
    }
    launch(chosen.record, chosen.reason, values, device)


@untraced
def _pack_tables(cu_seqlens, max_chunks, max_segments, *rule) -> Tables:
    tables = empty_tables(Rows(max_chunks, max_segments, 0), cu_seqlens.shape[0] - 1, cu_seqlens.device)
    write_tables(tables, cu_seqlens, SegmentRule(*rule), False)
    return tables


def _pack_tables_fake(cu_seqlens, max_chunks, max_segments, *rule) -> Tables:
    return empty_tables(Rows(max_chunks, max_segments, 0), cu_seqlens.shape[0] - 1, cu_seqlens.device)


define(
    "pack_tables(Tensor cu_seqlens, SymInt max_chunks, SymInt max_segments, int segment_tokens, int segment_minimum, "
    "int most_segments=0) -> (Tensor, Tensor, Tensor)",
    _pack_tables,
    _pack_tables_fake,
)
