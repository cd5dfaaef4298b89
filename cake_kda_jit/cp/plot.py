"""A picture of who holds which tokens."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..errors import CakeKdaError, UnsupportedProblemError

if TYPE_CHECKING:
    from .partition import Partition

# More bars than this take minutes to draw and cannot be told apart.
MOST_FRAGMENTS = 20_000


def plot(partition: Partition, path: str | os.PathLike[str]) -> None:
    """See ``Partition.plot``."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise CakeKdaError("matplotlib is not installed; pip install 'cake_kda_jit[plot]'") from None
    shown = min(partition.num_fragments, MOST_FRAGMENTS)
    height = min(12.0, 1.6 + 0.35 * partition.world_size)
    figure = Figure(figsize=(10, height), dpi=120, layout="constrained")
    accepted = figure.canvas.get_supported_filetypes()
    ending = os.path.splitext(path)[1].removeprefix(".").lower()
    if ending not in accepted:
        raise UnsupportedProblemError(f"{os.fspath(path)!r} is no picture; let it end in one of {', '.join(accepted)}")
    axes = figure.add_subplot()
    end = partition.ends[shown - 1] if shown else 0
    bars: dict[tuple[int, str, str], list[tuple[int, int]]] = {}
    for number in range(shown):
        start, tokens = partition.starts[number], partition.ends[number] - partition.starts[number]
        color = f"C{partition.documents[number] % 10}"
        # A white edge tells neighbours apart, and would hide a bar that is no wider than itself.
        edge = "white" if 200 * tokens > end else color
        bars.setdefault((partition.ranks[number], color, edge), []).append((start, tokens))
    for (rank, color, edge), ranges in bars.items():
        axes.broken_barh(ranges, (rank - 0.4, 0.8), facecolor=color, edgecolor=edge, linewidth=0.5)
    for boundary in sorted({boundary for boundary in partition.cu_seqlens if boundary <= end}):
        axes.axvline(boundary, color="0.6", linewidth=0.5, zorder=0)
    axes.set(xlabel="token of the pack", ylabel="rank", title=_title(partition, shown))
    axes.set_xlim(0, max(end, 1))
    axes.set_ylim(partition.world_size - 0.5, -0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path)


def _title(partition: Partition, shown: int) -> str:
    held = [partition.num_local_tokens(rank) for rank in range(partition.world_size)]
    share = f"{max(held)}" if min(held) == max(held) else f"{min(held)} to {max(held)}"
    text = (
        f"{partition.layout}: {partition.num_tokens} tokens in {partition.num_documents} documents (colours), "
        f"{share} tokens a rank"
    )
    if shown < partition.num_fragments:
        text += f"\nonly the first {shown} of {partition.num_fragments} fragments"
    return text
