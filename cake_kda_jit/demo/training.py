"""The training loop: one plan, or one context of several ranks, per pack, shared by every layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from torch.nn import functional

from ..cp.context import KcpContext
from ..cp.options import KcpOptions
from ..ops.plan import make_plan
from ..ops.problem import KdaOptions
from .failures import WrongUse
from .model import ByteLanguageModel
from .packing import Pack
from .ranks import Ranks, device_name
from .settings import HIDDEN_SIZE, Settings

DEFAULT_MAX_THREADS = 2

OnStep = Callable[[float, int], None]
"""Called after each step with its loss in nats per byte and its tokens."""


@dataclass(frozen=True)
class Batch:
    """A pack on the device: this rank's inputs and targets ``[1, T]``, and what tells the layers its documents.

    ``ctx`` is None on a single rank; ``num_tokens`` are those of all ranks.
    """

    inputs: Tensor
    targets: Tensor
    documents: dict[str, object]
    ctx: KcpContext | None
    num_tokens: int


def make_trainer(settings: Settings, ranks: Ranks) -> Trainer:
    """Return a new model on the settings' device, with its optimiser; raises WrongUse if there is no such device.

    Sets the number of threads of torch, and with it that of the cpu kernels.
    """
    most_threads = DEFAULT_MAX_THREADS if ranks.size == 1 else 1
    torch.set_num_threads(settings.threads or min(torch.get_num_threads(), most_threads))
    try:
        device = torch.device(device_name(settings, ranks.rank))
        torch.empty(0, device=device)
        if device.index is not None:
            torch.cuda.set_device(device)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise WrongUse(f"device {settings.device!r} cannot be used: {reason}; try --device cpu") from None
    return Trainer(settings, device, ranks)


class Trainer:
    """A model and what it is trained with; everything random follows ``settings.seed``, on every rank alike."""

    def __init__(self, settings: Settings, device: torch.device, ranks: Ranks) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.device = device
        self.ranks = ranks
        model = ByteLanguageModel(HIDDEN_SIZE, settings.layers, settings.heads, settings.head_dim)
        self.model = model.to(self.device)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95)
        )

    @property
    def num_parameters(self) -> int:
        """Number of trained values."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def num_threads(self) -> int:
        """Threads that torch and the cpu kernels use."""
        return torch.get_num_threads()

    def load_kernels(self) -> None:
        """Run every kernel of a step once on a few tokens, so that compiling is over before the training starts."""
        self._losses(self._whole(Pack(inputs=b"kda", targets=b"da!", cu_seqlens=(0, 2, 3)))).sum().backward()
        self.optimizer.zero_grad()
        self.ranks.meet()

    def train(self, packs: Iterator[Pack], on_step: OnStep) -> list[float]:
        """Take ``settings.steps`` steps, one pack each; returns their losses in nats per byte."""
        losses = []
        for step, pack in enumerate(islice(packs, self.settings.steps)):
            batch = self._batch(pack)
            token_losses = self._losses(batch)
            (token_losses.sum() / batch.num_tokens).backward()
            self.ranks.reduce(self.model.parameters(), batch.ctx)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for group in self.optimizer.param_groups:
                group["lr"] = self.settings.learning_rate * warmup_then_cosine(step, self.settings.steps)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(self.ranks.whole(token_losses.detach(), batch.ctx).mean().item())
            on_step(losses[-1], len(pack.inputs))
        return losses

    @torch.no_grad()
    def validate(self, packs: Iterable[Pack]) -> float | None:
        """Return the mean loss over the packs in nats per byte, None without packs."""
        total, tokens = 0.0, 0
        for pack in packs:
            batch = self._batch(pack)
            total += self.ranks.whole(self._losses(batch), batch.ctx).sum().item()
            tokens += batch.num_tokens
        return total / tokens if tokens else None

    @torch.no_grad()
    def continue_text(self, prompt: bytes, count: int, temperature: float = 0.6) -> bytes:
        """Append ``count`` bytes to the prompt, each drawn from the model's distribution.

        The whole text is read again for every byte: simple, and quick enough for a line or two. Other ranks take no
        part.
        """
        text = bytearray(prompt)
        for _ in range(count):
            batch = self._whole(Pack(bytes(text), bytes(text), (0, len(text))))
            logits = self.model(batch.inputs, batch.documents)[0, -1]
            text.append(int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1)))
        return bytes(text)

    def _batch(self, pack: Pack) -> Batch:
        """This rank's part of a pack."""
        if self.ranks.size == 1:
            return self._whole(pack)
        ctx = self.ranks.context(pack, KcpOptions(backward=self.settings.backward))
        inputs, targets = (ctx.partition.shard(tokens, ctx.rank) for tokens in self._tokens(pack))
        return Batch(inputs, targets, {"cp_context": ctx}, ctx, len(pack.inputs))

    def _whole(self, pack: Pack) -> Batch:
        """All of a pack."""
        plan = make_plan(
            torch.tensor(pack.cu_seqlens, dtype=torch.int32),
            num_heads=self.settings.heads,
            head_dim=self.settings.head_dim,
            device=self.device,
        )
        documents = {"plan": plan, "options": KdaOptions(backward=self.settings.backward)}
        return Batch(*self._tokens(pack), documents, None, len(pack.inputs))

    def _tokens(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Inputs and targets ``[1, T]``."""
        inputs, targets = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8).long().unsqueeze(0).to(self.device)
            for data in (pack.inputs, pack.targets)
        )
        return inputs, targets

    def _losses(self, batch: Batch) -> Tensor:
        """The loss of each of this rank's tokens, ``[1, T]``, in nats."""
        logits = self.model(batch.inputs, batch.documents)
        return functional.cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none")


def warmup_then_cosine(step: int, steps: int) -> float:
    """Return the factor of the learning rate: up to 1 over the first tenth of the steps, then down to 0.1."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
