"""Knobs: order, kinds, errors, and the documentation's table."""

from __future__ import annotations

from pathlib import Path

import pytest

from cake_kda_jit import config
from cake_kda_jit.errors import ConfigError


def test_argument_then_environment_then_default(monkeypatch):
    assert config.resolve("BACKWARD", None) == "saved"
    monkeypatch.setenv("CAKE_KDA_JIT_BACKWARD", "replay")
    assert config.resolve("BACKWARD", None) == "replay"
    assert config.resolve("BACKWARD", "saved") == "saved"


def test_empty_is_unset(monkeypatch):
    monkeypatch.setenv("CAKE_KDA_JIT_JOBS", "")
    assert config.read("JOBS") is None
    assert not config.is_set("JOBS")


@pytest.mark.parametrize(
    "name, text",
    [
        ("DISABLE", "yes"),
        ("JOBS", "0"),
        ("JOBS", "auto"),
        ("LOCK_TIMEOUT", "-1"),
        ("LOCK_TIMEOUT", "inf"),
        ("CHECKPOINT_TOKENS", "100"),
        ("TRANSFER_WALK", "fast"),
        ("FAMILY", "tpu"),
        ("CACHE_MAX_BYTES", "1e9"),
    ],
)
def test_malformed_values_name_the_variable_and_what_is_accepted(monkeypatch, name, text):
    monkeypatch.setenv("CAKE_KDA_JIT_" + name, text)
    with pytest.raises(ConfigError, match=f"CAKE_KDA_JIT_{name}='{text}'.*accepted"):
        config.read(name)


def test_the_documented_table_is_the_generated_one():
    page = Path(__file__).resolve().parent.parent / "docs" / "environment.md"
    assert config.table() in page.read_text(encoding="utf-8")
