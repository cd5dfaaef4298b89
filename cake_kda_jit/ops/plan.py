"""Plans: all that depends on a pack of documents, made once and reused by every layer, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .. import config
from ..errors import UnsupportedProblemError
from ..runtime.device import arch_of_device
from ..runtime.launch import launch, operation
from .problem import CHUNK_TOKENS
from .select import SegmentRule, segment_rule, select_plain

HEAD_DIMS = (64, 128)
_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class Plan:
    """Tables of one pack. Made by ``make_plan``; immutable, hashable, picklable.

    ``boundaries`` are the N + 1 document boundaries in tokens, ``rule`` how documents are cut into segments. The tables
    are on ``device``: ``cu_seqlens`` int64 ``[N + 1]``, ``chunk_table`` and ``segment_table`` int32 ``[*, 4]``,
    ``summary_offsets`` int64 ``[N + 1]``.
    """

    boundaries: tuple[int, ...]
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

    @property
    def num_documents(self) -> int:
        """N, empty documents included."""
        return len(self.boundaries) - 1

    @property
    def num_tokens(self) -> int:
        """T, the pack's length."""
        return self.boundaries[-1]

    @property
    def num_chunks(self) -> int:
        """Chunks of 64 tokens, counted from each document's first token."""
        return self.chunk_table.shape[0]

    @property
    def num_segments(self) -> int:
        """Segments; a document has at least one."""
        return self.segment_table.shape[0]


def check_boundaries(boundaries: list[int], total: int | None = None, name: str = "cu_seqlens", unit: str = "tokens"):
    """Raise UnsupportedProblemError unless boundaries start at 0, never decrease and end at ``total`` units."""
    if not boundaries or boundaries[0] != 0:
        given = boundaries[0] if boundaries else "nothing"
        raise UnsupportedProblemError(f"{name} starts with {given}; it must start with 0")
    for index, (start, end) in enumerate(zip(boundaries, boundaries[1:])):
        if end < start:
            raise UnsupportedProblemError(
                f"{name}[{index + 1}] = {end} is below {name}[{index}] = {start}; boundaries must never decrease"
            )
    if total is not None and boundaries[-1] != total:
        raise UnsupportedProblemError(
            f"{name} ends at {boundaries[-1]} but the inputs hold {total} {unit}; the last boundary must equal their "
            "number"
        )
    if boundaries[-1] > _MAX_TOKENS:
        raise UnsupportedProblemError(f"a pack of {boundaries[-1]} {unit}; at most {_MAX_TOKENS} fit one call")


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
) -> Plan:
    """Return the tables of a pack of documents, to be passed to every call on that pack.

    ``cu_seqlens`` int32 or int64 ``[N + 1]`` in tokens, copied here, so that a later change of the tensor harms
    nothing; ``num_heads`` H, ``num_value_heads`` HV (default H), ``head_dim`` K = V. Calls with a plan make no copy to
    the host. ``segment_tokens`` cuts every longer document into segments of that many tokens, a multiple of 64, and 0
    cuts none; by default the rule depends on HV, V and each document's own length. Segments change time, and results
    by rounding only.

    Raises UnsupportedProblemError for boundaries or sizes that no kernel takes.
    """
    boundaries = boundaries_of(cu_seqlens, cu_seqlens_cpu)
    check_boundaries(boundaries)
    heads = PlanHeads(num_heads, num_heads if num_value_heads is None else num_value_heads, head_dim)
    rule = segment_rule(heads.num_value_heads, head_dim)
    if segment_tokens is not None:
        if (
            not isinstance(segment_tokens, int)
            or not 0 <= segment_tokens < _MAX_TOKENS
            or segment_tokens % CHUNK_TOKENS
        ):
            raise UnsupportedProblemError(f"segment_tokens={segment_tokens}; use 0 or a multiple of {CHUNK_TOKENS}")
        rule = SegmentRule(segment_tokens, segment_tokens + 1)
    return plan_of_boundaries(boundaries, heads, torch.device(device), rule)


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
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    lengths = [end - start for start, end in zip(boundaries, boundaries[1:])]
    num_chunks = sum(-(-length // CHUNK_TOKENS) for length in lengths)
    segments = [rule.num_segments(length) for length in lengths]
    num_summaries = sum(count for count in segments if count > 1 or summarize_all)
    # Tables made under inference mode could not be saved for a later backward.
    with torch.inference_mode(False):
        tables = {
            "cu_seqlens": torch.tensor(boundaries, dtype=torch.int64, device="cpu").to(device),
            "chunk_table": torch.empty((num_chunks, 4), dtype=torch.int32, device=device),
            "segment_table": torch.empty((sum(segments), 4), dtype=torch.int32, device=device),
            "summary_offsets": torch.zeros(len(boundaries), dtype=torch.int64, device=device),
        }
        if lengths:
            _pack_tables(tables, rule, summarize_all)
    return Plan(
        tuple(boundaries), heads.num_heads, heads.num_value_heads, heads.head_dim, device, rule, num_summaries, **tables
    )


def _pack_tables(tables: dict[str, torch.Tensor], rule: SegmentRule, summarize_all: bool) -> None:
    device = tables["cu_seqlens"].device
    chosen = select_plain("pack_tables", "int64", arch_of_device(device).name, config.read("FAMILY"))
    values = {name: table.data_ptr() for name, table in tables.items()}
    values |= {
        "num_documents": tables["cu_seqlens"].shape[0] - 1,
        "max_chunks": tables["chunk_table"].shape[0],
        "max_segments": tables["segment_table"].shape[0],
        "segment_tokens": rule.segment_tokens,
        "segment_minimum": rule.minimum_tokens,
        "summarize_all": int(summarize_all),
    }
    with operation():
        launch(chosen.record, chosen.reason, values, device)
