"""What several programs share: dtype names, and how a variant is named from its parameters."""

from __future__ import annotations

from ..arch import ARCHES, CPU_ARCHES, CUDA_ARCHES
from ..record import Entry, Field, Limits, Record, make_params

HEAD_DIMS = (64, 128)
DTYPES = ("bf16", "fp16", "fp32")
ZERO_SPILLS = Limits()
CUDA_PROBLEMS = (("bf16", 64), ("bf16", 128), ("fp16", 128))
"""The (dtype, K = V) that CUDA records ship for."""


def variant_name(dtype: str, head_dim: int) -> str:
    """Return the variant of a program that is compiled per dtype and head size, e.g. ``bf16_k128``."""
    return f"{dtype}_k{head_dim}"


def cpu_tile_records(program: str, entry: Entry) -> tuple[Record, ...]:
    """Return the cpu records of a pipeline program, one per dtype and K = V.

    The shipped ones keep their tiles in fp32. The test-only twins keep them in bf16, as the CUDA programs do, so that a
    CUDA program can be compared with its twin on the very same tiles.
    """
    shipped = [_cpu_tile_record(program, entry, dtype, k, "fp32") for dtype in DTYPES for k in HEAD_DIMS]
    twins = [_cpu_tile_record(program, entry, dtype, k, "bf16") for dtype, k in CUDA_PROBLEMS]
    return (*shipped, *twins)


def _cpu_tile_record(program: str, entry: Entry, dtype: str, head_dim: int, tile_dtype: str) -> Record:
    is_twin = tile_dtype == "bf16"
    return Record(
        program=program,
        variant=variant_name(dtype, head_dim) + ("_tiles_bf16" if is_twin else ""),
        family="cpu",
        params=make_params(dtype=dtype, head_dim=head_dim, tile_dtype=tile_dtype),
        archs=CPU_ARCHES,
        template=f"cpu/{program}.cpp.jinja",
        entry=entry,
        shipped=not is_twin,
        limits=Limits(max_spill_bytes=None),
    )


def smxx_tile_records(program: str, fields: tuple[Field, ...], limits: Limits = ZERO_SPILLS) -> tuple[Record, ...]:
    """Return the shipped smxx records of a pipeline program: tiles are bf16, whatever the dtype of the inputs."""
    return tuple(
        Record(
            program=program,
            variant=variant_name(dtype, head_dim),
            family="smxx",
            params=make_params(dtype=dtype, head_dim=head_dim, tile_dtype="bf16"),
            archs=CUDA_ARCHES,
            template=f"smxx/{program}.cu.jinja",
            entry=Entry(fields),
            limits=limits,
        )
        for dtype, head_dim in CUDA_PROBLEMS
    )


def sm90_tile_records(program: str, fields: tuple[Field, ...], limits: Limits = ZERO_SPILLS) -> tuple[Record, ...]:
    """Return the sm90 records of a pipeline program: those of smxx, on the targets that have this family."""
    return tuple(
        Record(
            program=program,
            variant=variant_name(dtype, head_dim),
            family="sm90",
            params=make_params(dtype=dtype, head_dim=head_dim, tile_dtype="bf16"),
            archs=tuple(name for name in CUDA_ARCHES if "sm90" in ARCHES[name].families),
            template=f"sm90/{program}.cu.jinja",
            entry=Entry(fields),
            limits=limits,
        )
        for dtype, head_dim in CUDA_PROBLEMS
    )
