"""A training step of one layer on two ranks, beside the same step on one.

``python docs/examples/two_ranks.py`` starts both ranks. With one GPU a rank, start it under torchrun, give the device
and drop ``multiprocessing.spawn``: nothing else changes.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from cake_kda_jit import KcpContext, Partition, gather, reduce_parameter_gradients
from cake_kda_jit.layers import KimiDeltaAttention

RANKS, HIDDEN = 2, 64
BOUNDARIES = [0, 150, 150, 220]  # three documents, the second one empty


def make_layer_and_pack():
    """The same on every rank: parameters and the whole pack."""
    torch.manual_seed(0)
    layer = KimiDeltaAttention(HIDDEN, num_heads=2, head_dim=64)
    return layer, torch.randn(1, BOUNDARIES[-1], HIDDEN)


def step_on_one():
    """What both ranks together must equal."""
    layer, x = make_layer_and_pack()
    y = layer(x, cu_seqlens=torch.tensor(BOUNDARIES))
    y.square().sum().backward()
    return y, [parameter.grad for parameter in layer.parameters()]


def step_on_ranks(ctx):
    """One rank's part: its tokens, its share of the loss, and the one reduction of a step."""
    layer, x = make_layer_and_pack()
    x = ctx.partition.shard(x, ctx.rank)
    y = layer(x, cp_context=ctx)
    y.square().sum().backward()
    reduce_parameter_gradients(ctx, *layer.parameters())
    return gather(y, ctx), [parameter.grad for parameter in layer.parameters()]


def error(found, expected):
    """Relative Frobenius error."""
    return ((found - expected).norm() / expected.norm()).item()


def main(rank, meeting_point):
    """One rank."""
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}/ranks", rank=rank, world_size=RANKS)
    ctx = KcpContext(Partition.balanced(BOUNDARIES, RANKS, whole_below=100))
    y, gradients = step_on_ranks(ctx)
    expected_y, expected = step_on_one()
    worst = max(error(one, other) for one, other in zip(gradients, expected))
    print(
        f"rank {rank}: {ctx.num_local_tokens} tokens, error {error(y, expected_y):.1e}, of gradients: {worst:.1e}\n",
        end="",
        flush=True,
    )  # one write a line
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as meeting_point:
        multiprocessing.spawn(main, args=(meeting_point,), nprocs=RANKS)
