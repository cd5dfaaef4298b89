"""transfer_walk (cpu): every form against FP64, the roundings it emulates, ragged chains, and what it refuses."""

from __future__ import annotations

import json
import re

import pytest
import torch

from cake_kda_jit.arch import ARCHES, host_arch
from cake_kda_jit.catalog import registry
from cake_kda_jit.compiler.artifact import REPORT
from cake_kda_jit.compiler.build import build
from cake_kda_jit.errors import ToolchainNotFound, UnsupportedProblemError
from cake_kda_jit.programs.transfer_walk import FORMS, SM90_FORMS
from cake_kda_jit.reference import transfer_walk_reference
from cake_kda_jit.runtime.load import get_kernel, load

from .walks import FORM_ERRORS, make_states, make_summaries, relative_error

BF16_FORMS = ("bf16x3_hw64", "bf16x3")


def address(tensor):
    return None if tensor is None else tensor.data_ptr()


def launch(form, values):
    get_kernel(registry().get("transfer_walk", form, "cpu"), host_arch()).launch(values)


def walk_values(M, B, initial, offsets, transpose=False, num_threads=2):
    """The argument block's values, and NaN-poisoned outputs."""
    _, heads, head_dim, _ = B.shape
    entry = torch.full_like(B, float("nan"))
    exit_ = torch.full((len(offsets) - 1, heads, head_dim, head_dim), float("nan"))
    values = {
        "M": M.data_ptr(),
        "B": B.data_ptr(),
        "initial": address(initial),
        "offsets": offsets.data_ptr(),
        "entry": entry.data_ptr(),
        "exit": exit_.data_ptr(),
        "num_chains": len(offsets) - 1,
        "num_value_heads": heads,
        "first_head": 0,
        "num_block_heads": heads,
        "head_dim": head_dim,
        "transpose": int(transpose),
        "num_threads": num_threads,
    }
    return values, entry, exit_


def run_walk(form, M, B, initial, offsets, transpose=False, num_threads=2):
    table = torch.tensor(offsets)
    values, entry, exit_ = walk_values(M, B, initial, table, transpose, num_threads)
    launch(form, values)
    return entry, exit_


@pytest.fixture(scope="module")
def long_chain():
    return make_summaries(64, 1, 128)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_error_after_1_to_64_fragments(form, transpose, long_chain):
    M, B = long_chain
    initial = make_states(1, 1, 128)
    entry, exit_ = run_walk(form, M, B, initial, [0, 64], transpose)
    expected_entry, expected_exit = transfer_walk_reference(M, B, initial, [0, 64], transpose)
    walked = (63 - f if transpose else f for f in (1, 4, 16))
    errors = [relative_error(entry[f], expected_entry[f]) for f in walked]
    assert max(*errors, relative_error(exit_, expected_exit)) < 2 * FORM_ERRORS[form]


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("form", FORMS)
def test_ragged_chains(form, head_dim, heads, transpose):
    offsets = [0, 0, 3, 4, 4, 6, 6]
    M, B = make_summaries(6, heads, head_dim, seed=2)
    initial = make_states(6, heads, head_dim)
    entry, exit_ = run_walk(form, M, B, initial, offsets, transpose)
    expected_entry, expected_exit = transfer_walk_reference(M, B, initial, offsets, transpose)
    for found, expected in zip((*entry, *exit_), (*expected_entry, *expected_exit)):
        assert relative_error(found, expected) < 2 * FORM_ERRORS[form]
    for empty in (0, 3, 5):
        assert torch.equal(exit_[empty], initial[empty])
    first = (2, 3, 5) if transpose else (0, 3, 4)
    assert torch.equal(entry[list(first)], initial[[1, 2, 4]])


@pytest.mark.parametrize("transpose", [False, True])
def test_value_width_changes_no_bit(transpose):
    M, B = make_summaries(5, 2, 128)
    initial = make_states(2, 2, 128)
    for narrow, full in zip(*(run_walk(form, M, B, initial, [0, 2, 5], transpose) for form in BF16_FORMS)):
        assert torch.equal(narrow, full)


