"""chunk_grad on a CUDA device against its cpu twin on the very same bf16 tiles; outputs poisoned with NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cake_kda_jit.bench.problems import relative_error
from cake_kda_jit.errors import UnsupportedProblemError

from ..programs.gradients import INPUTS, exact_chunk_gradients, grad_outputs, grad_values, random_edges
from ..programs.pipeline import (
    FUSED,
    Pack,
    Tables,
    assert_equal_bits,
    edited,
    make_pack,
    make_tables,
)
from .twins import BAD_BLOCKS_ON_DEVICE, launch_on_device, launch_twin

pytestmark = pytest.mark.gpu

EDGES = (0, 1, 63, 64, 65, 0, 130, 16, 17)

# Each is relative to the norm of its (chunk, head). dv is the same product, rounded once; dbeta adds fp32 sums in
# another order. dq and dk differ by TF32 roundings of pairs (2^-12 in each of two factors) and by elements that bf16
# then moves by a step. dg sums such differences over up to 64 rows.
TOLERANCES = {"dv": 1e-4, "dbeta": 2e-3, "dq": 2e-3, "dk": 2e-3, "dg": 4e-3}
# An fp16 do is rounded to bf16, which is 1.7e-3 in norm, before it meets anything.
FP16_TOLERANCES = TOLERANCES | {"dq": 4e-3, "dk": 4e-3, "dg": 8e-3, "dbeta": 4e-3}
# Parameters' sums, relative to the sum of absolute terms: errors of a channel's dg are alike along a chunk, so that a
# sum over it has dg's own, and twice that where q is not normalised and pairs of rows cancel in dg.
SUM_TOLERANCE = 2 * TOLERANCES["dg"]


def launch_values(pack: Pack, edges, heads=None) -> dict[str, object]:
    values = grad_values(pack, edges, heads)
    del values["num_threads"]
    return values


def run_on_device(pack: Pack, edges, heads=None, **replaced) -> dict[str, torch.Tensor]:
    outputs = grad_outputs(pack)
    values = launch_values(pack, edges, heads) | outputs | replaced
    launch_on_device("chunk_grad", pack.variant, values, outputs)
    return outputs


def run_twin(pack: Pack, edges) -> dict[str, torch.Tensor]:
    outputs = grad_outputs(pack)
    launch_twin("chunk_grad", pack.variant, grad_values(pack, edges) | outputs, outputs)
    return outputs


def assert_near_twin(pack: Pack, found: dict[str, torch.Tensor], twin: dict[str, torch.Tensor]) -> None:
    """Chunk by chunk and head by head; parameters' sums against the sum of what they add."""
    tolerances = FP16_TOLERANCES if pack.q.dtype is torch.float16 else TOLERANCES
    for name in ("d" + name for name in INPUTS):
        assert torch.isfinite(found[name]).all(), name
        whole = twin[name].double()
        for chunk, (_, token, rows, _) in enumerate(pack.tables.chunks()):
            one, other = (x[token : token + rows].double().transpose(0, 1) for x in (found[name], whole))
            difference, norms = (one - other).flatten(1).norm(dim=1), other.flatten(1).norm(dim=1)
            typical = whole.norm() / max(1, whole.numel()) ** 0.5 * other[0].numel() ** 0.5
            worst = (difference / torch.maximum(norms, typical).clamp_min(1e-30)).max().item()
            assert worst <= tolerances[name], (name, chunk, worst)
    if pack.gate_form != "ready":
        absolute = twin["dg"].double().abs().sum() / max(1, len(pack.tables.chunks()) * pack.HV)
        for name, terms in (("partial_dt_bias", absolute / pack.K), ("partial_A_log", 3.0 * absolute)):
            assert torch.isfinite(found[name]).all(), name
            difference = (found[name].double() - twin[name].double()).square().mean().sqrt()
            assert difference <= SUM_TOLERANCE * terms, (name, (difference / terms).item())


def assert_as_twin(pack: Pack, edges=None) -> dict[str, torch.Tensor]:
    edges = random_edges(pack) if edges is None else edges
    found = run_on_device(pack, edges)
    assert_near_twin(pack, found, run_twin(pack, edges))
    return found


