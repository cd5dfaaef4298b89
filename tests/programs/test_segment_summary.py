"""segment_summary (cpu): M and B against the recurrence in FP64, D against its gradient, the scan's own bits for B."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cake_kda_jit.bench.problems import BUDGETS, relative_error
from cake_kda_jit.errors import UnsupportedProblemError
from cake_kda_jit.reference import recurrent_kda, segment_summary_reference

from .pipeline import (
    BAD_BLOCKS,
    Pack,
    assert_near,
    launch,
    log_decay,
    make_pack,
    make_tables,
    poisoned,
    record_of,
    run_prepare,
    run_summary,
    scan_values,
)

LENGTHS = (0, 300, 64, 130, 40)  # in segments of 128 tokens: one without tokens, three, one, two, one
FUSED = {"gate_form": "ready", "beta_form": "sigmoid", "l2norm": True}


def make_weak_pack(lengths, variant="fp32_k64", **options) -> Pack:
    """Weak gates, so that M of a whole segment is not 0; every segment is summarised."""
    pack = make_pack(lengths, variant, **FUSED | options)
    pack.g.mul_(0.02)
    return pack.cut(128, summarize_all=1)


def token_offsets(pack: Pack) -> list[int]:
    """First token of each segment, and the end."""
    chunks, offsets = pack.tables.chunks(), [0]
    for _, first_chunk, num_chunks, _ in pack.tables.segments():
        offsets.append(offsets[-1] + sum(chunk[2] for chunk in chunks[first_chunk : first_chunk + num_chunks]))
    return offsets


def exact_inputs(pack: Pack):
    return [x.double().unsqueeze(0) for x in (pack.q, pack.k, pack.v, log_decay(pack), pack.beta)]


def exact_summaries(pack: Pack):
    """M and B by the recurrence."""
    _, k, v, g, beta = exact_inputs(pack)
    return segment_summary_reference(
        k, v, g, beta, token_offsets(pack), use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True
    )


def exact_state_gradients(pack: Pack):
    """D: the gradient of each segment's entry state for the output's gradient alone, by autograd."""
    offsets = token_offsets(pack)
    state = torch.zeros(len(offsets) - 1, pack.HV, pack.K, pack.K, dtype=torch.float64, requires_grad=True)
    o, _ = recurrent_kda(
        *exact_inputs(pack),
        initial_state=state,
        cu_seqlens=offsets,
        scale=pack.scale,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )
    o.backward(pack.do.double().unsqueeze(0))
    return state.grad


def assert_summary(name, found, expected, pack: Pack) -> None:
    if pack.tile_dtype is torch.float32:
        assert_near(name, found, expected)
    else:
        assert torch.isfinite(found).all(), name
        assert relative_error(found, expected) <= BUDGETS["weak"]["final_state"], name


@pytest.mark.parametrize("variant", ["fp32_k64", "bf16_k64", "bf16_k128"])
def test_every_segment_against_the_recurrence(variant):
    pack = make_weak_pack(LENGTHS, variant)
    tiles = run_prepare(pack)
    M, B = run_summary(pack, tiles)
    _, D = run_summary(pack, tiles, backward=1)
    exact_M, exact_B = exact_summaries(pack)
    assert exact_M[1].norm() > 0.1, "the problem's M is worth computing"
    for name, found, expected in (("M", M, exact_M), ("B", B, exact_B), ("D", D, exact_state_gradients(pack))):
        assert_summary(name, found, expected, pack)


def test_a_segment_of_no_chunks_is_the_identity():
    pack = make_weak_pack((0, 5))
    M, B = run_summary(pack, run_prepare(pack))
    assert torch.equal(M[0], torch.eye(64).expand(2, 64, 64)) and not B[0].any()
    _, D = run_summary(pack, run_prepare(pack), backward=1)
    assert not D[0].any()


@pytest.mark.parametrize("variant", ["fp32_k64", "bf16_k64"])
def test_B_has_the_bits_of_a_scan_from_zero(variant):
    pack = make_weak_pack(LENGTHS, variant)
    tiles = run_prepare(pack)
    _, B = run_summary(pack, tiles)
    segments = torch.tensor([row[0] for row in pack.tables.segments()])
    as_documents = pack.tables.segment_table.clone()
    as_documents[:, 0] = torch.arange(len(segments))
    tables = replace(pack.tables, segment_table=as_documents)
    final_state = poisoned(len(segments), pack.HV, 64, 64)
    outputs = {"o": poisoned(*pack.v.shape, dtype=pack.v.dtype), "final_state": final_state}
    nothing = dict.fromkeys(
        ("h", "v_new", "checkpoints", "initial_state", "segment_entry", "ready", "checkpoint_chunks")
    )
    launch(record_of("chunk_scan", pack.variant), scan_values(replace(pack, tables=tables), tiles) | outputs | nothing)
    assert torch.equal(B, final_state)


def test_hard_resets_forget_the_entry_state():
    pack = make_weak_pack((130, 70))
    pack.g[[100, 128, 150]] = -torch.inf
    tiles = run_prepare(pack)
    M, B = run_summary(pack, tiles)
    _, D = run_summary(pack, tiles, backward=1)
    assert not M.any()
    assert_summary("B", B, exact_summaries(pack)[1], pack)
    assert_summary("D", D, exact_state_gradients(pack), pack)


def test_only_segments_with_a_summary_row_are_summarised():
    """Documents of one segment have none, and the others' rows are those of the summary of all segments."""
    everything = make_weak_pack(LENGTHS)
    tiles = run_prepare(everything)
    some = everything.cut(128)
    rows = [index for index, row in enumerate(some.tables.segments()) if row[3] >= 0]
    assert len(rows) == int(some.tables.summary_offsets[-1]) == 5
    for backward in (0, 1):
        found = run_summary(some, tiles, backward=backward)
        expected = run_summary(everything, tiles, backward=backward)
        assert all(torch.equal(one, every[rows]) for one, every in zip(found, expected))