def test_thread_count_changes_no_bit():
    M, B = make_summaries(5, 2, 128)
    initial = make_states(2, 2, 128)
    results = [run_walk("bf16x3_hw64", M, B, initial, [0, 2, 5], num_threads=threads) for threads in (1, 3, 16)]
    for entry, exit_ in results[1:]:
        assert torch.equal(entry, results[0][0]) and torch.equal(exit_, results[0][1])


def test_absent_initial_is_zero():
    M, B = make_summaries(3, 1, 64)
    absent = run_walk("bf16x3_hw64", M, B, None, [0, 0, 3])
    zeros = run_walk("bf16x3_hw64", M, B, torch.zeros(2, 1, 64, 64), [0, 0, 3])
    assert torch.equal(absent[0], zeros[0]) and torch.equal(absent[1], zeros[1])
    assert torch.equal(absent[1][0], torch.zeros(1, 64, 64))


@pytest.mark.parametrize("form", BF16_FORMS)
def test_identity_keeps_every_bit(form):
    """Three bf16 parts hold the 24 bits of fp32, and summing them back loses none."""
    M, B, initial = torch.eye(128).view(1, 1, 128, 128), torch.zeros(1, 1, 128, 128), make_states(1, 1, 128)
    assert torch.equal(run_walk(form, M, B, initial, [0, 1])[1], initial)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("term", "truncated"), [(0.75 * 2.0**-23, 1.0), (-0.25 * 2.0**-23, 1.0 - 2.0**-24)])
@pytest.mark.parametrize("k", [1, 100], ids=["same step", "later step"])
def test_accumulation_truncates(form, term, truncated, k):
    """As tensor cores do, within a step and from step to step: 1 + 3/4 ulp gives 1, 1 - 1/4 ulp gives 1 - 1/2 ulp."""
    M, B, initial = (torch.zeros(1, 1, 128, 128) for _ in range(3))
    M[..., 0, 0] = initial[..., 0, 7] = 1.0
    M[..., 0, k], initial[..., k, 7] = 1.0, term
    assert run_walk(form, M, B, initial, [0, 1])[1][0, 0, 0, 7].item() == truncated


@pytest.mark.parametrize("form", FORMS)
def test_last_addition_rounds(form):
    """B meets one rounding to nearest: 1 + 3/4 ulp gives 1 + 1 ulp."""
    M, B, initial = (torch.zeros(1, 1, 64, 64) for _ in range(3))
    M[..., 0, 0] = initial[..., 0, 7] = 1.0
    B[..., 0, 7] = 0.75 * 2.0**-23
    assert run_walk(form, M, B, initial, [0, 1])[1][0, 0, 0, 7].item() == 1.0 + 2.0**-23


def test_tf32_rounds_ties_away_from_zero():
    """1 + 2^-11 is half way between two numbers of TF32; the plain form shows what it was rounded to."""
    M, B, initial = torch.eye(64).view(1, 1, 64, 64), torch.zeros(1, 1, 64, 64), torch.zeros(1, 1, 64, 64)
    initial[..., 0, 0], initial[..., 1, 0] = 1.0 + 2.0**-11, -1.0 - 2.0**-11
    found = run_walk("tf32_hilo_plain_tf32", M, B, initial, [0, 1])[1][0, 0, :2, 0]
    assert found.tolist() == [1.0 + 2.0**-10, -1.0 - 2.0**-10]


@pytest.mark.parametrize("form", FORMS)
def test_nan_stays_in_its_column(form):
    M, B = make_summaries(2, 1, 64)
    initial = make_states(1, 1, 64)
    initial[0, 0, 5, 9] = float("nan")
    exit_ = run_walk(form, M, B, initial, [0, 2])[1][0, 0]
    assert exit_[:, 9].isnan().all() and exit_.isnan().sum() == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_value_heads": 0}, "num_value_heads is 0"),
        ({"num_value_heads": -1}, "num_value_heads is -1"),
        ({"head_dim": 96}, "head_dim is 96"),
        ({"transpose": 2}, "transpose is 2"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"num_chains": -1}, "num_chains is -1"),
        ({"offsets": None}, "offsets is null"),
        ({"first_head": 1}, "heads 1 to 1 are asked for; there are 1"),
        ({"num_block_heads": 0}, "heads 0 to -1 are asked for"),
        ({"M": None}, "M is null"),
        ({"B": None}, "B is null"),
        ({"entry": None}, "entry is null"),
    ],
)
def test_refuses(changes, message):
    M, B = torch.zeros(2, 1, 64, 64), torch.zeros(2, 1, 64, 64)
    offsets = torch.tensor([0, 2])
    values, entry, exit_ = walk_values(M, B, None, offsets)
    with pytest.raises(UnsupportedProblemError, match=message):
        launch("bf16x3_hw64", values | changes)
    assert entry.isnan().all() and exit_.isnan().all()


