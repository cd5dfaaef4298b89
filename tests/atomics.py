"""The atomic instructions of compiled CUDA kernels, each with the reason why it may be there.

``python -m tests.atomics DIRECTORY`` lists those of every library of a prebuilt directory. Exit code 1: one has no
reason, or a library could not be read. An atomic on values would add them in the order in which threads arrive, so
that results would differ from run to run.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cake_kda_jit.compiler.disassemble import DISASSEMBLE_SECONDS, MISSING, find_disassemblers
from cake_kda_jit.compiler.jobs import available_cores
from cake_kda_jit.compiler.roots import VERSION_DIR
from cake_kda_jit.compiler.toolchain import run_tool

REASONS = {
    r"SYNCS\.ARRIVE\..*RED.*": "an arrival at an mbarrier of another CTA of the cluster: it counts, and adds no value",
    r"ATOMS\.ARRIVE\.64": "an arrival at an mbarrier of the CTA's own, as sm_80 has it: it counts, and adds no value",
    r"ATOMG\.E\.ADD\.STRONG\.GPU": "device/ready_tiles.cuh: chunk_prepare counts who takes an item and who goes",
}
"""What may stand in the machine code: a pattern of the whole opcode, and why it changes no result."""

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_ATOMIC = re.compile(r"U?RED[GS]?|REDAS|ATOM[GS]?|UTMAREDG|UBLKRED")


def is_atomic(opcode: str) -> bool:
    """Whether an opcode such as ``RED.E.ADD.F32`` reads, changes and writes memory in one."""
    name, *modifiers = opcode.split(".")
    return bool(_ATOMIC.fullmatch(name)) or not {"RED", "ATOM"}.isdisjoint(modifiers)


def reason_of(opcode: str) -> str | None:
    """Why an atomic instruction may be there, None if it may not."""
    return next((reason for pattern, reason in REASONS.items() if re.fullmatch(pattern, opcode)), None)


def atomics_in(disassembly: str) -> Counter[str]:
    """The atomic instructions in what cuobjdump prints, and how often each stands there; raises for no code at all."""
    opcodes = _INSTRUCTION.findall(disassembly)
    if not opcodes:
        raise ValueError("the disassembly has no instruction")
    return Counter(opcode for opcode in opcodes if is_atomic(opcode))


def atomics_of(library: Path) -> Counter[str]:
    """The atomic instructions of a library's kernels, by the first disassembler that can read it."""
    said = MISSING
    for tool in find_disassemblers():
        status, out, err = run_tool([tool, "-sass", str(library)], seconds=DISASSEMBLE_SECONDS)
        if not status:
            return atomics_in(out)
        said = f"{tool} fails: {err.strip() or status}"
    raise ValueError(f"{library}: {said}")


def list_atomics(libraries: Iterable[Path]) -> dict[Path, Counter[str]]:
    """The atomic instructions of each library, as many at a time as there are cores."""
    libraries = list(libraries)
    with ThreadPoolExecutor(available_cores()) as pool:
        return dict(zip(libraries, pool.map(atomics_of, libraries)))


def main(directory: str) -> int:
    """Print every atomic instruction of a prebuilt directory's libraries with its reason."""
    root = Path(directory) / VERSION_DIR
    libraries = sorted(root.glob("sm_*/*/*.so"))
    if not libraries:
        print(f"{root} has no CUDA library", file=sys.stderr)
        return 1
    missing = 0
    for library, found in list_atomics(libraries).items():
        for opcode, count in sorted(found.items()):
            reason = reason_of(opcode)
            missing += reason is None
            print(f"{library.relative_to(root)}: {count} {opcode}: {reason or 'NO REASON'}")
    print(f"{len(libraries)} libraries; atomic instructions without a reason: {missing}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
