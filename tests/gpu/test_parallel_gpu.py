"""Context parallelism on a CUDA device: virtual ranks against FP64 and one device, and real processes that share it."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from cake_kda_jit import KcpContext, KcpOptions, Partition, chunk_kda, gather, reduce_parameter_gradients
from cake_kda_jit.bench import problems
from cake_kda_jit.bench.precision import PARAMETERS, parameter_shares
from cake_kda_jit.bench.problems import make_problem
from cake_kda_jit.cp import passes
from cake_kda_jit.cp.plan import ParallelPlan
from cake_kda_jit.ops.workspace import tile_bytes_per_head

from ..cp import devices
from ..cp.ranks import (
    LAYOUTS,
    assert_same_bits,
    attention,
    attention_of_rank,
    boundaries,
    conv_call,
    conv_problem,
    convolution,
)

pytestmark = pytest.mark.gpu

PACK = (300, 0, 1, 200, 63, 3)


def on_cpu(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in found.items()}


def assert_within_budgets_or_as_near_as_one_device(found, alone, expected, problem, regime) -> None:
    """Where the kernels of one device exceed a budget, ranks may exceed it by as much, and a fifth more."""

    def errors(some, name):
        yield problems.relative_error(some[name], expected[name])
        yield from (error for _, _, error in problems.local_errors(name, some[name], expected[name], problem))

    for name, tensor in found.items():
        assert torch.isfinite(tensor).all(), name
        if name in PARAMETERS:
            continue
        budget = problems.BUDGETS[regime][name.replace("dinitial", "final")]
        for index, (mine, yours) in enumerate(zip(errors(found, name), errors(alone, name))):
            limit = budget * (problems.LOCAL_FACTOR if index else 1)
            assert mine <= max(limit, 1.2 * yours), (name, index, mine, yours)
    shares, others = (parameter_shares(some, expected, problem, regime) for some in (found, alone))
    for name, mine in shares.items():
        assert mine <= max(1, 1.2 * others[name]), (name, mine, others[name])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("regime, head_dim", [("bounded", 64), ("softplus", 128), ("correlated", 128)])
def test_within_the_budgets_of_one_device(regime, head_dim, layout, nan_poison):
    problem = make_problem(PACK, regime=regime, head_dim=head_dim)
    partition = getattr(Partition, layout)(boundaries(PACK), 4)
    found = on_cpu(attention(problem.to("cuda"), partition).whole)
    alone = on_cpu(problems.run(chunk_kda, problem.to("cuda"), output_final_state=True))
    assert_within_budgets_or_as_near_as_one_device(found, alone, problems.reference(problem), problem, regime)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exchanges_backwards_and_head_blocks_change_no_bit(layout, nan_poison, monkeypatch):
    partition = getattr(Partition, layout)(boundaries(PACK), 3)
    problem = make_problem(PACK, heads=3, value_heads=6).to("cuda")
    expected = attention(problem, partition, KcpOptions(exchange="all_gather", backward="saved"))
    group_bytes = 2 * tile_bytes_per_head(ParallelPlan(partition).most_chunks, 64, 2, states=2, values=2)
    for exchange, backward, limit, hide_bytes in (
        ("spread", "saved", None, passes.HIDE_BYTES),
        ("relay", "replay", None, 1),
        ("spread", "replay", group_bytes, 1),
        ("relay", "saved", 2 * group_bytes, 1),
    ):
        monkeypatch.setattr(passes, "HIDE_BYTES", hide_bytes)
        options = KcpOptions(exchange=exchange, backward=backward, workspace_limit=limit)
        found = attention(problem, partition, options)
        for mine, yours in zip(found.ranks, expected.ranks):
            assert_same_bits(mine, yours)


def test_one_rank_has_the_bits_of_one_device(nan_poison):
    problem = make_problem(PACK).to("cuda")
    expected = problems.run(chunk_kda, problem, output_final_state=True)
    assert_same_bits(attention(problem, Partition.zigzag(boundaries(PACK), 1)).whole, expected)


@pytest.mark.parametrize("backward", ["saved", "replay"])
def test_spans_that_are_cut_in_segments(backward, nan_poison):
    """Two heads: spans of 8,192 tokens and more have segments of 2,048, whose summaries are chained to the span's."""
    lengths = (26_000, 10_000)
    problem = make_problem(lengths, regime="softplus").to("cuda")
    partition = Partition.contiguous(boundaries(lengths), 3)
    found = attention(problem, partition, KcpOptions(backward=backward)).whole
    expected = problems.run(chunk_kda, problem, output_final_state=True)
    for name, tensor in expected.items():
        if name not in ("dA_log", "ddt_bias"):
            # Each is within the budget of FP64, so they are within twice the budget of each other.
            budget = problems.BUDGETS["softplus"]["final_state" if name == "dinitial_state" else name]
            assert problems.relative_error(found[name], tensor.double()) <= 2 * budget, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_have_the_same_bits(layout, nan_poison):
    problem = make_problem(PACK).to("cuda")
    partition = getattr(Partition, layout)(boundaries(PACK), 3)
    first, *others = (attention(problem, partition) for _ in range(4))
    for other in others:
        for mine, yours in zip(first.ranks, other.ranks):
            assert_same_bits(mine, yours)


