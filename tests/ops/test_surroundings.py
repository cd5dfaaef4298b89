"""Calls inside what users put around them: default dtypes, checkpointing, inference mode, threads, derivatives."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import cake_kda_jit
from cake_kda_jit import (
    KcpOptions,
    UnsupportedProblemError,
    causal_conv1d,
    chunk_kda,
    last_launches,
    make_plan,
    segment_summary,
    transfer_walk,
)
from cake_kda_jit.bench.problems import make_problem, run

OPS = Path(cake_kda_jit.__file__).parent / "ops"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(dtype):
    problem = make_problem((70, 20))
    expected = run(chunk_kda, problem, output_final_state=True)
    torch.set_default_dtype(dtype)
    try:
        found = run(chunk_kda, problem, output_final_state=True)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_memory_is_allocated_with_a_dtype():
    """Kernels write a fixed dtype; torch.empty without one follows the user's default."""
    for path in OPS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.empty", "torch.zeros", "torch.ones"):
                assert "dtype" in {keyword.arg for keyword in node.keywords}, f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant):
    problem = make_problem((70, 20), with_state=False)

    def gradients(wrap):
        leaves = [tensor.clone().requires_grad_() for tensor in problem.inputs.values()]
        wrap(*leaves).float().square().sum().backward()
        return [leaf.grad for leaf in leaves]

    def plain(*inputs):
        return chunk_kda(*inputs, cu_seqlens=problem.cu_seqlens, **problem.keywords)[0]

    found = gradients(lambda *inputs: checkpoint(plain, *inputs, use_reentrant=use_reentrant))
    assert all(torch.equal(one, other) for one, other in zip(found, gradients(plain)))


