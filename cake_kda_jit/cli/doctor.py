"""``doctor``: test this machine's compilers, cache and settings for real."""

from __future__ import annotations

import argparse
import sys

from ..compiler import doctor
from .common import add_json, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print each finding as it comes; exit code 1 if something is broken."""
    findings = []
    device, arch = _device()
    for finding in (device, *doctor.examine(arch)) if arguments.json else _shown(device, arch):
        findings.append(finding)
    broken = [finding for finding in findings if finding.status == doctor.FAIL]
    if arguments.json:
        print_json([finding.as_json() for finding in findings])
    else:
        print(f"{len(broken)} broken" if broken else "nothing is broken")
    return 1 if broken else 0


def _shown(device: doctor.Finding, arch: str | None):
    print(_line(device), flush=True)
    yield device
    for finding in doctor.examine(arch):
        print(_line(finding), flush=True)
        yield finding


def _line(finding: doctor.Finding) -> str:
    line = f"{finding.status:<8} {finding.check}: {finding.says}"
    return f"{line}\n{'':<8}   -> {finding.do}" if finding.do else line


def _device() -> tuple[doctor.Finding, str | None]:
    """Return what torch says of this machine's GPU, and its target."""
    try:
        import torch
    except ImportError as error:
        return doctor.Finding("torch", doctor.FAIL, f"it cannot be imported: {error}", "pip install torch"), None
    says = f"torch {torch.__version__} on Python {sys.version.partition(' ')[0]}"
    if not torch.cuda.is_available():
        return doctor.Finding("device", doctor.OK, f"{says}; no CUDA device, so kernels run on the CPU"), None
    capability = torch.cuda.get_device_capability()
    says = f"{says}; {torch.cuda.get_device_name()} of compute capability {capability[0]}.{capability[1]}"
    arch = doctor.find_device_target(capability)
    if arch is None:
        do = "targets are of compute capability 8.0 and later; tensors on the CPU work"
        return doctor.Finding("device", doctor.FAIL, f"{says}, which has no target here", do), None
    return doctor.Finding("device", doctor.OK, f"{says}, target {arch.name}"), arch.name
