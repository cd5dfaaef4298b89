"""``transfer_walk``: carry the state through affine summaries, S_in[f+1] = M_f S_in[f] + B_f, at FP32 accuracy.

Tensor cores multiply bf16 or TF32 numbers, so each fp32 operand is split into parts whose products are summed:
``templates/macros/split_products.jinja`` lists the pairs, smallest first. One library holds K = V = 64 and 128.

The families sum in different orders, so their bits differ; within one, the value width changes none.
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
# Of the family sm90, in several widths: ops/select takes the one that fills the processors where none is named.
SM90_FORMS = {
    "bf16x3_hw32": ("bf16x3", 6, 32, True),
    "bf16x3_hw64": ("bf16x3", 6, 64, True),
    "bf16x3": ("bf16x3", 6, 128, True),
    "tf32_hilo_hw64": ("tf32", 4, 64, False),
    "tf32_hilo": ("tf32", 4, 128, False),
    "tf32_hilo_three_mma_hw64": ("tf32", 3, 64, False),
    "tf32_hilo_three_mma": ("tf32", 3, 128, False),
    "tf32_hilo_plain_tf32_hw64": ("tf32", 1, 64, False),
    "tf32_hilo_plain_tf32": ("tf32", 1, 128, False),
}
SM90_WIDTHS = {32: "bf16x3_hw32", 64: "bf16x3_hw64", 128: "bf16x3"}
FAMILY_FORMS = {"cpu": FORMS, "smxx": FORMS, "sm90": SM90_FORMS}
TEMPLATES = {
    "cpu": "cpu/transfer_walk.cpp.jinja",
    "smxx": "smxx/transfer_walk.cu.jinja",
    "sm90": "sm90/transfer_walk.cu.jinja",
}
# A warpgroup that splits M for two others is the faster form at full width, and the only one in TF32.
PRODUCERS_TEMPLATE = "sm90/transfer_walk_producers.cu.jinja"
PRECISION_MODES = ("tf32_hilo", "tf32_hilo_three_mma", "tf32_hilo_plain_tf32")


def has_producers(family: str, split: str, value_width: int) -> bool:
    """Return whether the form is the one whose M is split by a warpgroup of its own."""
    return family == "sm90" and (split == "tf32" or value_width == 128)


def shared_memory_bytes(family: str, split: str, num_terms: int, value_width: int) -> int:
    """Return what one CTA needs at least, at K = 128: the parts of S; in sm90 its columns of B and tiles of M too.

    smxx pads rows to keep banks apart, sm90 exchanges columns. Up to 64 columns sm90 has two buffers for the parts and
    all of M under way. With producers: eight slots with parts of M and two barriers each, four or eight groups of 2 KiB
    of M as it is for each of four warps, and B.
    """
    if family == "cpu":
        return 0
    if has_producers(family, split, value_width):
        part_bytes = 3 * 2 if split == "bf16x3" else 4 * min(num_terms, 2)
        groups = 4 if part_bytes * value_width > 6 * 128 else 8
        return 8 * (128 * 16 * part_bytes + 16) + 4 * groups * 2048 + 128 * value_width * 4
    if family == "sm90":
        return 128 * (value_width * (3 * 2 * 2 + 4) + 128 * 4)
    of_64_columns = 3 * 128 * (64 + 8) * 2 if split == "bf16x3" else 64 * (128 + 8) * 4
    return value_width // 64 * of_64_columns


def _archs(family: str, shared_bytes: int) -> tuple[str, ...]:
    if family == "cpu":
        return CPU_ARCHES
    fitting = (ARCHES[name] for name in CUDA_ARCHES if ARCHES[name].shared_memory_bytes >= shared_bytes)
    return tuple(arch.name for arch in fitting if family in arch.families)


def _record(variant: str, family: str) -> Record:
    split, num_terms, value_width, shipped = FAMILY_FORMS[family][variant]
    is_cpu = family == "cpu"
    shared_bytes = shared_memory_bytes(family, split, num_terms, value_width)
    return Record(
        program="transfer_walk",
        variant=variant,
        family=family,
        params=make_params(split=split, num_terms=num_terms, value_width=value_width),
        archs=_archs(family, shared_bytes),
        template=PRODUCERS_TEMPLATE if has_producers(family, split, value_width) else TEMPLATES[family],
        entry=CPU_ENTRY if is_cpu else CUDA_ENTRY,
        shipped=shipped,
        limits=Limits(max_spill_bytes=0 if shipped and not is_cpu else None, shared_memory_bytes=shared_bytes),
    )


PROGRAM = Program(
    name="transfer_walk",
    summary="states entering every fragment of every chain, from the fragments' affine summaries",
    records=tuple(_record(variant, family) for family, forms in FAMILY_FORMS.items() for variant in forms),
    bytes_note="per (fragment, head) at K = V = 128: M 64 KiB per CTA pass, B 64 KiB, entry 64 KiB",
)
