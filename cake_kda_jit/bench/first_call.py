"""What a first training step waits for: its kernels compiled, found in the cache, or prebuilt, in fresh processes.

Run ``python -m cake_kda_jit.bench first_call [--device cuda] [--arch sm_90a] [--jobs N] [--json FILE]``. Compiling for
a target needs no device of it; the arms that run a step are left out where there is none. The caches are empty
directories, thrown away at the end; nothing of the user's own cache is read or written.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import config
from ..arch import ARCHES, Arch, get_arch
from ..catalog import registry
from ..compiler.discover import find_toolchain
from ..compiler.jobs import num_jobs
from ..compiler.manifest import MANIFEST_SCHEMA
from ..errors import CakeKdaError
from ..ops.problem import AttentionProblem, ConvProblem
from ..ops.select import select_attention, select_conv, select_plain
from ..paths import PACKAGE_DIR, manifest_path
from ..record import Record
from ..runtime.device import arch_of_device
from .core import Row, Times, print_table, write_report
from .first_step import CONV_WIDTH, HEAD_DIM, HEADS

ARMS = {
    "together": "the step's kernels compiled by `prebuild`, jobs at a time, from an empty cache",
    "cold": "a first step that compiles each kernel when it needs it, from an empty cache",
    "cached": "a first step whose kernels are in the user cache",
    "prebuilt": "a first step from a prebuilt directory, on a machine whose compilers all fail",
    "shipped": "all shipped records of the target compiled by `prebuild`, from an empty cache",
}
STEP_PROGRAMS = {
    "training": {
        "attention": ("chunk_prepare", "chunk_scan", "grad_scan", "chunk_grad"),
        "conv": ("conv_forward", "conv_backward"),
        "plain": {"pack_tables": "int64", "parameter_reduce": "fp32"},
    },
    "conv": {"attention": (), "conv": ("conv_forward", "conv_backward"), "plain": {}},
}
CLEARED = ("CAKE_KDA_JIT_PREBUILT", "CAKE_KDA_JIT_CACHE_RO", "CAKE_KDA_JIT_DISABLE", "CUDA_HOME")


class MeasurementFailed(CakeKdaError):
    """A process that was timed failed, or did not do what its arm is about."""


@dataclass(frozen=True)
class FirstCallRow(Row):
    """``records`` kernels, ``jobs`` compilations at a time (0: none), ``load``: other processes per core before it."""

    records: int = 0
    jobs: int = 0
    load: float = 0.0


def step_records(step: str, arch: str) -> list[Record]:
    """Return the records of a step, as selection chooses them; raises UnsupportedProblemError where one is missing."""
    programs = STEP_PROGRAMS[step]
    attention = AttentionProblem(arch, "bf16", HEADS, HEADS, HEAD_DIM)
    conv = ConvProblem(arch, "bf16", HEADS * HEAD_DIM, CONV_WIDTH)
    chosen = [select_attention(program, attention, None) for program in programs["attention"]]
    chosen += [select_conv(program, conv, None) for program in programs["conv"]]
    chosen += [select_plain(program, variant, arch, None) for program, variant in programs["plain"].items()]
    return [one.record for one in chosen]


@dataclass(frozen=True)
class Bench:
    """The places and settings of one measurement."""

    work: Path
    step: str
    arch: Arch
    device: str | None
    jobs: int

    def manifest(self) -> Path:
        """Write and return a manifest of the step's records."""
        path = self.work / "step.json"
        names = ("program", "variant", "family")
        rows = [{name: getattr(one, name) for name in names} for one in step_records(self.step, self.arch.name)]
        path.write_text(json.dumps({"schema": MANIFEST_SCHEMA, "records": rows}), encoding="utf-8")
        return path

    def compile(self, manifest: Path, name: str) -> float:
        """Compile a manifest into ``work/name`` with an empty cache ``work/name.cache``; returns seconds."""
        command = ["-m", "cake_kda_jit", "prebuild", "--manifest", str(manifest), "--arch", self.arch.name]
        command += ["--out", str(self.work / name), "--jobs", str(self.jobs)]
        began = time.perf_counter()
        _python(command, CAKE_KDA_JIT_CACHE_DIR=str(self.work / f"{name}.cache"))
        return time.perf_counter() - began

    def first_step(self, origin: str, **environment: str) -> float:
        """Run the step in a fresh process; returns seconds from torch's import to the end of the first step."""
        said = json.loads(_python(["-m", f"{__package__}.first_step", self.step, self.device], **environment))
        needed = {record.name for record in step_records(self.step, self.arch.name)}
        if said["origins"] != dict.fromkeys(needed, origin):
            raise MeasurementFailed(f"the step's kernels should be {sorted(needed)}, all {origin}: {said['origins']}")
        return said["device"] + said["first"]

    def poisoned(self) -> tuple[dict[str, str], Path]:
        """Return an environment in which every compiler fails and leaves a mark, and the file of the marks."""
        directory, mark = self.work / "poison", self.work / "compiler was run"
        directory.mkdir(exist_ok=True)
        tools = ("nvcc", "g++", "c++", "clang++", "gcc", "cc", "ninja", "ptxas", "cicc")
        for tool in tools:
            (directory / tool).write_text(f'#!/bin/sh\necho "$0 $*" >> "{mark}"\nexit 1\n', encoding="utf-8")
            (directory / tool).chmod(0o755)
        named = {"NVCC": "nvcc", "CXX": "g++", "NINJA": "ninja"}
        paths = {f"CAKE_KDA_JIT_{name}": str(directory / tool) for name, tool in named.items()}
        return {"PATH": str(directory), **paths}, mark


