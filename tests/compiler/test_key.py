"""Every field that changes a library changes its key; nothing else does."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from cake_kda_jit.arch import get_arch
from cake_kda_jit.compiler import flags, key, lookup
from cake_kda_jit.compiler.key import build_key, canonical_json, source_key
from cake_kda_jit.compiler.toolchain import Tool, Toolchain
from cake_kda_jit.record import BuildKeywords, Entry, Field, make_params

from .tiny import ROOT, tiny_record

HOST = Tool(
    "/usr/bin/g++",
    {"version": "12.2.0", "target": "x86_64-linux-gnu", "binaries": {"driver": "a", "cc1plus": "b"}},
)
NVCC = Tool(
    "/opt/cuda/bin/nvcc",
    {"version": "13.0.88", "cudart": 13000, "binaries": {"nvcc": "c", "ptxas": "d", "cicc": "e", "cudafe++": "f"}},
    {"root": "/opt/cuda", "library_directory": "", "source_path_option": True},
)


def make_key(record=None, arch="sm_90a", text="0" * 64, host=HOST, nvcc=NVCC, extra=()):
    record = record or tiny_record("smxx")
    toolchain = Toolchain(host, nvcc)
    source = source_key(record, arch, text)
    return build_key(source, flags.compile_flags(record, get_arch(arch), toolchain), toolchain.identity, extra)


def with_identity(tool: Tool, *path: str) -> Tool:
    """The tool with one value of its identity changed."""
    identity = json.loads(json.dumps(tool.identity))
    inner = identity
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = "changed"
    return Tool(tool.path, identity, tool.facts)


def record_with(**changes):
    return {"record": tiny_record("smxx", **changes)}


def keywords_with(**changes):
    return record_with(build_keywords=BuildKeywords(**changes))


CHANGES = {
    "program": record_with(program="other"),
    "variant": record_with(variant="bf16"),
    "family": {"record": tiny_record("smxx", family="sm90")},
    "params": record_with(params=make_params(gain=3)),
    "param name": record_with(params=make_params(grain=2)),
    "template": record_with(template="smxx/other.cu.jinja"),
    "field name": record_with(entry=Entry((Field("data", "ptr"), Field("count", "i64"), Field("factor", "f32")))),
    "field kind": record_with(entry=Entry((Field("values", "ptr"), Field("count", "i64"), Field("factor", "i32")))),
    "opt_level": keywords_with(opt_level=2),
    "lineinfo": keywords_with(lineinfo=True),
    "max_registers": keywords_with(max_registers=128),
    "fast_math": keywords_with(fast_math=True),
    "defines": keywords_with(defines=(("A", "1"),)),
    "define value": keywords_with(defines=(("A", "2"),)),
    "target": {"arch": "sm_80"},
    "source text": {"text": "1" * 64},
    "host version": {"host": with_identity(HOST, "version")},
    "host target": {"host": with_identity(HOST, "target")},
    "host driver": {"host": with_identity(HOST, "binaries", "driver")},
    "cc1plus": {"host": with_identity(HOST, "binaries", "cc1plus")},
    "nvcc version": {"nvcc": with_identity(NVCC, "version")},
    "cudart": {"nvcc": with_identity(NVCC, "cudart")},
    **{name: {"nvcc": with_identity(NVCC, "binaries", name)} for name in ("nvcc", "ptxas", "cicc", "cudafe++")},
    "extra flags": {"extra": ("-lineinfo",)},
    "order of extra flags": {"extra": ("-g", "-lineinfo")},
    "library directory": {"nvcc": Tool(NVCC.path, NVCC.identity, {**NVCC.facts, "library_directory": "lib"})},
}


def test_each_field_changes_the_key_alone():
    keys = {name: make_key(**change) for name, change in CHANGES.items()}
    keys["nothing"] = make_key()
    keys["other order of extra flags"] = make_key(extra=("-lineinfo", "-g"))
    assert len(set(keys.values())) == len(keys)


def test_schema_is_in_the_key(monkeypatch):
    before = make_key()
    monkeypatch.setattr(key, "SCHEMA", 2)
    assert make_key() != before


def test_paths_docs_and_limits_are_not_in_the_key():
    elsewhere = Tool("/home/me/cuda 13/bin/nvcc", NVCC.identity, {**NVCC.facts, "root": "/home/me/cuda 13"})
    assert make_key(nvcc=elsewhere, host=Tool("/opt/bin/c++", HOST.identity)) == make_key()
    documented = Entry((Field("values", "ptr", "said otherwise"), Field("count", "i64"), Field("factor", "f32")))
    # A field's doc is a comment of the rendered text, which has its own digest.
    assert make_key(tiny_record("smxx", entry=documented)) == make_key()
    assert make_key(tiny_record("smxx", shipped=False, archs=("sm_90a",))) == make_key()


def test_canonical_json_refuses_what_has_no_one_form():
    assert canonical_json({"b": (1, 2), "a": "ä"}) == '{"a":"\\u00e4","b":[1,2]}'
    with pytest.raises(ValueError):
        canonical_json(float("nan"))
    with pytest.raises(TypeError):
        canonical_json({1, 2})


PRINT_KEYS = """
import os, sys
from pathlib import Path
from cake_kda_jit import paths
paths.data_dir = lambda: Path(sys.argv[1])
from cake_kda_jit.arch import get_arch
from cake_kda_jit.compiler import lookup
from tests.compiler.tiny import tiny_record, HOST_ARCH
found = lookup.search(tiny_record(), HOST_ARCH)
print(lookup.get_build_key(found))
"""


def test_surroundings_do_not_change_the_key(data, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    path = os.environ["PATH"].split(os.pathsep)
    surroundings = [
        {},
        {"PYTHONHASHSEED": "7", "LANG": "tr_TR.UTF-8", "HOME": str(home), "USER": "nobody", "TZ": "Asia/Tokyo"},
        {"PATH": os.pathsep.join(reversed(path)), "CAKE_KDA_JIT_JOBS": "7", "CAKE_KDA_JIT_VERBOSE": "1"},
        {"CAKE_KDA_JIT_CACHE_DIR": str(tmp_path / "other"), "CPATH": "/nowhere", "NVCC_APPEND_FLAGS": "-G"},
    ]
    printed = {
        subprocess.run(
            [sys.executable, "-c", PRINT_KEYS, str(data)],
            cwd=home if number % 2 else ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **changes},
            umask=0o077 if number % 2 else 0o022,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for number, changes in enumerate(surroundings)
    }
    assert len(printed) == 1 and len(printed.pop()) == 64


def test_extra_flags_are_in_the_key_and_on_the_command_line(data, monkeypatch):
    found = lookup.search(tiny_record(), get_arch("x86_64"))
    plain = lookup.get_build_key(found)
    monkeypatch.setenv("CAKE_KDA_JIT_EXTRA_FLAGS", "-DNAME='a b' -g1")
    found = lookup.search(tiny_record(), get_arch("x86_64"))
    assert lookup.get_build_key(found) != plain
    assert flags.extra_flags() == ("-DNAME=a b", "-g1")
