"""Plans: all that depends on a pack of documents, made once and reused by every layer, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch

from ..errors import UnsupportedProblemError
from ..runtime.launch import operation
from .operators import untraced
from .pack import MAX_TOKENS, check_boundaries
from .problem import CHUNK_TOKENS
from .select import SegmentRule, segment_rule
from .tables import Tables, empty_tables, most_rows, rows_of_batch, rows_of_lengths, write_tables

HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class Plan:
    """Tables of one pack. Made by ``make_plan``; immutable, hashable, picklable.

    ``boundaries`` are the N + 1 document boundaries in tokens, ``num_tokens`` T, ``rule`` how documents are cut into
    segments. The tables are on ``device``: ``cu_seqlens`` int64 ``[N + 1]``, ``chunk_table`` and ``segment_table``
    int32 ``[*, 4]``, ``summary_offsets`` int64 ``[N + 1]``.
    """

    boundaries: tuple[int, ...] | None
    num_tokens: int
    num_heads: int
    num_value_heads: int
    head_dim: int
    device: torch.device
    rule: SegmentRule
    num_summaries: int
    cu_seqlens: torch.Tensor = field(compare=False, repr=False)
    chunk_table: torch.Tensor = field(compare=False, repr=False)
    segment_table: torch.Tensor = field(compare=False, repr=False)
    summary_offsets: torch.Tensor = field(compare=False, repr=False)

    has_spare_rows: ClassVar[bool] = False
    """Whether the pack may end before the tensors do."""

    @property
    def num_documents(self) -> int:
        """N, empty documents included."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_chunks(self) -> int:
        """Chunks of 64 tokens, counted from each document's first token."""
        return self.chunk_table.shape[0]

    @property
    def num_segments(self) -> int:
        """Segments; a document has at least one."""
        return self.segment_table.shape[0]

    @cached_property
    def sizes(self) -> tuple:
        """All but the content of the tables: what decides, of a plan, which launches a call makes."""
        heads = (self.num_heads, self.num_value_heads, self.head_dim)
        rows = (self.num_chunks, self.num_segments, self.num_documents, self.num_summaries, self.has_spare_rows)
        return (self.num_tokens, *heads, self.device, *rows)

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """chunk_table, segment_table, summary_offsets."""
        return self.chunk_table, self.segment_table, self.summary_offsets

    def may_hold(self, boundaries: list[int]) -> bool:
        """Whether the plan is of these boundaries, as far as the host knows."""
        return tuple(boundaries) == self.boundaries

    def update(self, cu_seqlens: torch.Tensor) -> None:
        """Refused: only a capacity plan can take another pack."""
        raise UnsupportedProblemError(
            "this plan is of one pack and never changes; make a new one, or give make_plan max_documents and max_tokens"
        )


@dataclass(frozen=True, eq=False)
class CapacityPlan(Plan):
    """A plan for every pack of at most ``num_documents`` documents and ``num_tokens`` tokens, one after the other.

    Made by ``make_plan`` with ``max_documents`` and ``max_tokens``. All sizes are those of the maxima, so a CUDA graph
    that was captured with it serves every pack. ``boundaries`` is None; ``limits`` int64 ``[N + 1]`` is the most that
    each boundary may be. Two of them are equal if they are one object.
    """

    limits: torch.Tensor = field(repr=False)

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    has_spare_rows: ClassVar[bool] = True

    def may_hold(self, boundaries: list[int]) -> bool:
        """Whether the plan is of these boundaries; the tables on a GPU are not read, so there the answer is yes."""
        missing = [boundaries[-1]] * (self.cu_seqlens.shape[0] - len(boundaries))
        return self.device.type != "cpu" or boundaries + missing == self.cu_seqlens.tolist()

    @untraced
    def update(self, cu_seqlens: torch.Tensor) -> None:
        """Take another pack, in place and without a copy to the host: int32 or int64 ``[N + 1]``, N <= num_documents.

        It may be captured into a CUDA graph if ``cu_seqlens`` is on the plan's device. A tensor on the CPU is checked
        here; the content of one on a GPU is checked there, by an assertion that stops the device. A backward of a
        forward before the update raises torch's error for tensors changed in place.

        Raises UnsupportedProblemError for what is no pack of this capacity.
        """
        _check_table("cu_seqlens", cu_seqlens)
        given = cu_seqlens.shape[0]
        if not 1 <= given <= self.cu_seqlens.shape[0]:
            raise UnsupportedProblemError(
                f"cu_seqlens has {given} entries; this plan holds 1 to {self.num_documents + 1}: make one with more "
                "max_documents"
            )
        is_on_host = cu_seqlens.device.type == "cpu"
        if is_on_host:
            boundaries = cu_seqlens.tolist()
            self._check_boundaries(boundaries)
            # A copy of our own: one from pinned memory could be read after the caller has changed it.
            cu_seqlens = torch.tensor(boundaries, dtype=torch.int64, device="cpu")
        with torch.no_grad(), operation():
            self.cu_seqlens[:given].copy_(cu_seqlens, non_blocking=True)
            if given <= self.num_documents:
                # Documents that the pack lacks are empty ones at its end.
                self.cu_seqlens[given:].copy_(self.cu_seqlens[given - 1 : given])
            if not is_on_host:
                self._assert_boundaries()
            tables = Tables(self.chunk_table, self.segment_table, self.summary_offsets)
            write_tables(tables, self.cu_seqlens, self.rule, False)
            for table in tables:
                torch.autograd.graph.increment_version(table)

    def _check_boundaries(self, boundaries: list[int]) -> None:
        check_boundaries(boundaries)
        if boundaries[-1] > self.num_tokens:
            raise UnsupportedProblemError(
                f"cu_seqlens ends at {boundaries[-1]}; this plan holds {self.num_tokens} tokens: make one with more "
                "max_tokens"
            )

    def _assert_boundaries(self) -> None:
        # In few launches: boundaries are a pack's if no maximum of those before and no limit changes them.
        allowed = torch.minimum(self.cu_seqlens.cummax(0).values.clamp(min=0), self.limits)
        torch._assert_async(
            (allowed == self.cu_seqlens).all(),
            f"cu_seqlens of a capacity plan must start at 0, never decrease and end at {self.num_tokens} or before",
        )


