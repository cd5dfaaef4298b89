"""The size cap: least recently used entries go; those in use or locked stay; what dead builders left is removed."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time

import pytest

from cake_kda_jit import paths
from cake_kda_jit.compiler import flock, gc, staging, usage
from cake_kda_jit.compiler.build import build
from cake_kda_jit.compiler.lookup import find_artifact
from cake_kda_jit.errors import ConfigError
from cake_kda_jit.record import make_params

from .forked import Forked
from .tiny import HOST_ARCH, FakeCompiler, tiny_record, write_templates

MIB = 1 << 20


def record(number: int):
    return tiny_record(params=make_params(gain=number))


def names(root) -> set[str]:
    return {entry.name for entry in gc.list_entries(root)}


@pytest.fixture(scope="session")
def twenty_entries(tmp_path_factory, tiny_library):
    """A cache of twenty entries of a MiB each, made once, and the compiler that made it."""
    place = tmp_path_factory.mktemp("twenty")
    body = f'cp \'{tiny_library}\' "$out"; truncate -s {MIB} "$out"; exit 0'
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAKE_KDA_JIT_CXX", str(FakeCompiler(place / "g++", "/usr/bin/env g++", body).path))
        patch.setenv("CAKE_KDA_JIT_CACHE_DIR", str(place / "cache"))
        data = write_templates(place / "data")
        patch.setattr(paths, "data_dir", lambda: data)
        names = [build(record(number), HOST_ARCH).directory.name for number in range(20)]
    return place, names


@pytest.fixture
def twenty(data, twenty_entries, cache_dir, monkeypatch):
    """Twenty entries of a MiB each, the first one used longest ago; returns their names in that order."""
    place, names = twenty_entries
    shutil.copytree(place / "cache", cache_dir)
    monkeypatch.setenv("CAKE_KDA_JIT_CXX", str(place / "g++"))
    for number, name in enumerate(names):
        when = time.time() - 86400 + 60 * number
        os.utime(cache_dir / "v1" / HOST_ARCH / name, (when, when))
    return names


def test_least_recently_used_entries_go(twenty, cache_dir):
    total = sum(entry.num_bytes for entry in gc.list_entries(cache_dir))
    done = gc.collect(cache_dir, 10 * MIB)
    assert names(cache_dir) == set(twenty[-9:]), "nine whole entries fit below ten MiB"
    assert done.num_bytes == sum(entry.num_bytes for entry in gc.list_entries(cache_dir)) <= 10 * MIB
    assert done.freed_bytes == total - done.num_bytes and len(done.removed) == 11
    assert not list((cache_dir / "v1" / ".trash").iterdir())
    assert gc.collect(cache_dir, 10 * MIB).removed == []


def test_a_hit_counts_as_use(twenty, cache_dir):
    assert find_artifact(record(0), HOST_ARCH).origin == "cache"
    gc.collect(cache_dir, 10 * MIB)
    assert twenty[0] in names(cache_dir) and twenty[1] not in names(cache_dir)


def test_entries_in_use_or_locked_stay(twenty, cache_dir):
    mine = find_artifact(record(2), HOST_ARCH)
    os.utime(usage.stamp_of(cache_dir, mine.directory), (1, 1))  # used long ago, and held still
    (cache_dir / "held").touch()

    def hold_in_another_process():
        artifact = find_artifact(record(3), HOST_ARCH)
        (cache_dir / "held").unlink()
        time.sleep(20)
        return artifact.origin

    other = Forked(hold_in_another_process)
    while (cache_dir / "held").exists():
        time.sleep(0.01)
    locked = flock.lock_file(cache_dir / "v1" / ".locks" / f"{twenty[4]}.lock")
    try:
        done = gc.collect(cache_dir, 0)
        assert names(cache_dir) == {twenty[2], twenty[3], twenty[4]}
        assert sorted(done.kept.values()) == ["in use", "in use", "locked by a build"]
    finally:
        flock.release(locked)
        other.kill()
    del mine
    gc.collect(cache_dir, 0)
    assert names(cache_dir) == set()


def test_every_build_keeps_the_cap(data, quick_cxx, cache_dir, monkeypatch, tiny_library):
    quick_cxx(f'cp \'{tiny_library}\' "$out"; truncate -s {MIB} "$out"; exit 0')
    monkeypatch.setenv("CAKE_KDA_JIT_CACHE_MAX_BYTES", str(5 * MIB))
    for number in range(8):
        artifact = build(record(number), HOST_ARCH)
        assert artifact.library.exists(), "a build's own entry is in use"
        os.utime(artifact.directory, (1000 + number, 1000 + number))
        del artifact
    assert len(names(cache_dir)) == 4


def test_malformed_cap_is_refused_before_anything_is_compiled(data, quick_cxx, cache_dir, monkeypatch):
    compiler = quick_cxx()
    monkeypatch.setenv("CAKE_KDA_JIT_CACHE_MAX_BYTES", "8GB")
    with pytest.raises(ConfigError, match="CAKE_KDA_JIT_CACHE_MAX_BYTES='8GB'"):
        build(record(0), HOST_ARCH)
    assert compiler.num_calls == 0 and names(cache_dir) == set()


def test_without_locks_what_was_used_lately_stays(twenty, cache_dir, monkeypatch):
    def fail(handle, kind):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(flock.fcntl, "flock", fail)
    find_artifact(record(5), HOST_ARCH)
    gc.collect(cache_dir, 0)
    assert names(cache_dir) == {twenty[5]}


def test_staging_of_dead_builders_goes_and_of_living_ones_stays(data, cache_dir):
    def build_until_killed():
        with staging.staging_directory(cache_dir, "dead") as place:
            (place.directory / "half.o").write_text("half")
            (cache_dir / "ready").touch()
            time.sleep(20)

    cache_dir.mkdir()
    child = Forked(build_until_killed)
    while not (cache_dir / "ready").exists():
        time.sleep(0.01)
    with staging.staging_directory(cache_dir, "living") as living:
        gc.collect(cache_dir)
        assert len(list((cache_dir / "v1" / ".staging").glob("dead.*"))) == 2, "its builder lives"
        child.kill()
        # One that was made where nothing could be locked, long ago and lately.
        old, new = (cache_dir / "v1" / ".staging" / name for name in ("old.1", "new.1"))
        old.mkdir(), new.mkdir()
        (cache_dir / "v1" / ".staging" / "published.2.builder").touch()  # killed just after it had published
        os.utime(old, (1, 1))
        gc.collect(cache_dir)
        left = {path.name for path in (cache_dir / "v1" / ".staging").iterdir()}
        assert left == {living.directory.name, living.directory.name + ".builder", "new.1"}
    assert not living.directory.exists()


def test_half_written_small_files_go(data, cache_dir):
    for place in (".locks", ".memo"):
        (cache_dir / "v1" / place).mkdir(parents=True)
        for name, when in ((".old.1", 1), (".new.2", None), ("kept.json", 1)):
            (cache_dir / "v1" / place / name).touch()
            if when:
                os.utime(cache_dir / "v1" / place / name, (when, when))
    gc.collect(cache_dir)
    for place in (".locks", ".memo"):
        assert {path.name for path in (cache_dir / "v1" / place).iterdir()} == {".new.2", "kept.json"}


def test_old_failures_and_quarantined_entries_go(data, fake_cxx, cache_dir):
    for place in (".failed", ".quarantine"):
        for name, age in (("old", 8 * 86400), ("new", 3600)):
            path = cache_dir / "v1" / place / name
            path.mkdir(parents=True)
            (path / "build.log").write_text("x" * 1000)
            os.utime(path, (time.time() - age,) * 2)
    done = gc.collect(cache_dir)
    assert sorted(done.removed) == [".failed/old", ".quarantine/old"]
    assert gc.collect(cache_dir, 100).num_bytes == 0, "over the cap they go before entries do"


def test_clear_keeps_what_is_in_use(twenty, cache_dir):
    mine = find_artifact(record(7), HOST_ARCH)
    done = gc.clear(cache_dir)
    assert names(cache_dir) == {twenty[7]} and len(done.removed) == 19
    assert not (cache_dir / "v1" / ".memo").exists()
    assert json.loads((mine.directory / "provenance.json").read_text())["build_key"] == mine.build_key


def test_asking_whether_an_entry_is_in_use_harms_no_look_up(twenty, cache_dir):
    """The question takes the library's lock for a moment; a look-up in that moment waits and finds the entry."""
    entry = next(entry for entry in gc.list_entries(cache_dir) if entry.name == twenty[1])
    handle = flock.lock_existing(next(entry.directory.glob("*.so")))
    threading.Timer(0.1, lambda: flock.release(handle)).start()
    assert build(record(1), HOST_ARCH).origin == "cache"
    assert not (cache_dir / "v1" / ".quarantine").exists()


def test_entry_that_is_removed_while_it_is_looked_up_is_a_miss(twenty, cache_dir):
    entry = next(entry for entry in gc.list_entries(cache_dir) if entry.name == twenty[1])
    handle = flock.lock_existing(next(entry.directory.glob("*.so")))
    threading.Timer(0.1, lambda: (entry.directory.rename(cache_dir / "gone"), flock.release(handle))).start()
    assert find_artifact(record(1), HOST_ARCH) is None
