"""Tables: plain where a program reads them, with rules on a terminal; and how quick ``list`` is."""

from __future__ import annotations

import io
import subprocess
import sys
import time

import pytest

from cake_kda_jit.cli.table import print_table
from cake_kda_jit.compiler.build import build

from ..compiler.tiny import HOST_ARCH, ROOT, tiny_record

HEAD, ROWS = ("name", "bytes", "where"), [("a", "5", "[red]/x"), ("longer", "1000", "")]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_text_is_aligned_and_has_no_trailing_space(capsys):
    print_table(HEAD, ROWS, right=("bytes",))
    assert capsys.readouterr().out == "name    bytes  where\na           5  [red]/x\nlonger   1000\n"


def test_terminal_gets_rules_and_every_cell(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    print_table(HEAD, ROWS, right=("bytes",))
    text = sys.stdout.getvalue()
    assert "─────" in text and "[red]/x" in text and "1000" in text
    assert text.index("name") < text.index("longer")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_every_verb_with_a_table_works_on_both(cli, records, quick_cxx, monkeypatch, is_terminal):
    quick_cxx()
    build(tiny_record(), HOST_ARCH)
    for arguments in (("list",), ("report",), ("env",), ("cache", "ls")):
        if is_terminal:
            monkeypatch.setattr(sys, "stdout", Terminal())
        code, out, _ = cli(*arguments)
        out = sys.stdout.getvalue() if is_terminal else out
        assert code == 0 and ("─" in out) == is_terminal, arguments


def test_list_is_quick_and_imports_neither_torch_nor_rich(tmp_path):
    """It takes 0.1 s on a quiet machine; there is room here for a loaded one."""
    code = (
        "import sys\nfrom cake_kda_jit.cli import main\nstatus = main(['list'])\n"
        "heavy = {'torch', 'jinja2', 'ninja', 'rich', 'numpy'} & set(sys.modules)\n"
        "sys.exit(status or (f'imported {heavy}' if heavy else 0))\n"
    )
    took = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=60)
        took.append(time.perf_counter() - began)
    assert min(took) < 1, took
