"""Checks on real devices, a process each: ``python -m tests.cp.devices WORLD DEVICE BACKEND [TOKENS]``.

It prints one JSON object: check -> the traceback of each rank that failed. ``TOKENS`` scales the packs, so that the
same checks run over gloo on the CPU; a check that breaks its group makes one of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from cake_kda_jit import (
    CommunicationError,
    KcpContext,
    KcpOptions,
    Partition,
    PlanMismatchError,
    causal_conv1d,
    gather,
    last_launches,
    reduce_parameter_gradients,
)
from cake_kda_jit.bench.cp_cases import PACKS, Sizes
from cake_kda_jit.bench.precision import parameter_errors
from cake_kda_jit.bench.problems import BUDGETS, PARAMETER_BUDGET, relative_error
from cake_kda_jit.bench.virtual_ranks import (
    FORMS,
    PER_TOKEN,
    Pack,
    differences,
    make_pack,
    on_one_device,
    on_rank,
    put_together,
    run_on_ranks,
)
from cake_kda_jit.cp import comm

from .ranks import EXCHANGES, LAYOUTS, assert_same_bits, conv_call, conv_problem, convolution, three_convolutions
from .worlds import raises

ROOT = Path(__file__).resolve().parents[2]
RUNS = 5
WALKS = ("bf16x3_hw64", "bf16x3", "tf32_hilo")
WALK_BITS = {"bf16x3": "bf16x3_hw64"}
"""Walks that have the bits of another."""
LATE_TIMEOUT = 2.0
SECONDS = 240.0


@dataclass(frozen=True)
class World:
    """What the processes have in common; ``sizes`` are those of the packs."""

    size: int
    device: str
    backend: str
    tokens: int | None

    @property
    def is_rehearsal(self) -> bool:
        """On the CPU it is about whether the checks work: two packs, and runs that are repeated once."""
        return self.device == "cpu"

    @property
    def packs(self) -> list[str]:
        """The packs to take."""
        return ["Q1", "Q6"] if self.is_rehearsal else list(PACKS)

    @property
    def runs(self) -> int:
        """How many runs have the same bits."""
        return 2 if self.is_rehearsal else RUNS

    @property
    def sizes(self) -> Sizes:
        """Few heads: it is about the exchange."""
        return Sizes(2, 64 if self.is_rehearsal else 128, self.tokens)

    def device_of(self, rank: int) -> torch.device:
        """A device each where there are enough, else one for all; NCCL needs the former."""
        shared = self.device == "cuda" and self.backend != "nccl"
        return torch.device("cpu") if self.device == "cpu" else torch.device("cuda", 0 if shared else rank)

    def pack(self, name: str, rank: int, regime: str = "softplus") -> Pack:
        """The same numbers on every rank."""
        sizes, device = self.sizes, self.device_of(rank)
        return make_pack(sizes.lengths(name), regime=regime, heads=sizes.heads, head_dim=sizes.head_dim, device=device)


def whole_of(found: dict[str, torch.Tensor], ctx: KcpContext) -> dict[str, torch.Tensor]:
    """The whole pack's tensors on every rank: tokens gathered; states and parameters, which are parts, summed."""
    whole = {}
    for name, tensor in found.items():
        if name in PER_TOKEN:
            whole[name] = gather(tensor, ctx)
        else:
            parameter = torch.zeros_like(tensor, requires_grad=True)
            parameter.grad = tensor.clone()
            reduce_parameter_gradients(ctx, parameter)
            whole[name] = parameter.grad
    return whole


def assert_near_one_device(found, alone, pack: Pack, regime: str) -> None:
    """Each is within the budget of FP64, so they are within twice the budget of each other.

    ddt_bias, a sum over tokens of dg's, as a whole: bf16 tiles cost single channels more.
    """
    errors = differences(found, alone) | {"ddt_bias": relative_error(found["ddt_bias"], alone["ddt_bias"].double())}
    for name, error in errors.items():
        assert torch.isfinite(found[name]).all(), name
        budget = BUDGETS[regime][{"dinitial_state": "final_state", "ddt_bias": "dg"}.get(name, name)]
        assert error <= 2 * budget, (name, error)
    assert parameter_errors(found, alone, pack.problem)[0] <= 2 * PARAMETER_BUDGET


# ---- checks ----------------------------------------------------------------------------------------------------------