@pytest.mark.parametrize("heads", [(2, 2), (2, 4), (1, 3)])
@pytest.mark.parametrize("variant", ["bf16_k64", "bf16_k128", "fp16_k128"])
def test_gradients_of_every_chunk(variant, heads):
    H, HV = heads
    assert_as_twin(make_pack(EDGES, variant, H=H, HV=HV, **FUSED))


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("beta_form", ["ready", "sigmoid", "two_sigmoid"])
@pytest.mark.parametrize("gate_form", ["ready", "softplus", "bounded"])
def test_every_input_form(gate_form, beta_form, l2norm):
    pack = make_pack((70, 3), "bf16_k128", H=2, HV=2, gate_form=gate_form, beta_form=beta_form, l2norm=l2norm, seed=1)
    assert_as_twin(pack)


@pytest.mark.parametrize("heads", [(2, 2), (1, 2)])
@pytest.mark.parametrize("variant", ["bf16_k128", "fp16_k128"])
def test_a_beta_of_zero_has_a_gradient(variant, heads):
    """Such a token writes nothing, so that its dbeta is no multiple of v'."""
    pack = make_pack((70, 20), variant, H=heads[0], HV=heads[1], beta_form="ready", l2norm=True)
    rows = [0, 3, 63, 64, 89]
    pack.beta[rows] = 0.0
    edges = random_edges(pack)
    found, expected = run_on_device(pack, edges)["dbeta"], exact_chunk_gradients(pack, edges)["dbeta"]
    # z, h and v' are rounded to bf16, 1.7e-3 each, in a sum whose terms cancel, and dbeta itself.
    assert relative_error(found[rows], expected[rows]) <= 5e-3
    assert relative_error(found, expected) <= 5e-3


@pytest.mark.parametrize("variant", ["bf16_k64", "bf16_k128", "fp16_k128"])
@pytest.mark.parametrize("gate_form", ["ready", "softplus"])
def test_unbounded_gates_of_grouped_heads(gate_form, variant):
    assert_as_twin(make_pack((130, 21), variant, H=1, HV=2, gate_form=gate_form, l2norm=True))


@pytest.mark.parametrize("absent", [("A_log",), ("dt_bias",), ("A_log", "dt_bias")])
def test_bounded_gate_without_parameters(absent):
    pack = make_pack((66,), "bf16_k128", H=2, gate_form="bounded", **dict.fromkeys(absent))
    edges, outputs = random_edges(pack), grad_outputs(pack)
    wanted = {f"partial_{name}": None for name in absent}
    found = run_on_device(pack, edges, **wanted)
    launch_twin("chunk_grad", pack.variant, grad_values(pack, edges) | outputs | wanted, outputs)
    for name in ("dq", "dk", "dg"):
        error = (found[name].double() - outputs[name].double()).norm() / outputs[name].double().norm()
        assert error <= TOLERANCES[name], name
    for name in wanted:
        assert found[name].isnan().all(), f"{name} is not wanted"


@pytest.mark.parametrize("gate_form", ["softplus", "bounded"])
@pytest.mark.parametrize("g_dtype", [torch.float32, torch.float16])
def test_gate_and_beta_of_another_dtype(g_dtype, gate_form):
    pack = make_pack((66, 9), "bf16_k128", H=2, g_dtype=g_dtype, gate_form=gate_form, beta_form="sigmoid")
    found = assert_as_twin(pack)
    assert found["dg"].dtype is found["dbeta"].dtype is g_dtype