def test_conv_under_activation_checkpointing():
    x, weight = torch.randn(1, 20, 8, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    checkpoint(lambda *inputs: causal_conv1d(*inputs)[0], x, weight, use_reentrant=False).sum().backward()
    assert x.grad is not None and weight.grad is not None


def test_a_plan_of_inference_mode_trains():
    problem = make_problem((70, 20), with_state=False)
    with torch.inference_mode():
        plan = make_plan(problem.cu_seqlens, num_heads=2, head_dim=64, device="cpu")
    leaves = [tensor.clone().requires_grad_() for tensor in problem.inputs.values()]
    chunk_kda(*leaves, plan=plan, **problem.keywords)[0].float().sum().backward()
    assert all(leaf.grad is not None for leaf in leaves)


def test_second_derivatives_and_undifferentiable_pieces_are_refused():
    problem = make_problem((20,), dtype=torch.float32, with_state=False)
    leaves = [tensor.clone().requires_grad_() for tensor in problem.inputs.values()]
    o, _ = chunk_kda(*leaves, **problem.keywords)
    [dq] = torch.autograd.grad(o.sum(), leaves[:1], create_graph=True)
    with pytest.raises(UnsupportedProblemError, match="chunk_kda_backward has no gradient"):
        dq.sum().backward()
    _, k, v, g, beta = leaves
    M, B = segment_summary(k, v, -g.abs(), beta, torch.tensor([0, 20]))
    with pytest.raises(UnsupportedProblemError, match="segment_summary has no gradient"):
        M.sum().backward()
    entry, _ = transfer_walk(M.detach().requires_grad_(), B.detach(), None, torch.tensor([0, 1]))
    with pytest.raises(UnsupportedProblemError, match="transfer_walk has no gradient"):
        entry.sum().backward()


def test_each_operation_has_an_account_of_its_own():
    problem = make_problem((20,), with_state=False)
    plan = make_plan(problem.cu_seqlens, num_heads=2, head_dim=64, device="cpu")
    assert [one.program for one in last_launches()] == ["pack_tables"]
    chunk_kda(*problem.inputs.values(), plan=plan, **problem.keywords)
    assert [one.program for one in last_launches()] == ["chunk_prepare", "chunk_scan"]


def test_accounts_of_two_threads_do_not_mix():
    problems = {64: make_problem((130,), head_dim=64), 128: make_problem((130,), head_dim=128)}
    mixed = []

    def work(problem):
        for _ in range(10):
            run(chunk_kda, problem, output_final_state=True)
            variants = {one.variant for one in last_launches() if one.program != "parameter_reduce"}
            if len(variants) > 1:
                mixed.append(variants)

    threads = [threading.Thread(target=work, args=(problem,)) for problem in problems.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not mixed


@pytest.mark.parametrize("call", ["chunk_kda", "causal_conv1d", "transfer_walk", "segment_summary", "make_plan"])
def test_a_forced_family_that_cannot_run_raises_everywhere(monkeypatch, call):
    problem = make_problem((20,), with_state=False)
    q, k, v, g, beta = problem.inputs.values()
    plan = make_plan(problem.cu_seqlens, num_heads=2, head_dim=64, device="cpu")
    monkeypatch.setenv("CAKE_KDA_JIT_FAMILY", "smxx")
    calls = {
        "chunk_kda": lambda: chunk_kda(q, k, v, g, beta, plan=plan, **problem.keywords),
        "causal_conv1d": lambda: causal_conv1d(torch.randn(1, 9, 8), torch.randn(8, 4)),
        "transfer_walk": lambda: transfer_walk(
            torch.zeros(1, 1, 64, 64), torch.zeros(1, 1, 64, 64), None, torch.tensor([0, 1])
        ),
        "segment_summary": lambda: segment_summary(k, v, g, beta, torch.tensor([0, 20])),
        "make_plan": lambda: make_plan(torch.tensor([0, 5]), num_heads=1, head_dim=64, device="cpu"),
    }
    with pytest.raises(UnsupportedProblemError, match="family 'smxx' cannot run"):
        calls[call]()


BAD = {
    "host copy alone": (lambda p, a: a.update(cu_seqlens=None, cu_seqlens_cpu=torch.tensor([0, 8, 20])), "without cu_"),
    "host copy differs": (lambda p, a: a.update(cu_seqlens_cpu=torch.tensor([0, 8, 20])), "differs from cu_seqlens"),
    "list beside a plan": (lambda p, a: a.update(plan=p, cu_seqlens=[0, 12, 20]), "cu_seqlens is list"),
    "host copy beside a plan": (
        lambda p, a: a.update(plan=p, cu_seqlens=None, cu_seqlens_cpu=torch.tensor([0, 8, 20])),
        "differs from the boundaries",
    ),
    "plan of another kind": (lambda p, a: a.update(plan="x", cu_seqlens=None), "plan is str"),
    "options of another kind": (lambda p, a: a.update(options={}), "options is dict"),
    # Their walk and exchange would have no effect here.
    "options of a context": (lambda p, a: a.update(options=KcpOptions()), "options is KcpOptions"),
    "A_log": (lambda p, a: a.update(use_gate_in_kernel=True, A_log=[0.0]), "A_log is list"),
    "state": (lambda p, a: a.update(initial_state=[0.0]), "initial_state is list"),
    "scale": (lambda p, a: a.update(scale=1e300), "scale=1e"),
    "tiny bound": (lambda p, a: a.update(use_gate_in_kernel=True, lower_bound=-1e-60), "lower_bound=-1e-60"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_kinds_are_refused(case):
    change, message = BAD[case]
    problem = make_problem((12, 8), with_state=False)
    plan = make_plan(problem.cu_seqlens, num_heads=2, head_dim=64, device="cpu")
    arguments = {**problem.inputs, "cu_seqlens": problem.cu_seqlens}
    change(plan, arguments)
    with pytest.raises(UnsupportedProblemError, match=message):
        chunk_kda(**arguments)


def test_messages_name_the_arguments():
    M = B = torch.zeros(4, 1, 64, 64)
    with pytest.raises(UnsupportedProblemError, match="offsets ends at 3 but the inputs hold 4 fragments"):
        transfer_walk(M, B, None, torch.tensor([0, 3]))
    with pytest.raises(UnsupportedProblemError, match="M is int; give a tensor"):
        transfer_walk(1, B, None, torch.tensor([0, 4]))
    with pytest.raises(UnsupportedProblemError, match="M is None; give a tensor"):
        transfer_walk(None, B, None, torch.tensor([0, 4]))
    conv = {"x": torch.zeros(1, 4, 8), "weight": torch.zeros(8, 4)}
    for change, message in (
        ({"x": [1.0]}, "x is list; give a tensor"),
        ({"weight": None}, "weight is None; give a tensor"),
        ({"initial_state": [1.0]}, "initial_state is list; give a tensor"),
        ({"plan": "x"}, "plan is str; give what make_plan returned"),
    ):
        with pytest.raises(UnsupportedProblemError, match=message):
            causal_conv1d(**conv | change)
    v, beta = torch.zeros(1, 4, 1, 64), torch.zeros(1, 4, 1)
    with pytest.raises(UnsupportedProblemError, match="A_log is list; give a tensor"):
        segment_summary(v, v, v, beta, torch.tensor([0, 4]), use_gate_in_kernel=True, A_log=[0.0])
    with pytest.raises(UnsupportedProblemError, match="num_value_heads=0"):
        make_plan(torch.tensor([0, 4]), num_heads=1, num_value_heads=0, device="cpu")
    with pytest.raises(UnsupportedProblemError, match="num_heads=2.0; give an integer"):
        make_plan(torch.tensor([0, 4]), num_heads=2.0, device="cpu")


@pytest.mark.parametrize("lengths", [(5, 15), (1, 1, 18), (2, 1, 2, 15)])
def test_conv_halos_are_fp32_states(lengths):
    """Fragments handed over by fp32 states give the bits of the whole: a halo's gradient is added before rounding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, sum(lengths), 8, generator=generator).to(torch.bfloat16)
    weight = torch.randn(8, 4, generator=generator)
    dy = torch.randn(x.shape, generator=generator).to(torch.bfloat16)
    whole = x.clone().requires_grad_()
    causal_conv1d(whole, weight)[0].backward(dy)
    parts = [part.clone().requires_grad_() for part in x.split(lengths, dim=1)]
    state, outputs = torch.zeros(1, 8, 3), []
    for part in parts:
        y, state = causal_conv1d(part, weight, initial_state=state, output_final_state=True)
        outputs.append(y)
    assert state.dtype == torch.float32
    torch.cat(outputs, dim=1).backward(dy)
    assert torch.equal(torch.cat([part.grad for part in parts], dim=1), whole.grad)
