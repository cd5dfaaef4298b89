"""Scans that begin beside chunk_prepare, against the same launched when all tiles are there: equal bits."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from cake_kda_jit import chunk_kda, last_launches, make_plan
from cake_kda_jit.ops.pipeline import Pipeline
from cake_kda_jit.ops.problem import KdaOptions
from cake_kda_jit.ops.select import Following

from .twins import device_has

pytestmark = pytest.mark.gpu

HEAD_DIM, REPEATS = 128, 30


class Case(NamedTuple):
    """A pack, and when CTAs make room: after ``num_ahead`` tiles, None: as the rule says.

    ``capacity``: tokens of a capacity plan, which has room for one document more.
    """

    lengths: tuple[int, ...] = (4200,)
    heads: int = 32
    dtype: torch.dtype = torch.bfloat16
    g_dtype: torch.dtype = torch.bfloat16
    capacity: int | None = None
    num_ahead: int | None = 1000


CASES = {
    "by the rule": Case(num_ahead=None),
    "room at once": Case(num_ahead=0),
    "no room": Case(num_ahead=1 << 30),
    # One of them empty, with tails: the last ones wait for long.
    "several documents": Case((3900, 0, 3000, 2100), heads=8),
    "fp32 gates, which nothing stages": Case(g_dtype=torch.float32),
    "fp16": Case(dtype=torch.float16, g_dtype=torch.float16),
    # Segments and chunks that no document has.
    "a capacity plan": Case((3001, 127), heads=16, capacity=5000),
    # More CTAs than there are processors for: the last ones begin when others have ended.
    "many documents": Case((700,) * 6, heads=32),
}


def options_of(name: str, **options) -> KdaOptions:
    """Options are part of a prepared call's key: a limit of its own keeps the calls of one kind apart from others."""
    steps = ("saved", "saved at once", "saved late", "replay")
    kinds = ("behind", *(f"{where}, {step}" for where in ("behind", "beside") for step in steps), *CASES)
    return KdaOptions(workspace_limit=2_000_000_000 + kinds.index(name), **options)


class Call:
    """One forward with a plan, on inputs of its own; ``expected`` is what it returns with the scan behind."""

    def __init__(self, name: str):
        lengths, heads, dtype, g_dtype, capacity, _ = CASES[name]
        self.name, self.num_documents = name, len(lengths)
        generator = torch.Generator(device="cuda").manual_seed(1)
        tokens = capacity or sum(lengths)

        def normal(*shape, dtype=dtype):
            return torch.randn(1, tokens, *shape, generator=generator, device="cuda").to(dtype)

        q, k, v = (normal(heads, HEAD_DIM) for _ in range(3))
        self.inputs = q, k, v, normal(heads, HEAD_DIM, dtype=g_dtype), normal(heads)
        boundaries = torch.tensor([0, *lengths]).cumsum(0)
        limits = {"max_documents": len(lengths) + 1, "max_tokens": capacity} if capacity else {}
        self.keywords = {
            "plan": make_plan(boundaries, num_heads=heads, head_dim=HEAD_DIM, device="cuda", **limits),
            "A_log": torch.zeros(heads, device="cuda"),
            "dt_bias": torch.zeros(heads * HEAD_DIM, device="cuda"),
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "lower_bound": -5.0,
            "output_final_state": True,
        }
        with following(lambda own: None):
            self.expected = self.run(options_of("behind"))
        assert not begins_beside()

    def run(self, options: KdaOptions | None = None):
        return chunk_kda(*self.inputs, options=options or options_of(self.name), **self.keywords)

    def check(self, found) -> None:
        (o, states), (expected_o, expected_states) = found, self.expected
        assert torch.equal(o, expected_o)
        assert torch.equal(states[: self.num_documents], expected_states[: self.num_documents])


@contextmanager
def following(choose):
    """Prepares calls with what ``choose`` makes of the rule's choice."""
    own = Pipeline.following
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, "following", lambda self, block, scan: choose(own(self, block, scan)))
        yield


def begins_beside() -> bool:
    return any("beside" in launched.reason for launched in last_launches())


def skip_without_room() -> None:
    if not device_has("sm90") or torch.cuda.get_device_properties(0).multi_processor_count < 128:
        pytest.skip("only the sm90 family, on a device with two processors for each of 64 CTAs")


