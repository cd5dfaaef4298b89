"""chunk_scan (cpu) alone on given tiles, and behind chunk_prepare against the recurrence, both in FP64."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from cake_kda_jit.bench.problems import BUDGETS, relative_error
from cake_kda_jit.catalog import registry
from cake_kda_jit.compiler.build import build
from cake_kda_jit.errors import ToolchainNotFound, UnsupportedProblemError
from cake_kda_jit.reference import recurrent_kda, transfer_walk_reference

from .pipeline import (
    BAD_BLOCKS,
    FP32_TOLERANCE,
    FUSED,
    Pack,
    assert_equal_bits,
    assert_near,
    edited,
    exact_beta,
    launch,
    log_decay,
    make_pack,
    make_tables,
    poisoned,
    record_of,
    run_prepare,
    run_summary,
    scan_values,
    whole_values,
)

EDGES = (0, 1, 63, 64, 65, 0, 200)


def scan_outputs(pack: Pack, num_heads: int, checkpoint_chunks: int) -> dict[str, torch.Tensor]:
    chunks, K, HV = pack.tables.num_chunks, pack.K, pack.HV
    return {
        "o": poisoned(*pack.v.shape, dtype=pack.v.dtype),
        "final_state": poisoned(len(pack.lengths), HV, K, K),
        "h": poisoned(num_heads, chunks, K, K, dtype=pack.tile_dtype),
        "v_new": poisoned(*pack.value_tile(num_heads), dtype=pack.tile_dtype),
        "checkpoints": poisoned(chunks // checkpoint_chunks + pack.tables.num_segments, HV, K, K),
    }


def run_scan(pack: Pack, tiles, *, heads=None, num_threads=2, checkpoint_chunks=2, segment_entry=None, **replaced):
    """Launch chunk_scan; returns its outputs, those that ``replaced`` sets to None left out."""
    outputs = scan_outputs(pack, (heads or (0, pack.HV))[1], max(checkpoint_chunks, 1))
    states = {"initial_state": pack.initial_state, "segment_entry": segment_entry, "ready": None}
    values = scan_values(pack, tiles, heads, num_threads) | outputs | states
    values |= {"checkpoint_chunks": checkpoint_chunks} | replaced
    launch(record_of("chunk_scan", pack.variant), values)
    return {name: tensor for name, tensor in outputs.items() if values[name] is not None}


def exact_scan(pack: Pack, tiles, stored, segment_entry=None):
    """The scan of the same tiles in FP64: v_new, and with v' as it was stored o, final_state and h.

    The scan uses v' as its tile holds it; FP64 would not round every element to the same side.
    """
    tiles = {name: tile.double() for name, tile in tiles.items()}
    v, beta = pack.v.double().transpose(0, 1), exact_beta(pack).T.unsqueeze(-1)
    found = {name: tensor.double() for name, tensor in scan_outputs(pack, pack.HV, 1).items()}
    found["v_new"] = torch.zeros_like(stored)
    chunks, segments = pack.tables.chunks(), pack.tables.segments()
    for index, (document, first_chunk, num_chunks, summary_row) in enumerate(segments):
        S = torch.zeros(pack.HV, pack.K, pack.K, dtype=torch.float64)
        if index and segments[index - 1][0] == document:
            S = segment_entry[summary_row].double()
        elif pack.initial_state is not None:
            S = pack.initial_state[document].double()
        for chunk in range(first_chunk, first_chunk + num_chunks):
            _, token, count, _ = chunks[chunk]
            rows = slice(token, token + count)
            ke, qg, kg = (tiles[name][:, chunk, :count] for name in ("ke", "qg", "kg"))
            Aqk, Tinv = (tiles[name][:, chunk, :count, :count] for name in ("Aqk", "Tinv"))
            v_new = Tinv @ (beta[:, rows] * (v[:, rows] - ke @ S))
            found["h"][:, chunk] = S.mT
            found["v_new"][:, chunk, :count] = v_new
            v_new = stored[:, chunk, :count]
            found["o"][rows] = (qg @ S + Aqk @ v_new).transpose(0, 1)
            S = tiles["decay_total"][:, chunk].unsqueeze(-1) * S + kg.mT @ v_new
        found["final_state"][document] = S
    return found


def assert_exact_scan(pack: Pack, tiles, found, **states) -> None:
    stored = whole_values(found["v_new"])
    expected = exact_scan(pack, tiles, stored, **states)
    for name in ("o", "final_state", "h"):
        assert_near(name, found[name], expected[name])
    # Two parts of bf16 lose 2^-16 of a number at most; fp32 tiles lose nothing.
    assert_near("v_new", stored, expected["v_new"], 2.0**-16 + FP32_TOLERANCE)
    assert_near("v_new", found["v_new"][:, :, :64], expected["v_new"])
    for chunk, (_, _, rows, _) in enumerate(pack.tables.chunks()):
        for part in found["v_new"].split(64, dim=2):
            assert not part[:, chunk, rows:].any(), "rows past the chunk's end are 0"


@pytest.mark.parametrize("variant", ["fp32_k64", "bf16_k64", "bf16_k128"])
def test_every_output_on_the_same_tiles(variant):
    pack = make_pack(EDGES, variant, **FUSED)
    tiles = run_prepare(pack)
    assert_exact_scan(pack, tiles, run_scan(pack, tiles))


@pytest.mark.parametrize("variant", ["fp32_k64", "bf16_k128"])
@pytest.mark.parametrize("gate_form", ["softplus", "bounded"])
def test_prepare_and_scan_against_the_recurrence(variant, gate_form):
    pack = make_pack(EDGES, variant, **FUSED | {"gate_form": gate_form})
    found = run_scan(pack, run_prepare(pack))
    o, final_state = recurrent_kda(
        *(x.double().unsqueeze(0) for x in (pack.q, pack.k, pack.v, log_decay(pack), pack.beta)),
        initial_state=pack.initial_state.double(),
        cu_seqlens=pack.boundaries(),
        scale=pack.scale,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )
    for name, expected in (("o", o[0]), ("final_state", final_state)):
        if variant == "fp32_k64":
            assert_near(name, found[name], expected)
        else:
            assert relative_error(found[name], expected) <= BUDGETS[gate_form][name], name


def test_ready_gates_with_hard_resets():
    pack = make_pack((150, 40), gate_form="ready")
    pack.g[[30, 64, 149, 150]] = -torch.inf
    tiles = run_prepare(pack)
    found = run_scan(pack, tiles)
    assert_exact_scan(pack, tiles, found)
    without = replace(pack, initial_state=None)
    assert torch.equal(run_scan(without, tiles)["o"][30:], found["o"][30:]), "nothing crosses a reset"


def test_without_an_initial_state():
    pack = make_pack((70, 0, 64), **FUSED, initial_state=None)
    tiles = run_prepare(pack)
    found = run_scan(pack, tiles)
    assert_exact_scan(pack, tiles, found)
    zeros = run_scan(replace(pack, initial_state=torch.zeros(3, pack.HV, 64, 64)), tiles)
    zeros.pop("checkpoints"), found.pop("checkpoints")
    assert_equal_bits(found, zeros)


@pytest.mark.parametrize("checkpoint_chunks", [1, 2, 3, 100])
def test_checkpoints_are_the_unrounded_states(checkpoint_chunks):
    """With an interval of one chunk they are h before its rounding; other intervals keep a part of these."""
    pack = make_pack((0, 300, 64, 130), "bf16_k64", **FUSED).cut(128)
    tiles = run_prepare(pack)
    entry = torch.randn(int(pack.tables.summary_offsets[-1]), pack.HV, 64, 64)
    found = run_scan(pack, tiles, segment_entry=entry, checkpoint_chunks=checkpoint_chunks)
    used = set()
    for index, (document, first_chunk, num_chunks, summary_row) in enumerate(pack.tables.segments()):
        for j in range(-(-num_chunks // checkpoint_chunks)):
            row = first_chunk // checkpoint_chunks + j + index
            used.add(row)
            state = found["checkpoints"][row]
            assert torch.equal(state.to(torch.bfloat16), found["h"][:, first_chunk + j * checkpoint_chunks])
            if j == 0:
                is_first = index == 0 or pack.tables.segments()[index - 1][0] != document
                expected = pack.initial_state[document] if is_first else entry[summary_row]
                assert torch.equal(state, expected.mT)
    unused = [row for row in range(len(found["checkpoints"])) if row not in used]
    assert found["checkpoints"][unused].isnan().all()


def test_empty_documents_pass_their_state():
    pack = make_pack((0, 5, 0), **FUSED)
    found = run_scan(pack, run_prepare(pack))
    assert torch.equal(found["final_state"][[0, 2]], pack.initial_state[[0, 2]])
    empty = make_pack((0, 0), **FUSED)
    nothing = dict.fromkeys(("o", "h", "v_new", "v", "beta"))
    found = run_scan(empty, dict.fromkeys(("ke", "qg", "kg", "Aqk", "Tinv", "decay_total")), **nothing)
    assert torch.equal(found["final_state"], empty.initial_state)


@pytest.mark.parametrize("variant", ["fp32_k64", "bf16_k64"])
def test_segments_give_what_one_segment_gives(variant):
    """The walk's states enter the segments. M and B carry fp32 roundings of a few chunks, and in bf16 those of v'."""
    pack = make_pack((300, 0, 64, 200, 30), variant, **FUSED | {"gate_form": "ready"})
    pack.g.mul_(0.05)
    tiles = run_prepare(pack)
    whole = run_scan(pack, tiles)
    cut = pack.cut(128, minimum=100)
    M, B = run_summary(cut, tiles)
    entry, _ = transfer_walk_reference(M, B, pack.initial_state, cut.tables.summary_offsets)
    found = run_scan(cut, tiles, segment_entry=entry.float())
    assert_exact_scan(cut, tiles, found, segment_entry=entry)
    tolerance = 1e-5 if variant == "fp32_k64" else 4e-3
    for name in ("o", "final_state", "h", "v_new"):
        assert relative_error(found[name].double(), whole[name].double()) <= tolerance, name


@pytest.mark.parametrize("absent", [("h",), ("v_new",), ("checkpoints",), ("final_state",), ("h", "v_new")])
def test_absent_outputs_change_no_bit_of_the_others(absent):
    pack = make_pack((130, 5), "bf16_k64", **FUSED)
    tiles = run_prepare(pack)
    everything = run_scan(pack, tiles)
    found = run_scan(pack, tiles, **dict.fromkeys(absent))
    assert found.keys() == everything.keys() - set(absent)
    assert_equal_bits(clean(found), clean({name: everything[name] for name in found}))


def clean(outputs):
    """Checkpoint rows that no segment uses hold NaN; bits are compared all the same, but other NaNs are refused."""
    assert not any(tensor.isnan().any() for name, tensor in outputs.items() if name != "checkpoints")
    return outputs


@pytest.mark.parametrize("heads", [(0, 2), (2, 2), (2, 4)])
def test_a_head_block_has_the_bits_of_the_whole(heads):
    first, count = heads
    block = slice(first, first + count)
    pack = make_pack((70, 5), H=3, HV=6, **FUSED)
    tiles = run_prepare(pack)
    whole = run_scan(pack, tiles)
    assert_exact_scan(pack, tiles, whole)
    found = run_scan(pack, run_prepare(pack, heads), heads=heads)
    for name, tensor in whole.items():
        if name in ("h", "v_new"):
            assert torch.equal(found[name], tensor[block]), name
        else:
            used = ~tensor[:, block].isnan()
            assert torch.equal(found[name][:, block][used], tensor[:, block][used]), name
            outside = torch.ones(pack.HV, dtype=torch.bool)
            outside[block] = False
            assert found[name][:, outside].isnan().all(), f"{name}: other heads are left alone"


def test_bits_do_not_depend_on_threads_or_neighbours():
    pack = make_pack((40, 170, 9), **FUSED)
    tiles = run_prepare(pack)
    found = run_scan(pack, tiles)
    for num_threads in (1, 3, 16):
        assert_equal_bits(run_scan(pack, tiles, num_threads=num_threads), found)
    rows = {name: getattr(pack, name)[40:210] for name in ("q", "k", "v", "g", "beta")}
    alone = replace(pack, **rows, lengths=(170,), tables=make_tables((170,)), initial_state=pack.initial_state[1:2])
    own = run_scan(alone, run_prepare(alone))
    assert torch.equal(own["o"], found["o"][40:210])
    assert torch.equal(own["final_state"][0], found["final_state"][1])
    assert torch.equal(own["h"], found["h"][:, 1:4]) and torch.equal(own["v_new"], found["v_new"][:, 1:4])


def test_strided_values_and_rows_without_a_document():
    """A capacity plan's spare rows change nothing."""
    pack = make_pack((70, 5), **FUSED)
    tiles = run_prepare(pack)
    expected = run_scan(pack, tiles, checkpoints=None)
    spare = torch.tensor([[-1, 0, 0, -1]], dtype=torch.int32)
    tables = replace(pack.tables, segment_table=torch.cat([pack.tables.segment_table, spare]))
    strided = replace(pack, v=torch.stack([pack.v, pack.v], dim=-1)[..., 0], tables=tables)
    assert_equal_bits(run_scan(strided, tiles, checkpoints=None), expected)


