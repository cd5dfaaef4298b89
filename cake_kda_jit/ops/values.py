"""Turn tensors and options into the argument values that the chunk programs share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..programs.attention_fields import BETA_FORMS, DTYPE_CODES, GATE_FORMS
from ..runtime.device import arch_of_device
from .checks import DTYPE_NAMES
from .problem import AttentionProblem


@dataclass(frozen=True)
class Inputs:
    """The tensors of one packed attention call: q, k ``[T, H, K]``, v ``[T, HV, V]``, g ``[T, HV, K]``, beta ``[T,
    HV]``.

    Gate parameters are fp32 or None; ``cu_seqlens`` and ``chunk_offsets`` are the plan's tables.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_state: torch.Tensor | None
    cu_seqlens: torch.Tensor
    chunk_offsets: torch.Tensor

    @property
    def num_documents(self) -> int:
        """N."""
        return self.cu_seqlens.shape[0] - 1

    def state_shape(self) -> tuple[int, int, int, int]:
        """``[N, HV, K, V]``."""
        return (self.num_documents, self.v.shape[1], self.q.shape[2], self.v.shape[2])

    def problem(self) -> AttentionProblem:
        """What must be solved, for ``select``."""
        arch = arch_of_device(self.q.device).name
        return AttentionProblem(arch, DTYPE_NAMES[self.q.dtype], self.q.shape[1], self.v.shape[1], self.q.shape[2])


@dataclass(frozen=True)
class Transforms:
    """What is done to the inputs before the recurrence; the two forms are keys of the programs' codes."""

    scale: float
    lower_bound: float | None
    use_qk_l2norm: bool
    gate_form: str
    beta_form: str


def address(tensor: torch.Tensor | None) -> int | None:
    """Return a tensor's address, None (a null pointer) for an absent tensor."""
    return None if tensor is None else tensor.data_ptr()


def attention_values(inputs: Inputs, transforms: Transforms) -> dict[str, object]:
    """Return the values of the argument fields that the chunk programs share."""
    return {
        "q": inputs.q.data_ptr(),
        "k": inputs.k.data_ptr(),
        "v": inputs.v.data_ptr(),
        "g": inputs.g.data_ptr(),
        "beta": inputs.beta.data_ptr(),
        "A_log": address(inputs.A_log),
        "dt_bias": address(inputs.dt_bias),
        "initial_state": address(inputs.initial_state),
        "cu_seqlens": inputs.cu_seqlens.data_ptr(),
        "chunk_offsets": inputs.chunk_offsets.data_ptr(),
        "q_strides": inputs.q.stride(),
        "k_strides": inputs.k.stride(),
        "v_strides": inputs.v.stride(),
        "g_strides": inputs.g.stride(),
        "beta_strides": inputs.beta.stride(),
        "num_documents": inputs.num_documents,
        "scale": transforms.scale,
        "lower_bound": transforms.lower_bound or 0.0,
        "num_heads": inputs.q.shape[1],
        "num_value_heads": inputs.v.shape[1],
        "g_dtype": DTYPE_CODES[DTYPE_NAMES[inputs.g.dtype]],
        "beta_dtype": DTYPE_CODES[DTYPE_NAMES[inputs.beta.dtype]],
        "gate_form": GATE_FORMS[transforms.gate_form],
        "beta_form": BETA_FORMS[transforms.beta_form],
        "use_qk_l2norm": int(transforms.use_qk_l2norm),
    }
