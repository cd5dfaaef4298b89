"""``list``, ``why``, ``cache``, ``report`` and ``prebuild``: what is built, why, and what it costs."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from dataclasses import replace

import pytest

from cake_kda_jit.cli import cache as cache_verb
from cake_kda_jit.compiler import report
from cake_kda_jit.compiler.build import build
from cake_kda_jit.record import BuildKeywords, make_params

from ..compiler.tiny import HOST_ARCH, tiny_record

PTXAS = """\
ptxas info    : Compiling entry function '_ZN12_GLOBAL__N_15scaleEPflf' for 'sm_90a'
    24 bytes stack frame, {spill} bytes spill stores, 20 bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, 1024 bytes smem, 552 bytes cmem[0]
"""


def test_list_shows_states(cli, records, quick_cxx):
    quick_cxx()
    build(tiny_record(), HOST_ARCH)
    code, out, _ = cli("list")
    lines = {tuple(line.split()[1:4]): line for line in out.splitlines()}
    assert code == 0 and f"{HOST_ARCH}*" in lines["fp32", "cpu", "shipped"]
    assert "*" not in lines["fp32", "smxx", "shipped"] and "*" not in lines["hidden", "cpu", "test-only"]
    code, out, _ = cli("list", "--built", "--json", "--arch", HOST_ARCH)
    (row,) = json.loads(out)
    assert (row["variant"], row["built"], row["archs"]) == ("fp32", [HOST_ARCH], [HOST_ARCH])


def test_list_does_not_count_what_templates_have_outdated(cli, records, quick_cxx, data):
    quick_cxx()
    build(tiny_record(), HOST_ARCH)
    header = data / "templates" / "shared" / "gain.hpp"
    header.write_text("// changed\n" + header.read_text())
    assert json.loads(cli("list", "--built", "--json")[1]) == []


def why(cli, *more):
    code, out, _ = cli("why", "tiny", "fp32", "--arch", HOST_ARCH, "--json", *more)
    assert code == 0
    return json.loads(out)


def test_why_of_a_hit_and_of_nothing(cli, records, quick_cxx):
    quick_cxx()
    found = why(cli)
    assert found["hit"] is None and found["neighbours"] == [] and len(found["build_key"]) == 64
    assert any("no entry tiny__fp32" in line for line in found["looked"])
    built = build(tiny_record(), HOST_ARCH)
    found = why(cli)
    assert str(built.directory) in found["hit"] and found["build_key"] == built.build_key
    assert [one["differences"] for one in found["neighbours"]] == [[]]
    code, out, _ = cli("why", "tiny", "fp32", "--arch", HOST_ARCH)
    assert code == 0 and "found: " in out and "the same" in out


def changed_param(records, data, monkeypatch):
    records(tiny_record(params=make_params(gain=3)))


def changed_keyword(records, data, monkeypatch):
    records(tiny_record(build_keywords=BuildKeywords(opt_level=2)))


def changed_template(records, data, monkeypatch):
    header = data / "templates" / "shared" / "gain.hpp"
    header.write_text("// changed\n" + header.read_text())


def changed_flags(records, data, monkeypatch):
    monkeypatch.setenv("CAKE_KDA_JIT_EXTRA_FLAGS", "-DX=1")


def changed_compiler(records, data, monkeypatch):
    script = data.parent / "fake-g++"
    script.write_text(script.read_text() + "# patched\n")


@pytest.mark.parametrize(
    "change, fields",
    [
        (changed_param, {"record.params.gain", "source"}),
        (changed_keyword, {"record.build_keywords.opt_level", "flags"}),
        (changed_template, {"templates.shared/gain.hpp", "source"}),
        (changed_flags, {"extra_flags"}),
        (changed_compiler, {"toolchain.host.binaries.driver"}),
    ],
)
def test_why_names_the_field_that_differs(cli, records, quick_cxx, data, monkeypatch, change, fields):
    quick_cxx()
    build(tiny_record(), HOST_ARCH)
    change(records, data, monkeypatch)
    found = why(cli)
    assert found["hit"] is None
    assert {one["field"] for one in found["neighbours"][0]["differences"]} == fields
    code, out, _ = cli("why", "tiny", "fp32", "--arch", HOST_ARCH)
    assert "would be compiled" in out and all(field in out for field in fields)


def test_why_shows_the_nearest_first(cli, records, quick_cxx, data, monkeypatch):
    quick_cxx()
    build(tiny_record(params=make_params(gain=9), build_keywords=BuildKeywords(opt_level=1)), HOST_ARCH)
    near = build(tiny_record(build_keywords=BuildKeywords(opt_level=2)), HOST_ARCH)
    first, second = why(cli)["neighbours"]
    assert first["directory"] == str(near.directory) and len(first["differences"]) < len(second["differences"])


def test_why_tells_damage_and_a_missing_toolchain(cli, records, quick_cxx, monkeypatch, tmp_path):
    quick_cxx()
    library = build(tiny_record(), HOST_ARCH).library
    library.write_bytes(library.read_bytes()[:99])
    assert "99 bytes" in why(cli)["neighbours"][0]["fault"]
    monkeypatch.setenv("CAKE_KDA_JIT_CXX", str(tmp_path / "none"))
    found = why(cli)
    assert found["build_key"] is None and "is not an executable" in found["toolchain_error"]


def test_cache_verbs(cli, records, quick_cxx, cache_dir):
    quick_cxx()
    names = []
    for gain in range(4):
        names.append(build(tiny_record(params=make_params(gain=gain)), HOST_ARCH).directory.name)
        os.utime(cache_dir / "v1" / HOST_ARCH / names[-1], (1000 + gain, 1000 + gain))
    code, out, _ = cli("cache", "ls", "--json")
    (listed,) = json.loads(out)
    assert code == 0 and [row["name"] for row in listed["entries"]] == names and listed["bytes"] > 0
    assert not any(row["in_use"] for row in listed["entries"])
    held = build(tiny_record(params=make_params(gain=0)), HOST_ARCH)
    code, out, _ = cli("cache", "ls")
    assert code == 0 and "in use" in out and "4 entries" in out
    entry = listed["entries"][0]["bytes"]
    code, out, _ = cli("cache", "gc", "--max-bytes", 2 * entry + entry // 2, "--json")
    (done,) = json.loads(out)
    assert code == 0 and sorted(done["removed"]) == sorted(f"{HOST_ARCH}/{name}" for name in names[1:3])
    code, out, _ = cli("cache", "clear")
    assert code == 0 and f"{names[0]} stays: in use" in out and "removed 1," in out
    assert held.library.exists()


def test_cache_verify_finds_damage_and_moves_it_away(cli, records, quick_cxx, cache_dir):
    quick_cxx()
    for gain in range(3):
        entry = build(tiny_record(params=make_params(gain=gain)), HOST_ARCH)
    assert cli("cache", "verify")[:2] == (0, f"3 good, 0 of changed headers, 0 damaged in {cache_dir}\n")
    entry.library.write_bytes(entry.library.read_bytes()[:-1] + b"?")
    code, out, _ = cli("cache", "verify")
    assert code == 1 and "digest differs" in out and "moved to" in out and "2 good" in out
    assert not entry.directory.exists() and cli("cache", "verify")[0] == 0


def test_cache_verify_of_a_named_directory_repairs_nothing(cli, records, quick_cxx, cache_dir, tmp_path):
    quick_cxx()
    entry = build(tiny_record(), HOST_ARCH)
    shutil.copytree(cache_dir, tmp_path / "prebuilt")
    copy = tmp_path / "prebuilt" / entry.directory.relative_to(cache_dir)
    (copy / "provenance.json").write_text("{")
    code, out, _ = cli("cache", "verify", "--dir", tmp_path / "prebuilt", "--json")
    assert code == 1 and [one["directory"] for one in json.loads(out)[0]["damaged"]] == [str(copy)]
    assert copy.exists()


@pytest.fixture
def two_builds(records, toolkit, monkeypatch, tmp_path):
    """One kernel of two nvccs, in two directories: 160 registers and 16 spilled bytes against 168 and none."""
    for name, registers, spill in (("A", 160, 16), ("B", 168, 0)):
        fake = toolkit(name + " cuda", body=f"cat <<'EOF'\n{PTXAS.format(registers=registers, spill=spill)}EOF")
        monkeypatch.setenv("CAKE_KDA_JIT_NVCC", str(fake.nvcc))
        monkeypatch.setenv("CAKE_KDA_JIT_CACHE_DIR", str(tmp_path / name))
        build(tiny_record("smxx"), "sm_90a")
    return tmp_path / "A", tmp_path / "B"


@pytest.fixture
def disassembler(no_cuda, monkeypatch, tmp_path):
    """Put a fake cuobjdump beside a named nvcc; it prints ``text``, or does what ``body`` says."""

    def make(place, text: str = "", body: str = ""):
        path = place / "bin" / "cuobjdump"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\necho x >> '{tmp_path}/disassembled'\n{body}\ncat <<'EOF'\n{text}EOF\n")
        path.chmod(0o755)
        return tmp_path / "disassembled"

    return make


SASS = """\