def test_shares_are_taken_and_put_together_while_the_host_goes_on():
    """A host that waited for its device would wait for a late peer's messages as well, without an end."""
    x = torch.randn(1, 564, 3, device="cuda")
    partition = Partition.per_document_zigzag(boundaries((300, 64, 200)), 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        whole = partition.unshard([partition.shard(x, rank) for rank in range(2)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(whole, x)
    shape = partition.shard(x, 0).shape
    with FakeTensorMode():
        assert partition.shard(torch.empty(x.shape, device="cuda"), 0).shape == shape


def conv_on_gpu(cu, **how):
    problem = conv_problem(cu, dtype=torch.bfloat16, channels=256, **how)
    for name, value in vars(problem).items():
        if isinstance(value, torch.Tensor):
            setattr(problem, name, value.cuda())
    return problem


@pytest.mark.parametrize("layout", [*LAYOUTS, "tokens"])
def test_the_convolution_has_the_bits_of_one_device(layout, nan_poison):
    cu = boundaries((130, 0, 1, 70, 3))
    if layout == "tokens":
        partition = Partition.from_fragments(cu, [(token % 3, token, token + 1) for token in range(cu[-1])], 3)
    else:
        partition = getattr(Partition, layout)(cu, 3)
    problem = conv_on_gpu(cu, state_dtype=torch.float32)
    found, expected = convolution(problem, partition).whole, conv_call(problem, output_final_state=True)
    for name in ("y", "final_state"):
        assert torch.equal(found[name], expected[name]), name
    # fp32 sums in another order: a bf16 rounding may fall to the other side
    assert (found["dx"] != expected["dx"]).float().mean() < 1e-3
    assert torch.allclose(found["dinitial_state"], expected["dinitial_state"], rtol=1e-5, atol=1e-5)
    for name in ("dweight", "dbias"):
        # bf16 parts of three ranks, each rounded once
        assert problems.relative_error(found[name], expected[name].double()) <= 8e-3, name


# ---- real processes --------------------------------------------------------------------------------------------------

WORLDS = {
    "gloo": devices.World(2, "cuda", "gloo", 6_000),
    "nccl": devices.World(2, "cuda", "nccl", None),
}
"""gloo stages through pinned memory, and its processes share one device; NCCL needs a device for each."""


@pytest.fixture(scope="module")
def worlds():
    """The results of all checks by backend, each run once, at its first use."""
    return cache(lambda backend: devices.start(WORLDS[backend]))


@pytest.mark.parametrize("check", [check.__name__ for check in devices.CHECKS])
@pytest.mark.parametrize("backend", WORLDS)
def test_real_processes(worlds, backend, check):
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs two devices")
    failed = worlds(backend)[check]
    assert not failed, "\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items())


def test_the_demo_on_two_ranks_has_the_loss_of_one(tmp_path):
    """With a device each the ranks talk through NCCL, with one device through gloo."""
    alone, shared = (demo(tmp_path, *ranks) for ranks in ([], ["--ranks", "2", "--layout", "per_document_zigzag"]))
    # Sums in another order, and bf16 tiles that begin elsewhere: 1e-3 of the loss after 12 steps.
    assert shared["losses"] == pytest.approx(alone["losses"], rel=1e-2)
    assert shared["losses"][-1] < shared["losses"][0]


def demo(folder: Path, *more: str) -> dict:
    text = folder / "verse.txt"
    text.write_text("".join(f"line {n}: the quick brown fox jumps over the lazy dog\n" for n in range(60)))
    small = ["--steps", "12", "--tokens", "192", "--max-length", "60", "--layers", "1", "--heads", "1"]
    where = ["--device", "cuda", "--text", str(text), "--out", str(folder / "loss.png"), "--json"]
    command = [sys.executable, "-m", "cake_kda_jit", "demo", *small, *where, *more]
    done = subprocess.run(command, cwd=devices.ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_nccl_of_one_rank(tmp_path, nan_poison):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        partition = Partition.contiguous(boundaries(PACK), 1)
        problem = make_problem(PACK).to("cuda")
        ctx = KcpContext(partition)
        assert_same_bits(attention_of_rank(problem, ctx), problems.run(chunk_kda, problem, output_final_state=True))
        # These exchange with all ranks, in a collective without a message.
        assert torch.equal(gather(problem.inputs["q"], ctx), problem.inputs["q"])
        parameter = torch.zeros(3, device="cuda", requires_grad=True)
        parameter.grad = torch.ones_like(parameter)
        reduce_parameter_gradients(ctx, parameter)
        assert parameter.grad.tolist() == [1.0] * 3 and not ctx.channel._ahead
    finally:
        dist.destroy_process_group()
