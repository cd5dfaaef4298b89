"""Which instructions a CUDA library's kernels are made of, counted in the disassembly of the library itself."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from pathlib import Path

from . import discover, memo
from .key import digest, file_digest
from .toolchain import run_tool

NAME = "cuobjdump"
MISSING = f"no {NAME} beside any nvcc or on PATH; `{discover.INSTALL_COMMAND}` brings one"
DISASSEMBLE_SECONDS = 300.0

GROUPS = {
    "HMMA": "HMMA",
    "HGMMA": "HGMMA",
    "LDSM": "LDSM",
    "LDG": "LDG",
    "LDGSTS": "LDGSTS",
    "TMA": "UBLKCP|UTMALDG|UTMASTG|UTMAREDG",
    "STG": "STG",
    "LDS": "LDS",
    "STS": "STS",
    "MUFU": "MUFU",
    "BAR": "BAR",
    "RED/ATOM": "REDG?|REDAS|ATOM[GS]?",
    "local": "LDL|STL",
}
"""What is counted, and the opcodes that count as it: as they stand in the code, not as often as they run."""

TOTAL = "all"

_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)")
_OPCODES = {name: re.compile(pattern) for name, pattern in GROUPS.items()}

Mix = dict[str, dict[str, int]]  # symbol -> group -> instructions


def find_disassemblers() -> list[str]:
    """Return the disassemblers of this machine: beside each nvcc, on PATH, in /usr/local/cuda."""
    directories = [os.path.dirname(path) for place in discover.nvcc_places() for path in _links(place.path)]
    found = [shutil.which(os.path.join(directory, NAME)) for directory in directories]
    found += [shutil.which(NAME), shutil.which(os.path.join(discover.USUAL_CUDA, "bin", NAME))]
    return list(dict.fromkeys(path for path in found if path))


def _links(path: str | None) -> list[str]:
    return [path, os.path.realpath(path)] if path else []


def instruction_mix(library: Path) -> tuple[Mix, str]:
    """Return the instructions of a library's kernels by group, and why there are none, if so.

    The result is remembered, because a library is disassembled in about a second. Raises nothing: a disassembler that
    does not know the library's target is a reason.
    """
    reason = MISSING
    for tool in find_disassemblers():
        name = f"instructions-{digest([file_digest(library), tool])[:32]}"
        known = memo.read_tool(name)
        if known is not None:
            return known["mix"], ""
        status, out, err = run_tool([tool, "-sass", str(library)], seconds=DISASSEMBLE_SECONDS)
        mix = count_instructions(out)
        if not status and mix:
            memo.write_tool(name, [tool], {"mix": mix})
            return mix, ""
        said = (err.strip() or f"exit status {status}" if status else "it finds no kernel").splitlines()[-1]
        reason = f"{tool} fails: {said}"
    return {}, reason


def count_instructions(text: str) -> Mix:
    """Return the counts of each function in a disassembly, without groups that have none."""
    counts: dict[str, Counter[str]] = {}
    current: Counter[str] | None = None
    for line in text.splitlines():
        if function := _FUNCTION.match(line):
            current = counts.setdefault(function.group(1), Counter())
        elif current is not None and (instruction := _INSTRUCTION.match(line)):
            opcode = instruction.group(1)
            if opcode != "NOP":
                current[TOTAL] += 1
            current.update(name for name, pattern in _OPCODES.items() if pattern.fullmatch(opcode))
    return {name: {group: n for group in (*GROUPS, TOTAL) if (n := found[group])} for name, found in counts.items()}
