"""Every gradient of chunk_kda on a CUDA device against FP64, and what must change none of their bits."""

from __future__ import annotations

import itertools

import pytest
import torch

from cake_kda_jit import KdaOptions, chunk_kda, last_launches, make_plan
from cake_kda_jit.bench import problems
from cake_kda_jit.bench.precision import PARAMETERS, parameter_errors, parameter_shares
from cake_kda_jit.bench.problems import BUDGETS, LOCAL_FACTOR, NAMES, PARAMETER_BUDGET, REGIMES, Problem, make_problem
from cake_kda_jit.ops.workspace import head_blocks, tile_bytes_per_head
from cake_kda_jit.programs.tile_fields import TILE_NAMES

from .twins import bits

pytestmark = pytest.mark.gpu

LENGTHS = (65, 0, 1, 200, 63, 64, 3)
VARIANTS = [(64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float16)]


def run(problem: Problem, **extra) -> dict[str, torch.Tensor]:
    """Outputs and gradients on the device, as CPU tensors by name."""
    found = problems.run(chunk_kda, problem.to("cuda"), output_final_state=True, **extra)
    return {name: tensor.cpu() for name, tensor in found.items()}


def with_plan(problem: Problem, segment_tokens: int | None = None, **extra) -> dict[str, torch.Tensor]:
    q, v = problem.inputs["q"], problem.inputs["v"]
    plan = make_plan(
        problem.cu_seqlens,
        num_heads=q.shape[2],
        num_value_heads=v.shape[2],
        head_dim=q.shape[3],
        device="cuda",
        segment_tokens=segment_tokens,
    )
    return run(problem, plan=plan, **extra)


def ready_problem(lengths, **options) -> Problem:
    """Gates and write strengths that need no transform, unit keys; nothing but gradients of inputs and state."""
    problem = make_problem(lengths, **options)
    inputs, generator = problem.inputs, torch.Generator().manual_seed(3)
    dtype = inputs["k"].dtype
    inputs["k"] = torch.nn.functional.normalize(inputs["k"].float(), dim=-1).to(dtype)
    inputs["g"] = (-torch.rand(inputs["g"].shape, generator=generator)).to(dtype)
    inputs["beta"] = torch.sigmoid(inputs["beta"].float()).to(dtype)
    problem.keywords = {name: x for name, x in problem.keywords.items() if name == "initial_state"}
    return problem


def local_errors(name, found, expected, problem):
    """(document, head, error) of every document that has tokens, or of every row of a batch.

    dbeta is a sum over V of terms of either sign, and in a document of few tokens one of them may count alone. If its
    terms happen to cancel there is nothing left to be relative to; so it is relative to their norm, if that is larger.
    """
    terms = problems.random_sign_dbeta(expected, problem) if name == "dbeta" else None
    yield from problems.local_errors(name, found, expected[name], problem, terms)


def check_against_reference(found, expected, problem, regime) -> None:
    """The budgets, of the whole and of each document and head; sums over tokens by what their tiles permit."""
    for name, tensor in found.items():
        assert torch.isfinite(tensor).all(), name
        if name in PARAMETERS:
            continue
        budget = BUDGETS[regime][name.replace("dinitial", "final")]
        assert problems.relative_error(tensor, expected[name]) <= budget, name
        for document, head, error in local_errors(name, tensor, expected, problem):
            assert error <= LOCAL_FACTOR * budget, (name, document, head)
    if "dA_log" in found:
        check_parameters(found, expected, problem, regime)


def check_parameters(found, expected, problem, regime) -> None:
    on_device = [{name: values[name].cuda() for name in (*PARAMETERS, "dg")} for values in (found, expected)]
    shares = parameter_shares(*on_device, problem.to("cuda"), regime)
    assert max(shares.values()) <= 1, shares


