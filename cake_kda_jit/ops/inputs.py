"""The tensors and transforms of one packed attention call, as the programs take them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ..runtime.device import arch_of_device
from .checks import DTYPE_NAMES
from .problem import AttentionProblem, resolve_scale
from .recorder import AT_ONCE, Executor


def joined(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a tensor whose dimensions before the last ``rank - 1`` can be counted as one, of tokens.

    It is the given one wherever its strides allow that: no view, which autograd would have to differentiate.
    """
    if tensor.dim() == rank or tensor.shape[0] == 1 or tensor.stride(0) == tensor.shape[1] * tensor.stride(1):
        return tensor
    return tensor.contiguous()


@dataclass(frozen=True)
class Inputs:
    """q, k ``[T, H, K]``, v ``[T, HV, V]``, g ``[T, HV, K]``, beta ``[T, HV]``; gate parameters fp32 or None.

    A batch dimension may stand before T if both can be counted as one.
    ``q`` or ``v`` may be None where only summaries are wanted. The rest are the plan's tables; ``num_summaries`` is the
    number of summary rows. ``has_spare_rows``: the pack may end before the tensors do; such rows of outputs are 0.
    ``executor`` runs the launches on them; under a ``Recorder`` they are operands.
    """

    q: torch.Tensor | None
    k: torch.Tensor
    v: torch.Tensor | None
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_state: torch.Tensor | None
    chunk_table: torch.Tensor
    segment_table: torch.Tensor
    summary_offsets: torch.Tensor
    num_summaries: int
    has_spare_rows: bool = False
    executor: Executor = AT_ONCE

    @cached_property
    def device(self) -> torch.device:
        """Of every tensor."""
        return self.k.device

    def empty_rows(self, like: torch.Tensor) -> torch.Tensor:
        """Return a contiguous output with a row per token: 0 where programs may write none, else not initialised."""
        return self.executor.empty(like.shape, like.dtype, self.device, is_zero=self.has_spare_rows)

    def empty_like(self, like: torch.Tensor | None) -> torch.Tensor | None:
        """Return a contiguous tensor that is not initialised, None for an absent one."""
        return None if like is None else self.empty(like.shape, like.dtype)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a contiguous tensor that is not initialised."""
        return self.executor.empty(shape, dtype, self.device)

    @cached_property
    def num_documents(self) -> int:
        """N."""
        return self.summary_offsets.shape[0] - 1

    @cached_property
    def num_heads(self) -> int:
        """H."""
        return self.k.shape[-2]

    @cached_property
    def num_value_heads(self) -> int:
        """HV."""
        return self.g.shape[-2]

    @cached_property
    def head_dim(self) -> int:
        """K = V."""
        return self.k.shape[-1]

    def state_shape(self) -> tuple[int, int, int, int]:
        """``[N, HV, K, V]``."""
        return (self.num_documents, self.num_value_heads, self.head_dim, self.head_dim)

    @cached_property
    def problem(self) -> AttentionProblem:
        """What must be solved, for ``select``."""
        arch = arch_of_device(self.device).name
        return AttentionProblem(arch, DTYPE_NAMES[self.k.dtype], self.num_heads, self.num_value_heads, self.head_dim)


@dataclass(frozen=True)
class Transforms:
    """What is done to the inputs before the recurrence; the two forms are keys of the programs' codes."""

    scale: float
    lower_bound: float | None
    use_qk_l2norm: bool
    gate_form: str
    beta_form: str


def transforms_of(
    head_dim: int,
    scale: float | None,
    lower_bound: float | None,
    use_qk_l2norm: bool,
    use_gate: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
) -> Transforms:
    """Return the transforms that the arguments of a call name, checked by now; raises for a scale that is none."""
    gate_form, beta_form = gate_form_of(use_gate, lower_bound), beta_form_of(use_beta_sigmoid, allow_neg_eigval)
    return Transforms(resolve_scale(scale, head_dim), lower_bound, use_qk_l2norm, gate_form, beta_form)


def gate_form_of(use_gate: bool, lower_bound: float | None) -> str:
    """Return the key of ``GATE_FORMS``."""
    if not use_gate:
        return "ready"
    return "softplus" if lower_bound is None else "bounded"


def beta_form_of(use_sigmoid: bool, allow_neg_eigval: bool) -> str:
    """Return the key of ``BETA_FORMS``."""
    if not use_sigmoid:
        return "ready"
    return "two_sigmoid" if allow_neg_eigval else "sigmoid"
