"""Context parallelism for any delta-rule kernel, from segment_summary and transfer_walk.

Each rank holds a run of consecutive tokens of one document. ``python docs/examples/state_transfer.py`` starts three
ranks and compares each with the whole document on one device.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from cake_kda_jit import chunk_kda, segment_summary, transfer_walk

TOKENS, HEADS, HEAD_DIM = 300, 2, 64


def entry_state(k, v, g, beta):
    """The state that enters this rank's tokens, ``[1, HV, K, V]``: summaries of all ranks, walked in rank order."""
    world, tokens = dist.get_world_size(), k.shape[1]
    M, B = segment_summary(k, v, g, beta, torch.tensor([0, tokens]))  # this rank as S_out = M S_in + B
    gathered = [[torch.empty_like(part) for _ in range(world)] for part in (M, B)]
    for parts, part in zip(gathered, (M, B)):
        dist.all_gather(parts, part)
    all_M, all_B = (torch.cat(parts) for parts in gathered)
    entry, _ = transfer_walk(all_M, all_B, None, torch.tensor([0, world]))
    return entry[dist.get_rank()][None]


def forward(q, k, v, g, beta):
    """The forward of this rank's tokens; put your own kernel in the place of chunk_kda."""
    return chunk_kda(q, k, v, g, beta, initial_state=entry_state(k, v, g, beta))[0]


def main(rank, world, meeting_point):
    """One rank: its tokens' output beside that of the whole document."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, TOKENS, HEADS, HEAD_DIM, generator=generator) for _ in range(4))
    k, g = torch.nn.functional.normalize(k, dim=-1), -0.1 * g.abs()
    inputs = (q, k, v, g, torch.rand(1, TOKENS, HEADS, generator=generator))
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}/ranks", rank=rank, world_size=world)
    mine = slice(TOKENS * rank // world, TOKENS * (rank + 1) // world)
    o = forward(*(tensor[:, mine] for tensor in inputs))
    expected = chunk_kda(*inputs)[0][:, mine]
    error = ((o - expected).norm() / expected.norm()).item()
    print(f"rank {rank}: {o.shape[1]} tokens, error {error:.1e}\n", end="", flush=True)  # one write a line
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as meeting_point:
        multiprocessing.spawn(main, args=(3, meeting_point), nprocs=3)
