"""What an operation needs of a ``cp_context``. The contexts themselves are in ``cp``, which builds on this package."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from ..errors import UnsupportedProblemError
from . import checks
from .keys import Known, can_remember, key_of


class ParallelContext(ABC):
    """The ranks that share a pack, seen from one of them; ``num_documents`` N counts those of the whole pack."""

    num_documents: int
    checked: Known
    """The transforms of calls of ``chunk_kda`` that need no check again, by their keys."""

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

    @abstractmethod
    def short_convolutions(
        self, rows: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Run ``causal_conv1d`` with SiLU on checked q, k and v, of as many taps each, with one exchange."""


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


def find_checked(cp_context: object, asked: tuple) -> tuple | None:
    """Return the transforms of a call that was checked, asked for as of ``Known.find``; None for no context either."""
    return cp_context.checked.find(*asked) if isinstance(cp_context, ParallelContext) else None


def remember_checked(cp_context: ParallelContext, asked: tuple | None, tensors: Sequence, transforms: tuple) -> None:
    """Remember the transforms of a call that was checked: not without a key, or if a tensor was copied for the call."""
    if asked is None:
        return
    key, given = key_of(*asked), asked[2]
    if can_remember(key, given) and all(one is other for one, other in zip(given, tensors)):
        cp_context.checked.keep(key, transforms)


def attend_parallel(
    cp_context: ParallelContext, tensors: tuple, transforms: tuple, output_final_state: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return o and the final states, None unless wanted, of checked tensors."""
    keeps = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)
    o, final_state = cp_context.attention(tensors, transforms, output_final_state=output_final_state, keep=keeps)
    return o, final_state if output_final_state else None


def short_convolutions(
    rows: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], cp_context: ParallelContext, **others: object
) -> tuple[torch.Tensor, ...] | None:
    """Return q, k and v ``[1, T, D]``, each through ``causal_conv1d`` with its weight ``[D, W]`` and SiLU.

    They share an exchange between the ranks. Errors are those of ``causal_conv1d``, which rule out ``others``. Returns
    None where dtypes or W differ: call them one by one.
    """
    for x, weight in zip(rows, weights):
        checks.check_convolution(x, weight, None)
        checks.check_no_transform("causal_conv1d", x, weight)
        check_context(cp_context, x, **others).check_tokens("x", x)
    kinds = {(x.dtype, x.device, weight.dtype, weight.shape[1]) for x, weight in zip(rows, weights)}
    if len(kinds) > 1:
        return None
    return cp_context.short_convolutions(rows, [weight.contiguous() for weight in weights])
