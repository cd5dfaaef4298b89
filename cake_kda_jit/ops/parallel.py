"""What an operation needs of a ``cp_context``. The contexts themselves are in ``cp``, which builds on this package."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ..errors import UnsupportedProblemError


class ParallelContext(ABC):
    """The ranks that share a pack, seen from one of them; ``num_documents`` N counts those of the whole pack."""

    num_documents: int

    @abstractmethod
    def check_tokens(self, name: str, tensor: torch.Tensor) -> None:
        """Raise PlanMismatchError unless ``tensor`` ``[1, T, ...]`` has this rank's tokens."""

    @abstractmethod
    def attention(
        self, tensors: tuple[torch.Tensor | None, ...], transforms: tuple, *, output_final_state: bool, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ``chunk_kda`` on checked inputs, those of its operator without the plan's tables and options."""

    @abstractmethod
    def convolution(
        self, tensors: tuple[torch.Tensor | None, ...], *, use_silu: bool, output_final_state: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ``causal_conv1d`` on checked x, weight, bias, initial_state."""


def check_context(cp_context: object, tensor: torch.Tensor, **others: object) -> ParallelContext | None:
    """Return the context, None without one; raises for what is none, and for arguments that it rules out."""
    if cp_context is None:
        return None
    if not isinstance(cp_context, ParallelContext):
        raise UnsupportedProblemError(
            f"cp_context is {type(cp_context).__name__}; give KcpContext(partition, group), or None for one rank"
        )
    for name, value in others.items():
        if value is not None:
            raise UnsupportedProblemError(
                f"{name} is given beside cp_context, which has its own; leave {name} out, or set it where the context "
                "is made"
            )
    if tensor.shape[0] != 1:
        raise UnsupportedProblemError(f"B = {tensor.shape[0]} with cp_context; a rank's tokens are one sequence, B = 1")
    return cp_context