def test_refuses_decreasing_offsets():
    M, B = torch.zeros(2, 1, 64, 64), torch.zeros(2, 1, 64, 64)
    offsets = torch.tensor([0, 2, 1])
    values, _, _ = walk_values(M, B, None, offsets)
    with pytest.raises(UnsupportedProblemError, match=r"offsets\[1\.\.\] is 2, 1"):
        launch("bf16x3_hw64", values)


def test_without_fragments_tensors_may_be_null():
    initial = make_states(2, 3, 64)
    empty = torch.empty(0, 3, 64, 64)
    offsets = torch.tensor([0, 0, 0])
    values, _, exit_ = walk_values(empty, empty, initial, offsets)
    launch("bf16x3_hw64", values | {"M": None, "B": None, "entry": None})
    assert torch.equal(exit_, initial)


def test_grid_is_one_task_per_value_block_head_and_chain():
    M, B, offsets = torch.zeros(1, 3, 128, 128), torch.zeros(1, 3, 128, 128), torch.tensor([0, 1, 1])
    values, _, _ = walk_values(M, B, None, offsets)
    for form, blocks in (("bf16x3_hw64", 2), ("bf16x3", 1)):
        kernel = get_kernel(registry().get("transfer_walk", form, "cpu"), host_arch())
        assert kernel.grid(kernel.record.entry.pack(values)) == (blocks, 3, 2)


def test_cuda_records_fit_their_architectures():
    for record in registry().records():
        if record.program == "transfer_walk" and record.family == "smxx":
            needed = record.limits.shared_memory_bytes
            assert record.archs == tuple(
                name for name, arch in ARCHES.items() if arch.is_cuda and arch.shared_memory_bytes >= needed
            )
            assert not record.shipped or len(record.archs) == sum(arch.is_cuda for arch in ARCHES.values())


def test_sm90_records_build_for_hopper_alone():
    records = [r for r in registry().records() if r.program == "transfer_walk" and r.family == "sm90"]
    assert {r.constants["value_width"] for r in records} == {32, 64, 128}
    for record in records:
        assert record.archs == ("sm_90a",) and record.shipped == (record.constants["split"] == "bf16x3")
        assert record.limits.shared_memory_bytes <= ARCHES["sm_90a"].shared_memory_bytes


@pytest.fixture(scope="module", params=["smxx", "sm90"])
def cuda_kernel(request):
    """A shipped CUDA library: it spills nothing (a limit of its record), and its entry answers without a device."""
    try:
        return load(build(registry().get("transfer_walk", "bf16x3_hw64", request.param), "sm_90a"))
    except ToolchainNotFound as error:
        pytest.skip(f"no nvcc: {error.cause}")


# Addresses that check() looks at and nothing reads.
CUDA_VALUES = {
    **dict.fromkeys(("M", "B", "initial", "offsets", "entry", "exit"), 0x1000),
    **{"num_chains": 70_000, "num_value_heads": 3, "first_head": 0, "num_block_heads": 3},
    **{"head_dim": 128, "transpose": 0},
}


@pytest.mark.parametrize(
    ("changes", "grid"),
    [
        ({}, (140_000, 3, 1)),
        ({"head_dim": 64}, (70_000, 3, 1)),
        ({"first_head": 1, "num_block_heads": 2}, (140_000, 2, 1)),
        ({"num_chains": 0, "offsets": None, "exit": None}, (0, 3, 1)),
        ({"M": None, "B": None, "entry": None, "initial": None}, (140_000, 3, 1)),
    ],
)
def test_cuda_grid(cuda_kernel, changes, grid):
    """Value blocks and chains in x, which goes to 2^31 - 1; heads in y, which stops at 65,535."""
    assert cuda_kernel.grid(cuda_kernel.record.entry.pack(CUDA_VALUES | changes)) == grid