@pytest.mark.parametrize("backward", [0, 1])
@pytest.mark.parametrize("flag", ["skip_first_M", "skip_first_B", "skip_last_B"])
def test_what_is_skipped_is_left_alone(flag, backward):
    pack = make_weak_pack(LENGTHS)
    tiles = run_prepare(pack)
    everything = run_summary(pack, tiles, backward=backward)
    found = run_summary(pack, tiles, backward=backward, **{flag: 1})
    documents = [row[0] for row in pack.tables.segments()]
    neighbour = -1 if "first" in flag else 1
    padded = [None, *documents, None]
    skipped = torch.tensor([padded[n + 1] != padded[n + 1 + neighbour] for n in range(len(documents))])
    assert skipped.sum() == len(LENGTHS)
    for name, one, every in zip("MB", found, everything):
        expected_nan = skipped if flag.endswith(name) else torch.zeros_like(skipped)
        assert one[expected_nan].isnan().all(), name
        assert torch.equal(one[~expected_nan], every[~expected_nan]), name


@pytest.mark.parametrize("absent", ["M", "B"])
def test_either_output_may_be_absent(absent):
    pack = make_weak_pack((130,))
    tiles = run_prepare(pack)
    everything = dict(zip("MB", run_summary(pack, tiles)))
    found = dict(zip("MB", run_summary(pack, tiles, **{absent: None})))
    assert found[absent] is None
    [present] = set("MB") - {absent}
    assert torch.equal(found[present], everything[present])


@pytest.mark.parametrize("heads", [(0, 2), (2, 4)])
def test_a_head_block_has_the_bits_of_the_whole(heads):
    first, count = heads
    pack = make_weak_pack((70, 5), H=3, HV=6)
    whole = run_summary(pack, run_prepare(pack))
    assert_summary("M", whole[0], exact_summaries(pack)[0], pack)
    found = run_summary(pack, run_prepare(pack, heads), heads=heads)
    inside = torch.zeros(6, dtype=torch.bool)
    inside[first : first + count] = True
    for one, every in zip(found, whole):
        assert torch.equal(one[:, inside], every[:, inside]) and one[:, ~inside].isnan().all()


def test_bits_do_not_depend_on_threads_or_neighbours():
    pack = make_weak_pack((40, 170, 9))
    tiles = run_prepare(pack)
    rows = {name: getattr(pack, name)[40:210] for name in ("q", "k", "v", "g", "beta", "do")}
    alone = replace(pack, **rows, lengths=(170,), tables=make_tables((170,), 128, summarize_all=1))
    for backward in (0, 1):
        found = run_summary(pack, tiles, backward=backward)
        own = run_summary(alone, run_prepare(alone), backward=backward)
        for num_threads in (1, 5):
            others = run_summary(pack, tiles, backward=backward, num_threads=num_threads)
            assert all(torch.equal(one, other) for one, other in zip(found, others))
        assert all(torch.equal(one[1:3], other) for one, other in zip(found, own))


BAD = BAD_BLOCKS | {
    "no kg": ({"kg": None}, "kg is null"),
    "no values": ({"v": None}, "v is null"),
    "no gradient": ({"backward": 1, "do_": None}, "do_ is null"),
    "no queries": ({"backward": 1, "qg": None}, "qg is null"),
    "no segments": ({"segment_table": None}, "segment_table is null"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused(case):
    change, message = BAD[case]
    pack = make_weak_pack((70,), H=2, HV=4)
    with pytest.raises(UnsupportedProblemError, match=message):
        run_summary(pack, run_prepare(pack), **change)


@pytest.mark.parametrize("backward", [0, 1])
def test_what_the_other_direction_reads_may_be_null(backward):
    pack = make_weak_pack((70,))
    tiles = run_prepare(pack)
    unread = {"v": None} if backward else {"qg": None, "Aqk": None, "do_": None}
    expected = run_summary(pack, tiles, backward=backward)
    found = run_summary(pack, tiles, backward=backward, **unread)
    assert all(torch.equal(one, other) for one, other in zip(found, expected))
