from __future__ import annotations

import pytest

from cake_kda_jit.catalog import Registry
from cake_kda_jit.cli import common, list_records, main
from cake_kda_jit.compiler import manifest
from cake_kda_jit.record import Program

from ..compiler.conftest import (  # noqa: F401  the compiler's fixtures serve here too
    cache_dir,
    clean_settings,
    data,
    fake_cxx,
    no_cuda,
    quick_cxx,
    quick_locks,
    tiny_library,
    toolkit,
)
from ..compiler.tiny import tiny_record


@pytest.fixture
def records(data, monkeypatch):  # noqa: F811
    """Set the registry's records, of every family; the manifests are written."""

    def use(*found):
        registry = Registry((Program("tiny", "", found),))
        for module in (common, list_records, manifest):
            monkeypatch.setattr(module, "registry", lambda: registry)
        manifest.write_manifests()

    use(tiny_record(), tiny_record("smxx"), tiny_record(variant="hidden", shipped=False))
    return use


@pytest.fixture
def cli(capsys):
    """Run a command line; returns exit code, standard output and standard error."""

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run
