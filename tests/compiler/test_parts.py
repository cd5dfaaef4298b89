"""The small parts: the ELF reader, the log reader, the number of jobs."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from cake_kda_jit import errors
from cake_kda_jit.compiler import jobs
from cake_kda_jit.compiler.build import build
from cake_kda_jit.compiler.diagnose import first_error, resources
from cake_kda_jit.compiler.elf import NotALibrary, read_library

from .tiny import ENTRY, HOST_ARCH, tiny_record


def test_elf_reader_reads_functions_and_their_code(data, tmp_path):
    path = build(tiny_record(), HOST_ARCH).library
    library = read_library(path)
    assert set(library.functions) >= {f"tiny__fp32{end}" for end in ("", "__run", "__grid", "__abi", "__error")}
    assert library.returns_constant("tiny__fp32__abi", ENTRY.abi)
    assert not library.returns_constant("tiny__fp32__none", ENTRY.abi)
    assert any(name.startswith("libc.") for name in library.needed)
    content = path.read_bytes()
    cut = tmp_path / "cut.so"
    for length in range(0, len(content), 997):
        cut.write_bytes(content[:length])
        with pytest.raises(NotALibrary):
            read_library(cut)


def test_elf_reader_refuses_other_files(tmp_path):
    for content in (b"", b"#!/bin/sh\n", b"\x7fELF\x01\x01" + bytes(100)):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(NotALibrary):
            read_library(tmp_path / "file")


@pytest.mark.parametrize(
    "log, line",
    [
        ("[1/1] g++ -o x\nx.cpp: In f:\nx.cpp:3:1: error: bad\nx.cpp:9:1: error: later\n", "x.cpp:3:1: error: bad"),
        ("FAILED: [code=1] x.so\nnvcc fatal   : Unknown option '-z'\nninja: build stopped\n",
         "nvcc fatal   : Unknown option '-z'"),
        ("ptxas fatal   : Ptx assembly aborted due to errors\n", "ptxas fatal   : Ptx assembly aborted due to errors"),
        ("x.cu(3): error: expected a \";\"\n", "x.cu(3): error: expected a \";\""),
        ("/usr/bin/ld: x.o: undefined reference to `f'\ncollect2: error: ld returned 1 exit status\n",
         "/usr/bin/ld: x.o: undefined reference to `f'"),
        ("FAILED: [code=3] x.so\nsomething unheard of\nninja: build stopped: no.\n", "something unheard of"),
        ("", None),
    ],
)  # fmt: skip
def test_first_error_is_the_compilers_own(log, line):
    assert first_error(log) == line


def test_resources_of_each_kernel():
    log = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'walk' for 'sm_90a'
ptxas info    : Function properties for walk
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 544 bytes smem, 16 bytes cmem[2]
ptxas info    : Compiling entry function 'other' for 'sm_90a'
ptxas info    : Function properties for other
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 8 bytes cumulative stack size
"""
    walk, other = resources(log)
    assert (walk["function"], walk["registers"], walk["shared_bytes"], walk["constant_bytes"]) == ("walk", 168, 544, 16)
    assert (other["stack_bytes"], other["spill_store_bytes"], other["spill_load_bytes"]) == (8, 4, 12)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 8 cores with 16 GiB available, whose cgroup limits the test writes; returns a writer of files."""
    cgroup = tmp_path / "cgroup"
    monkeypatch.setattr(jobs, "CGROUP", str(cgroup))
    monkeypatch.setattr(jobs, "SELF_CGROUP", str(tmp_path / "self"))
    monkeypatch.setattr(jobs, "MEMINFO", str(tmp_path / "meminfo"))
    monkeypatch.setattr(jobs.os, "sched_getaffinity", lambda pid: set(range(8)))

    def write(name: str, text: str):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    write("meminfo", "MemTotal: 99999999 kB\nMemAvailable: 16777216 kB")
    write("self", "0::/slice/job")
    return write


@pytest.mark.parametrize(
    "files, expected",
    [
        ({}, 8),
        ({"cgroup/memory.max": "4294967296"}, 2),
        ({"cgroup/memory.max": "max"}, 8),
        ({"cgroup/slice/memory.max": "4294967296"}, 2),
        ({"cgroup/slice/job/memory.max": "2147483648", "cgroup/slice/memory.max": "4294967296"}, 1),
        ({"cgroup/memory.max": "1000"}, 1),
        ({"cgroup/slice/job/cpu.max": "300000 100000"}, 3),
        ({"cgroup/cpu.max": "max 100000"}, 8),
        ({"cgroup/cpu.max": "50000 100000"}, 1),
        ({"self": "4:memory:/job", "cgroup/memory/job/memory.limit_in_bytes": "4294967296"}, 2),
        ({"self": "3:cpu,cpuacct:/", "cgroup/cpu/cpu.cfs_quota_us": "200000",
          "cgroup/cpu/cpu.cfs_period_us": "100000"}, 2),
        ({"self": "3:cpu:/", "cgroup/cpu/cpu.cfs_quota_us": "-1", "cgroup/cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"meminfo": "MemAvailable: 6291456 kB"}, 3),
        ({"meminfo": "", "self": ""}, 1),
    ],
)  # fmt: skip
def test_jobs_follow_cores_memory_and_cgroup(machine, files, expected):
    for name, text in files.items():
        machine(name, text)
    assert jobs.num_jobs() == expected


def test_jobs_of_the_settings_come_first(machine, monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "5")
    assert jobs.num_jobs() == 5
    monkeypatch.setenv("CAKE_KDA_JIT_JOBS", "2")
    assert (jobs.num_jobs(), jobs.num_jobs(7)) == (2, 7)


@pytest.mark.parametrize("name", ["CAKE_KDA_JIT_JOBS", "MAX_JOBS"])
@pytest.mark.parametrize("value", ["0", "auto", "-1", "2.5", " "])
def test_impossible_numbers_of_jobs_are_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(errors.ConfigError, match=f"{name}='{value}' is not valid; accepted: a positive integer"):
        jobs.num_jobs()


def test_needed_of_a_library_of_others():
    found = sorted(Path(sysconfig.get_config_var("LIBDIR")).glob("libpython3*.so.1.0"))
    if not found:
        pytest.skip("Python is linked statically here")
    assert "Py_Initialize" in read_library(found[0]).functions
