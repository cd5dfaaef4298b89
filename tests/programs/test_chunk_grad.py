"""chunk_grad against FP64 autograd of the recurrence, chunk by chunk, and the whole pipeline's gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cake_kda_jit.arch import ARCHES, CUDA_ARCHES
from cake_kda_jit.catalog import registry
from cake_kda_jit.codegen.render import render
from cake_kda_jit.errors import UnsupportedProblemError

from .gradients import (
    INPUTS,
    chunk_boundaries,
    exact_A_log_terms,
    exact_chunk_gradients,
    exact_gradients,
    grad_outputs,
    grad_values,
    random_edges,
    run_chunk_grad,
    run_pipeline,
)
from .pipeline import (
    CHUNK,
    FP32_TOLERANCE,
    Pack,
    assert_equal_bits,
    assert_near,
    launch,
    make_pack,
    make_tables,
    record_of,
    table_values,
)

LENGTHS = (70, 0, 64, 1, 37)
# dg adds up to 64 rows of terms of either sign, each itself a sum over 128 channels.
TOLERANCES = {"dg": 2 * FP32_TOLERANCE}
# One rounding to bf16 is 1.7e-3 in norm. Up to seven meet in a gradient: those of ke or kg, Aqk, Tinv, h or dS, v', z
# and its own.
BF16_TOLERANCE = 4.5e-3


def assert_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name in ("d" + name for name in INPUTS):
        assert_near(name, found[name], expected[name], TOLERANCES.get(name, FP32_TOLERANCE))


def assert_sums(name: str, found: Tensor, terms: list[Tensor], dims: tuple[int, ...]) -> None:
    """Sums of terms of either sign, one per chunk; each term carries an error like dg's own."""
    rms = torch.cat(terms).square().mean().sqrt()
    for n, part in enumerate(terms):
        error = (found[n].double() - part.sum(dims)).abs()
        assert (error <= FP32_TOLERANCE * (part.abs() + rms).sum(dims)).all(), f"{name} of chunk {n}"


@pytest.mark.parametrize(
    ("gate_form", "beta_form", "l2norm"),
    [("ready", "sigmoid", False), ("softplus", "ready", True), ("bounded", "two_sigmoid", True)],
)
def test_gradients_of_every_chunk(gate_form, beta_form, l2norm):
    pack = make_pack(LENGTHS, H=2, HV=4, gate_form=gate_form, beta_form=beta_form, l2norm=l2norm)
    edges = random_edges(pack)
    found, expected = run_chunk_grad(pack, edges), exact_chunk_gradients(pack, edges)
    assert_gradients(found, expected)
    if gate_form != "ready":
        sizes = torch.tensor(chunk_boundaries(pack)).diff().tolist()
        assert_sums("ddt_bias", found["partial_dt_bias"], expected["dg"].split(sizes), (0,))
        terms = exact_A_log_terms(pack, expected["dg"])
        assert_sums("dA_log", found["partial_A_log"], terms.split(sizes), (0, 2))


def test_a_beta_of_zero_has_a_gradient():
    """Such a token writes nothing, so that its dbeta is no multiple of v'."""
    pack = make_pack((70, 20), H=1, HV=2, beta_form="ready", l2norm=True)
    pack.beta[[0, 3, 63, 64, 89]] = 0.0
    edges = random_edges(pack)
    expected = exact_chunk_gradients(pack, edges)
    assert expected["dbeta"][3].any()
    assert_gradients(run_chunk_grad(pack, edges), expected)


@pytest.mark.parametrize(("segment_tokens", "checkpoint_chunks"), [(0, 0), (0, 2), (CHUNK, 0), (2 * CHUNK, 1)])
def test_the_pipeline_in_fp32(segment_tokens, checkpoint_chunks):
    pack = make_pack((150, 0, 64, 1), H=1, HV=2, beta_form="sigmoid", l2norm=True).cut(segment_tokens)
    dfinal_state = torch.randn(4, 2, 64, 64, generator=torch.Generator().manual_seed(3))
    found = run_pipeline(pack, dfinal_state, checkpoint_chunks)
    expected = exact_gradients(pack, pack.boundaries(), pack.initial_state, dfinal_state)
    assert_gradients(found, expected)
    assert_near("dinitial_state", found["dinitial_state"], expected["dinitial_state"])
    assert_sums("ddt_bias", found["ddt_bias"][None], [expected["dg"]], (0,))
    assert_sums("dA_log", found["dA_log"][None], [exact_A_log_terms(pack, expected["dg"])], (0, 2))


