"""Every measurement that a machine can make, one file each, as docs/performance.md is made from.

Run ``python -m cake_kda_jit.bench all [--device cuda] [--out DIR] [--only NAME ...] [--smoke]``. ``--smoke`` takes the
smallest problems and few runs: it shows that all of them work, and its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

from .core import print_table

DIRECTORY = Path("docs/measurements")
SMALL = ("--shapes", "256,2,1,strong", "--runs", "2")
SMALL_RANKS = ("--heads", "2", "--head-dim", "64", "--tokens", "900", "--runs", "2")
ONE_TABLE_ROW = ("--packs", "Q1", "--cp", "2", "--layouts", "zigzag", "--sessions", "1")


@dataclass(frozen=True)
class Measurement:
    """One module of ``bench``: where it runs, its options, those of a smoke run, and the name of its file.

    ``{place}`` in ``file`` is the device's name; ``{device}`` in options is cpu or cuda.
    """

    name: str
    devices: tuple[str, ...]
    options: tuple[str, ...] = ()
    smoke: tuple[str, ...] = ()
    file: str = ""

    def file_name(self, place: str) -> str:
        """Return the name of the file that it writes."""
        return (self.file or f"{self.name}_{{place}}.json").format(place=place)

    def command(self, device: str, path: Path, *, smoke: bool) -> list[str]:
        """Return its command line."""
        options = (*self.options, *(self.smoke if smoke else ()))
        return [*(option.format(device=device) for option in options), "--json", str(path)]


MEASUREMENTS = (
    Measurement("forward", ("cuda",), smoke=SMALL),
    Measurement("backward", ("cuda",), smoke=SMALL),
    Measurement("walk", ("cuda",), smoke=("--segments", "8", "--heads", "2", "--runs", "2")),
    Measurement("conv", ("cuda",), smoke=("--shapes", "256x128", "--layouts", "4 documents", "--runs", "2")),
    Measurement("gated_norm", ("cuda",), smoke=("--shapes", "256x2x64", "--runs", "2")),
    Measurement("cp", ("cuda",), ("--device", "cuda", "--workspace-limit", "16e9"), (*SMALL_RANKS, *ONE_TABLE_ROW)),
    Measurement("cp", ("cpu",), ("--device", "cpu", *SMALL_RANKS), ONE_TABLE_ROW),
    Measurement("virtual_time", ("cuda",), smoke=("--tokens", "900", "--heads", "2", "--runs", "1")),
    Measurement("timing", ("cpu",), smoke=("--tokens", "64", "--runs", "1"), file="cpu_timing.json"),
    Measurement("host", ("cuda",), smoke=("--tokens", "64", "--heads", "2", "--hidden", "128", "--runs", "3")),
    Measurement(
        "host",
        ("cpu",),
        ("--device", "cpu", "--tokens", "64", "--heads", "1", "--hidden", "128"),
        ("--runs", "3"),
    ),
    Measurement(
        "first_call",
        ("cpu", "cuda"),
        ("--device", "{device}"),
        ("--step", "conv", "--arms", "together", "cached", "prebuilt", "--runs", "1"),
    ),
)


def place_of(device: str) -> str:
    """Return the device's name as files carry it: cpu, h200."""
    return "cpu" if device == "cpu" else torch.cuda.get_device_name().split()[-1].lower()


def run(one: Measurement, device: str, path: Path, *, smoke: bool) -> str:
    """Run one measurement; returns "written", or how it failed, and never ends the others."""
    module = import_module(f"{__package__}.{one.name}")
    try:
        status = module.main(one.command(device, path, smoke=smoke))
    except Exception as error:  # one measurement that breaks must not cost those that follow on a rented machine
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return "written" if status == 0 and path.is_file() else f"exit code {status}"


def main(argv: list[str]) -> int:
    """Run them in turn and say what became of each; returns 1 if one failed."""
    parser = argparse.ArgumentParser(prog="cake-kda-jit bench all", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--out", type=Path, help=f"where the files go; default {DIRECTORY}, which smoke runs must not")
    parser.add_argument("--only", nargs="+", choices=[one.name for one in MEASUREMENTS], help="not all of them")
    parser.add_argument("--smoke", action="store_true", help="smallest problems: does it work at all?")
    options = parser.parse_args(argv)
    if options.smoke and options.out is None:
        parser.error(f"--smoke needs --out: its numbers do not belong into {DIRECTORY}")
    directory = options.out or DIRECTORY
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = [one for one in MEASUREMENTS if device in one.devices and one.name in (options.only or [one.name])]
    if not chosen:
        parser.error(f"none of {', '.join(options.only)} runs on {device}")
    outcomes = {}
    for one in chosen:
        path = directory / one.file_name(place_of(device))
        print(f"\n{one.name}", flush=True)
        outcomes[path] = run(one, device, path, smoke=options.smoke)
    print()
    print_table(["file", "outcome"], [[str(path), outcome.partition("\n")[0]] for path, outcome in outcomes.items()])
    return 0 if set(outcomes.values()) == {"written"} else 1
