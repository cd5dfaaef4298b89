"""How far the training is: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

from .failures import import_optional

SECONDS_BETWEEN_LINES = 5.0


def make_progress(steps: int, stream: TextIO) -> BarProgress | LineProgress:
    """Return the progress that suits the stream."""
    return BarProgress(steps, stream) if stream.isatty() else LineProgress(steps, stream)


class BarProgress:
    """A tqdm bar with the loss and tokens per second; tqdm adds the time left."""

    def __init__(self, steps: int, stream: TextIO) -> None:
        tqdm = import_optional("tqdm").tqdm
        self._speed = _Speed()
        # Given both numbers, the bar also shows on a terminal that reports a size of 0, as some containers' do.
        columns, rows = shutil.get_terminal_size()
        self._bar = tqdm(total=steps, unit="step", file=stream, ncols=columns, nrows=rows)

    def __enter__(self) -> BarProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def step(self, loss: float, tokens: int) -> None:
        """Count one step with its loss in nats per byte and its tokens."""
        self._bar.set_postfix_str(f"loss {loss:.2f}, {self._speed.after(tokens):,.0f} tokens/s", refresh=False)
        self._bar.update()


class LineProgress:
    """A line with step, loss, tokens per second and time left, every few seconds and at the end."""

    def __init__(self, steps: int, stream: TextIO) -> None:
        self._steps, self._stream = steps, stream
        self._speed = _Speed()
        self._done = 0
        self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES

    def __enter__(self) -> LineProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.flush()

    def step(self, loss: float, tokens: int) -> None:
        """Count one step with its loss in nats per byte and its tokens."""
        self._done += 1
        tokens_per_second = self._speed.after(tokens)
        if time.monotonic() < self._next_line and self._done < self._steps:
            return
        self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
        seconds_left = self._speed.seconds / self._done * (self._steps - self._done)
        print(
            f"step {self._done:>5}/{self._steps}   loss {loss:.2f}   {tokens_per_second:,.0f} tokens/s   "
            f"{seconds_left:.0f} s left",
            file=self._stream,
            flush=True,
        )


class _Speed:
    def __init__(self) -> None:
        self._start = time.monotonic()
        self._tokens = 0

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def after(self, tokens: int) -> float:
        """Count more tokens; returns the tokens per second since the start."""
        self._tokens += tokens
        return self._tokens / max(self.seconds, 1e-9)
