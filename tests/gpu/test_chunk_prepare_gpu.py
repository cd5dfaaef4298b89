"""chunk_prepare on a CUDA device against its cpu twin with the same bf16 tiles; outputs poisoned with NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cake_kda_jit.arch import Arch
from cake_kda_jit.catalog import registry
from cake_kda_jit.errors import UnsupportedProblemError
from cake_kda_jit.runtime.device import arch_of_device
from cake_kda_jit.runtime.load import get_kernel

from ..programs.pipeline import (
    BEHIND,
    FUSED,
    TILE_NAMES,
    Pack,
    Tables,
    assert_equal_bits,
    block_values,
    edited,
    exact_chunk,
    gate_values,
    make_pack,
    make_tables,
    make_tiles,
    run_prepare,
)
from .twins import BAD_BLOCKS_ON_DEVICE

pytestmark = pytest.mark.gpu

EDGES = (0, 1, 63, 64, 65, 0, 130)
INPUTS = ("q", "k", "g", "beta")

# Both round the same fp32 numbers to bf16, which differ by 1e-6: few elements fall on the other side.
DECAYED_ERROR = 3e-4
# TF32 rounds factors by 2^-12 and sums of products keep that, 2e-4 in norm; bf16 then moves elements by a step.
PAIR_ERROR = 3e-3
# A bf16 step, relative to a normal number. A tile's norm may be that of a few elements, each one step aside.
STEP = 2.0**-7
# A product of 64 powers of two, which the device rounds by up to 2^-22.5 each.
TOTAL_ERROR = 1.1e-5
# Beside that, g is rounded a few times on either side, by 6e-8 of itself: what decays by e^G is off by so much of G.
GATE_ERROR = 2e-7


def to_device(pack: Pack) -> Pack:
    tensors = {name: getattr(pack, name) for name in (*INPUTS, "A_log", "dt_bias")}
    tables = replace(pack.tables, chunk_table=pack.tables.chunk_table.cuda())
    return replace(pack, tables=tables, **{n: None if t is None else t.cuda() for n, t in tensors.items()})


def launch_values(pack: Pack, heads=None, **replaced) -> dict[str, object]:
    """An argument block for a pack on the device, its outputs poisoned there."""
    tiles = {name: tile.cuda() for name, tile in make_tiles(pack, (heads or (0, pack.HV))[1]).items()}
    tables = {"chunk_table": pack.tables.chunk_table, "num_chunks": pack.tables.num_chunks}
    values = block_values(pack, heads) | gate_values(pack) | BEHIND | tables | tiles | replaced
    del values["num_threads"]
    return values


def device_arch() -> Arch:
    return arch_of_device(torch.device("cuda", torch.cuda.current_device()))


def families_of(pack: Pack) -> list[str]:
    """The families with a record for a pack's variant on this device."""
    arch, variant = device_arch(), pack.variant.removesuffix("_tiles_bf16")
    records = [r for r in registry().shipped() if (r.program, r.variant) == ("chunk_prepare", variant)]
    return [r.family for r in records if r.family in arch.families and arch.name in r.archs]


