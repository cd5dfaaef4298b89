"""Launches of a CUDA record and of its cpu twin on the same values, so that their outputs can be compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
import torch
from torch import Tensor

from cake_kda_jit.bench.problems import relative_error
from cake_kda_jit.record import Record
from cake_kda_jit.runtime.device import arch_of_device
from cake_kda_jit.runtime.load import get_kernel

from ..programs.pipeline import BAD_BLOCKS, FUSED, Pack, launch, make_pack, make_tables, record_of

VARIANTS = ("bf16_k64", "bf16_k128", "fp16_k128")
# What a library refuses: (fields, message). CUDA records have no num_threads; both scans share the rest.
BAD_BLOCKS_ON_DEVICE = {name: case for name, case in BAD_BLOCKS.items() if name != "no threads"}
BAD_SCANS = BAD_BLOCKS_ON_DEVICE | {
    "no ke": ({"ke": None}, "ke is null"),
    "no values": ({"v": None}, "v is null"),
    "no segments": ({"segment_table": None}, "segment_table is null"),
    "negative segments": ({"num_segments": -1}, "num_segments is -1"),
    "too many segments": ({"num_segments": 2**31}, "at most 2.31 - 1 CTAs"),
    "interval": ({"checkpoint_chunks": 0}, "checkpoint_chunks is 0"),
    "misaligned": ({"kg": torch.zeros(4 * 2 * 64 * 64 + 1, dtype=torch.bfloat16)[1:]}, "multiple of 16"),
}


def device_record(program: str, variant: str, family: str = "smxx") -> Record:
    """The CUDA record whose cpu twin is called ``variant``."""
    records = import_module(f"cake_kda_jit.programs.{program}").PROGRAM.records
    name = variant.removesuffix("_tiles_bf16")
    return next(record for record in records if record.variant == name and record.family == family)


def cuda_families(program: str) -> tuple[str, ...]:
    """The CUDA families that the program has."""
    records = import_module(f"cake_kda_jit.programs.{program}").PROGRAM.records
    return tuple(dict.fromkeys(record.family for record in records if record.family != "cpu"))


def device_has(family: str) -> bool:
    """Whether the device can run a family."""
    return family in arch_of_device(torch.device("cuda", 0)).families


def on_device(tensor: Tensor) -> Tensor:
    """The tensor with its strides, and with what its memory holds between its elements."""
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).cuda()
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def launch_on_device(
    program: str, variant: str, values: dict[str, object], outputs: dict[str, Tensor], *, family: str = "smxx"
) -> None:
    """Launch the family's record with copies of the tensors; the outputs come back in place."""
    record = device_record(program, variant, family)
    moved = {name: on_device(value) if isinstance(value, Tensor) else value for name, value in values.items()}
    fields = {field.name for field in record.entry.fields}
    addresses = {
        name: value.data_ptr() if isinstance(value, Tensor) else value
        for name, value in moved.items()
        if name in fields
    }
    get_kernel(record, arch_of_device(torch.device("cuda", 0))).launch(addresses)
    torch.cuda.synchronize()
    for name, output in outputs.items():
        if values[name] is not None:
            output.copy_(moved[name])


def launcher_fixture(program: str) -> Callable:
    """A fixture that launches on the device, once for each CUDA family of a program; others than the device's skip."""

    @pytest.fixture(params=cuda_families(program))
    def launcher(request):
        if not device_has(request.param):
            pytest.skip(f"this device has no family {request.param}")
        return partial(launch_on_device, family=request.param)

    return launcher


def launch_twin(program: str, variant: str, values: dict[str, object], outputs: dict[str, Tensor]) -> None:
    """Launch the cpu record that has the same tiles."""
    launch(record_of(program, variant), values)


def make_weak_pack(lengths, variant: str = "bf16_k128", *, strength: float, **options) -> Pack:
    """Ready gates of a share of their strength: a state forgets little, and carries the roundings of many chunks."""
    pack = make_pack(lengths, variant, **FUSED | {"gate_form": "ready"} | options)
    pack.g.mul_(strength)
    return pack


def document_of(pack: Pack, document: int) -> Pack:
    """One document of an uncut pack, alone."""
    boundaries = pack.boundaries()
    rows = slice(boundaries[document], boundaries[document + 1])
    own = {name: getattr(pack, name)[rows] for name in ("q", "k", "v", "g", "beta", "do")}
    lengths = (pack.lengths[document],)
    initial_state = pack.initial_state[document : document + 1]
    return replace(pack, **own, lengths=lengths, tables=make_tables(lengths), initial_state=initial_state)


def bits(tensor: Tensor) -> Tensor:
    """The tensor's elements as integers: NaN equals itself, and 0 does not equal -0."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_close(name: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    """NaN in the same places, and every matrix of the last two dimensions within a relative error."""
    assert torch.equal(found.isnan(), expected.isnan()), f"{name}: other elements were written"
    found, expected = (x.double().nan_to_num().reshape(-1, *x.shape[-2:]) for x in (found, expected))
    scale = expected.norm() / max(1, len(expected)) ** 0.5
    for index, (one, other) in enumerate(zip(found, expected)):
        error = (one - other).norm() / torch.maximum(other.norm(), scale).clamp_min(1e-30)
        assert error <= tolerance, (name, index, error.item(), relative_error(found, expected))
