"""What several programs share: dtype names, and how a variant is named from its parameters."""

from __future__ import annotations

from ..arch import CPU_ARCHES
from ..record import Entry, Limits, Record, make_params

HEAD_DIMS = (64, 128)
DTYPES = ("bf16", "fp16", "fp32")


def variant_name(dtype: str, head_dim: int) -> str:
    """Return the variant of a program that is compiled per dtype and head size, e.g. ``bf16_k128``."""
    return f"{dtype}_k{head_dim}"


def cpu_attention_record(program: str, entry: Entry, dtype: str, head_dim: int) -> Record:
    """Return the cpu record of an attention program for one dtype and K = V = ``head_dim``."""
    return Record(
        program=program,
        variant=variant_name(dtype, head_dim),
        family="cpu",
        params=make_params(dtype=dtype, head_dim=head_dim),
        archs=CPU_ARCHES,
        template=f"cpu/{program}.cpp.jinja",
        entry=entry,
        limits=Limits(max_spill_bytes=None),
    )


def cpu_tile_record(program: str, entry: Entry, dtype: str, head_dim: int) -> Record:
    """Return the cpu record of a pipeline program: tiles are bf16, or fp32 for fp32 inputs."""
    return Record(
        program=program,
        variant=variant_name(dtype, head_dim),
        family="cpu",
        params=make_params(dtype=dtype, head_dim=head_dim, tile_dtype="fp32" if dtype == "fp32" else "bf16"),
        archs=CPU_ARCHES,
        template=f"cpu/{program}.cpp.jinja",
        entry=entry,
        limits=Limits(max_spill_bytes=None),
    )
