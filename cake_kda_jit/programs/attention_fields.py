"""The argument fields that the chunk programs share: inputs, transforms, the pack and the sizes.

Codes in the argument block: ``*_dtype`` 0 bf16, 1 fp16, 2 fp32; ``gate_form`` 0 ready, 1 softplus, 2 bounded;
``beta_form`` 0 ready, 1 sigmoid, 2 twice sigmoid.
"""

from __future__ import annotations

from ..record import Field

DTYPE_CODES = {"bf16": 0, "fp16": 1, "fp32": 2}
GATE_FORMS = {"ready": 0, "softplus": 1, "bounded": 2}
BETA_FORMS = {"ready": 0, "sigmoid": 1, "two_sigmoid": 2}

INPUT_POINTERS = (
    Field("q", "ptr", "[T, H, K] queries"),
    Field("k", "ptr", "[T, H, K] keys"),
    Field("v", "ptr", "[T, HV, V] values"),
    Field("g", "ptr", "[T, HV, K] gate: ready (natural log of the decay) or raw"),
    Field("beta", "ptr", "[T, HV] beta: ready or raw"),
    Field("A_log", "ptr", "[HV] fp32 or null"),
    Field("dt_bias", "ptr", "[HV, K] fp32 or null"),
    Field("initial_state", "ptr", "[N, HV, K, V] fp32 or null for zeros"),
    Field("cu_seqlens", "ptr", "[N + 1] int64: first token of each document"),
    Field("chunk_offsets", "ptr", "[N + 1] int64: first chunk of each document"),
)

INPUT_STRIDES = (
    Field("q_strides", "strides(3)", "elements per token, head, channel"),
    Field("k_strides", "strides(3)", "elements per token, head, channel"),
    Field("v_strides", "strides(3)", "elements per token, head, channel"),
    Field("g_strides", "strides(3)", "elements per token, head, channel"),
    Field("beta_strides", "strides(2)", "elements per token, head"),
)

SIZES = (Field("num_documents", "i64", "N"),)

TRANSFORMS = (
    Field("scale", "f32", "factor of q S and of Aqk"),
    Field("lower_bound", "f32", "bound of the bounded gate, in [-5, 0)"),
    Field("num_heads", "i32", "H"),
    Field("num_value_heads", "i32", "HV, a multiple of H"),
    Field("g_dtype", "i32", "0 bf16, 1 fp16, 2 fp32"),
    Field("beta_dtype", "i32", "0 bf16, 1 fp16, 2 fp32"),
    Field("gate_form", "i32", "0 ready, 1 softplus, 2 bounded"),
    Field("beta_form", "i32", "0 ready, 1 sigmoid, 2 twice sigmoid"),
    Field("use_qk_l2norm", "i32", "1: q and k are divided by their norm"),
)
