"""Many processes at once: one compilation a key, and an entry is wholly one builder's."""

from __future__ import annotations

import errno
import os
import shutil

import pytest

from cake_kda_jit.compiler import build as build_module
from cake_kda_jit.compiler import cache, flock, gc, staging
from cake_kda_jit.compiler.build import build
from cake_kda_jit.compiler.cache import verify_artifact
from cake_kda_jit.record import make_params

from .forked import Forked, built
from .test_build import run_tiny
from .tiny import HOST_ARCH, finish, start_worker, tiny_record


def test_sixteen_processes_and_one_key_compile_once(data, quick_cxx):
    fake = quick_cxx("sleep 1")
    children = [Forked(lambda: built(build(tiny_record(), HOST_ARCH))) for _ in range(16)]
    results = [child.result()["value"] for child in children]
    assert fake.num_calls == 1
    assert sorted(result["origin"] for result in results) == ["built"] + 15 * ["cache"]
    assert len({result["sha256"] for result in results}) == 1


def test_eight_processes_with_four_records_each(data, quick_cxx, cache_dir):
    """Each process in another order; every build has a private directory, and none is left."""
    fake = quick_cxx("pwd >> '" + str(data / "places") + "'")

    def work(first: int):
        gains = [(first + step) % 4 for step in range(4)]
        return [built(build(tiny_record(params=make_params(gain=gain)), HOST_ARCH)) for gain in gains]

    children = [Forked(lambda first=first: work(first)) for first in range(8)]
    results = [one for child in children for one in child.result()["value"]]
    assert len(results) == 32 and len({one["build_key"] for one in results}) == 4
    places = (data / "places").read_text().splitlines()
    assert fake.num_calls == len(places) == len(set(places)) == 4
    assert all(place.startswith(str(cache_dir / "v1" / ".staging")) for place in places)
    assert not list((cache_dir / "v1" / ".staging").iterdir())
    assert len(list((cache_dir / "v1" / HOST_ARCH).iterdir())) == 4


def test_fresh_processes_compile_once_and_real_libraries_differ(data):
    workers = [start_worker(data, "fp32", "other") for _ in range(2)]
    results = [finish(worker)["results"] for worker in workers]
    assert results[0][0]["sha256"] == results[1][0]["sha256"] != results[0][1]["sha256"]
    assert sorted(one["origin"] for result in results for one in result) == ["built", "built", "cache", "cache"]


def test_two_writers_with_different_bytes_leave_one_whole_entry(data, quick_cxx, monkeypatch, cache_dir):
    """Without locks both compile the same key; each result is verified, and the entry is one of the two."""

    def fail(path):
        raise OSError(errno.ENOLCK, "No locks available")

    # Bytes after the last section change the digest and nothing else.
    quick_cxx("sleep 0.2\n  trap 'echo $$ >> \"$out\"' EXIT", name="unsteady-g++")
    script = data.parent / "unsteady-g++"
    script.write_text(script.read_text().replace("exit 0\nfi", 'echo $$ >> "$out"; exit 0\nfi'))
    monkeypatch.setattr(flock, "lock_file", fail)
    children = [Forked(lambda: built(build(tiny_record(), HOST_ARCH))) for _ in range(4)]
    results = [child.result()["value"] for child in children]
    assert len({result["build_key"] for result in results}) == 1
    winner = build(tiny_record(), HOST_ARCH)
    assert winner.origin == "cache"
    verify_artifact(winner)
    assert {result["sha256"] for result in results} == {winner.sha256}, "the losers used the winner's"
    assert run_tiny(winner.library, 1.0) == [2.0, 4.0, 6.0]


def test_rename_that_loses_to_an_invisible_winner_loads_its_own(data, monkeypatch, cache_dir):
    """On a network file system the winner's entry may not be seen yet."""
    real = os.rename

    def lose(source, target):
        if f"/{HOST_ARCH}/" in str(target):
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        real(source, target)

    monkeypatch.setattr(os, "rename", lose)
    artifact = build(tiny_record(), HOST_ARCH)
    assert artifact.origin == "built" and "could not be replaced" in artifact.reason
    assert artifact.directory.parent == cache_dir / "v1" / ".staging"
    assert staging.remove_abandoned(cache_dir) == [], "it is used where it lies"
    assert run_tiny(artifact.library, 1.0) == [2.0, 4.0, 6.0]


def test_damaged_winner_is_replaced(data, quick_cxx, monkeypatch, cache_dir):
    quick_cxx()
    first = build(tiny_record(), HOST_ARCH)
    (first.directory / "provenance.json").write_text("{}")
    monkeypatch.setattr(build_module.lookup, "look_by_build_key", lambda *a, **k: False)
    with pytest.warns(RuntimeWarning, match="provenance cannot be read"):
        second = build(tiny_record(), HOST_ARCH)
    assert second.origin == "built" and second.directory == first.directory
    cache.check_library(second.library, second.size, second.sha256)


@pytest.mark.parametrize("number", [errno.EBUSY, errno.ENOTEMPTY, errno.EACCES])
def test_cleanup_that_fails_never_fails_a_build(data, quick_cxx, monkeypatch, cache_dir, number):
    quick_cxx()
    build(tiny_record(), HOST_ARCH)
    (cache_dir / "v1" / ".staging" / "left.12345678").mkdir()
    (cache_dir / "v1" / ".staging" / "left.12345678.builder").touch()
    real_rename = os.rename

    def rename(source, target):
        if ".trash" in str(target):
            raise OSError(number, os.strerror(number))
        real_rename(source, target)

    def rmtree(path, ignore_errors=False, **options):
        if not ignore_errors:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    monkeypatch.setenv("CAKE_KDA_JIT_CACHE_MAX_BYTES", "1")
    assert build(tiny_record(params=make_params(gain=3)), HOST_ARCH).origin == "built"
    kept = gc.collect(cache_dir).kept
    assert len(kept) == 2 and any("cannot be removed" in why for why in kept.values())
