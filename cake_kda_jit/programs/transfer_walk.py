"""``transfer_walk``: carry the state through affine summaries, S_in[f+1] = M_f S_in[f] + B_f, at FP32 accuracy.

Tensor cores multiply bf16 or TF32 numbers, so each fp32 operand is split into parts whose products are summed:
``templates/macros/split_products.jinja`` lists the pairs, smallest first. One library holds K = V = 64 and 128.
"""

from __future__ import annotations

from ..arch import ARCHES, CPU_ARCHES, CUDA_ARCHES
from ..record import Entry, Field, Limits, Program, Record, cpu_entry, make_params

FIELDS = (
    Field("M", "ptr", "[F, HV, K, K] fp32: M[i, j] maps input row j to output row i"),
    Field("B", "ptr", "[F, HV, K, V] fp32; the state gradients D when transposed"),
    Field("initial", "ptr", "[N, HV, K, V] fp32 or null for zeros; transposed: the gradient leaving each chain's end"),
    Field("offsets", "ptr", "[N + 1] int64: first fragment of each chain"),
    Field("entry", "ptr", "[F, HV, K, V] fp32: what enters each fragment, in walking order"),
    Field("exit", "ptr", "[N, HV, K, V] fp32: what leaves each chain; null: not wanted"),
    Field("num_chains", "i64", "N"),
    Field("num_value_heads", "i32", "HV"),
    Field("first_head", "i32", "first value head walked"),
    Field("num_block_heads", "i32", "value heads walked; the others are neither read nor written"),
    Field("head_dim", "i32", "K = V: 64 or 128"),
    Field("transpose", "i32", "1: walk from each chain's end with M transposed"),
)

CUDA_ENTRY = Entry(FIELDS)
CPU_ENTRY = cpu_entry(FIELDS)

# (splitting, terms kept, value columns per CTA, shipped). precision_mode 0, 1, 2 are tf32_hilo and the two below it.
FORMS = {
    "bf16x3_hw64": ("bf16x3", 6, 64, True),
    "bf16x3": ("bf16x3", 6, 128, False),
    "tf32_hilo": ("tf32", 4, 128, False),
    "tf32_hilo_three_mma": ("tf32", 3, 128, False),
    "tf32_hilo_plain_tf32": ("tf32", 1, 128, False),
}
PRECISION_MODES = ("tf32_hilo", "tf32_hilo_three_mma", "tf32_hilo_plain_tf32")


def shared_memory_bytes(split: str, value_width: int) -> int:
    """Return what one CTA needs at least, at K = 128: the parts of S, with the padding that keeps banks apart."""
    of_64_columns = 3 * 128 * (64 + 8) * 2 if split == "bf16x3" else 64 * (128 + 8) * 4
    return value_width // 64 * of_64_columns


def _record(variant: str, family: str) -> Record:
    split, num_terms, value_width, shipped = FORMS[variant]
    is_cpu = family == "cpu"
    shared_bytes = 0 if is_cpu else shared_memory_bytes(split, value_width)
    cuda_archs = tuple(name for name in CUDA_ARCHES if ARCHES[name].shared_memory_bytes >= shared_bytes)
    return Record(
        program="transfer_walk",
        variant=variant,
        family=family,
        params=make_params(split=split, num_terms=num_terms, value_width=value_width),
        archs=CPU_ARCHES if is_cpu else cuda_archs,
        template="cpu/transfer_walk.cpp.jinja" if is_cpu else "smxx/transfer_walk.cu.jinja",
        entry=CPU_ENTRY if is_cpu else CUDA_ENTRY,
        shipped=shipped,
        limits=Limits(max_spill_bytes=0 if shipped and not is_cpu else None, shared_memory_bytes=shared_bytes),
    )


PROGRAM = Program(
    name="transfer_walk",
    summary="states entering every fragment of every chain, from the fragments' affine summaries",
    records=tuple(_record(variant, family) for family in ("cpu", "smxx") for variant in FORMS),
    bytes_note="per (fragment, head) at K = V = 128: M 64 KiB per CTA pass, B 64 KiB, entry 64 KiB",
)
