"""DDP and FSDP2 over gloo, two processes on the CPU: every gradient is the mean over the ranks' packs."""

from __future__ import annotations

import copy
import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from cake_kda_jit import UnsupportedProblemError, make_plan
from cake_kda_jit.layers import KimiDeltaAttention

WORLD, HIDDEN, HEADS, HEAD_DIM = 2, 32, 2, 64
PACKS = ((30, 0, 20), (64, 3))  # of each rank: not even their numbers of tokens are equal


class Model(nn.Module):
    """Two layers with a residual around each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(KimiDeltaAttention(HIDDEN, HEADS, HEAD_DIM) for _ in range(2))

    def forward(self, x, plan):
        for layer in self.layers:
            x = x + layer(x, plan=plan)
        return x


def pack_of(rank: int):
    cu_seqlens = torch.tensor([0, *PACKS[rank]]).cumsum(0)
    x = torch.randn(1, sum(PACKS[rank]), HIDDEN, generator=torch.Generator().manual_seed(rank))
    return x, make_plan(cu_seqlens, num_heads=HEADS, head_dim=HEAD_DIM, device="cpu")


def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
    return model(*pack_of(rank)).float().square().sum()


def mean_gradients() -> dict[str, torch.Tensor]:
    """What both ranks' packs give one model in fp32, divided by the number of ranks."""
    model = Model()
    (sum(loss_of(model, rank) for rank in range(WORLD)) / WORLD).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def errors(found: dict[str, torch.Tensor]) -> dict[str, float]:
    expected = mean_gradients()
    assert set(found) == set(expected)
    return {name: ((found[name] - t).norm() / t.norm()).item() for name, t in expected.items()}


def check_ddp(rank: int) -> None:
    model = nn.parallel.DistributedDataParallel(Model())
    loss_of(model, rank).backward()
    found = errors({name.removeprefix("module."): p.grad for name, p in model.named_parameters()})
    assert max(found.values()) < 1e-5, found  # fp32 sums in another order


def shard(model: nn.Module, low: torch.dtype | None) -> None:
    """The recipe of docs/inside-pytorch.md: all but A_log and dt_bias in low precision."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(list(layer.children()), mesh=mesh, mp_policy=policy)
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    fully_shard(model, mesh=mesh, mp_policy=policy)


def check_fsdp(rank: int, low: torch.dtype | None) -> None:
    model = Model()
    gates = [(layer.A_log.detach().clone(), layer.dt_bias.detach().clone()) for layer in model.layers]
    shard(model, low)
    seen = []
    for layer in model.layers:
        # What reaches the layer's forward, behind FSDP's own hook: whole parameters, to the bit.
        layer.register_forward_pre_hook(lambda m, args: seen.append((m.A_log.clone(), m.dt_bias.clone())))
        layer.q_proj.register_forward_pre_hook(lambda m, args: seen.append(m.weight.dtype))
    loss_of(model, rank).backward()
    arrived = [entry for entry in seen if isinstance(entry, tuple)]
    for (A_log, dt_bias), (found_A_log, found_dt_bias) in zip(gates, arrived, strict=True):
        assert torch.equal(found_A_log, A_log) and torch.equal(found_dt_bias, dt_bias)
    assert {entry for entry in seen if isinstance(entry, torch.dtype)} == {low or torch.float32}
    parameters = dict(model.named_parameters())
    assert all(p.grad.dtype == p.dtype == torch.float32 for p in parameters.values())
    found = errors({name: p.grad.full_tensor() for name, p in parameters.items()})
    # bf16 rounds every weight and every tensor between the kernels once: a few times 2^-9.
    assert max(found.values()) < (1e-5 if low is None else 2e-2), found


def check_fsdp_without_the_recipe(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    layer = Model().layers[0]
    fully_shard(
        layer, mesh=init_device_mesh("cpu", (WORLD,)), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    )
    x, plan = pack_of(rank)
    with pytest.raises(UnsupportedProblemError, match="A_log arrived in the layer as torch.bfloat16"):
        layer(x, plan=plan)


def check_steps_agree(rank: int) -> None:
    """Three optimizer steps, sharded and not: the same losses, to fp32 rounding."""
    whole, sharded = Model(), Model()
    shard(sharded, None)
    twin = copy.deepcopy(whole)
    for step in range(3):
        losses = []
        for model, ranks in ((whole, range(WORLD)), (sharded, (rank,))):
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            optimizer.zero_grad()
            loss = sum(loss_of(model, r) for r in ranks)
            (loss / len(ranks)).backward()
            optimizer.step()
            losses.append(loss.detach())
        dist.all_reduce(losses[1])
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
        assert step > 0 or not torch.equal(whole.layers[0].A_log, twin.layers[0].A_log), "A_log is trained"


def work(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    try:
        check_ddp(rank)
        check_fsdp(rank, None)
        check_fsdp(rank, torch.bfloat16)
        check_fsdp_without_the_recipe(rank)
        check_steps_agree(rank)
        dist.barrier()  # nobody leaves while another still waits for its messages
    finally:
        dist.destroy_process_group()
    # The interpreter's end is left out: once rank 0 aborted there, under load, as the threads of store and gloo ended.
    os._exit(0)


def test_two_ranks():
    """All checks in one pair of processes: starting them takes longer than the checks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, (port,), WORLD)