Fatbin elf code:
================
arch = sm_90a
\tcode for sm_90a
\t\tFunction : _ZN12_GLOBAL__N_15scaleEPflf
\t.headerflags\t@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;           /* 0x00000a00ff017b82 */
                                                                    /* 0x000fe20000000800 */
        /*0010*/                   S2R R0, SR_TID.X ;               /* 0x0000000000007919 */
        /*0020*/               @P0 EXIT ;                           /* 0x000000000000094d */
        /*0030*/                   LDG.E.128 R4, desc[UR4][R2.64] ; /* 0x0000000402047981 */
        /*0040*/              @!P1 LDG.E R8, desc[UR4][R2.64+0x4] ; /* 0x0000000402047981 */
        /*0050*/                   LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64] ;
        /*0060*/                   HMMA.16816.F32.BF16 R4, R4, R8, R4 ;
        /*0070*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0080*/             @!UP0 UTMALDG.2D [UR8], [UR4] ;
        /*0090*/                   LDSM.16.MT88.4 R4, [R9] ;
        /*00a0*/                   LDS.128 R4, [R9] ;
        /*00b0*/                   STS [R9], R4 ;
        /*00c0*/                   MUFU.EX2 R5, R5 ;
        /*00d0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00e0*/                   ATOMS.ADD R4, [R9], R5 ;
        /*00f0*/                   RED.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R7 ;
        /*0100*/                   LDL R5, [R1] ;
        /*0110*/                   STL [R1], R5 ;
        /*0120*/              @PT  STG.E desc[UR4][R2.64], R5 ;
        /*0130*/                   BRA 0x130;
        /*0140*/                   NOP;
