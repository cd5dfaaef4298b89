"""Ahead of time: prebuilding, wheels of kernels, reproducible bytes."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile

import pytest

from cake_kda_jit import catalog, errors
from cake_kda_jit.compiler import manifest, providers
from cake_kda_jit.compiler.build import build
from cake_kda_jit.compiler.lookup import is_built
from cake_kda_jit.record import Program, make_params

from .tiny import HOST_ARCH, finish, start_worker, tiny_record

FOREIGN_ARCH = "aarch64" if HOST_ARCH != "aarch64" else "x86_64"


@pytest.fixture
def records(data, monkeypatch):
    """Set the registry's records; both manifests are written."""

    def use(*found):
        registry = catalog.Registry((Program("tiny", "", found),))
        monkeypatch.setattr(manifest, "registry", lambda: registry)
        manifest.write_manifests()
        return data / "build.json"

    return use


def libraries(root) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*.so"))}


def test_two_prebuilds_give_the_same_bytes(records, tmp_path, monkeypatch):
    """In another cache, from another directory, with another number of jobs."""
    path = records(tiny_record(), tiny_record(variant="other"))
    manifest.prebuild(path, [HOST_ARCH], tmp_path / "one", jobs=1)
    monkeypatch.setenv("CAKE_KDA_JIT_CACHE_DIR", str(tmp_path / "another cache"))
    monkeypatch.chdir(tmp_path)
    manifest.prebuild(path, [HOST_ARCH], tmp_path / "two", jobs=2)
    one, two = libraries(tmp_path / "one"), libraries(tmp_path / "two")
    assert len(one) == 2 and one == two


def test_stops_after_a_failure_unless_told_to_keep_going(records, data, tmp_path, quick_cxx):
    broken = tiny_record(variant="broken", template="cpu/broken.cpp.jinja")
    (data / "templates" / "cpu" / "broken.cpp.jinja").write_text("int broken = ;\n")
    others = [tiny_record(variant=f"good{number}") for number in range(4)]
    path = records(broken, *others)
    results = manifest.prebuild(path, [HOST_ARCH], tmp_path / "out", jobs=1)
    assert results[0].is_failed and len(results) < 5
    results = manifest.prebuild(path, [HOST_ARCH], tmp_path / "out", jobs=1, keep_going=True)
    assert len(results) == 5


