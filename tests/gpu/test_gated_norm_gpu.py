"""The gated norm on a CUDA device: against its cpu twin and FP64, and what changes no bit."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from cake_kda_jit import last_launches
from cake_kda_jit.errors import UnsupportedProblemError
from cake_kda_jit.layers import GatedRMSNorm
from cake_kda_jit.ops.gated import gated_rms_norm
from cake_kda_jit.runtime.device import arch_of_device
from cake_kda_jit.runtime.load import get_kernel

from ..programs import norms
from ..programs.convolutions import DTYPES, FP32_ERROR, assert_equal_bits
from ..programs.norms import (
    NormCase,
    assert_a_row_has_the_same_bits_anywhere,
    assert_gates_far_from_zero,
    assert_near,
    backward_values,
    forward_values,
    make_case,
    record_of,
    reference,
    strided_cases,
)
from ..programs.test_gated_norm_backward import BAD_BACKWARD
from ..programs.test_gated_norm_forward import BAD_FORWARD
from .twins import on_device

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nan_poison")]

# The device's exponential and reciprocals are off by a unit or two each, where the cpu family rounds exactly.
DEVICE_ERROR = 4 * FP32_ERROR
PROGRAMS = {"gated_norm_forward": forward_values, "gated_norm_backward": backward_values}


def to_device(case: NormCase) -> NormCase:
    given = {field.name: getattr(case, field.name) for field in fields(case)}
    return NormCase(**{n: on_device(value) if isinstance(value, Tensor) else value for n, value in given.items()})


def launch_on_device(program: str, case: NormCase, rows: int | None = None, **changes) -> dict[str, Tensor]:
    """Launch the library itself, with changed arguments, into outputs full of NaN; returns them on the cpu."""
    given = to_device(case)
    values, outputs = PROGRAMS[program](given, *(() if rows is None else (rows,)))
    kernel = get_kernel(record_of(program, case, "smxx"), arch_of_device(given.x.device))
    try:
        kernel.launch(values | changes)
    finally:
        torch.cuda.synchronize()
    return {name: tensor.cpu() for name, tensor in outputs.items() if name != "workspace"}


def run(case: NormCase) -> dict[str, Tensor]:
    """y, dx, dgate and dweight, by the libraries themselves."""
    return {name: out for program in PROGRAMS for name, out in launch_on_device(program, case).items()}


@pytest.mark.parametrize("weight_dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_dtypes_and_sizes(dtype, head_dim, weight_dtype):
    """Near FP64, and nearer its twin: errors of fp32 make 16 bits round to another number in few places only."""
    case = make_case(300, 3, head_dim, dtype=dtype, weight_dtype=weight_dtype)
    found = run(case)
    assert_near(found, reference(case), case, DEVICE_ERROR)
    twin = norms.run(case)
    for name in ("y", "dx", "dgate"):
        differs = (found[name] != twin[name]).double().mean().item()
        assert dtype == torch.float32 or differs < 0.05, (name, differs)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000])
def test_numbers_of_rows(rows, head_dim):
    """A CTA of the forward has 32 or 64 rows, a tile of the backward 64."""
    for heads in (1, 5):
        case = make_case(rows, heads, head_dim, dtype=torch.bfloat16)
        assert_near(run(case), reference(case), case, DEVICE_ERROR)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_strides_change_no_bit(dtype):
    case = make_case(dtype=dtype)
    expected = run(case)
    for strided in strided_cases(case).values():
        assert_equal_bits(run(strided), expected)
    one_for_all = torch.ones((), dtype=dtype).expand(case.dy.shape)
    assert_equal_bits(run(replace(case, dy=one_for_all)), run(replace(case, dy=one_for_all.contiguous())))


def test_same_bits_every_time():
    case = make_case(5000, 7, 128, dtype=torch.bfloat16, weight_dtype=torch.float32)
    found = run(case)
    for _ in range(20):
        assert_equal_bits(run(case), found)


def test_a_row_has_the_same_bits_anywhere():
    assert_a_row_has_the_same_bits_anywhere(run)


@pytest.mark.parametrize("rows", [1, 3, 64, 100, 5000])
def test_tiles_change_only_the_order_of_sums(rows):
    case = make_case(400, 3, 128, dtype=torch.bfloat16, weight_dtype=torch.float32)
    expected, found = run(case), launch_on_device("gated_norm_backward", case, rows)
    for name in ("dx", "dgate"):
        assert torch.equal(found[name], expected[name]), name
    assert_near(found, reference(case), case, DEVICE_ERROR)


def test_sums_over_many_rows():
    """fp32 sums of 600,000 terms of size 1, cut into tiles: within 2e-6 of their root sum of squares."""
    case = make_case(200_000, 3, dtype=torch.bfloat16, weight_dtype=torch.float32)
    error = (launch_on_device("gated_norm_backward", case)["dweight"].double() - reference(case)["dweight"]).abs().max()
    assert error < 2e-6 * 600_000**0.5


@pytest.mark.parametrize("rows", [1, 65, 300])
def test_eps_of_0_beside_rows_that_are_not_there(rows):
    """Behind the last row a tile counts zeros, whose root mean square is then 0: dweight is none the wiser."""
    case = replace(make_case(rows, 1, 128, dtype=torch.bfloat16, weight_dtype=torch.float32), eps=0.0)
    assert_near(run(case), reference(case), case, DEVICE_ERROR)


def test_gates_far_from_zero():
    # The exponential has its argument's error too: at 20, 20 times 2^-24, relative.
    assert_gates_far_from_zero(run, -86.0, 2 * DEVICE_ERROR)


def test_without_tokens():
    case = make_case(0)
    assert launch_on_device("gated_norm_forward", case, x=None, gate=None, y=None)["y"].numel() == 0
    nothing = dict.fromkeys(("x", "gate", "dy", "dx", "dgate", "workspace"))
    assert not launch_on_device("gated_norm_backward", case, **nothing)["dweight"].any()


def test_more_elements_than_32_bits_count():
    tokens, heads, head_dim = 2**18 + 40, 64, 128  # 2^31 elements of 4 GiB, and some
    if torch.cuda.get_device_properties(0).total_memory < 48 << 30:
        pytest.skip("needs 48 GiB of device memory")
    x, gate = (torch.randn(tokens, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(head_dim, device="cuda")
    results = []
    for rows in (slice(None), slice(-40, None)):
        leaves = [one[rows].detach().requires_grad_() for one in (x, gate)]
        y = gated_rms_norm(*leaves, weight, 1e-5)
        y.backward(torch.ones((), dtype=x.dtype, device="cuda").expand(y.shape))
        results.append([one[-30:].detach().clone() for one in (y, leaves[0].grad, leaves[1].grad)])
    for whole, part in zip(*results):
        assert torch.equal(whole, part)


def test_a_call_on_the_device_and_a_replayed_graph():
    case = make_case(70, 3, 128, dtype=torch.bfloat16, weight_dtype=torch.float32)
    expected, given = run(case), to_device(case)
    norm = GatedRMSNorm(128, case.eps).cuda()
    norm.weight.data.copy_(given.weight)
    x, gate = (one[None].requires_grad_() for one in (given.x, given.gate))

    def step() -> list[Tensor]:
        y = norm(x, gate)
        return [y, *torch.autograd.grad(y, (x, gate, norm.weight), given.dy[None])]

    def assert_right(found: list[Tensor]) -> None:
        shapes = zip(expected, found, strict=True)
        assert_equal_bits({name: one.detach().cpu().view(expected[name].shape) for name, one in shapes}, expected)

    assert_right(step())
    assert [(one.program, one.family) for one in last_launches()] == [("gated_norm_backward", "smxx")]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for one in found:
        one.detach().fill_(float("nan"))
    graph.replay()
    assert_right(found)


@pytest.mark.parametrize(
    ("program", "case"),
    [("gated_norm_forward", case) for case in BAD_FORWARD] + [("gated_norm_backward", case) for case in BAD_BACKWARD],
)
def test_bad_arguments_are_refused(program, case):
    changes, message = (BAD_FORWARD if program == "gated_norm_forward" else BAD_BACKWARD)[case]
    with pytest.raises(UnsupportedProblemError, match=message):
        launch_on_device(program, make_case(), **changes)
