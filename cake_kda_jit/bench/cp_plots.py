"""The picture of ``bench cp``'s table: speedups, scaling, layouts, exchanges, and the published figures beside ours."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from .cp_cases import ARMS, BOUNDARIES, LAYOUTS
from .cp_tables import Line, layout_costs, scalings, sessions_of

COLOURS = {"contiguous": "C0", "zigzag": "C1", "per_document_zigzag": "C2"}
STYLES = {"B1": "--", "B3": "-"}


def draw(lines: Sequence[Line], published: Sequence[Line], path: Path) -> None:
    """Draw six panels as PNG; without published figures theirs say so."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: list[Callable] = [
        lambda axis: _speedups(axis, lines),
        lambda axis: _scaling(axis, lines),
        lambda axis: _layouts(axis, lines),
        lambda axis: _exchanges(axis, lines),
        lambda axis: _beside(axis, lines, published, "speedup", _speedup),
        lambda axis: _beside_scaling(axis, lines, published),
    ]
    figure, axes = pyplot.subplots(2, 3, figsize=(15, 8.5), layout="constrained")
    for axis, panel in zip(axes.flat, panels):
        panel(axis)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)


def _speedup(line: Line) -> float | None:
    found = [one for one in (line.speedup(session) for session in sessions_of([line])) if one is not None]
    return statistics.median(found) if found else None


def _speedups(axis, lines: Sequence[Line]) -> None:
    """How many rows have which speedup, per session."""
    for session in sessions_of(lines):
        found = [one for one in (line.speedup(session) for line in lines) if one is not None]
        if found:
            label = f"session {session}: median {statistics.median(found):.3f}"
            axis.hist(found, bins=24, alpha=0.55, label=label)
    axis.axvline(1.0, color="black", linewidth=0.8, label="as fast")
    axis.set(title=f"{ARMS[0]} / {ARMS[1]}", xlabel="speedup", ylabel="rows")
    axis.legend(fontsize=8)


def _scaling(axis, lines: Sequence[Line]) -> None:
    """How much faster more ranks are than the fewest, median over packs, beside the ideal."""
    for (layout, boundary), points in _curves(lines).items():
        axis.plot(
            *zip(*points), marker="o", linestyle=STYLES[boundary], color=COLOURS[layout], label=f"{boundary} {layout}"
        )
    sizes = sorted({line.cp for line in lines})
    axis.plot(sizes, [size / sizes[0] for size in sizes], color="black", linewidth=0.8, label="ideal")
    axis.set(title=f"scaling from CP {sizes[0]}, median over packs", xlabel="CP", ylabel="times faster")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.legend(fontsize=8)


def _curves(lines: Sequence[Line]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for (layout, boundary, cp), values in sorted(scalings(lines).items(), key=lambda item: item[0][2]):
        found.setdefault((layout, boundary), []).append((cp, statistics.median(values)))
    return found


def _layouts(axis, lines: Sequence[Line]) -> None:
    """What each layout costs beside the contiguous one: median over packs, and from the least to the most."""
    costs, sizes = layout_costs(lines), sorted({line.cp for line in lines})
    others = [(boundary, layout) for layout in LAYOUTS[1:] for boundary in BOUNDARIES]
    for number, (boundary, layout) in enumerate(others):
        shift = 0.18 * (number - (len(others) - 1) / 2)
        for place, cp in enumerate(sizes):
            values = costs.get((cp, boundary, layout))
            if values:
                middle = statistics.median(values)
                axis.errorbar(
                    place + shift,
                    middle,
                    yerr=[[middle - min(values)], [max(values) - middle]],
                    fmt="s" if boundary == "B3" else "o",
                    color=COLOURS[layout],
                    label=f"{boundary} {layout}" if place == 0 else None,
                )
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set(title="time over that of the contiguous layout", xlabel="CP", ylabel="times as long")
    axis.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    if any(layout != LAYOUTS[0] for _, _, layout in costs):
        axis.legend(fontsize=8)


def _exchanges(axis, lines: Sequence[Line]) -> None:
    """The share of a row's time that its exchanges take alone."""
    sizes = sorted({line.cp for line in lines})
    for layout in LAYOUTS:
        for boundary in BOUNDARIES:
            points = []
            for cp in sizes:
                some = [line for line in lines if (line.layout, line.boundary, line.cp) == (layout, boundary, cp)]
                shares = [100 * row.exchange_ms / row.ms.median for line in some for row in line.rows]
                if shares:
                    points.append((cp, statistics.median(shares)))
            if points:
                axis.plot(
                    *zip(*points),
                    marker="o",
                    linestyle=STYLES[boundary],
                    color=COLOURS[layout],
                    label=f"{boundary} {layout}",
                )
    axis.set(title="exchanges alone, share of the row's time", xlabel="CP", ylabel="%")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)


def _beside(axis, lines: Sequence[Line], published: Sequence[Line], what: str, value: Callable) -> None:
    """Our ratio of each row against the published one."""
    ours = {line.key: value(line) for line in lines}
    theirs = {line.key: value(line) for line in published}
    for boundary in BOUNDARIES:
        keys = [line.key for line in lines if line.boundary == boundary and line.key in theirs]
        pairs = [(theirs[key], ours[key]) for key in keys if None not in (theirs[key], ours[key])]
        if pairs:
            axis.scatter(*zip(*pairs), s=14, alpha=0.7, label=f"{boundary}, {len(pairs)} rows")
    axis.set(title=f"{what}: ours beside the published, GB300", xlabel="published, GB300", ylabel="ours")
    _finish_beside(axis)


def _beside_scaling(axis, lines: Sequence[Line], published: Sequence[Line]) -> None:
    """Our scaling against the published one, a point per layout, boundary and number of ranks."""
    ours = {key: statistics.median(values) for key, values in scalings(lines).items()}
    theirs = {key: statistics.median(values) for key, values in scalings(published).items()} if published else {}
    for boundary in BOUNDARIES:
        pairs = [(theirs[key], value) for key, value in ours.items() if key in theirs and key[1] == boundary]
        if pairs:
            axis.scatter(*zip(*pairs), s=26, alpha=0.7, label=boundary)
    axis.set(title="scaling: ours beside the published, GB300", xlabel="published, GB300", ylabel="ours")
    _finish_beside(axis)


def _finish_beside(axis) -> None:
    if axis.collections:
        low = min(axis.get_xlim()[0], axis.get_ylim()[0])
        high = max(axis.get_xlim()[1], axis.get_ylim()[1])
        axis.plot([low, high], [low, high], color="black", linewidth=0.8)
        axis.legend(fontsize=8)
    else:
        axis.text(0.5, 0.5, "no published figures beside this file", ha="center", transform=axis.transAxes)
