"""``KcpContext``: one rank's view of a pack that several ranks share, made once and passed to every layer."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch

from .. import config
from ..errors import CakeKdaError, PlanMismatchError, UnsupportedProblemError
from ..ops.checks import DTYPE_NAMES
from ..ops.keys import Known
from ..ops.operators import untraced
from ..ops.parallel import ParallelContext
from ..ops.plan import PlanHeads
from ..ops.recorder import Recording
from .agreement import ERROR, shown
from .channel import Channel
from .comm import TorchChannel
from .options import WITH_KNOBS, KcpOptions, resolve_parallel_options
from .partition import Partition
from .plan import ParallelPlan
from .spans import Role
from .tables import LocalTables, make_tables
from .virtual import VirtualGroup

TIMEOUT = 60.0
"""Seconds that an exchange may take by default."""

_numbers = itertools.count()
_contexts: weakref.WeakValueDictionary[int, KcpContext] = weakref.WeakValueDictionary()


class KcpContext(ParallelContext):
    """The ranks of ``group``, each with its part of one partition. Making it is collective.

    ``group`` is a ``torch.distributed`` group (None: all ranks) or a ``VirtualGroup``. Fields of the partition and the
    options are compared through the group's host-side store; if they differ, all ranks raise the same PlanMismatchError
    with the rank and the field. Options that are None are decided then, and CAKE_KDA_JIT_FAMILY is compared beside them
    for convolutions. dtype, H, HV and K are compared in the same way by the first call of ``chunk_kda``; no later call
    does anything collective on the host. An exchange that takes more than ``timeout`` seconds raises
    CommunicationError on every rank that waits, and the group is of no more use.

    The calls on a context, backwards included, must be the same on all ranks and in the same order.
    """

    def __init__(
        self,
        partition: Partition,
        group: Any = None,
        *,
        options: KcpOptions | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        is_timeout = isinstance(timeout, (int, float)) and 0 < timeout < float("inf")
        self.group = group
        self.timeout = timeout
        channel = None if isinstance(group, VirtualGroup) else TorchChannel(group, timeout if is_timeout else TIMEOUT)
        try:
            if not is_timeout:
                raise UnsupportedProblemError(f"timeout={timeout!r}; give a positive number of seconds")
            if not isinstance(partition, Partition):
                raise UnsupportedProblemError(f"partition is {type(partition).__name__}; give a Partition")
            resolved = resolve_parallel_options(options)
            fields = _fields(partition, resolved)
        except CakeKdaError as error:
            # The others are told; they would wait for this rank until their time is over.
            if channel is not None:
                channel.agree("context", {ERROR: str(error)})
            raise
        number = 0 if channel is None else channel.agree("context", fields)
        size = group.size() if channel is None else channel.world_size
        if size != partition.world_size:
            raise PlanMismatchError(
                f"the partition is for {partition.world_size} ranks, the group has {size}; make one for {size}"
            )
        self._open(partition, resolved, ParallelPlan(partition), channel)
        self._name = f"context {number}"

    def _open(self, partition: Partition, options: KcpOptions, plan: ParallelPlan, channel: Channel | None) -> None:
        self.partition = partition
        self.options = options
        self.parallel_plan = plan
        self.num_documents = partition.num_documents
        self._channel = channel
        self._problem: tuple | None = None
        self._exchange: str | None = None
        self._prepared: torch.device | None = None
        self._fixed: tuple[tuple, torch.device] | None = None
        self._sizes = (0, 0, 0)
        # Plain numbers, made now: torch.compile must not look into how they are counted.
        self.num_local_tokens = 0 if channel is None else partition.num_local_tokens(channel.rank)
        self.num_entered = 0
        self._num_operations = 0
        self._cache: dict[tuple, Any] = {}
        self.parts: dict[Hashable, Recording] = {}
        self.checked = Known()
        self.handle = next(_numbers)
        _contexts[self.handle] = self

    @cached_property
    def _virtual_ranks(self) -> list[KcpContext]:
        made = []
        for rank in range(self.group.world_size):
            one = object.__new__(KcpContext)
            one.group, one.timeout = self.group, self.timeout
            one._open(self.partition, self.options, self.parallel_plan, self.group.channel(rank))
            one._name = f"context {self.handle}"
            made.append(one)
        return made

    def of_rank(self, rank: int) -> KcpContext:
        """Return a rank's context of one that was made with a VirtualGroup; ``run_virtual`` passes it."""
        if self._channel is not None:
            raise UnsupportedProblemError(
                "this is one rank's context already; of_rank belongs to VirtualGroup contexts"
            )
        if rank not in range(self.world_size):
            raise UnsupportedProblemError(f"rank={rank!r}; give one of the {self.world_size} ranks, counted from 0")
        return self._virtual_ranks[rank]

    def renew_ranks(self) -> None:
        """Make the contexts of a VirtualGroup's ranks anew: after a run that failed they stand at different calls."""
        self.__dict__.pop("_virtual_ranks", None)

    @property
    def channel(self) -> Channel:
        """This rank's end of the group."""
        if self._channel is None:
            raise UnsupportedProblemError(
                "this context stands for all ranks of a VirtualGroup; call through run_virtual(ctx, fn), which gives "
                "fn the context of its rank"
            )
        return self._channel

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.channel.rank

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return self.partition.world_size

    @cached_property
    def owned_first(self) -> tuple[int, ...]:
        """The documents whose first token is here: only their rows of an initial state are read, and get gradients.

        Empty documents are rank 0's.
        """
        return self._documents(Role.FIRST, Role.WHOLE)

    @cached_property
    def owned_last(self) -> tuple[int, ...]:
        """The documents whose last token is here: only their rows of a final state are filled. As ``owned_first``."""
        return self._documents(Role.LAST, Role.WHOLE)

    def _documents(self, *roles: Role) -> tuple[int, ...]:
        spans = self.parallel_plan.spans.of_rank(self.rank)
        return tuple(sorted(span.document for span in spans if span.role in roles))

    def explain(self, num_value_heads: int, head_dim: int = 128) -> str:
        """Return the exchanges for HV heads and K = V as a table: rounds, bytes, and which one is taken."""
        return self.parallel_plan.explain(num_value_heads, head_dim, self.options.exchange)

    # ---- what calls need ----

    def check_tokens(self, name: str, tensor: torch.Tensor) -> None:
        """See ParallelContext."""
        if tensor.shape[1] != self.num_local_tokens:
            raise PlanMismatchError(
                f"{name} has {tensor.shape[1]} tokens; rank {self.rank} of this partition holds "
                f"{self.num_local_tokens}: give its part, partition.shard(x, rank)"
            )

    def attention(self, tensors, transforms, *, output_final_state, keep):
        """See ParallelContext. What a compiled graph takes from here are numbers, which may differ in its next call."""
        from .library import attend

        q, v = tensors[0], tensors[2]
        problem = (DTYPE_NAMES[q.dtype], q.shape[2], v.shape[2], v.shape[3], q.device.type)
        if self._fixed != (problem, q.device):
            self._fix_problem(problem, q.device)
        self.prepare(q.device)
        options = (self.options.backward, self.options.checkpoint_tokens, self.options.keep_decayed_qk)
        sizes = (self.handle, self.num_documents, *self._sizes)
        arguments = (*tensors, *sizes, *transforms, *options)
        return attend(arguments, output_final_state=output_final_state, keep=keep)

    def convolution(self, tensors, *, use_silu, output_final_state):
        """See ParallelContext."""
        from .library import OPERATORS

        self.prepare(tensors[0].device)
        sizes = (self.handle, self.num_documents, self.num_entered)
        y, final_state, *_ = OPERATORS.kcp_causal_conv1d_forward(*tensors, *sizes, use_silu, output_final_state)
        return y, final_state

    def short_convolutions(self, rows, weights):
        """See ParallelContext."""
        from .library import OPERATORS

        self.prepare(rows[0].device)
        *found, _ = OPERATORS.kcp_short_convolutions_forward(*rows, *weights, self.handle, self.num_entered)
        return tuple(found)

    @untraced
    def _fix_problem(self, problem: tuple, device: torch.device) -> None:
        """Let all ranks agree on the first call's problem, and make a device's tables; refuses another problem."""
        if self._problem is None:
            names = ("dtype", "H", "HV", "K", "device type")
            self.channel.agree("first call of chunk_kda", {n: shown(value) for n, value in zip(names, problem)})
            self._exchange = self.parallel_plan.choose(self.options.exchange, problem[2], problem[3])
            self._problem = problem
        if problem != self._problem:
            raise PlanMismatchError(
                f"this call has (dtype, H, HV, K, device) = {problem}; the context's first call had {self._problem}: "
                "make a context of its own for it"
            )
        tables = self.tables(device)
        self._sizes = (tables.chunk_table.shape[0], tables.all.segment_table.shape[0], tables.num_summaries)
        self._fixed = (problem, device)

    def prepare(self, device: torch.device) -> None:
        """Make a device's tensors ready to be exchanged; collective at a device's first use."""
        if self._prepared != device:
            self._prepare(device)

    @untraced
    def _prepare(self, device: torch.device) -> None:
        self.channel.prepare(device)
        self.num_entered = len(self.parallel_plan.numbers_of(self.rank, Role.MIDDLE, Role.LAST))
        self._prepared = device

    @property
    def exchange(self) -> str:
        """The exchange that the first call of ``chunk_kda`` has fixed."""
        if self._exchange is None:
            raise UnsupportedProblemError("the exchange is chosen by the first call of chunk_kda; call it first")
        return self._exchange

    def tables(self, device: torch.device) -> LocalTables:
        """Return the tables of this rank's spans on a device, for the heads of the first call."""
        _, heads, value_heads, head_dim, _ = self._problem
        sizes = PlanHeads(heads, value_heads, head_dim)
        has_checkpoints = self.options.backward == "replay"

        def make() -> LocalTables:
            return make_tables(self.parallel_plan, self.rank, sizes, device, has_checkpoints=has_checkpoints)

        return self.cached(("tables", device), make)

    def cached(self, key: tuple, make: Callable[[], Any]) -> Any:
        """Return what ``make()`` returned when the key was first asked for."""
        if key not in self._cache:
            # Tables made under inference mode could not be saved for a later backward.
            with torch.inference_mode(False):
                self._cache[key] = make()
        return self._cache[key]

    def next_label(self, what: str) -> str:
        """Return the name of the next operation's exchanges. The numbers in it are the same on all ranks."""
        self._num_operations += 1
        return f"{self._name}, operation {self._num_operations}, {what}"

    def __reduce__(self):
        raise UnsupportedProblemError(
            "a KcpContext holds a process group and cannot be pickled; make one in each process"
        )


def get_context(handle: int) -> KcpContext:
    """Return the context of a handle; raises UnsupportedProblemError if it is gone."""
    found = _contexts.get(handle)
    if found is None:
        raise UnsupportedProblemError(f"the KcpContext with handle {handle} is gone; keep it as long as its operators")
    return found


def _fields(partition: Partition, options: KcpOptions) -> dict[str, str]:
    digests = partition.digests()
    layout = {name: shown(getattr(partition, name), digest) for name, digest in digests.items()}
    resolved = {_name_of(name): shown(value) for name, value in asdict(options).items()}
    # Convolutions ask for it in every call, whatever the options say.
    return layout | resolved | {config.knob("FAMILY").name: shown(config.read("FAMILY"))}


def _name_of(option: str) -> str:
    return f"options.{option}" + (f" ({config.knob(option.upper()).name})" if option in WITH_KNOBS else "")
