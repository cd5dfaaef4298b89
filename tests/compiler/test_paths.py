"""Awkward places: paths that a shell would misread, homes that cannot be written, directories of others."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from cake_kda_jit import errors
from cake_kda_jit.compiler import roots
from cake_kda_jit.compiler.build import build
from cake_kda_jit.record import make_params

from .forked import Forked, built
from .test_build import run_tiny
from .tiny import HOST_ARCH, tiny_record
from .toolkit import FakeToolkit

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")
AWKWARD = ["a space", "do$HOME $$ar", "co:lon", 'quo\'te "double"', "grüße 核 é", "per%cent #hash & (paren);", "-dash"]


@pytest.mark.parametrize("name", AWKWARD)
def test_cache_and_compilers_in_awkward_places(data, tmp_path, monkeypatch, tiny_library, name):
    """Cache, host compiler and CUDA toolkit all stand in a directory of that name; a second look-up is a hit."""
    place = tmp_path / name
    toolkit = FakeToolkit(place / "cuda", tiny_library)
    cxx = place / "g++"
    cxx.write_text('#!/bin/sh\nexec g++ "$@"\n')
    cxx.chmod(0o755)
    monkeypatch.setenv("CAKE_KDA_JIT_CACHE_DIR", str(place / "cache"))
    monkeypatch.setenv("CAKE_KDA_JIT_CXX", str(cxx))
    monkeypatch.setenv("CAKE_KDA_JIT_NVCC", str(toolkit.nvcc))
    for record, arch in ((tiny_record(), HOST_ARCH), (tiny_record("smxx"), "sm_90a")):
        first = build(record, arch)
        assert first.origin == "built" and first.directory.is_relative_to(place / "cache")
        assert build(record, arch).origin == "cache"
        assert run_tiny(first.library, 1.0) == [2.0, 4.0, 6.0]
    assert f"-ccbin={cxx}" in toolkit.calls[0]


@pytest.mark.parametrize("name", AWKWARD[:5])
def test_reproduction_of_a_failure_in_an_awkward_place(data, tmp_path, monkeypatch, name):
    monkeypatch.setenv("CAKE_KDA_JIT_CACHE_DIR", str(tmp_path / name))
    (data / "templates" / "shared" / "gain.hpp").write_text("#include <no_such_header.h>\n")
    with pytest.raises(errors.CompileError) as caught:
        build(tiny_record(), HOST_ARCH)
    again = subprocess.run(caught.value.reproduction, shell=True, capture_output=True, text=True, cwd="/")
    assert "no_such_header.h: No such file" in again.stderr


def test_headers_in_an_awkward_place_are_followed(data, tmp_path, monkeypatch):
    header = tmp_path / "in clude $x" / "gain.h"
    header.parent.mkdir()
    header.write_text("constexpr float kGain = 5;\n")
    (data / "templates" / "shared" / "gain.hpp").write_text("#include <gain.h>\n")
    monkeypatch.setenv("CAKE_KDA_JIT_EXTRA_FLAGS", f"'-I{header.parent}'")
    build(tiny_record(), HOST_ARCH)
    header.write_text("constexpr float kGain = 7;\n")
    assert run_tiny(build(tiny_record(), HOST_ARCH).library, 1.0) == [7.0, 14.0, 21.0]


def test_include_two_levels_down_whose_mtime_is_kept(data, tmp_path, monkeypatch):
    folder = tmp_path / "include"
    folder.mkdir()
    (folder / "outer.h").write_text("#include <middle.h>\n")
    (folder / "middle.h").write_text("#include <inner.h>\n")
    inner = folder / "inner.h"
    inner.write_text("constexpr float kGain = 5;\n")
    (data / "templates" / "shared" / "gain.hpp").write_text("#include <outer.h>\n")
    monkeypatch.setenv("CAKE_KDA_JIT_EXTRA_FLAGS", f"-I{folder}")
    build(tiny_record(), HOST_ARCH)
    before = inner.stat()
    inner.write_text("constexpr float kGain = 7;\n")
    os.utime(inner, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert inner.stat().st_size == before.st_size and inner.stat().st_mtime_ns == before.st_mtime_ns
    again = build(tiny_record(), HOST_ARCH)
    assert again.origin == "built" and run_tiny(again.library, 1.0) == [7.0, 14.0, 21.0]


def test_template_two_levels_down_whose_mtime_is_kept(data):
    shared = data / "templates" / "shared"
    (shared / "gain.hpp").write_text('{% include "shared/middle.hpp" %}')
    (shared / "middle.hpp").write_text('{% include "shared/inner.hpp" %}')
    inner = shared / "inner.hpp"
    inner.write_text("constexpr float kGain = 5;\n")
    build(tiny_record(), HOST_ARCH)
    before = inner.stat()
    inner.write_text("constexpr float kGain = 7;\n")
    os.utime(inner, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert run_tiny(build(tiny_record(), HOST_ARCH).library, 1.0) == [7.0, 14.0, 21.0]


@needs_nvcc
def test_real_nvcc_with_a_cache_in_an_awkward_place(data, tmp_path, monkeypatch):
    monkeypatch.setenv("CAKE_KDA_JIT_CACHE_DIR", str(tmp_path / "a b $HOME: 'q' \"d\" ü"))
    assert build(tiny_record("smxx"), "sm_80").origin == "built"
    assert build(tiny_record("smxx"), "sm_80").origin == "cache", "the header list was read back"


@pytest.fixture
def stranger():
    """Run a function as a user who can write nothing but TMPDIR; returns the report and that directory."""
    place = Path(tempfile.mkdtemp(prefix="cake_kda_jit-test-"))
    place.chmod(0o755)
    home, tmp = place / "home", place / "tmp"
    home.mkdir(), tmp.mkdir()
    home.chmod(0o555)
    tmp.chmod(0o1777)

    def run(function):
        def child():
            os.environ.update(HOME=str(home), TMPDIR=str(tmp))
            for name in ("XDG_CACHE_HOME", "CAKE_KDA_JIT_CACHE_DIR"):
                os.environ.pop(name, None)
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            return function()

        return Forked(child).result(), tmp

    yield run
    shutil.rmtree(place)


def test_read_only_home_falls_back_to_a_private_directory_with_one_warning(data, stranger, tmp_path):
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(0o755)  # the stranger must reach the templates
    build(tiny_record(), HOST_ARCH)  # loads every module while this user still can

    def twice():
        return [built(build(tiny_record(), HOST_ARCH)) for _ in range(2)]

    report, tmp = stranger(twice)
    if "Permission" in report.get("message", ""):
        pytest.skip(f"another user cannot run this Python's tools: {report['message']}")
    first, second = report["value"]
    assert (first["origin"], second["origin"]) == ("built", "cache")
    (fallback,) = tmp.glob("cake_kda_jit-*")
    assert first["library"].startswith(str(fallback))
    assert stat.S_IMODE(fallback.stat().st_mode) == 0o700
    assert len([text for text in report["warnings"] if "cannot be written" in text]) == 1


def test_prebuilt_loads_on_a_machine_where_nothing_can_be_written(data, stranger, tmp_path, monkeypatch, cache_dir):
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(0o755)
    build(tiny_record(), HOST_ARCH)
    shutil.rmtree(cache_dir / "v1" / ".memo")
    monkeypatch.setenv("CAKE_KDA_JIT_PREBUILT", str(cache_dir))
    report, tmp = stranger(lambda: built(build(tiny_record(), HOST_ARCH)))
    assert report["value"]["origin"] == "prebuilt"
    assert report["warnings"] == [] and not list(tmp.iterdir()), "nothing is written, nothing is warned of"


def test_fallback_of_another_user_is_refused(data, tmp_path, monkeypatch):
    """A directory planted under TMPDIR, or a link, could hold somebody else's libraries."""
    monkeypatch.delenv("CAKE_KDA_JIT_CACHE_DIR")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    fallback = roots.fallback_root()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    fallback.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.CacheNotWritable, match="belongs to another user or is open to others"):
        build(tiny_record(), HOST_ARCH)
    assert fallback not in roots.user_roots()


