"""One module per program: its argument fields, its parameters and its records. To add one, add its name here."""

from __future__ import annotations

PROGRAM_NAMES = (
    "chunk_backward",
    "chunk_forward",
    "conv_backward",
    "conv_forward",
    "transfer_walk",
)
