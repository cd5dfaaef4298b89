"""The host's time per call: from a call to its return, nothing waited for, a few calls one behind the other.

Run ``python -m cake_kda_jit.bench host [--device cuda] [--tokens 4096] [--heads 32] [--runs 20] [--compile]
[--peers fla] [--json FILE]``.

On a CUDA device a call returns when its launches are queued, so this is what Python and torch cost; a layer whose
kernels take less waits for its host. A burst begins with an idle device and is few enough calls that the device's queue
takes all of them, behind one that is not counted: a call behind a synchronisation finds a processor that has just been
asleep. What calls return is freed behind the burst. On a CPU the kernels themselves are in it: few tokens and heads
there.

Hosts change their pace, all that they do at once, by a factor of 1.8 every few seconds. So a *run* is a round: one
burst of every row. Twenty are some ten seconds on an H200. Each burst has a bare loop of Python beside it, and besides
the median of all a row has those of its bursts at the fast and at the slow pace, if there are two. The loop is a row
too: 1,000 turns in microseconds are the nanoseconds of one.

**Python time** is what of a layer's time is spent here. Clocks take its calls apart into torch's products, the
library's entries, which fill in the arguments of a pass and launch (on a CPU they are the kernels), and the rest; of a
backward, of what lies between the entry of its node of autograd and its exit. What the backward takes beyond that are
torch's engine and the waking of its thread. *With clocks* is a call while they run. A clock adds some of its own time
to the rest: as much as the Python time of a call of nothing, once per product and per pass.

Beside the layer stand layers one behind the other, per layer, as in a model, where the engine's thread is awake; what
torch alone takes on that host, an allocation, an empty node of autograd and its backward, and the nine projections; and
on a CUDA device the layer in CUDA graphs. ``--compile`` adds the compiled layer, which takes some ten seconds before
the first row, and ``--peers fla`` the same rows of a layer of flash-linear-attention's parts (``host_peers``).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from .core import machine, print_table, write_report
from .host_peers import make_fla
from .host_subjects import make_setting, make_subjects
from .host_timing import HostRow, measure
from .peers import names_of
from .performance_kinds import number

WHAT = "host time per call"


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table of microseconds."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=20, help="rounds of one burst per row")
    parser.add_argument("--burst", type=int, default=10, help="calls per burst")
    parser.add_argument("--forward-only", action="store_true", help="where no record has a gradient")
    parser.add_argument("--compile", action="store_true", help="the compiled layer too")
    parser.add_argument("--peers", default="", help="fla: a layer of its parts too, on kernels that do nothing")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    peers = names_of(parser, arguments.peers, ("fla",))
    device = torch.device(arguments.device)
    sizes = arguments.tokens, arguments.heads, arguments.hidden
    setting = make_setting(*sizes, device, with_backward=not arguments.forward_only)
    subjects = make_subjects(setting, compiles=arguments.compile)
    if peers:
        subjects.append(make_fla(setting.plan, setting.x))
    case = "T {}, H {}, hidden {}".format(*sizes)
    rows = measure(subjects, device, arguments.runs, arguments.burst, case)
    if arguments.json is not None:
        write_report(arguments.json, WHAT, "cake_kda_jit.bench.host", device, rows)
    rounds = f"{arguments.runs} rounds of bursts of {arguments.burst} calls"
    print(f"{WHAT}, us; {case}; {rounds}; {machine(device)['device']}, torch {torch.__version__}.\n")
    print_table(
        ["call", "median", "fastest", "slowest", "at the fast pace (runs)", "at the slow pace (runs)"],
        list(map(_line, rows)),
    )
    return 0


def _line(row: HostRow) -> list[str]:
    cells = [row.arm, *(number(1e3 * time) for time in (row.ms.median, row.ms.min, row.ms.max))]
    return cells + [
        "-" if times is None else f"{number(1e3 * times.median)} ({times.runs})" for times in (row.fast, row.slow)
    ]


if __name__ == "__main__":
    raise SystemExit(main())