BAD = BAD_BLOCKS | {
    "no ke": ({"ke": None}, "ke is null"),
    "no decays": ({"decay_total": None}, "decay_total is null"),
    "no values": ({"v": None}, "v is null"),
    "no o": ({"o": None}, "o is null"),
    "no segments": ({"segment_table": None}, "segment_table is null"),
    "negative segments": ({"num_segments": -1}, "num_segments is -1"),
    "interval": ({"checkpoint_chunks": 0}, "checkpoint_chunks is 0"),
    "no entry": ({"segment_entry": None}, "segment 1 is not its document's first, but segment_entry is null"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused(case):
    change, message = BAD[case]
    pack = make_pack((130,), H=2, HV=4, **FUSED).cut(64)
    entry = torch.zeros(3, 4, 64, 64)
    with pytest.raises(UnsupportedProblemError, match=message):
        run_scan(pack, run_prepare(pack), **{"segment_entry": entry} | change)


@pytest.mark.parametrize(("column", "value"), [(0, -2), (1, -1), (2, -1), (2, 3)])
def test_a_table_that_pack_tables_does_not_write_is_refused(column, value):
    pack = make_pack((70,))
    tables = replace(pack.tables, segment_table=edited(pack.tables.segment_table, 0, column, value))
    with pytest.raises(UnsupportedProblemError, match=r"segment_table\[0\] is document"):
        run_scan(replace(pack, tables=tables), run_prepare(pack))


@pytest.mark.parametrize("variant", ["bf16_k64", "bf16_k128", "fp16_k128"])
@pytest.mark.parametrize("program", ["chunk_scan", "grad_scan", "segment_summary"])
def test_sm90_products_are_not_serialized(program, variant):
    """ptxas notes C7508 to C7519: setmaxnreg was ignored, or wgmma made to wait, at a fraction of the speed."""
    try:
        artifact = build(registry().get(program, variant, "sm90"), "sm_90a")
    except ToolchainNotFound as error:
        pytest.skip(f"no nvcc: {error.cause}")
    logs = [path.read_text() for path in artifact.directory.iterdir() if path.suffix in (".txt", ".log", ".json")]
    assert any("ptxas info" in log for log in logs)
    assert not any(re.search(r"C75\d\d|wgmma\.mma_async instructions are serialized", log) for log in logs)
