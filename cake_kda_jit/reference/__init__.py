"""Plain torch references of everything this package computes: FP64-capable, readable, independent of the kernels.

`recurrent_kda` is the definition; the chunk form, its hand-written backward, the segment summaries and the transfer
walk restate it in the algebra that the kernels use. Nothing here imports the rest of the package.
"""

from .chunk import KdaGradients, chunk_kda_reference, chunk_kda_reference_backward
from .conv import causal_conv1d_reference
from .gate import beta, beta_backward, gate, gate_backward, l2norm, l2norm_backward
from .inputs import KdaKeywords
from .recurrence import recurrent_kda
from .summary import segment_summary_reference, transfer_walk_reference

__all__ = [
    "KdaGradients",
    "KdaKeywords",
    "beta",
    "beta_backward",
    "causal_conv1d_reference",
    "chunk_kda_reference",
    "chunk_kda_reference_backward",
    "gate",
    "gate_backward",
    "l2norm",
    "l2norm_backward",
    "recurrent_kda",
    "segment_summary_reference",
    "transfer_walk_reference",
]
