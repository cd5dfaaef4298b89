"""Attention cases from public reports: refusals, synchronisation, compilation, sizes. See docs/cases-attention.md."""

from __future__ import annotations

import pytest
import torch

from cake_kda_jit import (
    KdaOptions,
    UnsupportedProblemError,
    causal_conv1d,
    chunk_kda,
    last_launches,
    make_plan,
    segment_summary,
    transfer_walk,
)
from cake_kda_jit.bench import problems
from cake_kda_jit.bench.problems import make_problem, run
from cake_kda_jit.runtime.launch import operation as account

from .attention import assert_near_fp64, assert_nothing_is_built, call, weighted

# ---- refusals --------------------------------------------------------------------------------------------------------

SHAPES = {
    "g [B, T, HV]": ("g", (1, 20, 4), r"g has shape \[1, 20, 4\].*\[1, 20, 4, 64\]"),
    "g [B, T, H]": ("g", (1, 20, 2), r"g has shape \[1, 20, 2\].*\[1, 20, 4, 64\]"),
    "g [B, T, H, K]": ("g", (1, 20, 2, 64), r"g has shape \[1, 20, 2, 64\].*\[1, 20, 4, 64\]"),
    "g [B, T, HV, 1]": ("g", (1, 20, 4, 1), r"g has shape \[1, 20, 4, 1\]"),
    "g [B, HV, T, K]": ("g", (1, 4, 20, 64), r"g has shape \[1, 4, 20, 64\]"),
    "beta [B, T, H]": ("beta", (1, 20, 2), r"beta has shape \[1, 20, 2\].*\[1, 20, 4\]"),
    "beta [B, T, HV, 1]": ("beta", (1, 20, 4, 1), r"beta has shape \[1, 20, 4, 1\]"),
    "k [B, T, HV, K]": ("k", (1, 20, 4, 64), r"k has shape \[1, 20, 4, 64\].*\[1, 20, 2, 64\]"),
    "k of another length": ("k", (1, 19, 2, 64), r"k has shape \[1, 19, 2, 64\]"),
    "v of another length": ("v", (1, 21, 4, 64), r"v has shape \[1, 21, 4, 64\]|g has shape"),
    "q without a batch": ("q", (20, 2, 64), r"q has shape \[20, 2, 64\]"),
}


@pytest.mark.parametrize("case", SHAPES)
def test_a_tensor_of_a_wrong_shape_is_refused_with_both_shapes(case):
    name, shape, message = SHAPES[case]
    inputs = make_problem((20,), heads=2, value_heads=4, with_state=False).inputs
    inputs[name] = torch.zeros(shape, dtype=torch.bfloat16)
    with account():
        pass  # of no launches
    with pytest.raises(UnsupportedProblemError, match=message):
        chunk_kda(**inputs, use_qk_l2norm_in_kernel=True)
    assert not last_launches()


BOUNDARIES = {
    "decreasing": (
        torch.tensor([0, 12, 8, 16]),
        r"(cu_seqlens|offsets)\[2\] = 8 is below (cu_seqlens|offsets)\[1\] = 12",
    ),
    "last below T": (torch.tensor([0, 12, 15]), "ends at 15 but the inputs hold 16"),
    "last above T": (torch.tensor([0, 12, 17]), "ends at 17 but the inputs hold 16"),
    "first not 0": (torch.tensor([2, 16]), "starts with 2"),
    "first below 0": (torch.tensor([-4, 16]), "starts with -4"),
    "no entry": (torch.tensor([], dtype=torch.int64), "starts with nothing"),
    "float": (torch.tensor([0.0, 16.0]), "torch.float32"),
    "int16": (torch.tensor([0, 16], dtype=torch.int16), "torch.int16"),
    "bool": (torch.tensor([False, True]), "torch.bool"),
    "two dimensions": (torch.tensor([[0, 16]]), r"shape \[1, 2\]"),
    "list": ([0, 16], "list"),
    "device": (torch.tensor([0, 16], device="meta"), "is on meta"),
}


@pytest.mark.parametrize("operation", ["chunk_kda", "segment_summary", "transfer_walk", "causal_conv1d"])
@pytest.mark.parametrize("case", BOUNDARIES)
def test_malformed_boundaries_are_refused_with_the_offending_values(case, operation):
    """Every operation that takes boundaries reads them by the same function, and launches nothing when they are bad."""
    boundaries, message = BOUNDARIES[case]
    inputs = make_problem((16,), heads=1, with_state=False).inputs
    summaries = torch.zeros(16, 1, 64, 64)
    with account():
        pass  # of no launches
    with pytest.raises(UnsupportedProblemError, match=message):
        if operation == "chunk_kda":
            chunk_kda(**inputs, cu_seqlens=boundaries)
        elif operation == "segment_summary":
            segment_summary(*(inputs[name] for name in ("k", "v", "g", "beta")), boundaries)
        elif operation == "transfer_walk":
            transfer_walk(summaries, summaries, None, boundaries)
        else:
            causal_conv1d(torch.zeros(1, 16, 8), torch.zeros(8, 4), cu_seqlens=boundaries)
    assert not last_launches()


