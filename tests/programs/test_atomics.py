"""No atomic instruction on values: neither in the CUDA sources nor in the machine code that nvcc makes of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cake_kda_jit.catalog import registry
from cake_kda_jit.compiler.build import build
from cake_kda_jit.compiler.disassemble import MISSING, find_disassemblers
from cake_kda_jit.errors import ToolchainNotFound
from cake_kda_jit.paths import data_dir

from ..atomics import atomics_in, list_atomics, reason_of

TARGET = "sm_90a"
"""Of all targets the one with the most families; tests/architectures.sh asks the same of the others."""
ATOMIC_SOURCE = re.compile(
    r"\batomic[A-Z]\w*|__nv_atomic|cuda::(std::)?atomic|\b(red|atom|multimem)\.\w|\breduce\.async"
)
SOURCES_WITH_A_REASON = {"ready_tiles.cuh": "chunk_prepare counts who takes an item and who goes: no value is added"}


def test_no_source_has_an_atomic():
    """It needs no compiler: an atomic comes from a call, or from PTX that is written out."""
    sources = [p for name in ("smxx", "sm90", "device") for p in (data_dir() / "templates" / name).rglob("*.*")]
    assert len(sources) > 20
    found = {path.name: match.group() for path in sources if (match := ATOMIC_SOURCE.search(path.read_text()))}
    assert found == dict.fromkeys(SOURCES_WITH_A_REASON, "atomicAdd")


@pytest.mark.parametrize("text", ["atomicAdd(&sum, x)", 'asm("red.global.add.f32 [%0], %1;")', "atom.shared.add.u32"])
def test_an_atomic_in_a_source_is_seen(text):
    assert ATOMIC_SOURCE.search(text)


def test_machine_code_is_read_instruction_by_instruction():
    text = """
        /*0080*/                   LDG.E R2, desc[UR4][R2.64] ;        /* 0x0 */
        /*0090*/                   REDUX.SUM UR6, R2 ;
        /*00a0*/              @!P0 RED.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R4.64], R7 ;
        /*00b0*/               @P1 ATOMS.ADD RZ, [R4], R5 ;
        /*00c0*/                   SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R3+URZ], RZ ;
        /*00d0*/                   UTMAREDG.2D.ADD [UR4], [UR8] ;
    """
    found = atomics_in(text)
    assert [opcode.split(".")[0] for opcode in found] == ["RED", "ATOMS", "SYNCS", "UTMAREDG"]
    assert [opcode.split(".")[0] for opcode in found if reason_of(opcode)] == ["SYNCS"]
    with pytest.raises(ValueError, match="no instruction"):
        atomics_in("Fatbin elf code:")


def test_every_atomic_of_the_shipped_machine_code_has_a_reason():
    if not find_disassemblers():
        pytest.skip(MISSING)
    records = [r for r in registry().shipped() if r.family != "cpu" and TARGET in r.archs]
    try:
        libraries = {Path(build(record, TARGET).library): record.name for record in records}
    except ToolchainNotFound as error:
        pytest.skip(f"no nvcc: {error.cause}")
    found = {libraries[library]: atomics for library, atomics in list_atomics(libraries).items()}
    assert found.keys() == {record.name for record in records}
    assert not {(name, opcode) for name, atomics in found.items() for opcode in atomics if not reason_of(opcode)}
