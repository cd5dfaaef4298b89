"""Keys and the shortcut to them: what a key tells apart no shortcut confuses, and what was found once needs no key."""

from __future__ import annotations

import gc
import sys
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from cake_kda_jit import UnsupportedProblemError, causal_conv1d, chunk_kda
from cake_kda_jit.bench.problems import make_problem
from cake_kda_jit.layers import KimiDeltaAttention
from cake_kda_jit.ops import calls, keys, operators
from cake_kda_jit.ops.keys import Known, key_of

from .test_calls import HEAD_DIM, HEADS, HIDDEN, LENGTHS, plan_of


class Value:
    """Something to find."""


class Subclass(torch.Tensor):
    """Sees what is called."""


def kept(*asked) -> tuple[Known, Value]:
    """A value that has been found once, so that there is a shortcut to it."""
    known, value = Known(), Value()
    known.keep(key_of(*asked), value)
    assert known.find(*asked) is value
    return known, value


@pytest.fixture
def no_keys(monkeypatch):
    """From where this function is called on, to make a key fails the test."""
    return lambda: monkeypatch.setattr(keys, "key_of", lambda *asked: pytest.fail("a key was made"))


def tensors() -> list[torch.Tensor]:
    return [torch.randn(4, 6), nn.Parameter(torch.randn(4, 6)), torch.randn(4, 6, requires_grad=True)]


CHANGES = {
    "absent": lambda one: None,
    "a number": lambda one: 1.0,
    "a list": lambda one: [one],
    "shape": lambda one: one[:, :5],
    "rank": lambda one: one[0],
    "strides": lambda one: one.t().contiguous().t(),
    "dtype": lambda one: one.to(torch.bfloat16),
    "device": lambda one: one.to("meta"),
    "kind": lambda one: one.detach() if isinstance(one, nn.Parameter) else nn.Parameter(one.detach()),
    "subclass": lambda one: one.as_subclass(Subclass),
    "negation": lambda one: one._neg_view(),
    "sparse": torch.Tensor.to_sparse,
    "sparse rows": torch.Tensor.to_sparse_csr,
    "of oneDNN": torch.Tensor.to_mkldnn,
    "nested": lambda one: torch.nested.nested_tensor([*one]),
}


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_key_tells_apart_no_shortcut_confuses(name, position):
    given = tensors()
    known, value = kept("name", None, given)
    one = given[position]
    given[position] = CHANGES[name](one if name == "kind" else one.detach())
    assert known.find("name", None, given) is None
    assert known.find("name", None, tensors()) is value


def test_all_else_is_told_apart(monkeypatch):
    plan, given = plan_of(), tensors()
    known, value = kept("name", plan, given, 1.0, "option")
    assert known.find("name", plan_of((100, 10, 90)), given, 1.0, "option") is value  # of as many chunks
    others = (
        ("other", plan, given, 1.0, "option"),
        ("name", None, given, 1.0, "option"),
        ("name", plan_of((100, 100)), given, 1.0, "option"),
        ("name", plan, given, 2.0, "option"),
        ("name", plan, given, 1.0, None),
        ("name", plan, given, 1.0),
        ("name", plan, given, 1.0, ["no key"]),
        ("name", plan, given, torch.tensor(1.0), "option"),
        ("name", plan, given[:2], 1.0, "option"),
        ("name", plan, [*given, torch.randn(1)], 1.0, "option"),
        ("name", plan, [None, *given], 1.0, "option"),
        ("name", plan, [*given, None], 1.0, "option"),
    )
    assert not any(known.find(*other) for other in others)
    for knob in keys.KNOBS:
        with monkeypatch.context() as changed:
            changed.setenv(f"CAKE_KDA_JIT_{knob}", "1")
            assert known.find("name", plan, given, 1.0, "option") is None
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert known.find("name", plan, given, 1.0, "option") is None
    finally:
        torch.set_num_threads(threads)
    assert known.find("name", plan, given, 1.0, "option") is value


def test_absent_tensors_are_told_apart_by_their_places():
    one, other = torch.randn(4), torch.randn(4)
    known, value = kept("name", None, (one, None, other, None))
    assert known.find("name", None, (other, None, one, None)) is value
    for given in ((one, other, None, None), (one, None, None, other), (one, None, other), (one, other)):
        assert known.find("name", None, given) is None


WORLDS = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_found_again_without_a_key_whatever_the_world(name, needs_gradient, no_keys):
    """And the same value as elsewhere: what a thread adds to dispatch keys is no part of a key."""
    made = tensors()
    known, value = kept("name", None, made)
    with WORLDS[name]():
        given = [one.detach().clone().requires_grad_(needs_gradient) for one in made]
        given[1] = nn.Parameter(given[1].detach(), requires_grad=needs_gradient)
        assert known.find("name", None, given) is value
        no_keys()
        assert known.find("name", None, given) is value
    assert len(known) == 1


