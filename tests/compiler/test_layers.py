"""Layers of look-up: prebuilt, user cache, read-only caches, and what is said when none has the kernel."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from cake_kda_jit import catalog, errors
from cake_kda_jit.compiler import manifest
from cake_kda_jit.compiler.build import build
from cake_kda_jit.record import Program

from .tiny import HOST_ARCH, finish, start_worker, tiny_record

FOREIGN_ARCH = "aarch64" if HOST_ARCH != "aarch64" else "x86_64"


@pytest.fixture
def tiny_registry(monkeypatch):
    """A registry of the tiny kernel alone, in two variants."""
    records = tuple(tiny_record(variant=variant) for variant in ("fp32", "fp32_again"))
    found = catalog.Registry((Program("tiny", "", records),))
    monkeypatch.setattr(manifest, "registry", lambda: found)
    return found


@pytest.fixture
def prebuilt(data, tmp_path, tiny_registry, monkeypatch):
    """A prebuilt directory of the tiny kernel, made in a cache that is gone."""
    (path,) = manifest.write_manifests()[:1]
    out = tmp_path / "prebuilt"
    results = manifest.prebuild(path, [HOST_ARCH], out)
    assert [one.error for one in results] == [None, None]
    shutil.rmtree(tmp_path / "cache")
    return out


def listing(root) -> dict[str, tuple[int, int]]:
    return {str(p.relative_to(root)): (p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(root.rglob("*"))}


def test_prebuilt_serves_a_machine_without_compilers(prebuilt, data, cache_dir, tmp_path):
    before = listing(prebuilt)
    settings = {
        "CAKE_KDA_JIT_PREBUILT": str(prebuilt),
        "CAKE_KDA_JIT_DISABLE": "1",
        "PATH": str(tmp_path / "empty"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    hit = finish(start_worker(data, **settings))
    assert hit["origin"] == "prebuilt" and hit["library"].startswith(str(prebuilt))
    assert hit["loaded"] == [], "the provenance beside the library spares rendering"
    assert listing(prebuilt) == before
    assert not cache_dir.exists(), "nothing is written anywhere"


def test_prebuilt_comes_before_the_user_cache(prebuilt, data, monkeypatch):
    assert build(tiny_record(), HOST_ARCH).origin == "built"
    monkeypatch.setenv("CAKE_KDA_JIT_PREBUILT", f"/nonexistent{os.pathsep}{prebuilt}")
    assert build(tiny_record(), HOST_ARCH).origin == "prebuilt"


def test_prebuilt_of_another_source_is_not_taken(prebuilt, data, monkeypatch):
    monkeypatch.setenv("CAKE_KDA_JIT_PREBUILT", str(prebuilt))
    monkeypatch.setenv("CAKE_KDA_JIT_DISABLE", "1")
    header = data / "templates" / "shared" / "gain.hpp"
    text = header.read_text()
    header.write_text("// changed\n" + text)
    with pytest.raises(errors.NotPrebuilt, match="is of another source"):
        build(tiny_record(), HOST_ARCH)
    header.write_text(text)
    assert build(tiny_record(), HOST_ARCH).origin == "prebuilt"


def test_prebuilt_with_other_extra_flags_is_not_taken(prebuilt, data, monkeypatch):
    monkeypatch.setenv("CAKE_KDA_JIT_PREBUILT", str(prebuilt))
    monkeypatch.setenv("CAKE_KDA_JIT_EXTRA_FLAGS", "-DX=1")
    assert build(tiny_record(), HOST_ARCH).origin == "built"


def test_damaged_prebuilt_is_passed_over_and_left_alone(prebuilt, data, monkeypatch):
    monkeypatch.setenv("CAKE_KDA_JIT_PREBUILT", str(prebuilt))
    (library,) = prebuilt.glob("v1/*/tiny__fp32.*/tiny__fp32.so")
    library.write_bytes(library.read_bytes()[:500])
    before = listing(prebuilt)
    assert build(tiny_record(), HOST_ARCH).origin == "built"
    assert listing(prebuilt) == before


def test_read_only_cache_is_the_last_layer(data, cache_dir, tmp_path, monkeypatch):
    build(tiny_record(), HOST_ARCH)
    shared = tmp_path / "shared cache"
    cache_dir.rename(shared)
    monkeypatch.setenv("CAKE_KDA_JIT_CACHE_RO", str(shared))
    before = listing(shared)
    hit = build(tiny_record(), HOST_ARCH)
    assert (hit.origin, hit.directory.is_relative_to(shared)) == ("cache", True)
    assert listing(shared) == before
    assert not list(cache_dir.glob("v1/*/tiny*")), "a hit is not copied"


def test_disabled_lists_every_place(data, tmp_path, monkeypatch, cache_dir):
    monkeypatch.setenv("CAKE_KDA_JIT_DISABLE", "1")
    monkeypatch.setenv("CAKE_KDA_JIT_PREBUILT", os.pathsep.join([str(tmp_path / "a"), str(tmp_path / "b")]))
    monkeypatch.setenv("CAKE_KDA_JIT_CACHE_RO", str(tmp_path / "c"))
    with pytest.raises(errors.NotPrebuilt) as caught:
        build(tiny_record(), HOST_ARCH)
    for place in ("a", "b", "c", "cache"):
        assert str(tmp_path / place) in str(caught.value)
    assert "CAKE_KDA_JIT_DISABLE=1" in str(caught.value) and f"prebuild --arch {HOST_ARCH} " in str(caught.value)
    assert not cache_dir.exists()


def test_disabled_names_the_manifest_of_a_test_only_record(data, monkeypatch):
    monkeypatch.setenv("CAKE_KDA_JIT_DISABLE", "1")
    with pytest.raises(errors.NotPrebuilt, match=f"prebuild --manifest {data / 'build.test.json'} --arch"):
        build(tiny_record(shipped=False), HOST_ARCH)


def test_disabled_and_no_toolchain_use_the_user_cache_by_source(data, monkeypatch, tmp_path):
    build(tiny_record(), HOST_ARCH)
    monkeypatch.setenv("CAKE_KDA_JIT_DISABLE", "1")
    assert "compiling is disabled" in build(tiny_record(), HOST_ARCH).reason
    monkeypatch.delenv("CAKE_KDA_JIT_DISABLE")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert "no C++ compiler" in build(tiny_record(), HOST_ARCH).reason
    with pytest.raises(errors.ToolchainNotFound, match="g\\+\\+, c\\+\\+, clang\\+\\+"):
        build(tiny_record(variant="other"), HOST_ARCH)


def test_prebuild_skips_what_does_not_build_and_reports_what_failed(data, tmp_path, monkeypatch):
    good, narrow, broken = (
        tiny_record(),
        tiny_record(variant="narrow", archs=(FOREIGN_ARCH,)),
        tiny_record(variant="broken", template="cpu/broken.cpp.jinja"),
    )
    (data / "templates" / "cpu" / "broken.cpp.jinja").write_text("int broken = ;\n")
    found = catalog.Registry((Program("tiny", "", (good, narrow, broken)),))
    monkeypatch.setattr(manifest, "registry", lambda: found)
    manifest.write_manifests()
    results = manifest.prebuild(data / "build.json", [HOST_ARCH], tmp_path / "out", jobs=2, keep_going=True)
    by_variant = {one.record.variant: one for one in results}
    assert by_variant["fp32"].directory and by_variant["narrow"].is_skipped and by_variant["broken"].is_failed
    assert isinstance(by_variant["broken"].error, errors.CompileError)
    again = manifest.prebuild(data / "build.json", [HOST_ARCH], tmp_path / "out", keep_going=True)
    assert by_variant["fp32"].directory in [one.directory for one in again]
    entries = [path.name for path in (tmp_path / "out" / "v1" / HOST_ARCH).iterdir()]
    assert entries == [by_variant["fp32"].directory.name], "one entry, and no leftover of copying"


def test_manifest_that_does_not_fit_is_refused(data, tmp_path, tiny_registry):
    manifest.write_manifests()
    path = data / "build.json"
    content = json.loads(path.read_text())
    content["records"][0]["variant"] = "gone"
    path.write_text(json.dumps(content))
    with pytest.raises(errors.ConfigError, match="gone"):
        manifest.prebuild(path, [HOST_ARCH], tmp_path / "out")
    with pytest.raises(errors.ConfigError, match="cannot be read"):
        manifest.prebuild(tmp_path / "none.json", [HOST_ARCH], tmp_path / "out")


def test_named_cache_that_cannot_be_written_is_an_error(data, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CAKE_KDA_JIT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(errors.CacheNotWritable, match="CAKE_KDA_JIT_CACHE_DIR"):
        build(tiny_record(), HOST_ARCH)


def test_default_cache_that_cannot_be_written_falls_back_with_one_warning(data, tmp_path, monkeypatch, recwarn):
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("CAKE_KDA_JIT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    first = build(tiny_record(), HOST_ARCH)
    assert first.directory.is_relative_to(tmp_path / f"cake_kda_jit-{os.getuid()}")
    assert build(tiny_record(), HOST_ARCH).origin == "cache"
    assert len([w for w in recwarn if "cannot be written" in str(w.message)]) == 1
    (tmp_path / f"cake_kda_jit-{os.getuid()}").chmod(0o777)
    with pytest.raises(errors.CacheNotWritable, match="open to others"):
        build(tiny_record(), HOST_ARCH)