def assert_same_bits(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(bits(found[name]), bits(tensor)), name


@pytest.mark.parametrize("head_dim, dtype", VARIANTS)
@pytest.mark.parametrize("regime", REGIMES)
def test_packed_documents(regime, head_dim, dtype, nan_poison):
    problem = make_problem(LENGTHS, regime=regime, head_dim=head_dim, dtype=dtype)
    found, expected = run(problem), problems.reference(problem)
    check_against_reference(found, expected, problem, regime)


def test_dg_inside_a_long_document(nan_poison):
    """In its inner chunks dg is what roundings leave of pairs that cancel, by emulation 2.4e-3.

    If a pair's terms of dg were products of numbers rounded apart, it would be 5.1e-3, with one of the two factors
    rounded once 3.9e-3. The last chunk, which has half of dg, hides that from the norm of the whole: 3.7e-3.
    """
    problem = make_problem((2048,), heads=1, head_dim=128, seed=1)
    found, expected = run(problem)["dg"], problems.chunk_reference(problem.to("cuda"))["dg"].cpu()
    inner = slice(64, -64)
    assert problems.relative_error(found, expected) <= BUDGETS["bounded"]["dg"]
    assert problems.relative_error(found[:, inner], expected[:, inner]) <= BUDGETS["bounded"]["dg"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("regime", REGIMES)
def test_sums_over_tokens(regime, seed, nan_poison):
    """Every head's dA_log and every channel's ddt_bias, of packs of 3, 10 and 19 chunks and a document of 128."""
    for lengths in ((65, 20), LENGTHS, (65, 200, 63, 500, 220), (8192,)):
        head_dim = 64 if seed % 2 else 128
        problem = make_problem(lengths, regime=regime, heads=2, head_dim=head_dim, seed=seed).to("cuda")
        found = problems.run(chunk_kda, problem, output_final_state=True)
        shares = parameter_shares(found, problems.chunk_reference(problem), problem, regime)
        assert max(shares.values()) <= 1, (lengths, shares)


@pytest.mark.parametrize("regime", REGIMES)
def test_sums_over_many_chunks(regime, nan_poison):
    """Errors of many chunks average out, until they are within 3e-4 of the absolute terms.

    dA_log is from 128 chunks on, with at most 0.07e-3. Single channels of ddt_bias are at 512, with 0.12e-3 and
    0.14e-3, unless decays are so slow that a state's error is that of many chunks.
    """
    is_slow = regime in ("weak", "correlated")
    problem = make_problem((8192 if is_slow else 32_768,), regime=regime, heads=1, head_dim=128).to("cuda")
    found = problems.run(chunk_kda, problem, output_final_state=True)
    A_log, dt_bias = parameter_errors(found, problems.chunk_reference(problem), problem)
    assert A_log <= PARAMETER_BUDGET and (is_slow or dt_bias <= PARAMETER_BUDGET)


@pytest.mark.parametrize("head_dim, dtype", VARIANTS)
def test_ready_gates(head_dim, dtype, nan_poison):
    problem = ready_problem((70, 30, 200), head_dim=head_dim, dtype=dtype)
    check_against_reference(run(problem), problems.reference(problem), problem, "softplus")


def test_fp32_gates_without_a_state(nan_poison):
    problem = ready_problem((70, 30), head_dim=128, with_state=False)
    for name in ("g", "beta"):
        problem.inputs[name] = problem.inputs[name].float()
    found = run(problem)
    assert found["dg"].dtype == found["dbeta"].dtype == torch.float32
    check_against_reference(found, problems.reference(problem), problem, "softplus")


@pytest.mark.parametrize("value_heads", [2, 4, 8])
def test_grouped_value_heads_in_a_batch(value_heads, nan_poison):
    problem = make_problem(None, batch=(2, 100), heads=2, value_heads=value_heads, head_dim=128)
    found, expected = run(problem), problems.reference(problem)
    check_against_reference(found, expected, problem, "bounded")


def test_twice_sigmoid_scale_and_state_v_first(nan_poison):
    problem = make_problem((65, 20), head_dim=128)
    problem.keywords |= {"allow_neg_eigval": True, "scale": 0.3, "state_v_first": True}
    check_against_reference(run(problem), problems.reference(problem), problem, "bounded")


@pytest.mark.parametrize("segment_tokens", [64, 192])
@pytest.mark.parametrize("with_state", [True, False])
def test_segments(segment_tokens, with_state, nan_poison):
    problem = make_problem((700, 30, 0, 200), regime="weak", head_dim=128, with_state=with_state)
    found, expected = with_plan(problem, segment_tokens), problems.reference(problem)
    programs = [launched.program for launched in last_launches()]
    assert programs == [
        "chunk_prepare",
        "segment_summary",
        "transfer_walk",
        "grad_scan",
        "chunk_grad",
        "parameter_reduce",
    ]
    check_against_reference(found, expected, problem, "weak")


def test_segments_of_a_long_document_on_few_heads(nan_poison):
    """Segments of 2,048 tokens, as the default rule makes them of longer documents."""
    problem = make_problem((4500, 100), regime="weak", with_state=False)
    found, expected = with_plan(problem, 2048), problems.reference(problem)
    assert "transfer_walk" in [launched.program for launched in last_launches()]
    check_against_reference(found, expected, problem, "weak")


@pytest.mark.parametrize("segment_tokens", [0, 128])
def test_options_change_no_bit(segment_tokens, nan_poison):
    problem = make_problem((330, 0, 70, 1), head_dim=128, heads=2, value_heads=4)
    expected = with_plan(problem, segment_tokens, options=KdaOptions(backward="saved"))
    num_bytes = tile_bytes_per_head(9, 128, 2, states=2, values=2)
    limits = (None, 2 * num_bytes)
    assert [len(head_blocks(num_bytes, 2, 4, limit)) for limit in limits] == [1, 2]
    for backward, tokens, limit in itertools.product(("saved", "replay"), (64, 128, 512), limits):
        options = KdaOptions(backward=backward, checkpoint_tokens=tokens, workspace_limit=limit)
        assert_same_bits(with_plan(problem, segment_tokens, options=options), expected)


@pytest.mark.parametrize("options", [KdaOptions("replay"), KdaOptions("saved", keep_decayed_qk=True)])
@pytest.mark.parametrize("head_dim, dtype", VARIANTS)
def test_every_backward_gives_the_bits_of_saved(head_dim, dtype, options, nan_poison):
    problem = make_problem(LENGTHS, head_dim=head_dim, dtype=dtype)
    saved = run(problem, options=KdaOptions(backward="saved"))
    assert_same_bits(run(problem, options=options), saved)
    prepares_again = "chunk_prepare" in [launched.program for launched in last_launches()]
    assert prepares_again == (not options.keep_decayed_qk)


@pytest.mark.parametrize("segment_tokens", [0, 128])
def test_kept_decayed_q_and_k_in_blocks_of_heads(segment_tokens, nan_poison):
    problem = make_problem((330, 0, 70, 1), head_dim=128, heads=2, value_heads=4)
    expected = with_plan(problem, segment_tokens)
    limit = 2 * tile_bytes_per_head(9, 128, 2, states=1, values=1, kept=TILE_NAMES)
    options = KdaOptions(keep_decayed_qk=True, workspace_limit=limit)
    assert_same_bits(with_plan(problem, segment_tokens, options=options), expected)
    assert [launched.program for launched in last_launches()].count("chunk_grad") == 2


def test_one_token_documents_without_state_have_no_gate_gradient(nan_poison):
    problem = make_problem((1,) * 64, head_dim=128, with_state=False)
    assert not run(problem)["dg"].any()


def test_hard_resets(nan_poison):
    """Behind a decay of 0 everything is as in a document that begins there, and nothing reaches what is before it."""
    problem = ready_problem((100, 70), head_dim=128)
    problem.inputs["g"][:, [30, 100]] = -torch.inf
    found = run(problem)
    assert all(tensor.isfinite().all() for tensor in found.values())
    assert not found["dg"][:, [30, 100]].any()
    assert not found["dinitial_state"][1].any()
    alone = ready_problem((100, 70), head_dim=128)
    alone.inputs = {name: tensor[:, 30:] for name, tensor in problem.inputs.items()}
    alone.cu_seqlens, alone.keywords = torch.tensor([0, 70, 140]), {"initial_state": torch.zeros(2, 2, 128, 128)}
    do = torch.randn(1, 170, 2, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    do[:, :30] = 0
    expected = output_gradients(alone, do[:, 30:])
    for name, gradient in output_gradients(problem, do).items():
        if name == "g":
            # A suffix sum of dG, behind the reset of pairs that cancel but for their TF32 roundings.
            assert gradient[:, :30].abs().max() <= 1e-3 * expected[name].abs().max()
        else:
            assert not gradient[:, :30].any(), name
        # Other chunks round otherwise: twice a budget.
        assert problems.relative_error(gradient[:, 30:], expected[name].double()) <= 8e-3, name


def output_gradients(problem: Problem, do: torch.Tensor) -> dict[str, torch.Tensor]:
    """The inputs' gradients of o alone, contiguous or not as do is."""
    moved = problem.to("cuda")
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in moved.inputs.items()}
    o, _ = chunk_kda(*(leaves[name] for name in NAMES), cu_seqlens=moved.cu_seqlens, **moved.keywords)
    o.backward(do.cuda() if do.device.type == "cpu" else do)
    return {name: leaf.grad.cpu() for name, leaf in leaves.items()}


def test_strided_and_expanded_gradients(nan_poison):
    problem = make_problem((70, 5), head_dim=128)
    do = torch.randn(1, 75, 2, 128, generator=torch.Generator().manual_seed(5)).bfloat16().cuda()
    expected = output_gradients(problem, do)
    hidden = torch.full((1, 75, 3, 128, 2), float("nan"), dtype=torch.bfloat16, device="cuda")
    hidden[:, :, 1:, :, 0] = do
    assert_same_bits(output_gradients(problem, hidden[:, :, 1:, :, 0]), expected)
    ones = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16, device="cuda").expand(1, 75, 2, 128)
    assert_same_bits(output_gradients(problem, ones), output_gradients(problem, ones.contiguous()))


def test_strided_inputs(nan_poison):
    problem = make_problem((65, 20), head_dim=128)
    expected = run(problem)

    def strided(*inputs, **keywords):
        return chunk_kda(*(torch.stack([tensor, tensor], dim=-1)[..., 0] for tensor in inputs), **keywords)

    found = problems.run(strided, problem.to("cuda"), output_final_state=True)
    assert_same_bits({name: tensor.cpu() for name, tensor in found.items()}, expected)


def test_neighbours_change_no_bit(nan_poison):
    problem = make_problem((100, 300, 40), head_dim=128, with_state=False)
    rows = slice(100, 400)
    do = torch.randn(1, 440, 2, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    found = output_gradients(problem, do)
    inputs = {name: tensor[:, rows] for name, tensor in problem.inputs.items()}
    alone = Problem(inputs, problem.keywords, torch.tensor([0, 300]))
    for name, gradient in output_gradients(alone, do[:, rows]).items():
        assert torch.equal(gradient, found[name][:, rows]), name
    do[:, :100], do[:, 400:] = 0, 0
    for name, gradient in output_gradients(problem, do).items():
        assert not gradient[:, :100].any() and not gradient[:, 400:].any(), name


@pytest.mark.parametrize("backward", ["saved", "replay"])
def test_thirty_runs_give_the_same_bytes(backward, nan_poison):
    problem = make_problem((700, 65, 1), head_dim=128, heads=2, value_heads=4)
    options = KdaOptions(backward=backward)
    expected = with_plan(problem, 256, options=options)
    for _ in range(30):
        assert_same_bits(with_plan(problem, 256, options=options), expected)


def test_empty_documents_pass_the_gradient_of_their_state(nan_poison):
    problem = make_problem((0, 64, 0, 36, 0), head_dim=128)
    found = run(problem)
    generator = torch.Generator().manual_seed(99)
    torch.randn(found["o"].shape, generator=generator)
    dfinal_state = torch.randn(found["final_state"].shape, generator=generator)
    for document in (0, 2, 4):
        assert torch.equal(found["dinitial_state"][document], dfinal_state[document])


@pytest.mark.parametrize("lengths", [(0,), (0, 0)])
def test_a_pack_without_tokens(lengths, nan_poison):
    found = run(make_problem(lengths, head_dim=128))
    assert found["o"].shape[1] == 0 and not found["dA_log"].any() and not found["ddt_bias"].any()


def test_last_launches_say_what_ran():
    run(make_problem((65, 20), head_dim=128))
    launched = last_launches()
    assert [one.program for one in launched] == ["chunk_prepare", "grad_scan", "chunk_grad", "parameter_reduce"]
    assert all(one.family in ("smxx", "sm90") for one in launched)


def test_a_step_with_a_plan_does_not_synchronise():
    problem = make_problem((100, 300), head_dim=128).to("cuda")
    plan = make_plan(problem.cu_seqlens, num_heads=2, head_dim=128, device="cuda")
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in problem.inputs.items()}
    do = torch.ones_like(problem.inputs["v"])

    def step() -> None:
        o, _ = chunk_kda(*(leaves[name] for name in NAMES), plan=plan, **problem.keywords)
        o.backward(do)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