def test_the_pipeline_in_bf16():
    pack = make_pack((100, 30), "bf16_k128", H=1, HV=1, gate_form="bounded", beta_form="sigmoid", l2norm=True)
    dfinal_state = torch.randn(2, 1, 128, 128, generator=torch.Generator().manual_seed(3))
    found = run_pipeline(pack, dfinal_state)
    expected = exact_gradients(pack, pack.boundaries(), pack.initial_state, dfinal_state)
    for name in (*("d" + name for name in INPUTS), "dinitial_state"):
        error = (found[name].double() - expected[name]).norm() / expected[name].norm()
        assert error <= BF16_TOLERANCE, name
    # dg's errors are alike along a chunk: a sum over two chunks gains little on its terms.
    absolute = exact_A_log_terms(pack, expected["dg"]).abs().sum((0, 2))
    assert ((found["dA_log"].double() - expected["dA_log"]).abs() <= BF16_TOLERANCE * absolute).all()
    absolute = expected["dg"].abs().sum(0)
    assert (found["ddt_bias"].double() - expected["ddt_bias"]).norm() <= BF16_TOLERANCE * absolute.norm()


def widened(pack: Pack) -> Pack:
    """The same pack in fp32."""
    return replace(pack, **{name: getattr(pack, name).float() for name in (*INPUTS, "do")})


