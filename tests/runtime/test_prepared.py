"""A pass run by one foreign call: bits, account, errors, threads, and the blocks and the memory that it makes."""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cake_kda_jit import UnsupportedProblemError, last_launches
from cake_kda_jit.arch import host_arch
from cake_kda_jit.errors import DriverTooOld, LoadError
from cake_kda_jit.runtime import device
from cake_kda_jit.runtime.device import empty_tensors
from cake_kda_jit.runtime.load import Step, Steps, get_kernel
from cake_kda_jit.runtime.prepared import Memory, Pass

from ..programs.norms import NormCase, backward_values, forward_values, make_case, record_of, run
from .test_load import cuda_walk

CPU = torch.device("cpu")
GIVEN = ("x", "gate", "weight", "dy")
OWN = ("y", "dx", "dgate", "dweight", "workspace")
NUMBERS = {name: 1 + number for number, name in enumerate((*GIVEN, *OWN))}
MOST_BYTES = 4096  # kMostArgumentBytes of templates/host/steps.hpp


def step_of(program: str, case: NormCase, reason: str = "a test", **changes) -> Step:
    """The program on tensors of the case's layouts. ``changes``: numbers of its block, or (number, offset) pairs."""
    kernel = get_kernel(record_of(program, case), host_arch())
    make_values = forward_values if program == "gated_norm_forward" else backward_values
    entry = kernel.record.entry
    pointers = [field.name for field in entry.fields if field.is_pointer]
    numbers = {name: value for name, value in changes.items() if name not in pointers}
    block = entry.pack(make_values(case)[0] | {"num_threads": 1} | numbers)
    places = [changes.get(name, (NUMBERS[name], 0)) for name in pointers]
    return Step(kernel, reason, places, block[8 * entry.num_pointers :])


def pass_of(case: NormCase, *steps: Step) -> Pass:
    """On x, gate, weight and dy, with all results in its own memory."""
    outputs = forward_values(case)[1] | backward_values(case)[1]
    memory = [Memory(tuple(outputs[name].shape), outputs[name].dtype) for name in OWN]
    return Pass(CPU, len(GIVEN), memory, steps)


def both(case: NormCase, **changes) -> Pass:
    """Forward and backward, of two libraries; ``changes`` of the backward."""
    steps = step_of("gated_norm_forward", case, "first"), step_of("gated_norm_backward", case, "second", **changes)
    return pass_of(case, *steps)


def given_of(case: NormCase) -> list[torch.Tensor]:
    return [getattr(case, name) for name in GIVEN]


