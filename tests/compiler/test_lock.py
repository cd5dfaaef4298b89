"""The build lock: who waits for whom, for how long, and what is said."""

from __future__ import annotations

import errno
import os
import signal
import time

import filelock
import pytest

from cake_kda_jit import errors
from cake_kda_jit.compiler import lock
from cake_kda_jit.compiler.build import build

from .tiny import HOST_ARCH, finish, start_worker, tiny_record


def wait_for(condition, seconds: float = 10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition was not met in time"
        time.sleep(0.02)


def test_timeout_names_the_holder_and_counts_from_its_last_heartbeat(data, fake_cxx, cache_dir, monkeypatch):
    fake = fake_cxx("sleep 6")
    holder = start_worker(data)
    try:
        wait_for(lambda: fake.num_calls and list((cache_dir / "v1" / ".locks").glob("*.holder")))
        monkeypatch.setenv("CAKE_KDA_JIT_LOCK_TIMEOUT", "1.5")
        os.kill(holder.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(errors.LockTimeout, match=f"process {holder.pid} on .*without a sign of life"):
            build(tiny_record(), HOST_ARCH)
        assert 1.4 < time.monotonic() - began < 5
    finally:
        holder.kill()
        holder.wait()


def test_living_holder_is_waited_for_past_the_timeout(data, fake_cxx, monkeypatch):
    fake = fake_cxx("sleep 2")
    holder = start_worker(data)
    wait_for(lambda: fake.num_calls)
    monkeypatch.setenv("CAKE_KDA_JIT_LOCK_TIMEOUT", "1.3")
    assert build(tiny_record(), HOST_ARCH).origin == "cache"
    assert finish(holder)["origin"] == "built" and fake.num_calls == 1


def test_killed_builder_is_taken_over(data, fake_cxx, monkeypatch, capsys, cache_dir):
    go = data / "go"
    fake = fake_cxx(f"[ -e '{go}' ] || sleep 6")
    holder = start_worker(data)
    wait_for(lambda: fake.num_calls and list((cache_dir / "v1" / ".locks").glob("*.holder")))
    holder.kill()
    holder.wait()
    go.write_text("")
    monkeypatch.setenv("CAKE_KDA_JIT_VERBOSE", "1")
    began = time.monotonic()
    assert build(tiny_record(), HOST_ARCH).origin == "built"
    assert time.monotonic() - began < 5
    assert f"took over from process {holder.pid}" in capsys.readouterr().err


def test_interrupt_leaves_no_process_and_no_directory(data, fake_cxx, cache_dir):
    fake = fake_cxx(f"(sleep 1; touch '{data}/orphan') & sleep 6")
    builder = start_worker(data)
    wait_for(lambda: fake.num_calls)
    builder.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in builder.communicate(timeout=10)[1]
    assert not list((cache_dir / "v1" / ".staging").iterdir())
    assert not list((cache_dir / "v1" / ".locks").glob("*.holder"))
    time.sleep(1.1)
    assert not (data / "orphan").exists()


def test_waiting_is_shown(data, fake_cxx, monkeypatch, capsys):
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setenv("CAKE_KDA_JIT_VERBOSE", "1")
    fake = fake_cxx("sleep 1")
    holder = start_worker(data)
    wait_for(lambda: fake.num_calls)
    build(tiny_record(), HOST_ARCH)
    finish(holder)
    assert f"waiting for process {holder.pid} on" in capsys.readouterr().err


def test_file_system_without_locks_degrades_with_one_warning(data, monkeypatch):
    calls = []

    def fail(self, *arguments, **keywords):
        calls.append(1)
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock.FileLock, "acquire", fail)
    with pytest.warns(RuntimeWarning, match="cannot be locked.*No locks available") as caught:
        assert build(tiny_record(), HOST_ARCH).origin == "built"
    assert (len(calls), len(caught)) == (2, 1), "reopened once, then without"


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