class BatchTables(NamedTuple):
    """What a call needs of a plan, for a batch of equal lengths; named as in ``Plan``."""

    chunk_table: torch.Tensor
    segment_table: torch.Tensor
    summary_offsets: torch.Tensor
    num_summaries: int
    num_documents: int
    cu_seqlens: torch.Tensor
    has_spare_rows: bool = False

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """chunk_table, segment_table, summary_offsets."""
        return self[:3]


def _check_table(name: str, value: torch.Tensor) -> None:
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int32, torch.int64) or value.dim() != 1:
        given = f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value)
        raise UnsupportedProblemError(f"{name} is {given}; give a one-dimensional int32 or int64 tensor [N + 1]")
    if value.device.type not in ("cpu", "cuda"):
        raise UnsupportedProblemError(f"{name} is on {value.device}; give it on the CPU or on the inputs' device")


def boundaries_of(
    cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None = None, name: str = "cu_seqlens"
) -> list[int]:
    """Return cu_seqlens as integers, from the host copy if there is one; a CUDA tensor costs one synchronising copy."""
    _check_table(name, cu_seqlens)
    if cu_seqlens_cpu is None:
        return cu_seqlens.tolist()
    _check_table("cu_seqlens_cpu", cu_seqlens_cpu)
    if cu_seqlens_cpu.device.type != "cpu" or cu_seqlens_cpu.shape != cu_seqlens.shape:
        raise UnsupportedProblemError(
            f"cu_seqlens_cpu is {list(cu_seqlens_cpu.shape)} on {cu_seqlens_cpu.device}; it must be the CPU copy of "
            f"cu_seqlens {list(cu_seqlens.shape)}"
        )
    boundaries = cu_seqlens_cpu.tolist()
    if cu_seqlens.device.type == "cpu" and cu_seqlens.tolist() != boundaries:
        raise UnsupportedProblemError("cu_seqlens_cpu differs from cu_seqlens; it must be the CPU copy of it")
    return boundaries


def make_plan(
    cu_seqlens: torch.Tensor,
    *,
    num_heads: int,
    num_value_heads: int | None = None,
    head_dim: int = 128,
    device: torch.device | str,
    cu_seqlens_cpu: torch.Tensor | None = None,
    segment_tokens: int | None = None,
    max_documents: int | None = None,
    max_tokens: int | None = None,
) -> Plan:
    """Return the tables of a pack of documents, to be passed to every call on that pack.

    ``cu_seqlens`` int32 or int64 ``[N + 1]`` in tokens, copied here, so that a later change of the tensor harms
    nothing; ``num_heads`` H, ``num_value_heads`` HV (default H), ``head_dim`` K = V. Calls with a plan make no copy to
    the host. ``segment_tokens`` cuts every longer document into segments of that many tokens, a multiple of 64, and 0
    cuts none; by default the rule depends on HV, V and each document's own length. Segments change time, and results
    by rounding only.

    With ``max_documents`` and ``max_tokens``, given together, the plan is a ``CapacityPlan``: inputs then have T =
    ``max_tokens`` rows and states N = ``max_documents``, whatever the pack, and ``plan.update(cu_seqlens)`` takes
    another pack in place, without a copy to the host. Outputs and gradients are 0 in rows behind the pack's last token,
    whose inputs are not read; documents that the pack lacks are empty.

    Raises UnsupportedProblemError for boundaries or sizes that no kernel takes.
    """
    heads = PlanHeads(num_heads, num_heads if num_value_heads is None else num_value_heads, head_dim)
    heads.check()
    rule = _segment_rule(segment_tokens, heads)
    device = torch.device(device)
    if max_documents is None and max_tokens is None:
        boundaries = boundaries_of(cu_seqlens, cu_seqlens_cpu)
        check_boundaries(boundaries)
        return plan_of_boundaries(boundaries, heads, device, rule)
    if cu_seqlens_cpu is not None:
        cu_seqlens = torch.tensor(boundaries_of(cu_seqlens, cu_seqlens_cpu), device="cpu")
    plan = _empty_capacity_plan(max_documents, max_tokens, heads, device, rule)
    plan.update(cu_seqlens)
    return plan