def assert_bits(found: list[torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in zip(OWN, found):
        if name != "workspace":
            assert torch.equal(tensor, expected[name]), name


def test_bits_and_account_are_those_of_one_launch_after_another(nan_poison):
    """In two runs, of which the second asks for no grid."""
    case = make_case(300, 3)
    prepared = both(case)
    for seed in range(2):
        case = make_case(300, 3, seed=seed)
        found, launched = prepared.run(given_of(case)), last_launches()
        assert_bits(found, run(case))
        assert [(one.program, one.reason) for one in launched] == [
            ("gated_norm_forward", "first"),
            ("gated_norm_backward", "second"),
        ]
        for one, values in zip(launched, (forward_values(case)[0], backward_values(case)[0])):
            kernel = get_kernel(record_of(one.program, case), host_arch())
            assert one.grid == kernel.grid(kernel.record.entry.pack(values | {"num_threads": 1}))
            assert (one.variant, one.family, one.origin) == ("fp32_k64", "cpu", kernel.origin)


def test_a_pointer_may_lead_behind_an_address():
    """Rows of x from the seventh on, and y's rows from the second on in a longer tensor."""
    case = make_case(40, 2)
    row = 2 * 64 * 4
    part = replace(case, x=case.x[7:], gate=case.gate[7:], dy=case.dy[7:])
    offsets = {"x": (NUMBERS["x"], 7 * row), "gate": (NUMBERS["gate"], 7 * row), "y": (NUMBERS["y"], 2 * row)}
    y, *_ = pass_of(case, step_of("gated_norm_forward", part, **offsets)).run(given_of(case))
    assert torch.equal(y[2:35], run(part)["y"])


def test_an_absent_tensor_is_null():
    case = make_case()
    with pytest.raises(UnsupportedProblemError, match="gated_norm_backward__fp32_k64: dy is null"):
        both(case).run([*given_of(case)[:3], None])


def test_an_error_is_that_of_its_own_step():
    """The second of three: the first ran, the third did not, and no account changed."""
    case, marks = make_case(), torch.zeros(2, *make_case().x.shape)
    size = marks[0].nbytes
    first, third = (step_of("gated_norm_forward", case, y=(NUMBERS["dy"], size * n)) for n in range(2))
    second = step_of("gated_norm_backward", case, num_value_heads=-1)
    before = last_launches()
    with pytest.raises(UnsupportedProblemError, match="^gated_norm_backward__fp32_k64: num_value_heads is -1"):
        pass_of(case, first, second, third).run([case.x, case.gate, case.weight, marks])
    assert torch.equal(marks[0], run(case)["y"]) and not marks[1].any()
    run_alone = pass_of(case, second)
    with pytest.raises(UnsupportedProblemError, match="num_value_heads is -1"):
        run_alone.run(given_of(case))
    assert last_launches() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="the launch would succeed: this machine has a driver")
def test_a_library_of_another_family_answers_for_itself():
    """A cpu library runs the pass, and what the CUDA one says of a missing driver is raised as by its own launch."""
    kernel, values = cuda_walk()
    block = kernel.record.entry.pack(values)
    count = kernel.record.entry.num_pointers
    case = make_case()
    null = Step(
        kernel, "a test", [(0, address) for address in struct.unpack_from(f"={count}q", block)], block[8 * count :]
    )
    with pytest.raises(DriverTooOld, match=rf"{kernel.record.symbol}: .*InsufficientDriver.*update the driver"):
        pass_of(case, step_of("gated_norm_forward", case), null).run(given_of(case))


def test_threads_may_run_one_pass_at_once():
    """Each has its own addresses and its own block: the bits are those of one after another."""
    cases = [make_case(30, 2, seed=seed) for seed in range(8)]
    expected = [run(case) for case in cases]
    prepared, barrier = both(cases[0]), threading.Barrier(len(cases))

    def often(number: int) -> None:
        barrier.wait()
        for _ in range(40):
            assert_bits(prepared.run(given_of(cases[number])), expected[number])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(cases)) as pool:
            assert list(pool.map(often, range(len(cases)))) == [None] * len(cases)
    finally:
        sys.setswitchinterval(interval)


def test_a_pass_without_launches_is_its_memory():
    memory = Pass(CPU, 1, [Memory((3,), torch.float32, is_zero=True), Memory((2, 0), torch.int64)], ()).run((None,))
    assert [(tuple(one.shape), one.dtype) for one in memory] == [((3,), torch.float32), ((2, 0), torch.int64)]
    assert not memory[0].any()


class Entry:
    """Stands for the kernel of a step: an entry function that notes its block, in Python."""

    def __init__(self, num_bytes: int, status: int = 0, inside=lambda: None) -> None:
        def entry(block: int, stream: int | None) -> int:
            inside()
            self.seen.append((ctypes.string_at(block, num_bytes), stream or 0))
            return status

        self.seen: list[tuple[bytes, int]] = []
        self._launch = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(entry)

    def _raise(self, status: int) -> None:
        raise LoadError(f"status {status} of {len(self.seen)} calls")


@pytest.fixture(scope="module")
def runner():
    """Any library: each runs the steps of all."""
    return get_kernel(record_of("gated_norm_forward", make_case()), host_arch())