def test_a_tensor_given_twice_is_found_by_its_key():
    one = torch.randn(4)
    known, value = kept("name", None, (one, one))
    assert known.find("name", None, (one, one)) is value is known.find("name", None, (one, one.clone()))


def test_a_world_within_a_transform_finds_its_own_way():
    """Inside of torch.func a backward refuses, also one that has a shortcut."""
    x, weight = torch.randn(1, 9, 8, requires_grad=True), torch.randn(8, 4)
    y, _ = causal_conv1d(x, weight)
    dy = torch.randn_like(y)
    for _ in range(2):
        torch.autograd.grad(y, x, dy, retain_graph=True)

    def inside(_):
        return torch.autograd.grad(y, x, dy, retain_graph=True)[0]

    with pytest.raises(UnsupportedProblemError, match="inside a transform of torch.func"):
        torch.func.vmap(inside)(torch.randn(2))
    with pytest.raises(UnsupportedProblemError, match="is given a batch of gradients"):
        torch.autograd.grad(y, x, torch.stack([dy, dy]), is_grads_batched=True)


def test_shortcuts_keep_no_tensor_alive_and_nothing_that_was_forgotten(monkeypatch):
    monkeypatch.setattr(keys, "MOST_CALLS", 2)
    given = tensors()
    known, value = kept("name", None, given)
    seen = [weakref.ref(one) for one in (*given, value)]
    del given, value
    gc.collect()
    assert [one() is None for one in seen] == [True, True, True, False]
    for name in ("second", "third"):
        known.keep(key_of(name, None, tensors()), Value())
    assert len(known) == 2 and seen[-1]() is None


def test_many_layouts_behind_one_label(no_keys):
    """A few have a shortcut, all are found."""
    known = Known()
    given = [(torch.randn(4), torch.randn(size)) for size in range(1, 8)]
    for one in given:
        known.keep(key_of("name", None, one), one)
    for _ in range(2):
        assert all(known.find("name", None, one) is one for one in given)
    [near] = known._shortcuts._near.values()
    assert len(near) == keys.MOST_NEAR
    no_keys()
    assert all(known.find("name", None, one) is one for one in given[-keys.MOST_NEAR :])


# ---- a torch without such a check ------------------------------------------------------------------------------------


class SaysYes:
    """A check that compares nothing."""

    def __init__(self, *tensors, **options):
        self.check = lambda *tensors: True


@pytest.mark.parametrize("kind", ["gone", "says yes"])
def test_without_a_right_check_keys_do_all(kind, monkeypatch):
    class Module:
        TensorGuards = SaysYes

    monkeypatch.setitem(sys.modules, "torch._C._dynamo.guards", None if kind == "gone" else Module)
    assert keys._tensor_guards() is None
    monkeypatch.setattr(keys, "_guards", None)
    known, value = kept("name", None, tensors())
    assert known.find("name", None, tensors()) is value and known.find("name", None, tensors()[:2]) is None


def test_this_torch_has_it():
    assert keys._guards is not None


def test_who_wants_a_gradient_where_torch_does_not_say():
    one = torch.randn(3)
    for given in ((), (None, 1, "x"), (one, None), (one, one.clone().requires_grad_()), (None, nn.Parameter(one))):
        assert operators._any_requires_grad(*given) == operators.any_requires_grad(*given)


# ---- the calls themselves --------------------------------------------------------------------------------------------


def test_the_second_call_makes_no_key_and_lays_nothing_out(no_keys, monkeypatch):
    calls._calls.clear()
    problem, plan, layer = make_problem(LENGTHS), plan_of(), KimiDeltaAttention(HIDDEN, HEADS, HEAD_DIM)
    leaves = [one.clone().requires_grad_() for one in problem.inputs.values()]
    x, weight = torch.randn(1, 200, HIDDEN, requires_grad=True), torch.randn(HIDDEN, 4)

    def run() -> None:
        o, _ = chunk_kda(*leaves, plan=plan, **problem.keywords)
        y, _ = causal_conv1d(x, weight, plan=plan)
        (o.float().square().sum() + y.square().sum() + layer(x, plan=plan).square().sum()).backward()

    run()
    no_keys()
    monkeypatch.setattr(calls, "key_of", keys.key_of)
    monkeypatch.setattr(calls.Call, "_as_taken", lambda *_: pytest.fail("a backward was laid out"))
    run()


def test_a_parameter_whose_data_changes_is_noticed():
    """As a sharded layer's are from step to step: the object is the same."""
    x, weight = torch.randn(1, 9, 8), nn.Parameter(torch.randn(8, 4))
    with torch.no_grad():
        for _ in range(2):
            expected, _ = causal_conv1d(x, weight)
        weight.data = weight.t().contiguous().t()
        assert torch.equal(causal_conv1d(x, weight)[0], expected)
        weight.data = weight.detach()[:, :3]
        assert torch.equal(causal_conv1d(x, weight)[0], causal_conv1d(x, weight.detach().clone())[0])
        weight.data = torch.randn(7, 4)
    with pytest.raises(UnsupportedProblemError, match="weight"):
        causal_conv1d(x, weight)
