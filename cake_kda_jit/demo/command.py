"""One run of the demo, from the text to the last line. torch is imported only after the arguments are read."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from .. import config
from ..errors import CakeKdaError, ConfigError
from .corpus import Corpus, read_corpus
from .failures import DemoFailure, import_optional
from .figure import draw_loss, figure_path
from .packing import pack_documents, shuffled_forever
from .progress import make_progress
from .settings import Settings, parse

if TYPE_CHECKING:
    from .training import Trainer

FEW_STEPS = 5
SAMPLE_PROMPT = b"    def "
SAMPLE_BYTES = 100


def main(argv: list[str]) -> int:
    """Run the demo; returns 0, 1 if it failed, 2 for wrong use. ``--json`` leaves stdout to the result alone."""
    try:
        settings = parse(argv)
    except SystemExit as stop:
        return 2 if stop.code else 0
    try:
        result = run(settings, sys.stderr if settings.json else sys.stdout)
    except DemoFailure as failure:
        return _fail(failure, failure.exit_code)
    except CakeKdaError as error:
        return _fail(error, 2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 1)
    if settings.json:
        print(json.dumps(asdict(result)))
    return 0


def _fail(why: object, exit_code: int) -> int:
    print(f"cake-kda-jit demo: {why}", file=sys.stderr)
    return exit_code


@dataclass(frozen=True)
class Result:
    """What a run showed. Losses are in nats per byte; ``first_loss`` and ``last_loss`` are means over a few steps.

    ``kernels`` maps each kernel to its family, target and origin (built, cache or prebuilt); ``kernel_folders`` is
    where their libraries are.
    """

    settings: Settings
    parameters: int
    losses: list[float]
    first_loss: float
    last_loss: float
    validation_loss: float | None
    tokens_per_second: float
    training_seconds: float
    sample: str
    figure: str
    kernels: dict[str, tuple[str, str, str]]
    kernel_folders: list[str]


def run(settings: Settings, stream: TextIO) -> Result:
    """Train, validate, write a sample and draw the loss; says on the stream how it goes."""
    say = partial(print, file=stream, flush=True)
    check_packages(stream)
    figure = figure_path(settings.out)
    corpus = read_corpus(settings.text, settings.max_length)
    say(_corpus_line(corpus))

    # Threads that spin while they wait make a busy machine several times slower; OpenMP reads this when torch loads it.
    config.set_default("OMP_WAIT_POLICY", "passive")
    from .ranks import Ranks, started_ranks
    from .training import make_trainer

    trainer = make_trainer(settings, Ranks(0, settings.ranks, settings.layout))
    with started_ranks(settings):
        return train(settings, trainer, corpus, figure, stream)


def train(settings: Settings, trainer: Trainer, corpus: Corpus, figure: Path, stream: TextIO) -> Result:
    """Do what follows once there is a model; on several ranks, as the first of them."""
    from .kernels import announced_loading, kernels_line, kernels_used

    say = partial(print, file=stream, flush=True)
    say(
        f"model: {settings.layers} layers, {settings.heads} heads, K = V = {settings.head_dim}, "
        f"{trainer.num_parameters / 1e6:.1f} million parameters on {_where(settings)}, {trainer.num_threads} threads"
    )
    with announced_loading(say):
        trainer.load_kernels()

    packs = pack_documents(shuffled_forever(corpus.training, settings.seed), settings.tokens)
    start = time.monotonic()
    with make_progress(settings.steps, stream) as progress:
        losses = trainer.train(packs, progress.step)
    seconds = time.monotonic() - start

    validation_loss = trainer.validate(pack_documents(corpus.held_out, settings.tokens))
    first_loss, last_loss = first_and_last(losses)
    say(
        f"loss in nats per byte: {first_loss:.2f} at first, {last_loss:.2f} at last"
        + ("" if validation_loss is None else f", {validation_loss:.2f} on documents held out")
    )
    sample = trainer.continue_text(SAMPLE_PROMPT, SAMPLE_BYTES).decode(errors="replace")
    say(f"sample: {sample!r}")
    draw_loss(figure, losses, validation_loss, _figure_title(settings, corpus))
    say(f"loss curve: {figure}")
    kernels, kernel_folders = kernels_used()
    say(kernels_line(kernels, kernel_folders))
    return Result(
        settings=settings,
        parameters=trainer.num_parameters,
        losses=losses,
        first_loss=first_loss,
        last_loss=last_loss,
        validation_loss=validation_loss,
        tokens_per_second=settings.steps * settings.tokens / seconds,
        training_seconds=seconds,
        sample=sample,
        figure=str(figure),
        kernels=kernels,
        kernel_folders=kernel_folders,
    )


def check_packages(stream: TextIO) -> None:
    """Raise DemoFailure for a package of the extra ``demo`` that will be needed and is missing."""
    import_optional("matplotlib")
    if stream.isatty():
        import_optional("tqdm")


def first_and_last(losses: list[float]) -> tuple[float, float]:
    """Return the means of the first and of the last few losses, never of the same steps."""
    few = max(1, min(FEW_STEPS, len(losses) // 2))
    return sum(losses[:few]) / few, sum(losses[-few:]) / few


def _corpus_line(corpus: Corpus) -> str:
    return (
        f"text: {corpus.num_bytes / 1e6:.2f} MB from {corpus.num_files} files of {corpus.name}, "
        f"{len(corpus.training)} documents to train on, {len(corpus.held_out)} held out"
    )


def _where(settings: Settings) -> str:
    ranks = "" if settings.ranks == 1 else f", {settings.ranks} ranks in the layout {settings.layout}"
    return settings.device + ranks


def _figure_title(settings: Settings, corpus: Corpus) -> str:
    name = corpus.name if len(corpus.name) <= 50 else f"... {corpus.name[-46:]}"
    return (
        f"Kimi Delta Attention, {settings.layers} layers, {settings.heads} heads, K = V = {settings.head_dim}\n"
        f"bytes of {name}, {settings.tokens} tokens a step, {_where(settings)}"
    )