INTEGERS = st.integers(-(2**40), 2**40)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_blocks_are_built_as_python_builds_them(runner, data):
    """Any pointers, any bytes behind them, up to the largest block; nothing runs behind the first bad status."""
    addresses = [0, *data.draw(st.lists(INTEGERS, min_size=1, max_size=9))]
    numbers = st.integers(0, len(addresses) - 1)
    steps = []
    for status in data.draw(st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=5)):
        pointers = data.draw(st.lists(st.tuples(numbers, INTEGERS), max_size=6))
        words = data.draw(st.one_of(st.integers(0, 40), st.just(MOST_BYTES // 8 - len(pointers))))
        rest = data.draw(st.randoms(use_true_random=False)).randbytes(8 * words)
        steps.append(Step(Entry(8 * (len(pointers) + words), status), str(status), pointers, rest))
    bad = next((number for number, step in enumerate(steps) if step.reason != "0"), None)
    packed = struct.pack(f"={len(addresses)}q", *addresses)
    stream = data.draw(st.integers(0, 2**63))
    if bad is None:
        runner.launch_all(Steps(steps), packed, stream)
    else:
        with pytest.raises(LoadError, match=f"status {steps[bad].reason} of 1 calls"):
            runner.launch_all(Steps(steps), packed, stream)
    launched = steps if bad is None else steps[: bad + 1]
    assert [step.kernel.seen for step in launched] == [[(step.block(addresses), stream)] for step in launched]
    assert not any(step.kernel.seen for step in steps[len(launched) :])


def test_a_pass_may_run_within_another(runner):
    """As where an entry's own thread calls back: the outer block stays what it was."""
    inner = Entry(16)
    steps = Steps([Step(inner, "", [(1, 5)], b"within.."), Step(inner, "", [(0, 0)], b"its end.")])
    outer = Entry(16, inside=lambda: runner.launch_all(steps, struct.pack("=2q", 0, 70)))
    runner.launch_all(Steps([Step(outer, "", [(1, 1)], b"around..")] * 2), struct.pack("=2q", 0, 3))
    assert outer.seen == [(struct.pack("=q", 4) + b"around..", 0)] * 2
    assert inner.seen == [(struct.pack("=q", 75) + b"within..", 0), (struct.pack("=q", 0) + b"its end.", 0)] * 2


LAYOUTS = [((2, 3), (3, 1), torch.bfloat16), ((), (), torch.float32), ((2, 0), (1, 1), torch.int32)]
LAYOUTS += [((512,), (1,), torch.uint8)]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("default", [None, "meta"])
@pytest.mark.parametrize("has_shorter_way", [True, False])
def test_memory_is_as_torchs(mode, is_deterministic, default, has_shorter_way, monkeypatch):
    """Plain tensors on the device, in every mode and torch what torch.empty_strided would return."""
    if not has_shorter_way:
        monkeypatch.setattr(device, "_empty_strided_cpu", None)
    torch.use_deterministic_algorithms(is_deterministic)
    torch.set_default_device(default)
    try:
        with mode():
            found = empty_tensors(LAYOUTS, None)
            expected = [torch.empty_strided(*layout[:2], dtype=layout[2], device="cpu") for layout in LAYOUTS]
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_device(None)
    for one, other in zip(found, expected):
        for name in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf"):
            assert getattr(one, name) == getattr(other, name)
        assert type(one) is torch.Tensor and one.stride() == other.stride() and one.storage_offset() == 0
        assert one.is_inference() == (mode is torch.inference_mode) and one.data_ptr() % 64 == 0
        assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()


def test_memory_is_filled_where_torch_fills_it(nan_poison):
    """Unless the program tells torch not to fill; nothing is promised of it then."""
    real, single, _, integers = empty_tensors(LAYOUTS, None)
    assert real.isnan().all() and single.isnan() and (integers == 255).all()