def widened_edges(edges: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tiles without second parts in fp32."""
    rows = {name: tile[:, :, :CHUNK] if name in ("v_new", "z") else tile for name, tile in edges.items()}
    return {name: tile.float().contiguous() for name, tile in rows.items()}


def test_bf16_gradients_are_the_fp32_ones_rounded():
    pack = make_pack(LENGTHS, "bf16_k64", H=1, HV=2, gate_form="softplus", beta_form="sigmoid", l2norm=True)
    edges = random_edges(pack, second_parts=False)
    found = run_chunk_grad(pack, edges)
    expected = run_chunk_grad(widened(pack), widened_edges(edges))
    assert_equal_bits(found, {name: tensor.to(found[name].dtype) for name, tensor in expected.items()})


def test_fp32_gates_beside_bf16_inputs():
    pack = make_pack((70,), "bf16_k64", g_dtype=torch.float32, beta_form="sigmoid")
    edges = random_edges(pack, second_parts=False)
    found = run_chunk_grad(pack, edges)
    expected = run_chunk_grad(widened(pack), widened_edges(edges))
    assert found["dg"].dtype is found["dbeta"].dtype is torch.float32
    assert torch.equal(found["dg"], expected["dg"]) and torch.equal(found["dbeta"], expected["dbeta"])


def test_a_document_of_one_token_from_zero_has_no_gate_gradient():
    pack = make_pack((1, 1, 1), l2norm=True, initial_state=None)
    edges = random_edges(pack)
    edges["h"].zero_()
    found = run_chunk_grad(pack, edges)
    for name in ("dg", "partial_A_log", "partial_dt_bias"):
        assert not found[name].any(), name
    assert found["dk"].any()


def test_hard_resets():
    pack = make_pack((100,), gate_form="ready")
    pack.g[[0, 40, 63]] = -torch.inf
    pack.g[50, :, ::2] = -torch.inf
    edges = random_edges(pack)
    found = run_chunk_grad(pack, edges)
    assert_gradients(found, exact_chunk_gradients(pack, edges))
    assert not found["dg"][pack.g.isinf()].any(), "a reset has no gradient"


@pytest.mark.parametrize(("gate_form", "A_log"), [("softplus", 100.0), ("bounded", 100.0), ("bounded", 0.0)])
def test_saturated_gates(gate_form, A_log):
    pack = make_pack((66,), gate_form=gate_form, A_log=torch.full((2,), A_log), dt_bias=torch.zeros(2, 64))
    pack.g[3], pack.g[4], pack.g[5], pack.g[6] = 1e4, -1e4, torch.inf, -torch.inf
    pack.g[7:, :, 1::2] = pack.g[7:, :, 1::2].abs() + 1.0
    found = run_chunk_grad(pack, random_edges(widened(pack)))
    assert all(torch.isfinite(tensor).all() for tensor in found.values())
    assert not found["dg"][3:7].any()
    if A_log > 0:
        assert not found["dg"][7:, :, 1::2].any()


def test_head_blocks_and_threads_change_no_bit():
    pack = make_pack((70, 20), H=2, HV=4, l2norm=True)
    edges = random_edges(pack)
    whole = run_chunk_grad(pack, edges, num_threads=1)
    assert_equal_bits(run_chunk_grad(pack, edges, num_threads=5), whole)
    outputs = grad_outputs(pack)
    for first in (0, 2):
        block = {name: tile[first : first + 2] for name, tile in edges.items()}
        launch(record_of("chunk_grad", pack.variant), grad_values(pack, block, heads=(first, 2)) | outputs)
        if first == 0:
            assert outputs["dv"][:, 2:].isnan().all(), "the other heads are left alone"
    assert_equal_bits(outputs, whole)


def test_neighbours_change_no_bit():
    pack = make_pack((70, 90, 30))
    edges = random_edges(pack)
    found = run_chunk_grad(pack, edges)
    rows, chunks = slice(70, 160), slice(2, 4)
    inputs = {name: getattr(pack, name)[rows] for name in (*INPUTS, "do")}
    alone = replace(pack, lengths=(90,), tables=make_tables((90,)), **inputs)
    expected = run_chunk_grad(alone, {name: tile[:, chunks].contiguous() for name, tile in edges.items()})
    for name, tensor in expected.items():
        assert torch.equal(found[name][chunks if name.startswith("partial") else rows], tensor), name


def test_strided_inputs():
    pack = make_pack((70,), H=1, HV=2)
    edges = random_edges(pack)
    strided = {name: torch.stack([getattr(pack, name)] * 2, dim=-1)[..., 0] for name in (*INPUTS, "do")}
    assert_equal_bits(run_chunk_grad(replace(pack, **strided), edges), run_chunk_grad(pack, edges))


def test_rows_of_the_table_that_are_not_in_use():
    pack = make_pack((70,))
    values, tables = table_values((70,), max_chunks=4, max_segments=2)
    launch(record_of("pack_tables", "int64"), values)
    edges = random_edges(pack)
    expected = run_chunk_grad(pack, edges)
    padded = {name: torch.cat([tile, torch.full_like(tile, torch.nan)], dim=1) for name, tile in edges.items()}
    found = run_chunk_grad(replace(pack, tables=tables), padded)
    for name in ("partial_A_log", "partial_dt_bias"):
        assert not found[name][2:].any()
        found[name] = found[name][:2]
    assert_equal_bits(found, expected)


REFUSALS = [
    ({"num_heads": 0}, "num_heads is 0"),
    ({"num_heads": 3}, "multiple of num_heads, which is 3"),
    ({"num_block_heads": 1}, "whole groups of 2"),
    ({"first_head": 2}, r"head block is \[2, 2 \+ 2\)"),
    ({"num_threads": 0}, "num_threads is 0"),
    ({"z": None}, "z is null"),
    ({"dbeta": None}, "dbeta is null"),
    ({"chunk_table": None}, "chunk_table is null"),
    ({"gate_form": 3}, "gate_form is 3"),
    ({"A_log": None}, "A_log is null"),
    ({"gate_form": 0}, "partial_A_log is given, but gate_form is 0"),
    ({"dt_bias": None}, "dt_bias is null"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSALS)
def test_refusals(changed, message):
    pack = make_pack((CHUNK,), H=1, HV=2)
    values = grad_values(pack, random_edges(pack)) | grad_outputs(pack)
    with pytest.raises(UnsupportedProblemError, match=message):
        launch(record_of("chunk_grad", pack.variant), values | changed)


@pytest.mark.parametrize("arch", [name for name in CUDA_ARCHES if ARCHES[name].capability < (9, 0)])
def test_meetings_of_chunk_grad_wait_with_what_the_target_has(arch):
    """At K = 64 a CTA of sm_80 works ahead too, and try_wait begins with sm_90."""
    assert "mbarrier.try_wait" not in render(registry().get("chunk_grad", "bf16_k64", "smxx"), arch).text
