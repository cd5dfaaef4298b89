"""``chunk_forward``: the whole forward of one pack, chunk by chunk (cpu family)."""

from __future__ import annotations

from ..record import Field, Program, cpu_entry
from .attention_fields import INPUT_POINTERS, INPUT_STRIDES, SIZES, TRANSFORMS
from .common import DTYPES, HEAD_DIMS, cpu_attention_record

ENTRY = cpu_entry(
    INPUT_POINTERS
    + (
        Field("o", "ptr", "[T, HV, V] contiguous, dtype of q"),
        Field("final_state", "ptr", "[N, HV, K, V] fp32 or null"),
        Field("chunk_states", "ptr", "[chunks, HV, K, V] fp32 state entering each chunk, or null"),
    )
    + INPUT_STRIDES
    + SIZES
    + TRANSFORMS
)

PROGRAM = Program(
    name="chunk_forward",
    summary="gate, decays, delta rule and output of every document, one task per (document, value head)",
    records=tuple(cpu_attention_record("chunk_forward", ENTRY, dtype, k) for dtype in DTYPES for k in HEAD_DIMS),
    bytes_note="bf16, K = V = 128, H = HV, per token-head: 1,282 B, and 1,024 B where chunk states are kept",
)
