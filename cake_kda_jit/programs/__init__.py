"""One module per program: its argument fields, its parameters and its records. To add one, add its name here."""

from __future__ import annotations

PROGRAM_NAMES = (
    "chunk_grad",
    "chunk_prepare",
    "chunk_scan",
    "conv_backward",
    "conv_forward",
    "gated_norm_backward",
    "gated_norm_forward",
    "grad_scan",
    "pack_tables",
    "parameter_reduce",
    "segment_summary",
    "transfer_walk",
)