def launch(pack: Pack, values: dict[str, object], family: str = "smxx") -> None:
    record = registry().get("chunk_prepare", pack.variant.removesuffix("_tiles_bf16"), family)
    addresses = {name: value.data_ptr() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    kernel = get_kernel(record, device_arch())
    kernel.launch(addresses, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()


def run_on_device(pack: Pack, heads=None, **replaced) -> dict[str, torch.Tensor]:
    """Launch on the device by every family, whose bits are the same; returns the wanted tiles on the CPU."""
    pack = pack if pack.q.is_cuda else to_device(pack)
    found = []
    for family in families_of(pack):
        values = launch_values(pack, heads, **replaced)
        launch(pack, values, family)
        found.append({name: values[name].cpu() for name in TILE_NAMES if values[name] is not None})
    for other in found[1:]:
        assert_equal_bits(other, found[0])
    return found[0]


def assert_near_twin(found: dict[str, torch.Tensor], twin: dict[str, torch.Tensor]) -> None:
    """Tile by tile, in norm and element by element; what is 0 in the twin because it is masked is 0 here."""
    assert found.keys() == twin.keys()
    for name, tiles in found.items():
        expected = twin[name].double()
        assert torch.isfinite(tiles).all(), name
        if name == "decay_total":
            bound = (TOTAL_ERROR + GATE_ERROR * expected.clamp_min(1e-38).log().abs()) * expected + 1e-37
            assert ((tiles - expected).abs() <= bound).all(), name
            continue
        # A chunk of one token has one pair, whose sum may cancel: an error is also measured by what pairs are like.
        is_pair = name in ("Aqk", "Tinv")
        pairs = expected.diagonal(dim1=2, dim2=3)
        typical = pairs.norm() / pairs.count_nonzero().clamp_min(1).sqrt() if is_pair else torch.tensor(0.0)
        error = PAIR_ERROR if is_pair else DECAYED_ERROR
        for head, chunk in torch.cartesian_prod(*(torch.arange(n) for n in tiles.shape[:2])).tolist():
            other = expected[head, chunk]
            difference, largest = tiles[head, chunk].double() - other, other.abs().max()
            place = f"{name} of head {head}, chunk {chunk}"
            allowed = error * torch.max(other.norm(), typical) + STEP * largest
            assert difference.norm() <= allowed, (place, (difference.norm() / other.norm()).item())
            bound = STEP * other.abs() + (error * torch.max(largest, typical) if is_pair else 1e-37)
            assert (difference.abs() <= bound).all(), (place, difference.abs().max().item())
        if is_pair:
            assert not tiles.triu(1).any(), f"{name}: its upper part is 0"


def assert_rows_past_the_end_are_zero(pack: Pack, tiles: dict[str, torch.Tensor]) -> None:
    for chunk, (_, _, rows, _) in enumerate(pack.tables.chunks()):
        for name, tile in tiles.items():
            if name != "decay_total":
                assert not tile[:, chunk, rows:].any(), (name, chunk)


def assert_as_twin(pack: Pack) -> dict[str, torch.Tensor]:
    found = run_on_device(pack)
    assert_near_twin(found, run_prepare(pack))
    assert_rows_past_the_end_are_zero(pack, found)
    return found


@pytest.mark.parametrize("variant", ["bf16_k64", "bf16_k128", "fp16_k128"])
def test_tiles_of_every_chunk(variant):
    assert_as_twin(make_pack(EDGES, variant, H=2, HV=4, **FUSED))


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("beta_form", ["ready", "sigmoid", "two_sigmoid"])
@pytest.mark.parametrize("gate_form", ["ready", "softplus", "bounded"])
def test_every_input_form(gate_form, beta_form, l2norm):
    assert_as_twin(make_pack((70, 3), "bf16_k128", gate_form=gate_form, beta_form=beta_form, l2norm=l2norm, seed=1))


@pytest.mark.parametrize("absent", [("A_log",), ("dt_bias",), ("A_log", "dt_bias")])
def test_bounded_gate_without_parameters(absent):
    assert_as_twin(make_pack((66,), "bf16_k128", gate_form="bounded", **dict.fromkeys(absent)))


def test_softplus_far_below_zero_keeps_its_digits():
    """dt_bias of -17: log(1 + e^x) in fp32 would be 0, and the chunk would not decay at all."""
    pack = make_pack((64,), "bf16_k128", gate_form="softplus", A_log=torch.full((2,), 12.0))
    pack.dt_bias[:] = -17.0
    found = assert_as_twin(pack)
    assert (found["decay_total"] < 0.9).any()


@pytest.mark.parametrize("g_dtype", [torch.float32, torch.float16])
def test_gate_and_beta_of_another_dtype(g_dtype):
    assert_as_twin(make_pack((66,), "bf16_k128", g_dtype=g_dtype, **FUSED))


@pytest.mark.parametrize("g_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["channel stride", "odd rows", "misaligned"])
def test_layouts_change_no_bit(layout, g_dtype):
    pack = to_device(make_pack((67,), "bf16_k128", H=2, HV=4, g_dtype=g_dtype))

    def lay_out(x):
        T, heads, K = x.shape
        if layout == "channel stride":
            return torch.stack([x] * 2, dim=-1)[..., 0]
        if layout == "odd rows":
            return torch.cat([x, x[..., :1]], dim=-1)[..., :K]
        return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(T, heads, K)

    strided = {name: lay_out(getattr(pack, name)) for name in ("q", "k", "g")}
    assert all(torch.equal(view, getattr(pack, name)) for name, view in strided.items())
    strided["beta"] = torch.stack([pack.beta] * 3, dim=-1)[..., 1]
    assert_equal_bits(run_on_device(replace(pack, **strided)), run_on_device(pack))


def test_offsets_past_31_bits():
    """Tokens 40 million elements apart: the last row lies past 2^31 elements."""
    pack = to_device(make_pack((64,), "bf16_k64", H=1, HV=1, **FUSED))
    stride, sparse = 40_000_000, {}
    buffer = torch.empty(63 * stride + 3 * 64, dtype=torch.bfloat16, device="cuda")
    for n, name in enumerate(("q", "k", "g")):
        sparse[name] = buffer.as_strided((64, 1, 64), (stride, 64, 1), n * 64)
        sparse[name].copy_(getattr(pack, name))
    assert_equal_bits(run_on_device(replace(pack, **sparse)), run_on_device(pack))


def test_hard_resets_give_exact_zeros():
    """g = -inf at row 30 of a short chunk: no row reaches across it, and nothing is NaN."""
    pack = make_pack((50,), "bf16_k128", gate_form="ready")
    pack.g[30] = -torch.inf
    tiles = assert_as_twin(pack)
    assert not tiles["decay_total"].any()
    for name in ("ke", "qg"):
        assert not tiles[name][:, 0, 30:].any()
    assert not tiles["kg"][:, 0, :30].any()
    for name in ("Aqk", "Tinv"):
        assert not tiles[name][:, 0, 30:, :30].any()


@pytest.mark.parametrize("rows", [slice(None), slice(0, 64, 16), slice(15, 64, 16), slice(0, 1), slice(63, 64)])
def test_hard_resets_at_block_edges(rows):
    pack = make_pack((64,), "bf16_k128", gate_form="ready")
    pack.g[rows] = -torch.inf
    assert_as_twin(pack)


@pytest.mark.parametrize(("gate", "other"), [(-5.0, -5.0), (-100.0, -100.0), (-30.0, -100.0), (0.0, 0.0), (-1e-3, -20)])
def test_strong_and_weak_gates(gate, other):
    """Decays of up to e^-100 a token: their products leave fp32's range, their quotients would be NaN."""
    pack = make_pack((64, 40), "bf16_k128", gate_form="ready")
    pack.g[:] = gate
    pack.g[::3] = other
    assert_as_twin(pack)


@pytest.mark.parametrize("variant", ["bf16_k64", "bf16_k128"])
def test_correlated_keys(variant):
    """Keys of cosine 0.9 written with beta 0.95: a truncated series for Tinv would be wrong by a third."""
    pack = make_pack((64,), variant, gate_form="ready", HV=1, beta_form="ready", g_dtype=torch.float32)
    K = pack.K
    pack.k.copy_(torch.nn.functional.normalize(3.0 * torch.ones(K) / K**0.5 + pack.k.float(), dim=-1))
    pack.g[:] = -1e-3
    pack.beta[:] = 0.95
    exact = exact_chunk(pack, 0)
    assert (exact.k[0] @ exact.k[0].T).mean() > 0.85
    found = run_on_device(pack)
    assert_near_twin({"Aqk": found["Aqk"]}, {"Aqk": run_prepare(pack)["Aqk"]})
    error = (found["Tinv"][:, 0].double() - exact.Tinv).norm() / exact.Tinv.norm()
    assert error < PAIR_ERROR, error.item()


@pytest.mark.parametrize("sizes", [(12, 0), (-30, 0), (0, 20), (0, -30), (15, -12), (-12, 30)])
@pytest.mark.parametrize("l2norm", [False, True])
def test_rows_of_every_size(sizes, l2norm):
    """Factors of pairs are fp16: without a norm, keys and queries of 2^15 or 2^-30 must lose no digit there."""
    key, query = sizes
    pack = make_pack((64, 20), "bf16_k128", l2norm=l2norm, gate_form="ready")
    pack.g[:] = pack.g / 8.0
    pack.k[::2] *= 2.0**key
    pack.q[1::3] *= 2.0**query
    pack.beta[:] *= 1.0 if l2norm else 2.0 ** min(0, -2 * key)
    assert_as_twin(pack)


def test_a_later_gate_does_not_touch_an_earlier_row():
    pack = make_pack((64,), "bf16_k128", **FUSED)
    changed = replace(pack, g=pack.g.clone())
    changed.g[40:] += 3.0
    tiles, others = run_on_device(pack), run_on_device(changed)
    for name in ("ke", "qg", "Aqk", "Tinv"):
        assert torch.equal(tiles[name][:, :, :40], others[name][:, :, :40]), name
        assert not torch.equal(tiles[name], others[name]), name


@pytest.mark.parametrize("wanted", [(name,) for name in TILE_NAMES] + [("Aqk", "ke"), ("Tinv", "kg"), ()])
def test_absent_outputs_change_no_bit_of_the_others(wanted):
    pack = to_device(make_pack((70,), "bf16_k128", **FUSED))
    absent = {name: None for name in TILE_NAMES if name not in wanted}
    everything = run_on_device(pack)
    assert_equal_bits(run_on_device(pack, **absent), {name: everything[name] for name in wanted})


@pytest.mark.parametrize("absent", [("Aqk", "Tinv"), ("Tinv",)])
def test_what_a_backward_prepares_again_has_the_same_bits(absent):
    """Without pairs another kernel runs, here on more items than CTAs run at once."""
    pack = to_device(make_pack((500, 30, 64), "bf16_k128", H=16, HV=32, **FUSED))
    found = run_on_device(pack, **dict.fromkeys(absent))
    everything = run_on_device(pack)
    assert_equal_bits(found, {name: everything[name] for name in found})


def test_without_queries():
    pack = to_device(make_pack((70,), "bf16_k128", **FUSED))
    everything = run_on_device(pack)
    found = run_on_device(pack, q=None, qg=None, Aqk=None)
    assert_equal_bits(found, {name: everything[name] for name in found})


@pytest.mark.parametrize("heads", [(0, 2), (2, 2), (2, 4)])
def test_a_head_block_has_the_bits_of_the_whole(heads):
    first, count = heads
    pack = to_device(make_pack((70, 5), "bf16_k128", H=3, HV=6, **FUSED))
    whole = run_on_device(pack)
    assert_equal_bits(run_on_device(pack, heads), {n: tile[first : first + count] for n, tile in whole.items()})


def test_bits_do_not_depend_on_neighbours():
    pack = make_pack((40, 70, 9), "bf16_k128", **FUSED)
    tiles = run_on_device(pack)
    alone = replace(pack, **{name: getattr(pack, name)[40:110] for name in INPUTS}, tables=make_tables((70,)))
    assert_equal_bits(run_on_device(alone), {name: tile[:, 1:3].contiguous() for name, tile in tiles.items()})


def test_rows_behind_the_pack_are_not_read():
    pack = make_pack((70,), "bf16_k128", **FUSED)
    longer = {n: torch.cat([getattr(pack, n), torch.full_like(getattr(pack, n), float("nan"))]) for n in INPUTS}
    assert_equal_bits(run_on_device(replace(pack, **longer)), run_on_device(pack))


def test_same_bits_every_time():
    pack = to_device(make_pack((500, 30, 64), "bf16_k128", H=4, HV=8, **FUSED))
    first = run_on_device(pack)
    for _ in range(10):
        assert_equal_bits(run_on_device(pack), first)


def test_rows_without_a_document_are_left_alone():
    pack = make_pack((70,), "bf16_k128", **FUSED)
    tables = replace(pack.tables, chunk_table=edited(pack.tables.chunk_table, 1, 0, -1))
    found = run_on_device(replace(pack, tables=tables))
    assert_equal_bits({n: t[:, :1] for n, t in found.items()}, {n: t[:, :1] for n, t in run_on_device(pack).items()})
    assert all(tile[:, 1].isnan().all() for tile in found.values())


def test_more_chunks_than_a_grid_has_rows():
    """70,000 documents of one token; grid.y and grid.z stop at 65,535."""
    count = 70_000
    small = make_pack((1, 1), "bf16_k64", HV=1, **FUSED)
    table = torch.zeros(count, 4, dtype=torch.int32)
    table[:, 1] = torch.arange(count)
    table[:, 2] = 1
    many = {name: getattr(small, name)[-1:].expand(count, *getattr(small, name).shape[1:]) for name in INPUTS}
    tables = Tables(table, small.tables.segment_table, small.tables.summary_offsets)
    absent = dict.fromkeys(("ke", "qg", "kg", "Aqk"))
    found = run_on_device(replace(small, tables=tables, **many), **absent)
    expected = run_on_device(small, **absent)
    for name, tile in found.items():
        assert torch.equal(tile, expected[name][:, -1:].expand_as(tile)), name


def test_a_pack_without_chunks():
    pack = make_pack((0, 0), "bf16_k128")
    assert all(tile.numel() == 0 for tile in run_on_device(pack, k=None, q=None, qg=None, Aqk=None).values())


BAD = BAD_BLOCKS_ON_DEVICE | {
    "no keys": ({"k": None}, "k is null"),
    "no gate": ({"g": None}, "g is null"),
    "no queries": ({"q": None}, "q is null, but qg is wanted"),
    "g dtype": ({"g_dtype": 7}, "g_dtype is 7"),
    "gate form": ({"gate_form": 3}, "gate_form is 3"),
    "no A_log": ({"gate_form": 1, "A_log": None}, "A_log is null; the softplus gate"),
    "bound": ({"lower_bound": -6.0}, "lower_bound is -6"),
    "misaligned": ({"kg": 24}, "kg is 0x18; give a tensor whose address is a multiple of 16"),
    "too many": ({"num_chunks": 2**31}, "num_chunks is 2147483648 with 4 heads"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused(case):
    change, message = BAD[case]
    pack = to_device(make_pack((70,), "bf16_k128", H=2, HV=4, **FUSED))
    with pytest.raises(UnsupportedProblemError, match=message):
        launch(pack, launch_values(pack) | change)