@dataclass(frozen=True)
class PlanHeads:
    """H, HV and K = V of a plan."""

    num_heads: int
    num_value_heads: int
    head_dim: int

    def check(self) -> None:
        """Raise UnsupportedProblemError for sizes that no kernel takes."""
        for name, value in vars(self).items():
            if not isinstance(value, int):
                raise UnsupportedProblemError(f"{name}={value!r}; give an integer")
        if self.num_heads < 1 or self.num_value_heads < 1 or self.num_value_heads % self.num_heads:
            raise UnsupportedProblemError(
                f"num_heads={self.num_heads}, num_value_heads={self.num_value_heads}; both must be at least 1 and the "
                "value heads a multiple of the heads"
            )
        if self.head_dim not in HEAD_DIMS:
            raise UnsupportedProblemError(f"head_dim={self.head_dim}; K = V must be one of {HEAD_DIMS}")


def _segment_rule(segment_tokens: int | None, heads: PlanHeads) -> SegmentRule:
    if segment_tokens is None:
        return segment_rule(heads.num_value_heads, heads.head_dim)
    if not isinstance(segment_tokens, int) or not 0 <= segment_tokens < MAX_TOKENS or segment_tokens % CHUNK_TOKENS:
        raise UnsupportedProblemError(f"segment_tokens={segment_tokens}; use 0 or a multiple of {CHUNK_TOKENS}")
    return SegmentRule(segment_tokens, segment_tokens + 1)


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@untraced
def plan_of_boundaries(
    boundaries: list[int],
    heads: PlanHeads,
    device: torch.device,
    rule: SegmentRule | None = None,
    *,
    summarize_all: bool = False,
) -> Plan:
    """Return the plan of checked boundaries; ``summarize_all`` gives every segment a summary row."""
    heads.check()
    rule = segment_rule(heads.num_value_heads, heads.head_dim) if rule is None else rule
    device = _with_index(device)
    lengths = [end - start for start, end in zip(boundaries, boundaries[1:])]
    rows = rows_of_lengths(lengths, rule, summarize_all)
    # Tables made under inference mode could not be saved for a later backward.
    with torch.inference_mode(False), operation():
        cu_seqlens = torch.tensor(boundaries, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
        tables = empty_tables(rows, len(lengths), device)
        write_tables(tables, cu_seqlens, rule, summarize_all)
    sizes = (heads.num_heads, heads.num_value_heads, heads.head_dim)
    return Plan(tuple(boundaries), boundaries[-1], *sizes, device, rule, rows.summaries, cu_seqlens, *tables)


def _empty_capacity_plan(
    max_documents: int | None, max_tokens: int | None, heads: PlanHeads, device: torch.device, rule: SegmentRule
) -> CapacityPlan:
    for name, value in (("max_documents", max_documents), ("max_tokens", max_tokens)):
        if not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
            raise UnsupportedProblemError(
                f"{name}={value!r}; a capacity plan needs both max_documents and max_tokens, from 1 to {MAX_TOKENS}"
            )
    rows = most_rows(max_documents, max_tokens, rule)
    device = _with_index(device)
    with torch.inference_mode(False):
        cu_seqlens = torch.zeros(max_documents + 1, dtype=torch.int64, device=device)
        limits = torch.full_like(cu_seqlens, max_tokens)
        limits[:1].zero_()  # an assignment would copy a number from the host
        tables = empty_tables(rows, max_documents, device)
    sizes = (heads.num_heads, heads.num_value_heads, heads.head_dim)
    return CapacityPlan(None, max_tokens, *sizes, device, rule, rows.summaries, cu_seqlens, *tables, limits)


def tables_of_batch(batch: int, tokens: int, num_value_heads: int, head_dim: int, device: torch.device) -> BatchTables:
    """Return what a call needs for ``batch`` documents of ``tokens`` tokens; nothing is copied from the device."""
    if batch * tokens > MAX_TOKENS:
        raise UnsupportedProblemError(f"a batch of {batch * tokens} tokens; at most {MAX_TOKENS} fit one call")
    rule = segment_rule(num_value_heads, head_dim)
    rows = rows_of_batch(batch, tokens, rule)
    cu_seqlens = torch.arange(batch + 1, dtype=torch.int64, device=device) * tokens
    tables = torch.ops.cake_kda_jit.pack_tables(
        cu_seqlens, rows.chunks, rows.segments, rule.segment_tokens, rule.minimum_tokens, rule.most_segments
    )
    return BatchTables(*tables, rows.summaries, batch, cu_seqlens)