@pytest.mark.parametrize("case", ["decreasing", "first not 0", "float", "two dimensions", "device"])
def test_a_plan_of_malformed_boundaries_is_refused(case):
    boundaries, message = BOUNDARIES[case]
    with pytest.raises(UnsupportedProblemError, match=message):
        make_plan(boundaries, num_heads=1, head_dim=64, device="cpu")


@pytest.mark.parametrize("host_copy", [torch.tensor([0, 8]), torch.tensor([0, 8, 15]), torch.tensor([0, 16, 8])])
def test_a_malformed_host_copy_is_refused(host_copy):
    inputs = make_problem((16,), heads=1, with_state=False).inputs
    with pytest.raises(UnsupportedProblemError, match="cu_seqlens"):
        chunk_kda(**inputs, cu_seqlens=torch.tensor([0, 8, 16]), cu_seqlens_cpu=host_copy)


def test_a_batch_with_boundaries_is_refused():
    inputs = {name: tensor.repeat(2, *[1] * (tensor.dim() - 1)) for name, tensor in make_problem((16,)).inputs.items()}
    with pytest.raises(UnsupportedProblemError, match="B = 2 with cu_seqlens"):
        chunk_kda(**inputs, cu_seqlens=torch.tensor([0, 16]))


# ---- synchronisation and compilation ---------------------------------------------------------------------------------

READS = ("tolist", "item", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")


@pytest.mark.parametrize("backward", ["saved", "replay"])
@pytest.mark.parametrize("segment_tokens", [0, 64])
def test_a_call_with_a_plan_reads_no_tensor_on_the_host(monkeypatch, segment_tokens, backward):
    """On a GPU each of these methods waits for the device; with a plan neither forward nor backward uses one."""
    problem = make_problem((70, 0, 130))
    plan = make_plan(problem.cu_seqlens, num_heads=2, head_dim=64, device="cpu", segment_tokens=segment_tokens)
    leaves = [tensor.clone().requires_grad_() for tensor in problem.inputs.values()]

    def refuse(name):
        def call(*_):
            raise AssertionError(f"Tensor.{name} was called")

        return call

    with monkeypatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, refuse(name))
        with pytest.raises(AssertionError, match="tolist"):  # without a plan the boundaries are read
            chunk_kda(*leaves, cu_seqlens=problem.cu_seqlens, **problem.keywords)
        o, final_state = chunk_kda(
            *leaves, plan=plan, output_final_state=True, options=KdaOptions(backward=backward), **problem.keywords
        )
        torch.autograd.backward([o, final_state], [torch.ones_like(o), torch.ones_like(final_state)])
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


def test_20_packs_after_the_warm_up_compile_and_load_nothing(monkeypatch):
    """A pack's size and number of documents are arguments, never a part of a record."""

    def step(lengths, segment_tokens, index):
        problem = make_problem(lengths, heads=1, value_heads=2, seed=len(lengths))
        plan = make_plan(
            problem.cu_seqlens.to(torch.int32),
            num_heads=1,
            num_value_heads=2,
            head_dim=64,
            device="cpu",
            segment_tokens=segment_tokens,
        )
        call(problem, weighted(), segment_tokens, options=KdaOptions(backward=("saved", "replay")[index % 2]))
        chunk_kda(*problem.inputs.values(), plan=plan, **problem.keywords)

    assert_nothing_is_built(monkeypatch, step)


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_2048_short_documents(nan_poison):
    """Documents of 0 to 3 tokens, forward and backward: 1,536 chunks for 3,072 tokens."""
    lengths = [index % 4 for index in range(2048)]
    problem = make_problem(lengths, heads=1, dtype=torch.float32, regime="softplus")
    found = run(chunk_kda, problem, output_final_state=True, options=KdaOptions(backward="replay"))
    assert_near_fp64(found, problems.reference(problem))
    empty = torch.tensor(lengths) == 0
    assert torch.equal(found["final_state"][empty], problem.keywords["initial_state"][empty])


def test_more_than_65535_pairs_of_document_and_head():
    """A grid's second and third size end there; of one token each without a state, o is scale beta (q k) v."""
    problem = make_problem((1,) * 2048, heads=33, with_state=False)
    problem.inputs["g"] = torch.full((), -1.0, dtype=torch.bfloat16).expand(problem.inputs["g"].shape)
    problem.inputs["beta"].fill_(0.5)
    torch.set_num_threads(2)  # the fixture sets it back
    # head blocks of a few heads: a document of one token still fills a chunk of scratch, 170 MB a head
    options = KdaOptions(workspace_limit=600_000_000)
    with torch.no_grad():
        o, _ = chunk_kda(*problem.inputs.values(), cu_seqlens=problem.cu_seqlens, options=options)
    q, k, v = (problem.inputs[name].float() for name in ("q", "k", "v"))
    expected = 64**-0.5 * 0.5 * (q * k).sum(-1, keepdim=True) * v
    assert ((o - expected).norm() / expected.norm()) < 4e-3  # one rounding to bf16, at most 2^-8
