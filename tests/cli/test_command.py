"""The command line: verbs, JSON and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from cake_kda_jit import __version__, paths
from cake_kda_jit.arch import host_arch
from cake_kda_jit.catalog import Registry, registry
from cake_kda_jit.cli import main
from cake_kda_jit.cli.command import VERBS
from cake_kda_jit.codegen.render import render
from cake_kda_jit.record import Program

HOST_ARCH = host_arch().name


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb, capsys):
    try:
        status = main([verb, "--help"])
    except SystemExit as stop:
        status = stop.code
    assert status == 0
    assert "usage" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], "required"),
        (["fly"], "invalid choice"),
        (["bench"], "walk_precision"),
        (["bench", "fly"], "walk_precision"),
        (["render", "transfer_walk", "bf16x3"], "--arch"),
        (["render", "transfer_walk", "bf16x3", "--arch", "sm_1"], "target 'sm_1' is not known"),
        (["render", "transfer_walk", "bf16x4", "--arch", HOST_ARCH], "cpu/transfer_walk__bf16x3"),
        (["render", "transfer", "bf16x3", "--arch", HOST_ARCH], ", transfer_walk"),
        (["manifest"], "--write"),
        (["prebuild", "--arch", HOST_ARCH], "--out"),
        (["prebuild", "--arch", HOST_ARCH, "--out", "/nowhere", "--jobs", "0"], "positive integer"),
        (["prebuild", "--arch", HOST_ARCH, "--out", "/nowhere", "--manifest", "/none.json"], "cannot be read"),
    ],
)
def test_wrong_use_is_2(argv, words, capsys):
    assert main(argv) == 2
    assert words in capsys.readouterr().err


def test_list(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(registry().records())
    assert main(["list", "--json", "--shipped", "--family", "cpu"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == len([r for r in registry().shipped() if r.family == "cpu"])
    assert all(row["shipped"] for row in rows)


def test_render_prints_the_text_alone(capsys):
    record = registry().get("transfer_walk", "bf16x3", "cpu")
    assert main(["render", "transfer_walk", "bf16x3", "--arch", HOST_ARCH]) == 0
    assert capsys.readouterr().out == render(record, HOST_ARCH).text
    assert main(["render", "transfer_walk", "bf16x3", "--arch", HOST_ARCH, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == render(record, HOST_ARCH).digest


def test_env_shows_values_and_fails_on_a_malformed_one(monkeypatch, capsys):
    monkeypatch.setenv("CAKE_KDA_JIT_VERBOSE", "yes")
    assert main(["env", "--json"]) == 1
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert "accepted: 0 or 1" in rows["CAKE_KDA_JIT_VERBOSE"]["error"]
    monkeypatch.delenv("CAKE_KDA_JIT_VERBOSE")
    assert main(["env"]) == 0
    assert main(["env", "--markdown"]) == 0
    assert "| `CAKE_KDA_JIT_CACHE_DIR` |" in capsys.readouterr().out


def test_malformed_environment_is_wrong_use(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CAKE_KDA_JIT_DISABLE", "2")
    assert main(["prebuild", "--arch", HOST_ARCH, "--out", str(tmp_path)]) == 2
    assert "CAKE_KDA_JIT_DISABLE" in capsys.readouterr().err


def test_manifest_is_checked_and_written(monkeypatch, tmp_path, capsys):
    few = registry().records()[-2:]
    small = Registry((Program("transfer_walk", "", few),))
    monkeypatch.setattr("cake_kda_jit.compiler.manifest.registry", lambda: small)
    (tmp_path / "templates").symlink_to(paths.templates_dir())
    monkeypatch.setattr(paths, "data_dir", lambda: tmp_path)
    assert main(["manifest", "--check"]) == 1
    assert "build.json is not current" in capsys.readouterr().out
    assert main(["manifest", "--write"]) == 0
    assert main(["manifest", "--check"]) == 0
    rows = json.loads((tmp_path / "build.test.json").read_text())["records"]
    assert [row["variant"] for row in rows] == sorted(record.variant for record in few if not record.shipped)
    capsys.readouterr()
    assert main(["manifest", "--write", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"written": []}


def test_manifest_of_an_installed_package_is_not_written(monkeypatch, tmp_path, capsys):
    installed = tmp_path / "_data"
    installed.mkdir()
    monkeypatch.setattr("cake_kda_jit.compiler.manifest.PACKAGE_DIR", tmp_path)
    monkeypatch.setattr(paths, "data_dir", lambda: installed)
    assert main(["manifest", "--write"]) == 2
    assert "belong to an installed package" in capsys.readouterr().err
    assert list(installed.iterdir()) == []


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"cake-kda-jit {__version__}\n"


def test_bench_hands_its_arguments_on(monkeypatch, capsys):
    monkeypatch.setattr("cake_kda_jit.bench.pairs.main", lambda argv: print(argv) or 7)
    assert main(["bench", "pairs", "--some", "1"]) == 7
    assert capsys.readouterr().out == "['--some', '1']\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_behind_standard_output_is_one_message():
    command = f"{sys.executable} -m cake_kda_jit list --json > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "cake-kda-jit list: No space left on device\n")


def test_closed_pipe_is_no_failure():
    command = f"{sys.executable} -m cake_kda_jit list --json | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
