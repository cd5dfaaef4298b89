from __future__ import annotations

import pytest

from cake_kda_jit import config, paths

from .tiny import FakeCompiler, write_templates


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch, tmp_path):
    """No setting of the caller's environment, and an empty cache for each test."""
    for knob in config.KNOBS:
        if knob.name.startswith(config.PREFIX):
            monkeypatch.delenv(knob.name, raising=False)
    monkeypatch.setenv("CAKE_KDA_JIT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def cache_dir(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def data(monkeypatch, tmp_path):
    """The tiny kernel's data directory, in place of the package's."""
    data = write_templates(tmp_path / "data")
    monkeypatch.setattr(paths, "data_dir", lambda: data)
    return data


@pytest.fixture
def fake_cxx(monkeypatch, tmp_path):
    """Make a fake host compiler and select it."""

    def make(body: str = "", name: str = "fake-g++") -> FakeCompiler:
        fake = FakeCompiler(tmp_path / name, "/usr/bin/env g++", body)
        monkeypatch.setenv("CAKE_KDA_JIT_CXX", str(fake.path))
        return fake

    return make
