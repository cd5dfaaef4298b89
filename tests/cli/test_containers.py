"""The commands of docs/prebuilt-in-containers.md work: compiled here, run without compiler, GPU and writable home."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys

import pytest

from ..compiler.tiny import HOST_ARCH, ROOT, tiny_record

PAGE = (ROOT / "docs" / "prebuilt-in-containers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def shell(records, data, tmp_path, monkeypatch):
    """Run a block of the page, with the tiny kernel and this machine's target; returns its standard output."""
    records(tiny_record())
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$2" = pip ] && exec {sys.executable} "$@" --no-deps --quiet --target "{tmp_path}/site"\n'
        f'shift 2\nexec {sys.executable} -m tests.cli.tiny_cli "{data}" "$@"\n'
    )
    python.chmod(0o755)

    def run(block: str, *, compilers: bool) -> str:
        block = block.replace("/opt/cake_kda_jit", f"{tmp_path}/opt").replace("sm_90a x86_64_v3", HOST_ARCH)
        block = re.sub(r"\b(wheels)\b(?=[ /])", f"{tmp_path}/wheels", block).replace("sm_90a", HOST_ARCH)
        path = os.environ["PATH"] if compilers else ""
        environment = {
            "PATH": f"{tmp_path}/bin:{path}".rstrip(":"),
            "PYTHONPATH": f"{ROOT}:{tmp_path}/site",
            "HOME": str(tmp_path / "home") if compilers else "/no/such/home",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        done = subprocess.run(["/bin/sh", "-ec", block], cwd=ROOT, env=environment, capture_output=True, text=True,
                              timeout=120)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Warning" not in done.stderr, done.stderr
        return done.stdout

    return run


def files(place) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(place.rglob("*"))}


def test_directory(shell, tmp_path):
    assert "1 of 1 kernels are in" in shell(BLOCKS[0], compilers=True)
    shutil.rmtree(tmp_path / "home")
    before = files(tmp_path)
    out = shell(BLOCKS[1], compilers=False)
    assert "nothing is broken" in out and f"1 kernels for {HOST_ARCH}" in out
    assert f"{HOST_ARCH}*" in out and "1 good, 0 of changed headers, 0 damaged" in out
    assert files(tmp_path) == before, "nothing is written"


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip")
def test_wheel(shell, tmp_path):
    assert "wrote " in shell(BLOCKS[2], compilers=True)
    shutil.rmtree(tmp_path / "home")
    before = files(tmp_path)
    assert f"{HOST_ARCH}*" in shell(BLOCKS[3], compilers=False)
    assert {name for name in files(tmp_path) if not name.startswith(f"{tmp_path}/site")} == before.keys()


def test_every_block_is_run():
    assert len(BLOCKS) == 4