@pytest.fixture(params=CASES)
def call(request):
    skip_without_room()
    case = CASES[request.param]
    made = Call(request.param)
    with following(lambda own: own if case.num_ahead is None else Following(64, case.num_ahead)):
        made.check(made.run())
    assert begins_beside()
    return made


def test_bits_are_those_of_a_scan_behind(call, nan_poison):
    """A tile read before it is there would be NaN."""
    for _ in range(REPEATS):
        call.check(call.run())


def test_whatever_stands_before_and_behind_is_waited_for(call):
    """Inputs are written right before the call, and again right behind it, while only the scan is known to have ended.

    Nothing is compared before all is launched, so that the device is never idle.
    """
    given = [tensor.clone() for tensor in call.inputs]
    found = []
    for _ in range(REPEATS // 3):
        for tensor, own in zip(call.inputs, given):
            tensor.fill_(float("nan"))
            tensor.copy_(own)
        found.append(call.run())
        for tensor in call.inputs:
            tensor.fill_(float("nan"))
    for tensor, own in zip(call.inputs, given):
        tensor.copy_(own)
    for one in found:
        call.check(one)


def test_a_graph_replays_it(call):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call.run()
    for _ in range(REPEATS // 3):
        for tensor in found:
            tensor.fill_(float("nan"))
        graph.replay()
        call.check(found)


def test_two_streams_at_once(call):
    """Each has a chunk_prepare whose CTAs wait for processors, and a scan that waits for tiles."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    torch.cuda.synchronize()
    for _ in range(REPEATS // 3):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(call.run())
    torch.cuda.synchronize()
    for one in found:
        call.check(one)


def test_busy_processors(call):
    """Products on all processors, and on eight of them threads that leave no room for a CTA of the scan for long."""
    product, *sleeping = (torch.cuda.Stream() for _ in range(9))
    factor = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    for stream in sleeping:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
    with torch.cuda.stream(product):
        for _ in range(60):
            factor @ factor
    found = [call.run() for _ in range(REPEATS // 3)]
    torch.cuda.synchronize()
    for one in found:
        call.check(one)


@pytest.mark.parametrize("kind", ["saved", "saved at once", "saved late", "replay"])
def test_a_training_step(kind, nan_poison):
    """What chunk_scan keeps is what it keeps behind, and so is what grad_scan makes of tiles that come last first.

    A replay's grad_scan, which has more CTAs, begins behind.
    """
    skip_without_room()
    call = Call("by the rule")
    leaves = [tensor.requires_grad_() for tensor in call.inputs]
    num_ahead = {"saved at once": 0, "saved late": 2000}.get(kind)

    def gradients(where):
        o, states = call.run(options_of(f"{where}, {kind}", backward=kind.split()[0]))
        forward_is_beside = begins_beside()
        found = torch.autograd.grad([o, states], leaves, [o.detach(), states.detach()])
        return (forward_is_beside, begins_beside()), found

    def choose(own):
        return own if own is None or num_ahead is None else replace(own, num_ahead=num_ahead)

    with following(lambda own: None):
        beside, expected = gradients("behind")
    assert beside == (False, False)
    with following(choose):
        for _ in range(REPEATS):
            beside, found = gradients("beside")
            assert beside == (True, kind != "replay")
            assert all(map(torch.equal, found, expected))


def test_a_captured_training_step_beside_a_busy_kernel():
    skip_without_room()
    call = Call("by the rule")
    leaves = [tensor.requires_grad_() for tensor in call.inputs]

    def gradients(where):
        o, _ = call.run(options_of(f"{where}, saved", backward="saved"))
        return torch.autograd.grad(o, leaves, o.detach())

    with following(lambda own: None):
        expected = gradients("behind")
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients("beside")
    graph, factor = torch.cuda.CUDAGraph(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    with torch.cuda.graph(graph, stream=stream):
        found = gradients("beside")
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        for _ in range(60):
            factor @ factor
    for _ in range(REPEATS // 3):
        for tensor in found:
            tensor.fill_(float("nan"))
        graph.replay()
        assert all(map(torch.equal, found, expected))