def every_layout_backward_and_walk_on_every_pack(rank: int, world: World) -> None:
    """Within the budgets of one device, bit for bit as virtual ranks, and the same bits in every run."""
    for name in world.packs:
        pack = world.pack(name, rank)
        alone = on_one_device(pack)
        for layout in LAYOUTS:
            partition = getattr(Partition, layout)(pack.boundaries, world.size)
            expected: dict[str, dict[str, torch.Tensor]] = {}
            for form in WALKS:
                virtual = run_on_ranks(pack, partition, **FORMS[form])
                expected[form] = expected.get(WALK_BITS.get(form), virtual[rank])
                assert_same_bits(virtual[rank], expected[form])
                for backward in ("saved", "replay"):
                    ctx = KcpContext(partition, options=KcpOptions(backward=backward, **FORMS[form]))
                    for _ in range(world.runs):
                        found = on_rank(pack, ctx)
                        assert_same_bits(found, expected[form])
                whole = whole_of(found, ctx)
                assert_same_bits(whole, put_together(partition, virtual))
                assert_near_one_device(whole, alone, pack, "softplus")


def every_exchange_has_the_same_bits(rank: int, world: World) -> None:
    pack = world.pack("Q1", rank, "slow")
    for layout in LAYOUTS:
        partition = getattr(Partition, layout)(pack.boundaries, world.size)
        expected = run_on_ranks(pack, partition)[rank]
        for exchange in EXCHANGES:
            found = on_rank(pack, KcpContext(partition, options=KcpOptions(exchange=exchange)))
            assert_same_bits(found, expected)
            families = {one.family for one in last_launches()}
            assert families <= ({"cpu"} if world.device == "cpu" else {"smxx", "sm90"})


def the_convolution_has_the_bits_of_virtual_ranks(rank: int, world: World) -> None:
    fragments = [(token % world.size, token, token + 1) for token in range(9)] + [(world.size - 1, 9, 400)]
    for partition in (
        Partition.from_fragments([0, 2, 11, 400], fragments, world.size),
        Partition.per_document_zigzag([0, 130, 130, 131, 600], world.size),
    ):
        problem = conv_problem(partition.cu_seqlens, dtype=torch.bfloat16, channels=256, state_dtype=torch.float32)
        for name, value in vars(problem).items():
            if isinstance(value, torch.Tensor):
                setattr(problem, name, value.to(world.device_of(rank)))
        ctx = KcpContext(partition)
        assert ctx.channel.backend_of(world.device_of(rank)) == world.backend
        expected = convolution(problem, partition).ranks[rank]
        for _ in range(world.runs):
            assert_same_bits(conv_call(problem, ctx=ctx, output_final_state=True), expected)


def three_convolutions_share_an_exchange(rank: int, world: World) -> None:
    for layout in LAYOUTS:
        ctx = KcpContext(getattr(Partition, layout)([0, 130, 130, 131, 600], world.size))
        apart = three_convolutions(ctx, together=False, device=world.device_of(rank))
        for _ in range(world.runs):
            assert_same_bits(three_convolutions(ctx, together=True, device=world.device_of(rank)), apart)


def another_plan_on_one_rank_is_the_same_error_on_all(rank: int, world: World) -> None:
    odd = world.size - 1
    cu = [0, 100, 240]
    base = Partition.contiguous(cu, world.size)
    others = {"layout": Partition.zigzag(cu, world.size), "cu_seqlens": Partition.contiguous([0, 99, 240], world.size)}
    for field, other in others.items():
        with raises(PlanMismatchError, f"rank {odd} has {field} = "):
            KcpContext(other if rank == odd else base)
    with raises(PlanMismatchError, f"rank {odd} has options.transfer_walk (CAKE_KDA_JIT_TRANSFER_WALK) = "):
        KcpContext(base, options=KcpOptions(transfer_walk="tf32_hilo" if rank == odd else "bf16x3_hw64"))


def sub_groups_translate_their_ranks(rank: int, world: World) -> None:
    """The last ranks alone, and every rank by itself: group ranks are not those of the world."""
    members = list(range(1, world.size))
    groups = [dist.new_group([one]) for one in range(world.size)]
    tail = dist.new_group(members)
    pack = world.pack("Q2", rank)
    partition = Partition.contiguous(pack.boundaries, 1)
    ctx = KcpContext(partition, groups[rank])
    assert (ctx.rank, ctx.world_size) == (0, 1)
    assert_same_bits(on_rank(pack, ctx), on_one_device(pack))
    if rank in members:
        partition = Partition.zigzag(pack.boundaries, len(members))
        ctx = KcpContext(partition, tail)
        assert (ctx.rank, ctx.world_size) == (rank - 1, len(members))
        assert_same_bits(on_rank(pack, ctx), run_on_ranks(pack, partition)[ctx.rank])