@pytest.mark.parametrize("variant", SM90_FORMS)
def test_sm90_products_are_not_serialized(variant):
    """ptxas notes C7508 to C7517: setmaxnreg was ignored, or wgmma made to wait, at a fraction of the speed.

    Nothing is spilled by forms that are not shipped either: they are what the shipped one is compared with.
    """
    try:
        artifact = build(registry().get("transfer_walk", variant, "sm90"), "sm_90a")
    except ToolchainNotFound as error:
        pytest.skip(f"no nvcc: {error.cause}")
    logs = [path.read_text() for path in artifact.directory.iterdir() if path.suffix in (".txt", ".log", ".json")]
    assert any("ptxas info" in log for log in logs)
    assert not any(re.search(r"C75\d\d|wgmma\.mma_async instructions are serialized", log) for log in logs)
    kernels = json.loads((artifact.directory / REPORT).read_text())["kernels"]
    assert len(kernels) == 4 and not any(kernel["spill_store_bytes"] for kernel in kernels)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_value_heads": 0}, "num_value_heads is 0"),
        ({"head_dim": 32}, "head_dim is 32"),
        ({"transpose": -1}, "transpose is -1"),
        ({"num_chains": 2**30}, "num_chains is 1073741824; give 0 to 1073741823"),
        ({"num_block_heads": 4}, "heads 0 to 3 are asked for; there are 3"),
        ({"first_head": -1}, "heads -1 to 1 are asked for; there are 3"),
        ({"num_value_heads": 65_536, "num_block_heads": 65_536}, "num_block_heads is 65536; a grid has at most 65535"),
        ({"offsets": None}, "offsets is null"),
        ({"exit": 0x1008}, "exit is 0x1008; .* multiple of 16"),
        ({"initial": 0x1008}, "initial is 0x1008; .* multiple of 16"),
        ({"M": None}, "M is"),
        ({"B": 0x1004}, "B is 0x1004"),
        ({"entry": None}, "entry is"),
    ],
)
def test_cuda_entry_refuses(cuda_kernel, changes, message):
    with pytest.raises(UnsupportedProblemError, match=message):
        cuda_kernel.launch(CUDA_VALUES | changes)


@pytest.mark.parametrize("transpose", [False, True])
def test_what_is_not_needed_is_not_read(transpose):
    """From no state M of a chain's first fragment, and where nothing asks for the exit the last fragment: all NaN."""
    M, B = (tensor.clone() for tensor in make_summaries(6, 1, 64, seed=3))
    offsets = torch.tensor([0, 4, 4, 5, 6])
    expected, _ = run_walk("bf16x3_hw64", M, B, None, offsets.tolist(), transpose)
    first, last = ([3, 4, 5], [0, 4, 5]) if transpose else ([0, 4, 5], [3, 4, 5])
    M[first], M[last], B[last] = float("nan"), float("nan"), float("nan")
    values, entry, _ = walk_values(M, B, None, offsets, transpose)
    launch("bf16x3_hw64", values | {"exit": None})
    assert torch.equal(entry, expected)


def test_head_blocks_have_the_bits_of_the_whole():
    M, B = make_summaries(4, 3, 64, seed=4)
    initial, offsets = make_states(2, 3, 64), torch.tensor([0, 1, 4])
    values, whole, whole_exit = walk_values(M, B, initial, offsets)
    launch("bf16x3_hw64", values)
    values, entry, exit_ = walk_values(M, B, initial, offsets)
    launch("bf16x3_hw64", values | {"first_head": 1, "num_block_heads": 2})
    assert torch.equal(entry[:, 1:], whole[:, 1:]) and torch.equal(exit_[:, 1:], whole_exit[:, 1:])
    assert entry[:, 0].isnan().all() and exit_[:, 0].isnan().all()
