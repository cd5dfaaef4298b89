"""Prepared calls on what tests of results would not think of: odd tensors, hooks that turn them, a changed world."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from cake_kda_jit import KdaOptions, UnsupportedProblemError, causal_conv1d, chunk_kda, last_launches
from cake_kda_jit.bench.problems import make_problem
from cake_kda_jit.layers import KimiDeltaAttention

from .test_calls import HEAD_DIM, HEADS, HIDDEN, LENGTHS, Operators, assert_equal, plan_of, run_all


def test_saved_tensors_that_come_back_as_no_pass_takes_them():
    """Tables, weights and what is kept are contiguous; hooks may have turned them."""
    torch.manual_seed(0)
    layer, x, plan = KimiDeltaAttention(HIDDEN, HEADS, HEAD_DIM), torch.randn(1, 200, HIDDEN), plan_of()
    problem = make_problem(LENGTHS)

    def gradients() -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_(), *layer.parameters()]
        of_layer = torch.autograd.grad(layer(leaves[0], plan=plan).square().sum(), leaves)
        return [*of_layer, *run_all(problem, plan, options=KdaOptions(backward="replay"))]

    def turned(tensor):
        return tensor.transpose(0, -1) if tensor.dim() > 1 else tensor

    expected = gradients()
    for world in (nullcontext(), Operators()):
        with world, torch.autograd.graph.saved_tensors_hooks(lambda one: turned(one).contiguous(), turned):
            assert_equal(gradients(), expected)


def negated(tensor):
    """The tensor, as a view whose memory holds its negative."""
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


def test_a_pending_negation_is_carried_out():
    """Torch negates the imaginary part of a conjugate lazily; whoever reads the memory gets the other sign."""
    problem, plan = make_problem(LENGTHS, dtype=torch.float32), plan_of()
    x, weight = torch.randn(1, 200, 8), torch.randn(8, 4)
    q, k, v, g, beta = problem.inputs.values()
    plain = negated(v).resolve_neg()  # of the same strides, so that the other has its key but for the negation
    assert negated(v).is_neg() and torch.equal(plain, v)
    expected, _ = chunk_kda(q, k, plain, g, beta, plan=plan, **problem.keywords)
    convolved, _ = causal_conv1d(x, weight)
    for _ in range(2):
        assert torch.equal(chunk_kda(q, k, negated(v), g, beta, plan=plan, **problem.keywords)[0], expected)
        assert torch.equal(causal_conv1d(negated(x), negated(weight))[0], convolved)

    leaf = v.clone().requires_grad_()
    outputs = chunk_kda(q, k, leaf, g, beta, plan=plan, output_final_state=True, **problem.keywords)
    directions = [torch.randn_like(one) for one in outputs]
    expected = torch.autograd.grad(outputs, leaf, directions, retain_graph=True)
    assert_equal(torch.autograd.grad(outputs, leaf, list(map(negated, directions))), expected)


def test_a_backward_reads_the_environment_itself(monkeypatch):
    problem, plan = make_problem(LENGTHS, with_state=False), plan_of(segment_tokens=64)
    leaves = [tensor.clone().requires_grad_() for tensor in problem.inputs.values()]

    def walked(name: str) -> list[str]:
        o, _ = chunk_kda(*leaves, plan=plan, **problem.keywords)
        monkeypatch.setenv("CAKE_KDA_JIT_TRANSFER_WALK", name)
        o.float().sum().backward()
        monkeypatch.delenv("CAKE_KDA_JIT_TRANSFER_WALK")
        return [one.variant for one in last_launches() if one.program == "transfer_walk"]

    for name in ("tf32_hilo", "bf16x3_hw64", "tf32_hilo"):
        assert walked(name) == [name]


def test_a_batch_of_gradients_is_refused():
    x = torch.randn(1, 9, 8, requires_grad=True)
    y, _ = causal_conv1d(x, torch.randn(8, 4))
    with pytest.raises(UnsupportedProblemError, match="causal_conv1d_backward is given a batch of gradients"):
        torch.autograd.grad(y, x, torch.randn(2, *y.shape), is_grads_batched=True)


@pytest.mark.parametrize("name", ["q_proj", "k_conv1d", "b_proj"])
def test_a_weight_that_is_a_plain_attribute(name):
    layer, x, plan = KimiDeltaAttention(HIDDEN, HEADS, HEAD_DIM), torch.randn(1, 200, HIDDEN), plan_of()
    with torch.no_grad():
        expected, module = layer(x, plan=plan), layer.get_submodule(name)
        weight = module.weight.detach()
        del module.weight
        module.weight = weight
        assert torch.equal(layer(x, plan=plan), expected)


def test_a_tensor_that_is_not_dense_is_refused_by_name():
    """Also beside a prepared call: some of them answer with the strides of a dense one."""
    problem, plan = make_problem(LENGTHS, with_state=False), plan_of()
    inputs = dict(problem.inputs)
    chunk_kda(**inputs, plan=plan, **problem.keywords)
    for name, change, message in (
        ("v", torch.Tensor.to_sparse, "v is of layout torch.sparse_coo"),
        ("beta", lambda beta: beta[0].to_sparse_csr(), "beta is of layout torch.sparse_csr"),
        ("k", lambda k: torch.nested.nested_tensor([*k]), "k is a nested tensor"),
    ):
        with pytest.raises(UnsupportedProblemError, match=message):
            chunk_kda(**{**inputs, name: change(inputs[name])}, plan=plan, **problem.keywords)
