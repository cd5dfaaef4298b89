"""Plain torch references of everything this package computes: FP64-capable, readable, independent of the kernels.

`recurrent_kda` is the definition; the chunk form, its hand-written backward, the segment summaries and the transfer
walk restate it in the algebra that the kernels use. Nothing here imports the rest of the package.
"""

from .chunk import KdaGradients, chunk_kda_reference, chunk_kda_reference_backward
from .conv import causal_conv1d_reference
from .gate import beta, beta_backward, gate, gate_backward, l2norm, l2norm_backward
from .inputs import KdaKeywords
from .norm import gated_rms_norm_reference
from .recurrence import recurrent_kda
from .summary import segment_summary_reference, transfer_walk_reference
from .sums import ParameterNorms, parameter_norms_reference

__all__ = [
    "KdaGradients",
    "KdaKeywords",
    "ParameterNorms",
    "beta",
    "beta_backward",
    "causal_conv1d_reference",
    "chunk_kda_reference",
    "chunk_kda_reference_backward",
    "gate",
    "gate_backward",
    "gated_rms_norm_reference",
    "l2norm",
    "l2norm_backward",
    "parameter_norms_reference",
    "recurrent_kda",
    "segment_summary_reference",
    "transfer_walk_reference",
]
