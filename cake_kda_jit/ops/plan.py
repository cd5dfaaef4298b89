"""Plans: all that depends on a pack of documents, made once and reused by every layer, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch

from ..errors import UnsupportedProblemError
from .problem import CHUNK_TOKENS

HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class Plan:
    """Tables of one pack. Made by ``make_plan``; immutable, hashable, picklable.

    ``boundaries`` are the N + 1 document boundaries in tokens; ``cu_seqlens`` and ``chunk_offsets`` are the same and
    each document's first chunk as int64 tensors ``[N + 1]`` on ``device``.
    """

    boundaries: tuple[int, ...]
    num_heads: int
    num_value_heads: int
    head_dim: int
    device: torch.device
    cu_seqlens: torch.Tensor = field(compare=False, repr=False)
    chunk_offsets: torch.Tensor = field(compare=False, repr=False)
    num_chunks: int = 0

    @property
    def num_documents(self) -> int:
        """N, empty documents included."""
        return len(self.boundaries) - 1

    @property
    def num_tokens(self) -> int:
        """T, the pack's length."""
        return self.boundaries[-1]


def check_boundaries(boundaries: list[int], num_tokens: int | None = None) -> None:
    """Raise UnsupportedProblemError unless boundaries start at 0, never decrease and end at ``num_tokens``."""
    if not boundaries or boundaries[0] != 0:
        given = boundaries[0] if boundaries else "nothing"
        raise UnsupportedProblemError(f"cu_seqlens starts with {given}; it must start with 0")
    for index, (start, end) in enumerate(zip(boundaries, boundaries[1:])):
        if end < start:
            raise UnsupportedProblemError(
                f"cu_seqlens[{index + 1}] = {end} is below cu_seqlens[{index}] = {start}; "
                "document boundaries must never decrease"
            )
    if num_tokens is not None and boundaries[-1] != num_tokens:
        raise UnsupportedProblemError(
            f"cu_seqlens ends at {boundaries[-1]} but the inputs hold {num_tokens} tokens; "
            "the last boundary must equal the number of tokens"
        )


def boundaries_of(cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None = None) -> list[int]:
    """Return cu_seqlens as integers, from the host copy if there is one; a CUDA tensor costs one synchronising copy."""
    for name, value in (("cu_seqlens", cu_seqlens), ("cu_seqlens_cpu", cu_seqlens_cpu)):
        if value is None:
            continue
        if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int32, torch.int64) or value.dim() != 1:
            given = f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value)
            raise UnsupportedProblemError(f"{name} is {given}; give a one-dimensional int32 or int64 tensor [N + 1]")
    if cu_seqlens_cpu is None:
        return cu_seqlens.tolist()
    if cu_seqlens_cpu.device.type != "cpu" or cu_seqlens_cpu.shape != cu_seqlens.shape:
        raise UnsupportedProblemError(
            f"cu_seqlens_cpu is {list(cu_seqlens_cpu.shape)} on {cu_seqlens_cpu.device}; it "
            f"must be the CPU copy of cu_seqlens {list(cu_seqlens.shape)}"
        )
    return cu_seqlens_cpu.tolist()


def make_plan(
    cu_seqlens: torch.Tensor,
    *,
    num_heads: int,
    num_value_heads: int | None = None,
    head_dim: int = 128,
    device: torch.device | str,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> Plan:
    """Return the tables of a pack of documents, to be passed to every call on that pack.

    ``cu_seqlens`` int32 or int64 ``[N + 1]`` in tokens, copied here, so that a later change of the tensor harms
    nothing; ``num_heads`` H, ``num_value_heads`` HV (default H), ``head_dim`` K = V. Calls with a plan make no copy to
    the host. Raises UnsupportedProblemError for boundaries or sizes that no kernel takes.
    """
    boundaries = boundaries_of(cu_seqlens, cu_seqlens_cpu)
    check_boundaries(boundaries)
    return plan_of_boundaries(boundaries, num_heads, num_value_heads or num_heads, head_dim, torch.device(device))


def plan_of_boundaries(
    boundaries: list[int], num_heads: int, num_value_heads: int, head_dim: int, device: torch.device
) -> Plan:
    """Return the plan of checked boundaries; raises UnsupportedProblemError for sizes that no kernel takes."""
    if num_heads < 1 or num_value_heads < 1 or num_value_heads % num_heads:
        raise UnsupportedProblemError(
            f"num_heads={num_heads}, num_value_heads={num_value_heads}; both must be at least "
            "1 and the value heads a multiple of the heads"
        )
    if head_dim not in HEAD_DIMS:
        raise UnsupportedProblemError(f"head_dim={head_dim}; K = V must be one of {HEAD_DIMS}")
    lengths = [end - start for start, end in zip(boundaries, boundaries[1:])]
    chunk_offsets = list(accumulate((-(-length // CHUNK_TOKENS) for length in lengths), initial=0))
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    tables = torch.tensor([boundaries, chunk_offsets], dtype=torch.int64).to(device)
    return Plan(
        tuple(boundaries), num_heads, num_value_heads, head_dim, device, tables[0], tables[1], chunk_offsets[-1]
    )