def measure_arm(bench: Bench, arm: str, number: int) -> float:
    """Return the seconds of one run of an arm. ``together`` must have run once before the arms that run a step."""
    if arm == "together":
        return bench.compile(bench.manifest(), f"step{number}")
    if arm == "shipped":
        return bench.compile(manifest_path(shipped=True), f"shipped{number}")
    empty = str(bench.work / f"{arm}{number}.cache")
    if arm == "cold":
        return bench.first_step("built", CAKE_KDA_JIT_CACHE_DIR=empty)
    if arm == "cached":
        return bench.first_step("cache", CAKE_KDA_JIT_CACHE_DIR=str(bench.work / "step0.cache"))
    environment, mark = bench.poisoned()
    prebuilt = str(bench.work / "step0")
    seconds = bench.first_step("prebuilt", CAKE_KDA_JIT_PREBUILT=prebuilt, CAKE_KDA_JIT_CACHE_DIR=empty, **environment)
    if mark.exists():
        raise MeasurementFailed(f"a compiler was run beside prebuilt kernels: {mark.read_text(encoding='utf-8')}")
    return seconds


def measure(bench: Bench, arms: Sequence[str], *, runs: int, compile_runs: int) -> Iterator[FirstCallRow]:
    """Yield a row per arm, in the order of ``ARMS``; raises MeasurementFailed when a process fails."""
    compilers, needed = _compilers(bench.arch), len(step_records(bench.step, bench.arch.name))
    shipped = sum(bench.arch.name in record.archs for record in registry().shipped())
    if "together" not in arms and {"cached", "prebuilt"} & set(arms):
        measure_arm(bench, "together", 0)
    for arm in (arm for arm in ARMS if arm in arms):
        compiles = arm in ("together", "cold", "shipped")
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        spans = [1e3 * measure_arm(bench, arm, number) for number in range(compile_runs if compiles else runs)]
        times = Times(statistics.median(spans), min(spans), max(spans), len(spans))
        what, records = ("all shipped records", shipped) if arm == "shipped" else (f"{bench.step} step", needed)
        jobs = {"together": bench.jobs, "shipped": bench.jobs, "cold": 1}.get(arm, 0)
        sizes = {"records": records, "jobs": jobs, "load": round(load, 2)}
        engine = compilers if compiles else "no compiler"
        yield FirstCallRow(f"{what}, {bench.arch.name}", arm, engine, times, **sizes)


def _compilers(arch: Arch) -> str:
    toolchain = find_toolchain(arch)
    tools = [("nvcc", toolchain.nvcc), ("host compiler", toolchain.host)]
    return ", ".join(f"{name} {tool.identity['version']}" for name, tool in tools if tool is not None)


def _python(arguments: list[str], **environment: str) -> str:
    """Run this Python in an environment without layers of kernels; returns its output, its progress goes on."""
    clean = config.environment(without=CLEARED, **environment)
    clean["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PACKAGE_DIR.parent), clean.get("PYTHONPATH"))))
    done = subprocess.run([sys.executable, *arguments], env=clean, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise MeasurementFailed(f"python {' '.join(arguments)} ended with {done.returncode}; its message stands above")
    return done.stdout


def main(argv: list[str]) -> int:
    """Measure the arms and print them; returns 0, 1 when a process fails or a compiler ran where none may."""
    parser = argparse.ArgumentParser(prog="cake-kda-jit bench first_call", description=__doc__.splitlines()[0])
    parser.add_argument("--step", choices=STEP_PROGRAMS, default="training", help="what runs; conv: two kernels only")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where the step runs; default: cuda if there is one")
    parser.add_argument("--arch", choices=ARCHES, help="the target; default: the device's; others are only compiled")
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="; ".join(f"{n}: {what}" for n, what in ARMS.items()))
    parser.add_argument("--jobs", type=int, help="compilations at a time; default: by cores and memory")
    parser.add_argument("--runs", type=int, default=5, help="runs of the arms that compile nothing")
    parser.add_argument("--compile-runs", type=int, default=1, help="runs of the arms that compile")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args(argv)
    if min(options.runs, options.compile_runs, options.jobs or 1) < 1 or options.jobs == 0:
        parser.error("--runs, --compile-runs and --jobs are at least 1")
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    own = arch_of_device(device if device.type == "cpu" else torch.device("cuda", torch.cuda.current_device()))
    arch = get_arch(options.arch or own)
    can_run = arch == own
    arms = options.arms or [arm for arm in ARMS if can_run or arm in ("together", "shipped")]
    if not can_run and set(arms) - {"together", "shipped"}:
        parser.error(f"{arch.name} does not run on this {device.type}, {own.name}: use --arms together shipped")
    rows = []
    with tempfile.TemporaryDirectory(prefix="cake_kda_jit-first-") as work:
        bench = Bench(Path(work), options.step, arch, device.type, num_jobs(options.jobs))
        for row in measure(bench, arms, runs=options.runs, compile_runs=options.compile_runs):
            print(f"{row.arm}: {1e-3 * row.ms.median:.1f} s", file=sys.stderr, flush=True)
            rows.append(row)
    lines = [
        [row.case, row.arm, str(row.records), str(row.jobs or "-"), *_seconds(row.ms), f"{row.load:.1f}", row.engine]
        for row in rows
    ]
    print_table(["case", "arm", "kernels", "jobs", "median, s", "min", "max", "load per core", "compilers"], lines)
    if options.json:
        what = f"first call of a {options.step} step, bf16, K = V = {HEAD_DIM}, {arch.name}"
        write_report(options.json, what, "cake_kda_jit.bench first_call", device, rows)
    return 0


def _seconds(times: Times) -> list[str]:
    return [f"{1e-3 * value:.2f}" for value in (times.median, times.min, times.max)]
