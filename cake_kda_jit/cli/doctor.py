"""``doctor``: test this machine's compilers, cache and settings for real."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from .. import config
from ..arch import host_arch
from ..catalog import registry
from ..compiler import doctor
from ..compiler.lookup import is_built
from ..errors import UnsupportedArch, UnsupportedProblemError
from ..record import Record
from .common import add_json, print_json

DRIVER = Path("/proc/driver/nvidia/version")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print each finding as it comes; exit code 1 if something is broken."""
    findings = []
    for finding in _examine():
        findings.append(finding)
        if not arguments.json:
            print(_line(finding), flush=True)
    broken = [finding for finding in findings if finding.status == doctor.FAIL]
    if arguments.json:
        print_json([finding.as_json() for finding in findings])
    else:
        print(f"{len(broken)} broken" if broken else "nothing is broken")
    return 1 if broken else 0


def _line(finding: doctor.Finding) -> str:
    line = f"{finding.status:<8} {finding.check}: {finding.says}"
    return f"{line}\n{'':<8}   -> {finding.do}" if finding.do else line


def _examine() -> Iterator[doctor.Finding]:
    yield _driver()
    archs = []
    for finding, arch in _devices():
        yield finding
        if arch is not None and arch not in archs:
            archs.append(arch)
    is_malformed = False
    for finding in doctor.examine(archs[0] if archs else None):
        yield finding
        is_malformed |= (finding.check, finding.status) == ("environment", doctor.FAIL)
    if is_malformed:
        return  # a choice that depends on a malformed value is none
    try:
        for arch in (host_arch().name, *archs):
            yield attention_finding(arch)
    except UnsupportedArch as error:
        yield doctor.Finding("chunk_kda", doctor.FAIL, error.cause, error.hint)


def _driver() -> doctor.Finding:
    try:
        says = DRIVER.read_text(encoding="utf-8").partition("\n")[0].removeprefix("NVRM version:").strip()
    except OSError:
        says = f"no NVIDIA driver is loaded (there is no {DRIVER})"
    return doctor.Finding("driver", doctor.OK, says)


def _devices() -> Iterator[tuple[doctor.Finding, str | None]]:
    """Yield what torch says of this machine's GPUs, each with its target."""
    try:
        import torch
    except ImportError as error:
        do = "pip install torch; without it kernels can be compiled, but not run"
        yield doctor.Finding("torch", doctor.WARN, f"it cannot be imported: {error}", do), None
        return
    says = f"torch {torch.__version__} on Python {sys.version.partition(' ')[0]}"
    if not torch.cuda.is_available():
        yield doctor.Finding("device", doctor.OK, f"{says}; no CUDA device, so kernels run on the CPU"), None
        return
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        device = f"{says}; GPU {index}: {name} of compute capability {capability[0]}.{capability[1]}"
        arch = doctor.find_device_target(capability)
        if arch is None:
            do = "targets are of compute capability 8.0 and later; tensors on the CPU work"
            yield doctor.Finding("device", doctor.FAIL, f"{device}, which has no target here", do), None
        else:
            yield doctor.Finding("device", doctor.OK, f"{device}, target {arch.name}"), arch.name


def attention_finding(arch: str) -> doctor.Finding:
    """Say which records a call of chunk_kda with bf16 tensors and K = V = 128 would run on a target, and why.

    The choice is that of a call without arguments: by the environment, else by default.
    """
    from ..ops.problem import AttentionProblem
    from ..ops.select import select_attention, select_plain, select_walk

    problem, family = AttentionProblem(arch, "bf16", 32, 32, 128), config.read("FAMILY")
    chosen, refused = {}, {}
    for program in registry().programs:
        try:
            if program.name == "transfer_walk":
                found = select_walk(arch, None, 0, family, num_walks=32, head_dim=128)
            elif program.name == "parameter_reduce":
                found = select_plain(program.name, "fp32", arch, family)
            elif any(record.variant == "bf16_k128" for record in program.records):
                found = select_attention(program.name, problem, family)
            else:
                continue
        except UnsupportedProblemError as error:
            refused[program.name] = str(error)
        else:
            chosen[program.name] = found
    check = f"chunk_kda on {arch}"
    lines = [f"{found.record.name} ({_state(found.record, arch)}; {found.reason})" for found in chosen.values()]
    lines += [f"{name}: none, because {why}" for name, why in refused.items()]
    says = "\n".join(["bf16, 32 heads, K = V = 128", *(f"{'':<11}{line}" for line in lines)])
    if not refused:
        return doctor.Finding(check, doctor.OK, says)
    do = "unset CAKE_KDA_JIT_FAMILY" if family else "use tensors on the CPU for what needs those programs"
    return doctor.Finding(check, doctor.WARN, says, do)


def _state(record: Record, arch: str) -> str:
    if is_built(record, arch):
        return "built"
    return "not built, and compiling is disabled" if config.read("DISABLE") else "compiled on its first use"