@pytest.mark.parametrize("g_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["channel stride", "odd rows", "misaligned"])
def test_layouts_change_no_bit(layout, g_dtype):
    pack = make_pack((67,), "bf16_k128", H=2, HV=2, g_dtype=g_dtype, **FUSED)
    edges = random_edges(pack)

    def lay_out(x):
        T, heads, K = x.shape
        if layout == "channel stride":
            return torch.stack([x] * 2, dim=-1)[..., 0]
        if layout == "odd rows":
            return torch.cat([x, x[..., :1]], dim=-1)[..., :K]
        return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(T, heads, K)

    strided = {name: lay_out(getattr(pack, name)) for name in ("q", "k", "v", "g", "do")}
    strided["beta"] = torch.stack([pack.beta] * 3, dim=-1)[..., 1]
    assert_equal_bits(run_on_device(replace(pack, **strided), edges), run_on_device(pack, edges))


@pytest.mark.parametrize("variant", ["bf16_k64", "bf16_k128"])
@pytest.mark.parametrize("gate_form", ["ready", "softplus", "bounded"])
def test_one_token_from_zero_has_no_gate_gradient(gate_form, variant):
    pack = make_pack((1, 1, 1), variant, H=2, gate_form=gate_form, l2norm=True, initial_state=None)
    edges = random_edges(pack)
    edges["h"].zero_()
    found = run_on_device(pack, edges)
    assert not found["dg"].any() and found["dk"].any()
    if gate_form != "ready":
        assert not found["partial_A_log"].any() and not found["partial_dt_bias"].any()


@pytest.mark.parametrize("rows", [[0, 40, 63], [15, 16, 17], [3, 4, 5], list(range(0, 64, 16)), list(range(64))])
def test_hard_resets(rows):
    pack = make_pack((100,), "bf16_k128", H=2, gate_form="ready")
    pack.g[rows] = -torch.inf
    pack.g[50, :, ::2] = -torch.inf
    found = assert_as_twin(pack)
    assert not found["dg"][pack.g.isinf()].any(), "a reset has no gradient"


@pytest.mark.parametrize(("gate", "other"), [(-5.0, -5.0), (-100.0, -100.0), (-30.0, -100.0), (0.0, 0.0), (-1e-3, -20)])
def test_strong_and_weak_gates(gate, other):
    pack = make_pack((64, 40), "bf16_k128", H=2, gate_form="ready")
    pack.g[:] = gate
    pack.g[::3] = other
    assert_as_twin(pack)


def test_the_strongest_bounded_gate():
    """Decays of e^-5 a token: e^-80 over a block."""
    pack = make_pack((64, 40), "bf16_k128", H=2, gate_form="bounded", dt_bias=torch.full((2, 128), 40.0))
    assert_as_twin(pack)


@pytest.mark.parametrize(("gate_form", "A_log"), [("softplus", 100.0), ("bounded", 100.0), ("bounded", 0.0)])
def test_saturated_gates(gate_form, A_log):
    options = {"A_log": torch.full((2,), A_log), "dt_bias": torch.zeros(2, 128)}
    pack = make_pack((66,), "bf16_k128", H=2, gate_form=gate_form, **options)
    pack.g[3], pack.g[4], pack.g[5], pack.g[6] = 1e4, -1e4, torch.inf, -torch.inf
    pack.g[7:, :, 1::2] = pack.g[7:, :, 1::2].abs() + 1.0
    found = run_on_device(pack, random_edges(pack))
    assert all(torch.isfinite(tensor).all() for tensor in found.values())
    assert not found["dg"][3:7].any()
    if A_log > 0:
        assert not found["dg"][7:, :, 1::2].any()


@pytest.mark.parametrize("heads", [(0, 2), (2, 2), (2, 4)])
def test_a_head_block_has_the_bits_of_the_whole(heads):
    first, count = heads
    pack = make_pack((70, 5), "bf16_k128", H=3, HV=6, **FUSED)
    edges = random_edges(pack)
    whole = run_on_device(pack, edges)
    block = {name: tile[first : first + count].contiguous() for name, tile in edges.items()}
    found = run_on_device(pack, block, heads)
    own = slice(first, first + count)
    for name in ("dv", "dg", "dbeta", "partial_A_log", "partial_dt_bias"):
        assert torch.equal(found[name][:, own], whole[name][:, own]), name
        others = [h for h in range(6) if not first <= h < first + count]
        assert found[name][:, others].isnan().all(), f"{name} of the other heads is left alone"
    for name in ("dq", "dk"):
        assert torch.equal(
            found[name][:, first // 2 : (first + count) // 2], whole[name][:, first // 2 : (first + count) // 2]
        )


def test_bits_do_not_depend_on_neighbours():
    pack = make_pack((40, 70, 9), "bf16_k128", H=2, **FUSED)
    edges = random_edges(pack)
    found = run_on_device(pack, edges)
    rows, chunks = slice(40, 110), slice(1, 3)
    inputs = {name: getattr(pack, name)[rows] for name in (*INPUTS, "do")}
    alone = replace(pack, lengths=(70,), tables=make_tables((70,)), **inputs)
    expected = run_on_device(alone, {name: tile[:, chunks].contiguous() for name, tile in edges.items()})
    for name, tensor in expected.items():
        assert torch.equal(found[name][chunks if name.startswith("partial") else rows], tensor), name


def test_rows_behind_the_pack_are_not_read():
    pack = make_pack((70,), "bf16_k128", H=2, **FUSED)
    edges = random_edges(pack)
    names = (*INPUTS, "do")
    longer = {n: torch.cat([getattr(pack, n), torch.full_like(getattr(pack, n), float("nan"))]) for n in names}
    found = run_on_device(replace(pack, **longer), edges)
    for name, tensor in run_on_device(pack, edges).items():
        rows = slice(None) if name.startswith("partial") else slice(0, 70)
        assert torch.equal(found[name][rows], tensor), name


@pytest.mark.parametrize("gate_form", ["softplus", "bounded"])
def test_same_bits_every_time(gate_form):
    pack = make_pack((500, 30, 64), "bf16_k128", H=8, HV=8, gate_form=gate_form, l2norm=True)
    edges = random_edges(pack)
    first = run_on_device(pack, edges)
    for _ in range(10):
        assert_equal_bits(run_on_device(pack, edges), first)


@pytest.mark.parametrize("heads", [(2, 2), (1, 2)])
def test_rows_of_the_table_that_are_not_in_use(heads):
    H, HV = heads
    pack = make_pack((70,), "bf16_k128", H=H, HV=HV, **FUSED)
    edges = random_edges(pack)
    expected = run_on_device(pack, edges)
    table = torch.cat([pack.tables.chunk_table, edited(pack.tables.chunk_table, 0, 0, -1)])
    table[2:, 0] = -1
    tables = Tables(table, pack.tables.segment_table, pack.tables.summary_offsets)
    padded = {name: torch.cat([tile, torch.full_like(tile, torch.nan)], dim=1) for name, tile in edges.items()}
    found = run_on_device(replace(pack, tables=tables), padded)
    for name in ("partial_A_log", "partial_dt_bias"):
        assert not found[name][2:].any()
        found[name] = found[name][:2]
    assert_equal_bits(found, expected)


def test_a_pack_without_chunks():
    pack = make_pack((0, 0), "bf16_k128", H=2, **FUSED)
    assert all(tensor.numel() == 0 for tensor in run_on_device(pack, random_edges(pack)).values())


BAD = BAD_BLOCKS_ON_DEVICE | {
    "no queries": ({"q": None}, "q is null"),
    "no gradient": ({"do_": None}, "do_ is null"),
    "no z": ({"z": None}, "z is null"),
    "no dbeta": ({"dbeta": None}, "dbeta is null"),
    "misaligned": ({"dk": 24}, "dk is 0x18; give a tensor whose address is a multiple of 16"),
    "g dtype": ({"g_dtype": 7}, "g_dtype is 7"),
    "gate form": ({"gate_form": 3}, "gate_form is 3"),
    "bound": ({"lower_bound": -6.0}, "lower_bound is -6"),
    "ready gate": ({"gate_form": 0}, "partial_A_log is given, but gate_form is 0"),
    "no bias": ({"dt_bias": None}, "partial_dt_bias is given, but gate_form is 2 and dt_bias is null"),
    "too many": ({"num_chunks": 2**31}, "num_chunks is 2147483648 with 4 heads"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused(case):
    change, message = BAD[case]
    pack = make_pack((70,), "bf16_k128", H=2, HV=4, **FUSED)
    edges, outputs = random_edges(pack), grad_outputs(pack)
    with pytest.raises(UnsupportedProblemError, match=message):
        launch_on_device("chunk_grad", pack.variant, launch_values(pack, edges) | outputs | change, {})
