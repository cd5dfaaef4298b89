"""``chunk_backward``: every gradient of one pack from the kept chunk states (cpu family)."""

from __future__ import annotations

from ..record import Field, Program, cpu_entry
from .attention_fields import INPUT_POINTERS, INPUT_STRIDES, SIZES, TRANSFORMS
from .common import DTYPES, HEAD_DIMS, cpu_attention_record

ENTRY = cpu_entry(
    INPUT_POINTERS
    + (
        Field("chunk_states", "ptr", "[chunks, HV, K, V] fp32 state entering each chunk, from chunk_forward"),
        Field("do_", "ptr", "[T, HV, V] gradient of o, dtype of q"),
        Field("dfinal_state", "ptr", "[N, HV, K, V] fp32 or null for zeros"),
        Field("dq", "ptr", "[T, H, K] contiguous, dtype of q"),
        Field("dk", "ptr", "[T, H, K] contiguous, dtype of q"),
        Field("dv", "ptr", "[T, HV, V] contiguous, dtype of q"),
        Field("dg", "ptr", "[T, HV, K] contiguous, dtype of g"),
        Field("dbeta", "ptr", "[T, HV] contiguous, dtype of beta"),
        Field("dA_log", "ptr", "[HV] fp32 or null"),
        Field("ddt_bias", "ptr", "[HV, K] fp32 or null"),
        Field("dinitial_state", "ptr", "[N, HV, K, V] fp32 or null"),
        Field("workspace", "ptr", "partial sums of dA_log and ddt_bias per document"),
    )
    + INPUT_STRIDES
    + (Field("do_strides", "strides(3)", "elements per token, head, channel"),)
    + SIZES
    + (Field("workspace_bytes", "i64", "N * HV * (K + 1) * 4 where a parameter gradient is wanted"),)
    + TRANSFORMS
)


def workspace_bytes(num_documents: int, num_value_heads: int, head_dim: int) -> int:
    """Return the bytes of workspace that parameter gradients need: one fp32 row per (document, value head)."""
    return num_documents * num_value_heads * (head_dim + 1) * 4


PROGRAM = Program(
    name="chunk_backward",
    summary="gradients of q, k, v, g, beta, A_log, dt_bias and initial_state, one task per (document, key head)",
    records=tuple(cpu_attention_record("chunk_backward", ENTRY, dtype, k) for dtype in DTYPES for k in HEAD_DIMS),
    bytes_note="bf16, K = V = 128, H = HV, per token-head: 2,306 B read, 1,026 B written",
)