def test_no_home_at_all(data, tmp_path, monkeypatch):
    monkeypatch.delenv("CAKE_KDA_JIT_CACHE_DIR")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(roots.Path, "home", homeless)
    with pytest.warns(RuntimeWarning, match="this user has no home directory"):
        assert build(tiny_record(), HOST_ARCH).directory.is_relative_to(roots.fallback_root())


@pytest.mark.parametrize("fault", ["Read-only file system", "Permission denied", "Disk quota exceeded"])
def test_named_cache_that_cannot_be_written_names_the_reason(data, monkeypatch, fault):
    monkeypatch.setattr(roots, "_write_fault", lambda root: fault)
    with pytest.raises(errors.CacheNotWritable, match=f"CAKE_KDA_JIT_CACHE_DIR=.* cannot be written: {fault}"):
        build(tiny_record(), HOST_ARCH)


def test_part_of_the_cache_that_belongs_to_another_user(data, stranger, tmp_path, cache_dir, monkeypatch):
    """A shared directory that its first user opened to others only at the top."""
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(0o755)
    build(tiny_record(), HOST_ARCH)
    for path in (cache_dir, cache_dir / "v1"):
        path.chmod(0o777)
    (cache_dir / "v1" / ".staging").chmod(0o555)

    def child():
        os.environ["CAKE_KDA_JIT_CACHE_DIR"] = str(cache_dir)
        return built(build(tiny_record(params=make_params(gain=3)), HOST_ARCH))

    report, _ = stranger(child)
    assert report["error"] == "CacheNotWritable"
    assert "does another user own it" in report["message"] and str(cache_dir) in report["message"]


def test_tilde_in_a_named_directory_is_the_home(monkeypatch, tmp_path):
    """A container file's variables have seen no shell."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CAKE_KDA_JIT_CACHE_DIR", "~/kernels")
    monkeypatch.setenv("CAKE_KDA_JIT_PREBUILT", "~/a:~/b")
    assert roots.named_root() == tmp_path / "kernels"
    assert roots.named_layers("PREBUILT") == [tmp_path / "a", tmp_path / "b"]


def test_extra_flags_with_an_open_quote(data, monkeypatch):
    monkeypatch.setenv("CAKE_KDA_JIT_EXTRA_FLAGS", "-DX='a")
    with pytest.raises(errors.ConfigError, match="CAKE_KDA_JIT_EXTRA_FLAGS=.*quoted as for a shell"):
        build(tiny_record(), HOST_ARCH)
