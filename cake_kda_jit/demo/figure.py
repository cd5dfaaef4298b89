"""The loss curve as a PNG."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from .failures import WrongUse, import_optional


def figure_path(out: str) -> Path:
    """Return where the figure goes: ``out`` if it ends in .png, else ``loss.png`` in the folder ``out``, made here.

    Raises WrongUse if no file can be written there, before any training is spent on it.
    """
    path = Path(out) if out.endswith(".png") else Path(out) / "loss.png"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WrongUse(f"the folder of {str(path)!r} cannot be made: {error.strerror}; choose another --out") from None
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise WrongUse(f"{str(path)!r} cannot be written; choose another --out")
    return path


def draw_loss(path: Path, losses: Sequence[float], validation_loss: float | None, title: str) -> None:
    """Draw the losses in nats per byte against the step, as they are and smoothed, and the held-out loss as a line."""
    figure = import_optional("matplotlib.figure").Figure(figsize=(7.2, 4.2), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="each step")
    axes.plot(steps, smoothed(losses), color="tab:blue", linewidth=2, label="smoothed")
    if validation_loss is not None:
        axes.axhline(validation_loss, color="tab:orange", linestyle="--", label=f"held out: {validation_loss:.2f}")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png")


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return the mean of each loss and its neighbours: a tenth of the curve, at most 20 steps."""
    reach = min(20, len(losses) // 10) // 2
    windows = (losses[max(0, step - reach) : step + reach + 1] for step in range(len(losses)))
    return [sum(window) / len(window) for window in windows]