def a_late_rank_is_an_error_on_all(rank: int, world: World) -> None:
    """The last check: a communicator that was given up may not be taken down in order.

    Nothing here waits for the device but the exchanges: who reads a result waits as long as the process group lets him.
    In a zigzag every rank waits for every other; the late one has messages of before the others gave up to go through.
    """
    device = world.device_of(rank)
    ctx = KcpContext(Partition.zigzag([0, 200], world.size), dist.new_group(), timeout=LATE_TIMEOUT)
    x = torch.ones(1, ctx.num_local_tokens, 64, dtype=torch.bfloat16, device=device)
    weight = torch.ones(64, 4, dtype=torch.bfloat16, device=device)
    causal_conv1d(x, weight, cp_context=ctx)
    if rank == world.size - 1:
        time.sleep(3 * LATE_TIMEOUT)
    with raises(CommunicationError, f"timeout={LATE_TIMEOUT} s", within=8 * LATE_TIMEOUT, same=False):
        for _ in range(3 * comm.MOST_AHEAD + 6):
            causal_conv1d(x, weight, cp_context=ctx)


CHECKS = (
    the_convolution_has_the_bits_of_virtual_ranks,
    three_convolutions_share_an_exchange,
    every_exchange_has_the_same_bits,
    every_layout_backward_and_walk_on_every_pack,
    another_plan_on_one_rank_is_the_same_error_on_all,
    sub_groups_translate_their_ranks,
    a_late_rank_is_an_error_on_all,
)


def run_rank(rank: int, world: World, folder: str) -> None:
    torch.set_num_threads(1)
    # The watchdog of torch would end the process of the last check.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    if world.device == "cuda":
        torch.cuda.set_device(world.device_of(rank))
    dist.init_process_group(
        world.backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world.size,
        timeout=timedelta(seconds=60),
        device_id=world.device_of(rank) if world.backend == "nccl" else None,
    )
    for check in CHECKS:
        began, failure = time.monotonic(), ""
        try:
            check(rank, world)
        except Exception:  # noqa: BLE001 - told by the test
            failure = traceback.format_exc()
        if rank == 0:
            print(f"{check.__name__}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        Path(folder, f"{check.__name__}.{rank}").write_text(failure)
        if check is not CHECKS[-1]:
            dist.barrier()
    wait_for_all(world, folder)
    os._exit(0)  # the last group may be broken


def wait_for_all(world: World, folder: str) -> None:
    """Wait until every rank is through its last check: a process that ends takes memory away that others write to."""
    told = [Path(folder, f"{CHECKS[-1].__name__}.{rank}") for rank in range(world.size)]
    end = time.monotonic() + 10 * LATE_TIMEOUT
    while time.monotonic() < end and not all(path.exists() for path in told):
        time.sleep(0.1)


def start(world: World) -> dict[str, dict[str, str]]:
    """Run ``main`` in a process of its own, whose CUDA nobody else uses."""
    command = [sys.executable, "-m", "tests.cp.devices", str(world.size), world.device, world.backend]
    tokens = [] if world.tokens is None else [str(world.tokens)]
    done = subprocess.run([*command, *tokens], cwd=ROOT, capture_output=True, text=True, timeout=1.2 * SECONDS)
    print(done.stderr)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def main(world: World) -> dict[str, dict[int, str]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=run_rank, args=(rank, world, folder)) for rank in range(world.size)]
        for process in processes:
            process.start()
        end = time.monotonic() + SECONDS
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
        found: dict[str, dict[int, str]] = {}
        for check in CHECKS:
            texts = {rank: Path(folder, f"{check.__name__}.{rank}") for rank in range(world.size)}
            told = {rank: path.read_text() if path.exists() else "did not end" for rank, path in texts.items()}
            found[check.__name__] = {rank: text for rank, text in told.items() if text}
        return found


if __name__ == "__main__":
    size, device, backend, *tokens = sys.argv[1:]
    print(json.dumps(main(World(int(size), device, backend, int(tokens[0]) if tokens else None))))
