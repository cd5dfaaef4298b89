"""gated_norm_forward (cpu) against FP64: dtypes, sizes, strides, ends of the range, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cake_kda_jit.errors import UnsupportedProblemError

from .convolutions import DTYPES, FP32_ERROR, assert_equal_bits
from .norms import (
    assert_a_row_has_the_same_bits_anywhere,
    assert_gates_far_from_zero,
    assert_near,
    forward_values,
    launch,
    make_case,
    reference,
    run,
    strided_cases,
)


@pytest.mark.parametrize("weight_dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_dtypes_and_sizes(dtype, head_dim, weight_dtype):
    """y is rounded once; dweight has the weight's dtype, all else that of x."""
    case = make_case(head_dim=head_dim, dtype=dtype, weight_dtype=weight_dtype)
    found = run(case)
    assert {name: out.dtype for name, out in found.items()} == dict.fromkeys(("y", "dx", "dgate"), dtype) | {
        "dweight": weight_dtype
    }
    assert_near(found, reference(case), case)


@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (1, 129), (127, 1), (128, 1), (43, 3), (700, 2)])
def test_numbers_of_rows(tokens, heads):
    """Tasks have 128 rows, tiles of the backward 64."""
    case = make_case(tokens, heads)
    assert_near(run(case), reference(case), case)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_strides_change_no_bit(dtype):
    case = make_case(dtype=dtype)
    expected = run(case)
    for name, strided in strided_cases(case).items():
        assert not (strided.x.is_contiguous() and strided.x.data_ptr() % 16 == 0), name
        assert_equal_bits(run(strided), expected)
    one_for_all = torch.ones((), dtype=dtype).expand(case.dy.shape)
    assert_equal_bits(run(replace(case, dy=one_for_all)), run(replace(case, dy=one_for_all.contiguous())))


def test_thread_count_changes_no_bit():
    case = make_case(400, dtype=torch.bfloat16)
    expected = run(case, num_threads=1)
    for num_threads in (2, 7):
        assert_equal_bits(run(case, num_threads=num_threads), expected)


def test_a_row_has_the_same_bits_anywhere():
    assert_a_row_has_the_same_bits_anywhere(run)


def test_gates_far_from_zero():
    assert_gates_far_from_zero(run, -88.0, FP32_ERROR)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1e15])
def test_rows_of_any_size(scale):
    """eps keeps a row of zeros from being divided by 0; 1e15 squared is still an fp32 number."""
    case = make_case()
    case = replace(case, x=case.x * scale)
    found, expected = run(case), reference(case)
    found["dx"], expected["dx"] = (one["dx"] * max(scale, case.eps**0.5) for one in (found, expected))
    assert_near(found, expected, case)


def test_without_tokens():
    case = make_case(0)
    values, outputs = forward_values(case)
    launch("gated_norm_forward", case, values | {"x": None, "gate": None, "y": None})
    assert outputs["y"].numel() == 0


BAD = {
    "no heads": ({"num_value_heads": 0}, "num_value_heads is 0"),
    "negative tokens": ({"num_tokens": -1}, "num_tokens is -1"),
    "too many rows": ({"num_tokens": 2**31 // 3 + 1}, "num_tokens is 715827883; .* tokens times 3 heads"),
    "weight dtype": ({"weight_dtype": 3}, "weight_dtype is 3"),
    "negative eps": ({"eps": -1.0}, "eps is -1"),
    "eps is no number": ({"eps": float("nan")}, "eps is nan"),
    "no x": ({"x": None}, "x is null"),
    "no gate": ({"gate": None}, "gate is null"),
    "no weight": ({"weight": None}, "weight is null"),
}
BAD_FORWARD = BAD | {"no y": ({"y": None}, "y is null")}
BAD_THREADS = {"no threads": ({"num_threads": 0}, "num_threads is 0")}


@pytest.mark.parametrize(("changes", "message"), (BAD_FORWARD | BAD_THREADS).values(), ids=BAD_FORWARD | BAD_THREADS)
def test_refuses(changes, message):
    case = make_case()
    values, outputs = forward_values(case)
    with pytest.raises(UnsupportedProblemError, match=message):
        launch("gated_norm_forward", case, values | changes)
    assert outputs["y"].isnan().all()
