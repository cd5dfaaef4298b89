"""The build lock: who waits for whom, for how long, and what is said."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time

import pytest

from cake_kda_jit import errors
from cake_kda_jit.compiler import flock, progress
from cake_kda_jit.compiler.build import build
from cake_kda_jit.record import make_params

from .forked import Forked, built
from .tiny import HOST_ARCH, finish, start_worker, tiny_record


def wait_for(condition, seconds: float = 10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition was not met in time"
        time.sleep(0.01)


def build_tiny():
    return built(build(tiny_record(), HOST_ARCH))


@pytest.fixture
def start_holder(data, quick_cxx, cache_dir, quick_locks):
    """Start a process that holds the tiny kernel's lock while its compiler sleeps."""

    def start(seconds: float):
        fake = quick_cxx(f"[ -e '{data}/go' ] || sleep {seconds}")
        holder = Forked(build_tiny)
        wait_for(lambda: fake.num_calls and list((cache_dir / "v1" / ".locks").glob("*.holder")))
        return fake, holder

    return start


def test_timeout_names_the_holder_and_counts_from_its_last_heartbeat(start_holder, monkeypatch):
    _, holder = start_holder(6)
    monkeypatch.setenv("CAKE_KDA_JIT_LOCK_TIMEOUT", "0.6")
    try:
        os.kill(holder.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(errors.LockTimeout, match=f"process {holder.pid} on .*without a sign of life") as caught:
            build(tiny_record(), HOST_ARCH)
        assert 0.5 < time.monotonic() - began < 5
        assert "CAKE_KDA_JIT_LOCK_TIMEOUT" in caught.value.hint and ".lock" in caught.value.hint
    finally:
        holder.kill()


def test_lock_of_a_process_that_never_told_its_name_is_a_timeout(data, cache_dir, quick_locks, monkeypatch, capsys):
    """Held by something that is no builder: there is no heartbeat, so the wait counts from its begin."""
    build(tiny_record(), HOST_ARCH)
    (entry,) = (cache_dir / "v1" / HOST_ARCH).iterdir()
    entry.rename(cache_dir / "away")
    path = cache_dir / "v1" / ".locks" / f"{entry.name}.lock"
    monkeypatch.setenv("CAKE_KDA_JIT_LOCK_TIMEOUT", "0.5")
    handle = flock.lock_file(path)
    try:
        with pytest.raises(errors.LockTimeout, match="held by another process"):
            build(tiny_record(), HOST_ARCH)
    finally:
        flock.release(handle)
    assert "waiting for another process" in capsys.readouterr().err


def test_living_holder_is_waited_for_past_the_timeout(start_holder, monkeypatch):
    fake, holder = start_holder(1.4)
    monkeypatch.setenv("CAKE_KDA_JIT_LOCK_TIMEOUT", "0.8")
    assert build(tiny_record(), HOST_ARCH).origin == "cache"
    assert holder.result()["value"]["origin"] == "built" and fake.num_calls == 1


def test_killed_builder_is_taken_over_and_that_is_said(start_holder, data, capsys, cache_dir):
    _, holder = start_holder(6)
    holder.kill()
    (data / "go").write_text("")
    began = time.monotonic()
    assert build(tiny_record(), HOST_ARCH).origin == "built"
    assert time.monotonic() - began < 3
    assert f"took over from process {holder.pid}" in capsys.readouterr().err, "said without CAKE_KDA_JIT_VERBOSE too"
    assert not list((cache_dir / "v1" / ".staging").iterdir()), "what the dead builder left is removed"


def test_waiters_take_over_from_a_builder_killed_meanwhile(start_holder, data):
    fake, holder = start_holder(6)
    waiters = [Forked(build_tiny) for _ in range(3)]
    time.sleep(0.3)
    holder.kill()
    (data / "go").write_text("")
    results = [waiter.result() for waiter in waiters]
    assert sorted(result["value"]["origin"] for result in results) == ["built", "cache", "cache"]
    assert fake.num_calls == 2
    assert any(f"took over from process {holder.pid}" in result["stderr"] for result in results)


def test_interrupt_leaves_no_process_and_no_directory(data, fake_cxx, cache_dir):
    fake = fake_cxx(f"(sleep 0.6; touch '{data}/orphan') & sleep 6")
    builder = start_worker(data)
    wait_for(lambda: fake.num_calls)
    builder.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in builder.communicate(timeout=10)[1]
    assert not list((cache_dir / "v1" / ".staging").iterdir())
    assert not list((cache_dir / "v1" / ".locks").glob("*.holder"))
    time.sleep(0.7)
    assert not (data / "orphan").exists()


def test_waiting_is_shown_without_a_terminal(start_holder, capsys):
    _, holder = start_holder(0.8)
    build(tiny_record(), HOST_ARCH)
    holder.result()
    assert f"waiting for process {holder.pid} on" in capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_system_without_locks_degrades_with_one_warning(data, quick_cxx, monkeypatch, number):
    calls = []

    def fail(handle, kind):
        calls.append(kind)
        raise OSError(number, os.strerror(number))

    quick_cxx()
    monkeypatch.setattr(flock.fcntl, "flock", fail)
    with pytest.warns(RuntimeWarning, match="cannot be locked.*" + os.strerror(number)) as caught:
        assert build(tiny_record(), HOST_ARCH).origin == "built"
        assert build(tiny_record(params=(("gain", 3),)), HOST_ARCH).origin == "built"
    assert len(caught) == 1
    assert calls.count(flock.fcntl.LOCK_EX | flock.fcntl.LOCK_NB) >= 4, "each build reopened its lock once"


def test_lock_that_is_stale_once_is_reopened_without_a_word(data, quick_cxx, monkeypatch, recwarn):
    quick_cxx()
    real, calls = flock.fcntl.flock, []

    def stale_once(handle, kind):
        calls.append(kind)
        if len(calls) == 1:
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(handle, kind)

    monkeypatch.setattr(flock.fcntl, "flock", stale_once)
    assert build(tiny_record(), HOST_ARCH).origin == "built"
    assert not [one for one in recwarn if "locked" in str(one.message)]


def test_full_disk_while_locking_is_a_full_disk(data, quick_cxx, monkeypatch):
    quick_cxx()

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(flock, "lock_file", full)
    with pytest.raises(errors.DiskFull, match="is full.*No space left") as caught:
        build(tiny_record(), HOST_ARCH)
    assert "CAKE_KDA_JIT_CACHE_DIR" in caught.value.hint


def test_removed_lock_file_keeps_nobody_in(tmp_path):
    path = tmp_path / "lock"
    first = flock.lock_file(path)
    path.unlink()
    second = flock.lock_file(path)
    with pytest.raises(flock.Busy):
        flock.lock_file(path)
    flock.release(second)
    flock.release(first)


def test_killed_builder_leaves_no_compiler_behind(start_holder, data, fake_cxx, cache_dir, quick_locks):
    """The compiler is in a process group of its own, which ends with the builder however that one ends."""
    for number in (signal.SIGKILL, signal.SIGTERM):
        orphan = data / f"orphan {number}"
        fake = fake_cxx(f"(sleep 0.6; touch '{orphan}') & sleep 6", name=f"g++ {number}")
        builder = Forked(build_tiny)
        wait_for(lambda fake=fake: fake.num_calls)
        os.kill(builder.pid, number)
        os.waitpid(builder.pid, 0)
        time.sleep(0.8)
        assert not orphan.exists()


def test_long_compilation_is_told_without_a_terminal(data, quick_cxx, monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.1)
    quick_cxx("sleep 0.4")
    build(tiny_record(), HOST_ARCH)
    assert capsys.readouterr().err == f"compiling tiny__fp32 for {HOST_ARCH}: 0 s so far\n"


def test_progress_line(data, monkeypatch, capsys):
    monkeypatch.setenv("CAKE_KDA_JIT_VERBOSE", "1")
    build(tiny_record(), HOST_ARCH)
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith(f"compiling tiny__fp32 for {HOST_ARCH} ... ") and line.endswith(" s") for line in lines)
    build(tiny_record(), HOST_ARCH)
    assert "user cache" in capsys.readouterr().err
    monkeypatch.setenv("CAKE_KDA_JIT_VERBOSE", "0")
    build(tiny_record(variant="quiet"), HOST_ARCH)
    assert capsys.readouterr().err == ""


