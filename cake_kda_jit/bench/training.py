"""A short training run of the layer, the same on every device: losses into a file, curves of files into a picture.

Run ``python -m cake_kda_jit.bench training [--device cpu] [--kernel-dtype bf16] [--json FILE]``, on each device or with
each dtype, then ``... training --draw PICTURE FILE [FILE ...]``, which runs nothing. Parameters and documents follow
the seed alone, and both are made on the CPU, so that curves differ by the arithmetic only.

A document repeats six words of a vocabulary of forty in random order. Spelling is learnt first, at about 0.8 nats per
byte; what a model gains beyond that it reads from the document itself, through the state.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from ..demo.failures import import_optional
from ..demo.figure import smoothed
from ..demo.model import ByteLanguageModel
from ..demo.packing import Pack, pack_documents
from ..ops.plan import make_plan
from ..ops.problem import KdaOptions
from .core import machine, write_report

WHAT = "training losses, nats per byte"
HIDDEN, LAYERS, HEADS, HEAD_DIM = 128, 2, 2, 64
TOKENS = 512  # of a step
VOCABULARY, WORDS, LETTERS = 40, 6, "abcdefghijklmnop"
KERNEL_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Step:
    """One step: its number from 1 on, its loss, and what it ran with."""

    step: int
    loss: float
    kernel_dtype: str


def documents(seed: int) -> Iterator[bytes]:
    """Yield documents without end: 20 to 60 repetitions of six words, in random order."""
    generator = random.Random(seed)
    vocabulary = ["".join(generator.choices(LETTERS, k=generator.randint(3, 5))) for _ in range(VOCABULARY)]
    while True:
        words = generator.sample(vocabulary, WORDS)
        yield " ".join(generator.choices(words, k=generator.randint(20, 60))).encode()


class Training:
    """A small language model on a device, trained by AdamW at one learning rate."""

    def __init__(self, device: torch.device, kernel_dtype: str, backward: str | None, seed: int) -> None:
        torch.manual_seed(seed)
        model = ByteLanguageModel(HIDDEN, LAYERS, HEADS, HEAD_DIM)
        for block in model.blocks:
            block.attention.kernel_dtype = KERNEL_DTYPES[kernel_dtype]
        self.device, self.kernel_dtype, self.options = device, kernel_dtype, KdaOptions(backward=backward)
        self.model = model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
        self.packs = pack_documents(documents(seed), TOKENS)

    def steps(self, count: int) -> list[Step]:
        """Take so many steps."""
        losses = [self._step(next(self.packs)) for _ in range(count)]
        return [Step(n, loss.item(), self.kernel_dtype) for n, loss in enumerate(losses, 1)]

    def _step(self, pack: Pack) -> torch.Tensor:
        inputs, targets = (
            torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unsqueeze(0).to(self.device)
            for text in (pack.inputs, pack.targets)
        )
        plan = make_plan(torch.tensor(pack.cu_seqlens), num_heads=HEADS, head_dim=HEAD_DIM, device=self.device)
        logits = self.model(inputs, {"plan": plan, "options": self.options})
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()


def draw(picture: Path, files: Sequence[Path]) -> None:
    """Draw each file's losses, smoothed, and below how far they are from the first file's."""
    curves = {}
    for path in files:
        report = json.loads(path.read_text(encoding="utf-8"))
        name = f"{report['machine']['device'].partition(',')[0]}, {report['rows'][0]['kernel_dtype']} on the kernels"
        curves[name if name not in curves else f"{name} ({path.stem})"] = [row["loss"] for row in report["rows"]]
    figure = import_optional("matplotlib.figure").Figure(figsize=(7.2, 5.4), dpi=120, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    reference = next(iter(curves.values()))
    for number, (name, losses) in enumerate(curves.items()):
        steps, colour = range(1, len(losses) + 1), f"C{number}"
        top.plot(steps, losses, color=colour, alpha=0.25, linewidth=0.8)
        top.plot(steps, smoothed(losses), color=colour, linewidth=1.6, label=f"{name}: {losses[-1]:.3f} at last")
        if number:
            bottom.plot(steps, [abs(a - b) for a, b in zip(losses, reference)], color=colour, linewidth=0.9)
    top.set(
        ylabel="loss (nats per byte)",
        title=f"{LAYERS} layers, {HEADS} heads, K = V = {HEAD_DIM}, {TOKENS} tokens a step",
    )
    top.set_ylim(bottom=0)
    top.legend()
    bottom.set(xlabel="step", ylabel="difference from the first")
    bottom.set_yscale("log")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(picture, format="png")


def main(argv: Sequence[str] | None = None) -> int:
    """Train and write the losses, or draw those of files."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kernel-dtype", choices=tuple(KERNEL_DTYPES), default="bf16")
    parser.add_argument("--backward", choices=("saved", "replay"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the losses to this file")
    parser.add_argument("--draw", type=Path, nargs="+", metavar=("PICTURE", "FILE"), help="draw files, run nothing")
    arguments = parser.parse_args(argv)
    if arguments.draw is not None:
        picture, *files = arguments.draw
        if not files:
            parser.error("--draw needs a picture and at least one file")
        draw(picture, files)
        return 0
    device = torch.device(arguments.device)
    training = Training(device, arguments.kernel_dtype, arguments.backward, arguments.seed)
    steps = training.steps(arguments.steps)
    if arguments.json is not None:
        write_report(arguments.json, WHAT, "cake_kda_jit.bench.training", device, steps)
    shown = steps[:: max(1, len(steps) // 10)]
    print(f"{WHAT}, {arguments.kernel_dtype} on the kernels; {machine(device)['device']}")
    print("\n".join(f"step {one.step:4d}  {one.loss:.4f}" for one in (*shown, steps[-1])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
