"""``list``, ``why``, ``cache``, ``report`` and ``prebuild``: what is built, why, and what it costs."""

from __future__ import annotations

import json
import os
import shutil
import zipfile

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


def test_report(cli, two_builds):
    code, out, _ = cli("report", "--dir", two_builds[0], "--json")
    (row,) = json.loads(out)
    assert code == 0 and (row["program"], row["arch"], row["function"]) == ("tiny", "sm_90a", "scale")
    assert (row["registers"], row["spill_store_bytes"], row["spill_load_bytes"]) == (160, 16, 20)
    assert row["shared_bytes"] == 1024 and row["seconds"] >= 0 and row["toolchain"] == "13.0.99"
    code, out, _ = cli("report")
    head, line = out.splitlines()
    assert code == 0 and head.split()[:5] == ["program", "variant", "target", "kernel", "registers"]
    assert line.split()[:5] == ["tiny", "fp32", "sm_90a", "scale", "168"], "the default is the user cache"
    assert cli("report", "--arch", "sm_80")[0] == 1, "there is nothing to show"


def test_report_diff(cli, two_builds):
    code, out, _ = cli("report", "--diff", *two_builds)
    assert code == 0
    assert "tiny fp32 sm_90a scale: registers 160 -> 168, spill_store_bytes 16 -> 0" in out
    assert out.endswith("1 kernels differ\n")
    assert json.loads(cli("report", "--diff", *two_builds, "--json")[1])[0]["changed"]["registers"] == [160, 168]
    assert cli("report", "--diff", two_builds[0], two_builds[0])[1] == "0 kernels differ\n"


@pytest.mark.parametrize(
    "symbol, name",
    [
        ("transfer_walk__kernel", "transfer_walk__kernel"),
        ("_ZN12_GLOBAL__N_15scaleEPflf", "scale"),
        ("_Z5scalePf", "scale"),
        ("_ZN4tiny6kernelILi64EEEvPf", "kernel"),
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
