"""What a recorder makes of launches: places in memory, and addresses of every run."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cake_kda_jit import registry
from cake_kda_jit.ops.recorder import ALIGNMENT, Layout, Recorder, layout_of
from cake_kda_jit.runtime.load import Kernel
from cake_kda_jit.runtime.prepared import contiguous_strides

CPU = torch.device("cpu")
RECORD = registry().get("parameter_reduce", "fp32", "cpu")
POINTERS = [field.name for field in RECORD.entry.fields if field.kind == "ptr"]
NUMBERS = {field.name: 0 for field in RECORD.entry.fields if field.kind != "ptr" and field.name != "num_threads"}


@pytest.fixture
def blocks(monkeypatch):
    """The pointers of each launch of a run; nothing is launched, and no library asked."""
    seen = []

    def launch_all(self, steps, addresses, stream):
        addresses = struct.unpack(f"={len(addresses) // 8}q", addresses)
        seen.extend(struct.unpack_from(f"={len(POINTERS)}q", step.block(addresses)) for step in steps.each)

    monkeypatch.setattr(Kernel, "launch_all", launch_all)
    monkeypatch.setattr(Kernel, "grid", lambda self, block: (1, 1, 1))
    return seen


def launch(recorder: Recorder, *operands, is_beside: bool = False) -> None:
    addresses = [None if one is None else one.data_ptr() for one in operands]
    addresses += [None] * (len(POINTERS) - len(operands))
    recorder.launch(RECORD, "a test", dict(zip(POINTERS, addresses)) | NUMBERS, CPU, is_beside=is_beside)


def test_addresses_of_a_run(blocks):
    """Null, a given tensor, a part of one, an output, a part of what is kept: each is where the run's tensor is."""
    given = torch.zeros(4, 6)
    recorder = Recorder(CPU, 2)
    tensor, absent = recorder.tensor(0, layout_of(given)), recorder.tensor(1, None)
    output, kept = recorder.empty((3,), torch.float32, CPU), recorder.empty((5, 8), torch.bfloat16, CPU)
    other = recorder.empty((7,), torch.float32, CPU)
    launch(recorder, tensor[1:3], output, kept[2:], other)
    launch(recorder, absent, tensor, kept, output)
    recording = recorder.finish((None, output.view((3, 1))), {"kept": kept, "nothing": None})
    (nothing, found), (memory,) = recording.run((given, None))
    assert nothing is None and found.shape == (3, 1) and found.dtype == torch.float32
    assert recording.kept["kept"].layout == Layout((5, 8), (8, 1), torch.bfloat16) and list(recording.kept) == ["kept"]
    start = memory.data_ptr() + recording.kept["kept"].offset
    first, second = blocks
    assert first[:3] == (given[1:].data_ptr(), found.data_ptr(), start + 2 * 8 * 2)
    assert second == (0, given.data_ptr(), start, found.data_ptr())
    assert first[3] not in (0, start, found.data_ptr(), given.data_ptr())


def test_two_given_tensors_at_one_address_stay_two(blocks):
    recorder, tensor = Recorder(CPU, 2), torch.zeros(3)
    launch(recorder, *(recorder.tensor(number, layout_of(tensor)) for number in range(2)))
    recording = recorder.finish((), {})
    other = torch.zeros(3)
    recording.run((tensor, other))
    assert blocks[0][:2] == (tensor.data_ptr(), other.data_ptr())


def test_what_must_be_zero_is_zero_in_every_run(blocks):
    recorder = Recorder(CPU, 0)
    output, kept, scratch = (recorder.empty((9,), torch.float32, CPU, is_zero=True) for _ in range(3))
    launch(recorder, output, kept, scratch)
    recording = recorder.finish((output,), {"kept": kept})
    for _ in range(2):
        memory = recording.run_pass.run(())
        assert len(memory) == 3 and all((one == 0).all() for one in memory)
        for one in memory:
            one.fill_(torch.nan)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_scratch_shares_places_but_never_in_one_launch(data):
    """Allocations overlap only if the last launch of one comes before the first of the other."""
    sizes = data.draw(st.lists(st.integers(1, 2000), min_size=1, max_size=9))
    recorder = Recorder(CPU, 0)
    operands = [recorder.empty((size,), torch.uint8, CPU) for size in sizes]
    number_of = st.integers(0, len(sizes) - 1)
    launches = data.draw(st.lists(st.lists(number_of, min_size=1, max_size=4), min_size=1, max_size=8))
    for numbers in launches:
        launch(recorder, *(operands[number] for number in numbers))
    offsets = recorder._shared(range(len(sizes)))
    used = sorted({number for numbers in launches for number in numbers})
    assert sorted(offsets) == used
    spans = {n: [i for i, numbers in enumerate(launches) if n in numbers] for n in used}
    for n in used:
        assert offsets[n] % ALIGNMENT == 0
        for m in used:
            apart = spans[n][-1] < spans[m][0] or spans[m][-1] < spans[n][0]
            if n != m and not apart:
                assert offsets[n] + sizes[n] <= offsets[m] or offsets[m] + sizes[m] <= offsets[n]
    largest = max(sum(-(-sizes[n] // ALIGNMENT) * ALIGNMENT for n in set(numbers)) for numbers in launches)
    assert max(offsets[n] + sizes[n] for n in used) >= largest - ALIGNMENT


def test_scratch_of_a_launch_that_begins_beside_another_is_not_the_others():
    recorder = Recorder(CPU, 0)
    first, both, second, third = (recorder.empty((1000,), torch.uint8, CPU) for _ in range(4))
    launch(recorder, first, both)
    launch(recorder, both, second, is_beside=True)
    launch(recorder, third)
    offsets = recorder._shared(range(4))
    assert len({offsets[0], offsets[1], offsets[2]}) == 3 and offsets[3] in (offsets[0], offsets[1], offsets[2])


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (2, 0, 4)])
def test_strides_are_torchs(shape):
    assert contiguous_strides(shape) == torch.empty(shape, dtype=torch.uint8).stride()
