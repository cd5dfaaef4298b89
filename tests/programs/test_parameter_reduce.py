"""parameter_reduce: its tree of sums to the bit, and FP64 sums."""

from __future__ import annotations

import pytest
import torch

from cake_kda_jit.errors import UnsupportedProblemError

from .gradients import run_reduce
from .pipeline import launch, poisoned, record_of

GROUP = 64


def make_partials(chunks: int, HV=3, K=64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(chunks)
    return tuple(torch.randn(chunks, HV, *tail, generator=generator) for tail in ((), (K,)))


def add_in_order(terms: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(terms[:0].sum(0))
    for term in terms:
        total = total + term
    return total


def tree_sum(partial: torch.Tensor) -> torch.Tensor:
    """fp32: the chunks of each group in order, then the groups in order."""
    groups = [add_in_order(group) for group in partial.split(GROUP)] if len(partial) else []
    return add_in_order(torch.stack(groups)) if groups else torch.zeros_like(partial.sum(0))


@pytest.mark.parametrize("chunks", [0, 1, 63, 64, 65, 200])
def test_the_tree_to_the_bit(chunks):
    partial_A_log, partial_dt_bias = make_partials(chunks)
    found = run_reduce(partial_A_log, partial_dt_bias)
    assert torch.equal(found["dA_log"], tree_sum(partial_A_log))
    assert torch.equal(found["ddt_bias"], tree_sum(partial_dt_bias))


def test_near_the_sum_in_fp64():
    for partial, found in zip(make_partials(1000), run_reduce(*make_partials(1000)).values()):
        error = (found.double() - partial.double().sum(0)).abs()
        # at most 63 + 15 roundings of 2^-24, each of a partial sum below the sum of absolute values
        assert (error <= 78 * 2**-24 * partial.abs().sum(0)).all()


@pytest.mark.parametrize("K", [8, 100, 128])
def test_any_width_and_any_number_of_threads(K):
    partials = make_partials(70, HV=5, K=K)
    expected = run_reduce(*partials, num_threads=1)
    assert torch.equal(expected["ddt_bias"], tree_sum(partials[1]))
    for num_threads in (2, 9):
        found = run_reduce(*partials, num_threads=num_threads)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def make_values(**changed) -> dict[str, object]:
    partial_A_log, partial_dt_bias = make_partials(2)
    values = {
        "partial_A_log": partial_A_log,
        "partial_dt_bias": partial_dt_bias,
        "dA_log": poisoned(3),
        "ddt_bias": poisoned(3, 64),
        "num_chunks": 2,
        "num_value_heads": 3,
        "head_dim": 64,
        "num_threads": 1,
    }
    return values | changed


@pytest.mark.parametrize("absent", ["A_log", "dt_bias"])
def test_one_parameter_alone(absent):
    values = make_values(**{f"partial_{absent}": None, f"d{absent}": None})
    launch(record_of("parameter_reduce", "fp32"), values)
    present = "dt_bias" if absent == "A_log" else "A_log"
    assert torch.equal(values[f"d{present}"], tree_sum(values[f"partial_{present}"]))


REFUSED = (
    ({"num_value_heads": 0}, "num_value_heads is 0"),
    ({"head_dim": 0}, "head_dim is 0"),
    ({"num_chunks": -1}, "num_chunks is -1"),
    ({"partial_A_log": None}, "dA_log is given and partial_A_log is null"),
    ({"partial_dt_bias": None}, "ddt_bias is given and partial_dt_bias is null"),
)


@pytest.mark.parametrize(("changed", "message"), [*REFUSED, ({"num_threads": 0}, "num_threads is 0")])
def test_refusals(changed, message):
    with pytest.raises(UnsupportedProblemError, match=message):
        launch(record_of("parameter_reduce", "fp32"), make_values(**changed))
