"""The tensors and transforms of one packed attention call, as the programs take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..runtime.device import arch_of_device
from .checks import DTYPE_NAMES
from .problem import AttentionProblem


@dataclass(frozen=True)
class Inputs:
    """q, k ``[T, H, K]``, v ``[T, HV, V]``, g ``[T, HV, K]``, beta ``[T, HV]``; gate parameters fp32 or None.

    ``q`` or ``v`` may be None where only summaries are wanted. The rest are the plan's tables; ``num_summaries`` is the
    number of segments that have a summary row.
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

    @property
    def num_documents(self) -> int:
        """N."""
        return self.summary_offsets.shape[0] - 1

    @property
    def num_heads(self) -> int:
        """H."""
        return self.k.shape[1]

    @property
    def num_value_heads(self) -> int:
        """HV."""
        return self.g.shape[1]

    @property
    def head_dim(self) -> int:
        """K = V."""
        return self.k.shape[2]

    def state_shape(self) -> tuple[int, int, int, int]:
        """``[N, HV, K, V]``."""
        return (self.num_documents, self.num_value_heads, self.head_dim, self.head_dim)

    def problem(self) -> AttentionProblem:
        """What must be solved, for ``select``."""
        arch = arch_of_device(self.k.device).name
        return AttentionProblem(arch, DTYPE_NAMES[self.k.dtype], self.num_heads, self.num_value_heads, self.head_dim)


@dataclass(frozen=True)
class Transforms:
    """What is done to the inputs before the recurrence; the two forms are keys of the programs' codes."""

    scale: float
    lower_bound: float | None
    use_qk_l2norm: bool
    gate_form: str
    beta_form: str