def test_progress_counts(records, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CAKE_KDA_JIT_VERBOSE", "1")
    path = records(tiny_record(), tiny_record(variant="narrow", archs=(FOREIGN_ARCH,)))
    manifest.prebuild(path, [HOST_ARCH], tmp_path / "out", jobs=1)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[")]
    assert lines[0].startswith("[1/2] ") and lines[1].startswith("[2/2] ")
    assert any("built" in line for line in lines) and any("skipped, " in line for line in lines)


def test_interrupt_ends_all_compilers(records, tmp_path, fake_cxx, monkeypatch):
    fake_cxx(f"touch '{tmp_path}/started'; (sleep 1; touch '{tmp_path}/orphan') & sleep 20")
    path = records(tiny_record(), tiny_record(variant="other"))

    def interrupted(waiting):
        while not (tmp_path / "started").exists():
            pass
        raise KeyboardInterrupt

    monkeypatch.setattr(manifest, "as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        manifest.prebuild(path, [HOST_ARCH], tmp_path / "out", jobs=2)
    assert not (tmp_path / "orphan").exists()


@pytest.fixture
def wheel(records, tmp_path, cache_dir):
    """A wheel of the tiny kernel; the cache that it was made in is gone."""
    records(tiny_record(), tiny_record(variant="hidden", shipped=False))
    results, (path,) = manifest.prebuild_wheels([HOST_ARCH], tmp_path / "wheels", "1.2.3")
    assert [one.error for one in results] == [None]
    shutil.rmtree(cache_dir)
    return path


def test_wheel_is_reproducible_and_names_no_machine(wheel, records, tmp_path, monkeypatch):
    monkeypatch.setenv("CAKE_KDA_JIT_CACHE_DIR", str(tmp_path / "another cache"))
    _, (again,) = manifest.prebuild_wheels([HOST_ARCH], tmp_path / "again", "1.2.3")
    assert wheel.name == again.name and wheel.read_bytes() == again.read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            content = archive.read(name)
            assert str(tmp_path).encode() not in content and os.uname().nodename.encode() not in content, name


def test_wheel_carries_no_test_only_record(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert [name for name in names if name.endswith(".so")] and not [name for name in names if "hidden" in name]
    assert wheel.name.startswith(f"cake_kda_jit_prebuilt_{HOST_ARCH}-1.2.3-py3-none-linux_")


@pytest.fixture
def installed(wheel, tmp_path, monkeypatch):
    """The wheel, installed by pip into a directory on the path."""
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "No module named pip" in done.stderr:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    else:
        assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(str(site))
    providers.find_providers.cache_clear()
    return site


def test_installed_wheel_serves_a_machine_without_compilers(installed, data, tmp_path, cache_dir):
    settings = {"CAKE_KDA_JIT_DISABLE": "1", "PATH": str(tmp_path / "empty"), "PYTHONPATH": str(installed)}
    hit = finish(start_worker(data, **settings))
    assert hit["origin"] == "prebuilt" and hit["library"].startswith(str(installed))
    assert hit["loaded"] == [] and not cache_dir.exists(), "nothing is rendered, nothing is written"


def test_installed_wheel_is_matched_by_source_and_verified(installed, data, monkeypatch, cache_dir):
    assert build(tiny_record(), HOST_ARCH).origin == "prebuilt"
    assert is_built(tiny_record(), HOST_ARCH) and not is_built(tiny_record(params=make_params(gain=9)), HOST_ARCH)
    assert build(tiny_record(params=make_params(gain=9)), HOST_ARCH).origin == "built", "another source"
    (library,) = installed.glob(f"cake_kda_jit_prebuilt_{HOST_ARCH}/v1/*/*/*.so")
    library.write_bytes(library.read_bytes()[:400])
    assert build(tiny_record(), HOST_ARCH).origin == "built", "a damaged one is passed over"
    assert library.exists()
    monkeypatch.setenv("CAKE_KDA_JIT_DISABLE", "1")
    shutil.rmtree(cache_dir)
    with pytest.raises(errors.NotPrebuilt, match=f"installed wheel {installed}.*library has 400 bytes"):
        build(tiny_record(), HOST_ARCH)


def test_prebuilt_of_another_processor_is_passed_over(data, tmp_path, monkeypatch, cache_dir):
    """One CUDA target, two kinds of host: the same source key, another library."""
    entry = build(tiny_record(), HOST_ARCH).directory
    provenance = json.loads((entry / "provenance.json").read_text())
    provenance["toolchain"]["host"]["target"] = "riscv64-linux-gnu"
    (entry / "provenance.json").write_text(json.dumps(provenance))
    shutil.copytree(cache_dir, tmp_path / "prebuilt")
    shutil.rmtree(cache_dir)
    monkeypatch.setenv("CAKE_KDA_JIT_PREBUILT", str(tmp_path / "prebuilt"))
    monkeypatch.setenv("CAKE_KDA_JIT_DISABLE", "1")
    with pytest.raises(errors.NotPrebuilt, match="is for riscv64-linux-gnu"):
        build(tiny_record(), HOST_ARCH)


def test_test_only_records_build_from_their_own_manifest(records, data, tmp_path):
    records(tiny_record(), tiny_record(variant="hidden", shipped=False))
    results = manifest.prebuild(data / "build.test.json", [HOST_ARCH], tmp_path / "out")
    assert [one.record.variant for one in results] == ["hidden"] and results[0].directory


def test_library_needs_neither_torch_nor_cuda(data):
    """So it survives an upgrade of either, and a second look-up after one is a hit."""
    from cake_kda_jit.compiler.elf import read_library

    first = finish(start_worker(data))
    needed = read_library(first["library"]).needed
    loader = f"ld-linux-{platform.machine()}".replace("_", "-")
    assert {name.split(".so")[0] for name in needed} <= {"libc", "libm", "libstdc++", "libgcc_s", "libpthread", loader}
    torch = data / "site" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("__version__ = '99.0'\n")
    assert finish(start_worker(data, PYTHONPATH=str(data / "site")))["origin"] == "cache"
