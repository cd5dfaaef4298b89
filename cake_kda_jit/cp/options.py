"""Options of context-parallel calls: those of every call, and how ranks exchange states. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import UnsupportedProblemError
from ..ops.problem import KdaOptions
from ..ops.select import named_walk, resolve_walk
from .plan import check_exchange

WITH_KNOBS = ("backward", "checkpoint_tokens", "family", "transfer_walk")
"""Options that a knob of the same name decides where they are None."""


@dataclass(frozen=True)
class KcpOptions(KdaOptions):
    """``KdaOptions``, and: ``transfer_walk`` and ``precision_mode`` as in ``transfer_walk``; ``exchange``.

    ``exchange`` is "all_gather", "spread" or "relay", which give the same bits, or "auto" for the cheapest by bytes and
    rounds. None takes CAKE_KDA_JIT_*, then the default, once for all calls on a context. They are checked by the
    context that is made with them: then all ranks have the error.
    """

    transfer_walk: str | None = None
    precision_mode: int = 0
    exchange: str = "auto"

    def __post_init__(self) -> None:
        pass  # what is wrong on one rank alone must be told to the others, which wait for it in their contexts

    def resolved(self) -> KcpOptions:
        """Return the options with every knob decided; raises UnsupportedProblemError on a bad value.

        ``transfer_walk`` is "default" where nobody named a walk, and its width is then chosen by shape: what ranks have
        compared is not asked of their environments again.
        """
        check_exchange(self.exchange)
        resolve_walk(self.transfer_walk, self.precision_mode)
        found = replace(super().resolved(), transfer_walk=named_walk(self.transfer_walk, self.precision_mode))
        found._check()
        return found


def resolve_parallel_options(options: KcpOptions | None) -> KcpOptions:
    """Return the options of a context with every knob decided; raises on what is no KcpOptions."""
    if options is not None and not isinstance(options, KcpOptions):
        raise UnsupportedProblemError(f"options is {type(options).__name__}; give KcpOptions(...) or None")
    return (options or KcpOptions()).resolved()
