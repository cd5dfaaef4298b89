"""The drawn explanations, made by code: docs/chunk-form.svg, docs/programs.svg and docs/context-parallel.svg.

Run ``python -m tests.docs.pictures --write`` after a change here; a test says so when it is needed. A picture explains
itself (title and description) and follows the reader's light or dark theme.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"

STYLE = """\
    .page { fill: #ffffff; stroke: #d5dbe6; }
    .box { fill: #eef3fb; stroke: #4a6695; stroke-width: 1.4; }
    .layer { fill: #eaf5ee; stroke: #3d7a55; stroke-width: 1.4; }
    .build { fill: #fdf3e4; stroke: #9a6a1c; stroke-width: 1.4; }
    .run { fill: #f3eefb; stroke: #6b4f9e; stroke-width: 1.4; }
    .frame { fill: none; stroke: #9a6a1c; stroke-width: 1.2; stroke-dasharray: 5 4; }
    .cell { fill: #4a6695; stroke: #ffffff; stroke-width: 1; }
    .empty { fill: none; stroke: #d5dbe6; stroke-width: 1; }
    .line { fill: none; stroke: #44506a; stroke-width: 1.6; }
    .head { fill: #44506a; }
    text { font-family: -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; fill: #1b2436; }
    .name { font-size: 15px; font-weight: 600; }
    .detail { font-size: 12.5px; }
    .note { font-size: 12px; fill: #4c5972; }
    .band { font-size: 12px; font-weight: 600; letter-spacing: 1.5px; fill: #4c5972; }
    .code { font-size: 13px; font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #12161d; stroke: #2c3442; }
      .box { fill: #1a2740; stroke: #7f9fd4; }
      .layer { fill: #172a20; stroke: #6fb58b; }
      .build { fill: #2e2413; stroke: #d5a557; }
      .run { fill: #251d38; stroke: #a98fe0; }
      .frame { stroke: #d5a557; }
      .cell { fill: #7f9fd4; stroke: #12161d; }
      .empty { stroke: #2c3442; }
      .line { stroke: #aab6cc; }
      .head { fill: #aab6cc; }
      text { fill: #e9edf5; }
      .note, .band { fill: #aeb9cd; }
    }
"""
ARROW = (
    '<marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="9" markerHeight="9" '
    'markerUnits="userSpaceOnUse" orient="auto"><path class="head" d="M0,0 L10,5 L0,10 z"/></marker>'
)


def escaped(text: str) -> str:
    """Return text that may stand in XML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


class Canvas:
    """Shapes of one picture, in the order in which they are drawn; lengths are pixels."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self.width, self.height, self.title, self.description = width, height, title, description
        self.shapes = [f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10"/>']

    def text(self, x: float, y: float, text: str, kind: str = "detail", anchor: str = "start") -> None:
        """Write a line; y is its base line."""
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.shapes.append(f'<text class="{kind}" x="{x:g}" y="{y:g}"{where}>{escaped(text)}</text>')

    def rectangle(self, x: float, y: float, width: float, height: float, kind: str, *, opacity: float = 1) -> None:
        """Draw a rectangle without words."""
        shade = "" if opacity == 1 else f' fill-opacity="{opacity:.2f}"'
        size = f'width="{width:g}" height="{height:g}"'
        self.shapes.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" {size} rx="{min(6, height / 8):g}"{shade}/>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, lines: Sequence[tuple[str, str]]) -> None:
        """Draw a box with centred lines: (class, text) each."""
        self.rectangle(x, y, width, height, kind)
        first = y + height / 2 - 9.5 * (len(lines) - 1) + 4.5
        for number, (style, line) in enumerate(lines):
            self.text(x + width / 2, first + 19 * number, line, style, "middle")

    def arrow(self, *points: tuple[float, float], is_directed: bool = True) -> None:
        """Draw a line through points, with a head at its end."""
        path = " L".join(f"{x:g},{y:g}" for x, y in points)
        marker = ' marker-end="url(#arrow)"' if is_directed else ""
        self.shapes.append(f'<path class="line" d="M{path}"{marker}/>')

    def svg(self) -> str:
        """Return the picture."""
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title description">',
            f'  <title id="title">{escaped(self.title)}</title>',
            f'  <desc id="description">{escaped(self.description)}</desc>',
            f"  <style>\n{STYLE}  </style>",
            f"  <defs>{ARROW}</defs>",
            *(f"  {shape}" for shape in self.shapes),
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def chunk_form() -> str:
    """A chunk as pairs of tokens, made for all chunks at once, and the state that passes through them in order."""
    canvas = Canvas(
        940,
        440,
        "The chunk form",
        "Left: inside a chunk of 64 tokens every pair of rows i and j, j not after i, meets with the decay between "
        "them. This is computed for all chunks at once. Right: the state S enters a chunk; x is what S does not "
        "predict of v; solving with Tinv gives v prime, all updates of the chunk; o reads S and v prime; the decayed "
        "state and the updates leave the chunk as the next S. This runs chunk by chunk.",
    )
    canvas.text(30, 34, "EVERY CHUNK BY ITSELF", "band")
    size, left, top, rows = 30, 66, 72, 8
    canvas.rectangle(left, top, size * rows, size * rows, "empty")
    for i in range(rows):
        for j in range(i + 1):
            canvas.rectangle(left + size * j, top + size * i, size, size, "cell", opacity=0.82 ** (i - j))
    canvas.text(left + size * rows / 2, top - 12, "j: a key and its update", "note", "middle")
    canvas.text(left - 14, top + size * rows / 2, "i", "code", "middle")
    canvas.text(left + size * 4.2, top + size * 1.6, "later tokens", "note")
    canvas.text(left + size * 4.2, top + size * 1.6 + 16, "are never read", "note")
    notes = (
        ("code", "Akk[i,j] = beta_i k_i . k_j e^(G_i - G_j)"),
        ("code", "Aqk[i,j] = scale q_i . k_j e^(G_i - G_j)"),
        ("code", "Tinv = (I + Akk)^-1"),
        ("note", "paler: more decay between the rows i and j"),
    )
    for number, (style, line) in enumerate(notes):
        canvas.text(30, 344 + 22 * number, line, style)

    canvas.text(400, 34, "CHUNK AFTER CHUNK", "band")
    canvas.box(400, 176, 80, 70, "run", (("name", "S"), ("detail", "enters")))
    canvas.box(530, 60, 170, 62, "box", (("code", "x = v - ke S"), ("detail", "not yet predicted")))
    canvas.box(740, 60, 170, 62, "box", (("code", "v' = Tinv (beta x)"), ("detail", "all 64 updates")))
    canvas.box(620, 176, 210, 70, "layer", (("code", "o = qg S + Aqk v'"), ("detail", "the output of 64 tokens")))
    canvas.box(620, 300, 290, 70, "run", (("code", "S <- e^G_last S + kg^T v'"), ("detail", "leaves, and enters next")))
    canvas.arrow((440, 176), (440, 91), (528, 91))
    canvas.arrow((700, 91), (738, 91))
    canvas.arrow((480, 211), (618, 211))
    canvas.arrow((440, 246), (440, 335), (618, 335))
    canvas.arrow((790, 122), (790, 174))
    canvas.arrow((870, 122), (870, 298))
    canvas.text(400, 404, "ke, qg: k and q times e^G, the decay since the chunk began", "note")
    canvas.text(400, 422, "kg: k times e^(G_last - G), the decay that its update still meets", "note")
    return canvas.svg()


def programs() -> str:
    """The kernels of a training step, forward and backward."""
    canvas = Canvas(
        940,
        330,
        "The kernels of a training step",
        "Forward: conv_forward, chunk_prepare, then for documents in segments segment_summary and transfer_walk, then "
        "chunk_scan, which gives o and the states. Backward: chunk_prepare again, then for documents in segments the "
        "summaries of gradients and the transposed walk, then grad_scan, chunk_grad, parameter_reduce and "
        "conv_backward. pack_tables runs once for a pack, before all of them.",
    )
    canvas.text(30, 34, "ONCE A PACK", "band")
    canvas.box(30, 48, 130, 54, "build", (("code", "pack_tables"),))
    canvas.text(176, 70, "which tokens each chunk has, which chunks each segment;", "note")
    canvas.text(176, 88, "kept in the plan that all layers and the backward share", "note")
    width, gap = 128, 20
    lanes = (
        (150, "FORWARD", ("conv_forward", "chunk_prepare", "segment_summary", "transfer_walk", "chunk_scan")),
        (260, "BACKWARD", ("chunk_prepare", "segment_summary", "transfer_walk", "grad_scan", "chunk_grad", "")),
    )
    for y, name, boxes in lanes:
        canvas.text(30, y - 14, name, "band")
        x = 30
        for number, program in enumerate(filter(None, boxes)):
            kind = "layer" if program in ("segment_summary", "transfer_walk") else "box"
            canvas.box(x, y, width, 44, kind, (("code", program),))
            if number:
                canvas.arrow((x - gap, y + 22), (x - 2, y + 22))
            x += width + gap
    end = 30 + 5 * (width + gap)
    canvas.arrow((end - gap, 282), (end - 2, 282))
    canvas.box(end, 246, 140, 32, "box", (("code", "parameter_reduce"),))
    canvas.box(end, 286, 140, 32, "box", (("code", "conv_backward"),))
    canvas.text(end, 168, "green: only where a", "note")
    canvas.text(end, 184, "document has several", "note")
    canvas.text(end, 200, "segments or ranks", "note")
    return canvas.svg()


def context_parallel() -> str:
    """One document on two ranks: who computes what, when, and what crosses between them."""
    canvas = Canvas(
        940,
        560,
        "One document on two ranks",
        "A document is cut in three spans: the first and the last on rank 0, the middle one on rank 1. Rank 0 scans "
        "the first span at once, since its initial state is known, and sends the state that leaves it. Rank 1 "
        "summarizes the middle span as an affine map M, B before it knows what enters it. The exchange carries the "
        "state and the map; a walk over them finds what enters the middle and the last span, and both are scanned. "
        "Whole documents are scanned while the exchange is under way.",
    )
    canvas.text(30, 34, "THE DOCUMENT", "band")
    spans = ((40, 260, "run", "first span", "rank 0"), (300, 330, "layer", "middle span", "rank 1"),
             (630, 270, "run", "last span", "rank 0"))  # fmt: skip
    for x, width, kind, name, rank in spans:
        canvas.box(x, 54, width, 48, kind, (("name", f"{name}: {rank}"),))
    for x, label, y in ((40, "initial state", 134), (300, "S1", 134), (630, "S2 = M S1 + B", 134), (900, "final", 134)):
        canvas.arrow((x, 122), (x, 104))
        canvas.text(x, y + 3, label, "code", "start" if x < 100 else "end" if x == 900 else "middle")
    canvas.text(170, 160, "halo: the convolution of a span reads the 3 tokens before it, from their rank", "note")

    canvas.text(30, 206, "RANK 0", "band")
    canvas.text(30, 396, "RANK 1", "band")
    halo, meanwhile = ("1  halo, conv", "tokens received"), ("3  whole documents", "scanned meanwhile")
    stages = (
        # x, width, what rank 0 does, what rank 1 does
        (30, 150, halo, halo),
        (210, 190, ("2  prepare, scan", "the first span: S1"), ("2  prepare, summarize", "the middle span: M, B")),
        (470, 170, meanwhile, meanwhile),
        (710, 200, ("4  walk, scan", "the last span from S2"), ("4  walk, scan", "the middle span from S1")),
    )
    for number, (x, width, zero, one) in enumerate(stages):
        for y, kind, (name, detail) in ((222, "run", zero), (412, "layer", one)):
            canvas.box(x, y, width, 66, kind, (("name", name), ("detail", detail)))
        if number:
            before = stages[number - 1]
            for y in (255, 445):
                canvas.arrow((before[0] + before[1], y), (x - 2, y))
    canvas.rectangle(420, 312, 290, 76, "frame")
    canvas.text(436, 334, "EXCHANGE", "band")
    canvas.text(436, 355, "S1 to rank 1; M, B to rank 0", "detail")
    canvas.text(436, 374, "all_gather, spread or relay: the same bits", "note")
    canvas.arrow((340, 288), (340, 335), (418, 335))
    canvas.arrow((340, 412), (340, 365), (418, 365))
    canvas.arrow((710, 335), (790, 335), (790, 290))
    canvas.arrow((710, 365), (790, 365), (790, 410))
    backward = (
        "Backward: the same from the other end. The gradient of what leaves the last span is known first;",
        "D takes the place of B, and the walk multiplies by M transposed, the same M that the forward kept.",
    )
    for number, line in enumerate(backward):
        canvas.text(30, 514 + 20 * number, line, "note")
    return canvas.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "chunk-form.svg": chunk_form,
    "programs.svg": programs,
    "context-parallel.svg": context_parallel,
}


def outdated() -> list[str]:
    """Return the names of the pictures that differ from what is drawn here."""
    return [
        name
        for name, draw in PICTURES.items()
        if not (DOCS / name).exists() or (DOCS / name).read_text(encoding="utf-8") != draw()
    ]


if __name__ == "__main__":
    for stale in outdated():
        if sys.argv[1:] == ["--write"]:
            (DOCS / stale).write_text(PICTURES[stale](), encoding="utf-8")
        print(stale)
