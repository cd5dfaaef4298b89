from __future__ import annotations

import pytest

from cake_kda_jit import config, paths
from cake_kda_jit.compiler import discover, identify, lock, memo, providers, roots
from cake_kda_jit.compiler.build import build
from cake_kda_jit.compiler.key import file_digest

from .tiny import HOST_ARCH, FakeCompiler, tiny_record, write_templates
from .toolkit import FakeToolkit, path_without

_digests: dict[tuple, str] = {}


def quick_digest(path) -> str:
    """The digest of a compiler's binary, read once in a test run: each test begins with an empty cache."""
    key = (str(path), *memo.stat_of(path))
    if key not in _digests:
        _digests[key] = file_digest(path)
    return _digests[key]


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch, tmp_path):
    """No setting of the caller's environment, an empty cache, and nothing remembered from another test."""
    for knob in config.KNOBS:
        if knob.name.startswith(config.PREFIX):
            monkeypatch.delenv(knob.name, raising=False)
    for name in ("MAX_JOBS", "CUDA_HOME", "NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CAKE_KDA_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(roots, "_warned", set())
    monkeypatch.setattr(lock, "_warned", set())
    providers.find_providers.cache_clear()
    monkeypatch.setattr(identify, "file_digest", quick_digest)
    yield
    providers.find_providers.cache_clear()


@pytest.fixture
def cache_dir(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def data(monkeypatch, tmp_path):
    """The tiny kernel's data directory, in place of the package's."""
    data = write_templates(tmp_path / "data")
    monkeypatch.setattr(paths, "data_dir", lambda: data)
    return data


@pytest.fixture(scope="session")
def tiny_library(tmp_path_factory):
    """The tiny kernel's library for this machine, compiled once: what fake compilers copy."""
    place = tmp_path_factory.mktemp("tiny library")
    with pytest.MonkeyPatch.context() as patch:
        data = write_templates(place / "data")
        patch.setattr(paths, "data_dir", lambda: data)
        patch.setenv("CAKE_KDA_JIT_CACHE_DIR", str(place / "cache"))
        return build(tiny_record(), HOST_ARCH).library


@pytest.fixture
def fake_cxx(monkeypatch, tmp_path):
    """Make a fake host compiler and select it."""

    def make(body: str = "", name: str = "fake-g++", **answers: str) -> FakeCompiler:
        fake = FakeCompiler(tmp_path / name, "/usr/bin/env g++", body, answers)
        monkeypatch.setenv("CAKE_KDA_JIT_CXX", str(fake.path))
        return fake

    return make


@pytest.fixture
def quick_cxx(fake_cxx, tiny_library):
    """Make a fake host compiler that copies the tiny library after ``body``: it takes milliseconds."""
    return lambda body="", **options: fake_cxx(f"{body}\n  cp '{tiny_library}' \"$out\"; exit 0", **options)


@pytest.fixture
def toolkit(tmp_path, tiny_library):
    """Make fake CUDA toolkits."""
    return lambda name="cuda", release="13.0", **options: FakeToolkit(tmp_path / name, tiny_library, release, **options)


@pytest.fixture
def no_cuda(monkeypatch, tmp_path):
    """No nvcc on PATH or in the usual place."""
    monkeypatch.setenv("PATH", path_without("nvcc", "cuobjdump"))
    monkeypatch.setattr(discover, "USUAL_CUDA", str(tmp_path / "no such directory"))


@pytest.fixture
def quick_locks(monkeypatch):
    """Heartbeats and patience of a lock in tenths of a second; forked children have them too."""
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(lock, "POLL_SECONDS", 0.02)