def test_fork_during_a_build_neither_hangs_the_child_nor_keeps_the_lock(data, quick_cxx, quick_locks):
    """A data loader's worker forked while a thread compiles: it can build, and does not outlive its parent's lock."""
    go = data / "go"
    fake = quick_cxx(f"[ -e '{go}' ] || {{ touch '{data}/asleep'; sleep 6; }}")

    def parent():
        threading.Thread(target=build_tiny, daemon=True).start()
        wait_for((data / "asleep").exists)
        go.write_text("")
        other = Forked(lambda: built(build(tiny_record(params=make_params(gain=3)), HOST_ARCH)))
        Forked(lambda: time.sleep(4))  # a child that outlives its parent and inherits what that had open
        (data / "forked").write_text(other.result()["value"]["origin"])
        time.sleep(6)

    process = Forked(parent)
    wait_for((data / "forked").exists)
    process.kill()
    assert (data / "forked").read_text() == "built"
    began = time.monotonic()
    assert build(tiny_record(), HOST_ARCH).origin == "built"
    assert time.monotonic() - began < 3 and fake.num_calls == 3


def test_import_then_fork_touches_no_gpu(data):
    """Importing loads neither torch nor a driver, so a forked child may be the first to use CUDA."""
    result = finish(start_worker(data, "forked"))
    assert result["torch_before_fork"] is False and result["child"] == "built"
