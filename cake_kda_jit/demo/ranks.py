"""The demo on several ranks: processes that share every pack, this one being rank 0.

They talk through gloo; tensors of CUDA devices through NCCL, if there is a device for each rank.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from ..cp.context import KcpContext
from ..cp.options import KcpOptions
from ..cp.parameters import reduce_parameter_gradients
from ..cp.partition import Partition
from ..cp.whole import gather
from ..errors import CommunicationError
from .corpus import read_corpus
from .packing import Pack, pack_documents, shuffled_forever
from .settings import Settings

SECONDS_TO_END = 30.0
SECONDS_TO_START = 300.0
"""A rank that compiles kernels keeps the others waiting."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of a run. With ``size`` 1 there is no other."""

    rank: int
    size: int
    layout: str

    def meet(self) -> None:
        """Wait for all ranks, which may have kernels to compile; raises CommunicationError if one of them has ended."""
        if self.size > 1:
            try:
                # A sum on the host: a barrier may go through NCCL, which does not notice that a rank has ended.
                dist.all_reduce(torch.zeros(1))
            except RuntimeError as error:
                raise CommunicationError(f"a rank of the demo has ended: {error}") from error

    def context(self, pack: Pack, options: KcpOptions) -> KcpContext:
        """Return the context of a pack, of which every rank holds its part. Collective."""
        partition = getattr(Partition, self.layout)(pack.cu_seqlens, self.size)
        return KcpContext(partition, options=options)

    def whole(self, x: Tensor, ctx: KcpContext | None) -> Tensor:
        """Return the tokens ``[1, T]`` of all ranks."""
        return x if ctx is None else gather(x, ctx)

    def reduce(self, parameters: Iterable[Tensor], ctx: KcpContext | None) -> None:
        """Sum the gradients of all ranks: the one reduction of a step."""
        if ctx is not None:
            reduce_parameter_gradients(ctx, *parameters)


def has_device_each(settings: Settings) -> bool:
    """Whether every rank has a CUDA device to itself."""
    return settings.device == "cuda" and 1 < settings.ranks <= torch.cuda.device_count()


def device_name(settings: Settings, rank: int) -> str:
    """Return the device of a rank; where there are too few for one each, all share the one that is named."""
    return f"cuda:{rank}" if has_device_each(settings) else settings.device


@contextmanager
def started_ranks(settings: Settings) -> Iterator[None]:
    """Start the other ranks, which train and validate as this one does; the block is rank 0."""
    if settings.ranks == 1:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        others = multiprocessing.spawn(
            _run_other, args=(settings, folder), nprocs=settings.ranks - 1, join=False, daemon=True
        )
        try:
            _join_group(folder, 0, settings)
            yield
            dist.destroy_process_group()  # before the others are waited for: NCCL lets none go alone
            while not others.join(SECONDS_TO_END):
                pass
        finally:
            for process in others.processes:
                if process.is_alive():
                    process.terminate()
            if dist.is_initialized() and not has_device_each(settings):
                dist.destroy_process_group()


def _join_group(folder: str, rank: int, settings: Settings) -> None:
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_device_each(settings) else "gloo",
        init_method=f"file://{Path(folder, 'store')}",
        rank=rank,
        world_size=settings.ranks,
        timeout=timedelta(seconds=SECONDS_TO_START),
    )


def _run_other(index: int, settings: Settings, folder: str) -> None:
    """What rank 0 does, without a word."""
    from .training import make_trainer

    rank = index + 1
    trainer = make_trainer(settings, Ranks(rank, settings.ranks, settings.layout))
    _join_group(folder, rank, settings)
    trainer.load_kernels()
    corpus = read_corpus(settings.text, settings.max_length)
    trainer.train(
        pack_documents(shuffled_forever(corpus.training, settings.seed), settings.tokens), lambda loss, tokens: None
    )
    trainer.validate(pack_documents(corpus.held_out, settings.tokens))
    dist.destroy_process_group()