"""
MIX = {"HMMA": 1, "HGMMA": 1, "LDSM": 1, "LDG": 2, "LDGSTS": 1, "TMA": 1, "STG": 1, "LDS": 1, "STS": 1, "MUFU": 1,
       "BAR": 1, "RED/ATOM": 2, "local": 2, "all": 20}  # fmt: skip


def test_report_counts_instructions_once(cli, two_builds, disassembler, tmp_path):
    calls = disassembler(tmp_path / "B cuda", SASS)
    for _ in range(2):
        (row,) = json.loads(cli("report", "--dir", two_builds[1], "--json")[1])
        assert row["instructions"] == MIX and row["note"] is None
    assert calls.read_text() == "x\n", "it is remembered"
    out = cli("report", "--dir", two_builds[1])[1]
    assert "HMMA 1 HGMMA 1 LDSM 1 LDG 2" in out and "local 2" in out


def test_report_without_a_disassembler_says_so(cli, two_builds, disassembler, tmp_path):
    (row,) = json.loads(cli("report", "--json")[1])
    assert row["instructions"] is None and "no cuobjdump beside any nvcc or on PATH" in row["note"]
    code, out, _ = cli("report")
    assert code == 0 and "not counted" in out.splitlines()[1] and "toolchain install" in out.splitlines()[2]
    calls = disassembler(tmp_path / "B cuda", body="echo 'cuobjdump fatal : unknown sm' >&2; exit 1")
    (row,) = json.loads(cli("report", "--json")[1])
    assert row["registers"] == 168 and row["note"].endswith("cuobjdump fails: cuobjdump fatal : unknown sm")
    assert calls.exists(), "a failure is tried again next time"


def test_report_of_a_cpu_library_has_no_instructions(cli, records, quick_cxx):
    quick_cxx()
    build(tiny_record(), HOST_ARCH)
    (row,) = json.loads(cli("report", "--json")[1])
    assert (row["instructions"], row["note"], row["function"]) == (None, None, "") and row["library_bytes"] > 0
    assert "registers" not in row and "not counted" not in cli("report")[1]


def test_report_diff_of_instructions(two_builds):
    (before,), (after,) = (report.read_reports(path) for path in two_builds)
    mix = dict(MIX, HMMA=2)
    (change,) = report.compare([replace(before, instructions=MIX)], [replace(after, instructions=mix)])
    assert change.changed["HMMA"] == (1, 2) and "LDG" not in change.changed
    (change,) = report.compare([before], [replace(after, instructions=mix)])
    assert "HMMA" not in change.changed, "what one side does not know is no difference"


def test_two_kernels_of_one_name_are_two_rows(cli, records, toolkit, monkeypatch):
    log = PTXAS.format(registers=32, spill=0) + PTXAS.format(registers=64, spill=0).replace("scaleEPflf", "scaleEPdld")
    monkeypatch.setenv("CAKE_KDA_JIT_NVCC", str(toolkit(body=f"cat <<'EOF'\n{log}EOF").nvcc))
    build(tiny_record("smxx"), "sm_90a")
    rows = json.loads(cli("report", "--json")[1])
    assert [(row["function"], row["registers"]) for row in rows] == [("scale", 32), ("scale #2", 64)]


def test_report(cli, two_builds):
    code, out, _ = cli("report", "--dir", two_builds[0], "--json")
    (row,) = json.loads(out)
    assert code == 0 and (row["program"], row["arch"], row["function"]) == ("tiny", "sm_90a", "scale")
    assert (row["registers"], row["spill_store_bytes"], row["spill_load_bytes"]) == (160, 16, 20)
    assert (
        row["shared_bytes"] == 1024
        and row["stack_bytes"] == 24
        and row["seconds"] >= 0
        and row["toolchain"] == "13.0.99"
    )
    code, out, _ = cli("report")
    head, line = out.splitlines()[:2]
    assert code == 0 and head.split()[:6] == ["program", "variant", "family", "target", "kernel", "registers"]
    assert line.split()[:6] == ["tiny", "fp32", "smxx", "sm_90a", "scale", "168"], "the default is the user cache"
    assert cli("report", "--arch", "sm_80")[0] == 1, "there is nothing to show"


def test_report_diff(cli, two_builds):
    code, out, _ = cli("report", "--diff", *two_builds)
    assert code == 0
    assert "tiny fp32 smxx sm_90a scale: registers 160 -> 168, spill_store_bytes 16 -> 0" in out
    assert out.endswith("1 kernels differ\n")
    assert json.loads(cli("report", "--diff", *two_builds, "--json")[1])[0]["changed"]["registers"] == [160, 168]
    assert cli("report", "--diff", two_builds[0], two_builds[0])[1] == "0 kernels differ\n"


@pytest.mark.parametrize(
    "symbol, name",
    [
        ("transfer_walk__kernel", "transfer_walk__kernel"),
        ("_ZN12_GLOBAL__N_15scaleEPflf", "scale"),
        ("_Z5scalePf", "scale"),
        ("_ZN4tiny6kernelILi64EEEvPf", "kernel<64>"),
        ("_ZN12_GLOBAL__N_16kernelILi128ELb0ELin2EEEvNS_4ArgsE", "kernel<128, 0, -2>"),
        ("_ZN4tiny6kernelI6__halfEEvPT_", "kernel"),
        ("_Z", "_Z"),
    ],
)
def test_kernel_names_are_readable(symbol, name):
    assert report.short_name(symbol) == name


def test_prebuild_verb(cli, records, tmp_path, data):
    code, out, _ = cli("prebuild", "--arch", HOST_ARCH, "--out", tmp_path / "out", "--manifest", data / "build.json")
    assert (code, out) == (0, f"1 of 1 kernels are in {tmp_path / 'out'}\n")
    hidden = ("prebuild", "--arch", HOST_ARCH, "--out", tmp_path / "hidden", "--manifest", data / "build.test.json")
    code, out, _ = cli(*hidden, "--json")
    assert code == 0 and [row["record"] for row in json.loads(out)] == ["cpu/tiny__hidden"]


def test_directory_that_cannot_be_written_is_one_line(cli, records, tmp_path, data):
    (tmp_path / "file").write_text("")
    code, _, err = cli("prebuild", "--arch", HOST_ARCH, "--out", tmp_path / "file", "--manifest", data / "build.json")
    assert (code, err) == (1, f"cake-kda-jit prebuild: Not a directory: {tmp_path / 'file' / 'v1' / HOST_ARCH}\n")


def test_prebuild_wheel_verb(cli, records, tmp_path, data):
    code, out, _ = cli("prebuild", "--arch", HOST_ARCH, "--out", tmp_path / "out", "--wheel", "--json")
    assert code == 0
    (path,) = json.loads(out)["wheels"]
    assert zipfile.is_zipfile(path) and os.listdir(tmp_path / "out") == [os.path.basename(path)]
    wheel = ("prebuild", "--arch", HOST_ARCH, "--out", tmp_path / "no", "--wheel")
    code, _, err = cli(*wheel, "--manifest", data / "build.test.json")
    assert code == 2 and "test-only records are in no wheel" in err


def test_prebuild_keep_going(cli, records, tmp_path, data):
    (data / "templates" / "cpu" / "broken.cpp.jinja").write_text("int broken = ;\n")
    broken = tiny_record(variant="broken", template="cpu/broken.cpp.jinja")
    records(broken, *(tiny_record(variant=f"good{n}") for n in range(3)))
    arguments = ("prebuild", "--arch", HOST_ARCH, "--out", tmp_path / "out", "--jobs", 1)
    code, out, err = cli(*arguments, "--manifest", data / "build.json")
    assert code == 1 and "failed cpu/tiny__broken" in err and "expected primary-expression" in err
    code, out, _ = cli(*arguments, "--manifest", data / "build.json", "--keep-going")
    assert code == 1 and out.startswith("3 of 4 kernels")


def test_prebuild_of_a_target_that_the_compiler_does_not_know_fails(cli, records, tmp_path, data, toolkit, monkeypatch):
    monkeypatch.setenv("CAKE_KDA_JIT_NVCC", str(toolkit().nvcc))
    out_dir = tmp_path / "out"
    code, out, err = cli("prebuild", "--arch", "sm_90a", "sm_107a", "--out", out_dir, "--manifest", data / "build.json")
    assert code == 1 and "1 of 2 kernels" in out and "does not know sm_107a" in err and "toolchain install" in err


@pytest.mark.parametrize(
    "argv, words",
    [
        (["cache", "ls", "--max-bytes", "3"], "for `cache gc` only"),
        (["cache", "gc", "--max-bytes", "-3"], "for `cache gc` only"),
        (["cache", "ls", "--dir", "/no/such/place"], "is not a directory"),
        (["cache", "burn"], "invalid choice"),
        (["report", "--dir", "/no/such/place"], "is no cache and no prebuilt directory"),
        (["report", "--diff", "/a", "/b"], "is no cache and no prebuilt directory"),
        (["report", "--diff", "/a", "/b", "--dir", "/c"], "names both directories"),
        (["why", "tiny", "fp32"], "--arch"),
        (["why", "tiny", "none", "--arch", HOST_ARCH], "no record tiny none"),
        (["list", "--arch", "sm_1"], "target 'sm_1' is not known"),
    ],
)
def test_wrong_use(cli, records, argv, words):
    code, _, err = cli(*argv)
    assert code == 2 and words in err


def test_ages_in_words():
    assert [cache_verb._ago(s) for s in (5, 200, 8000, 200000)] == ["5 seconds", "3 minutes", "2 hours", "2 days"]
