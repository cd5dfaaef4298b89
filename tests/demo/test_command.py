"""The demo from its command line to its last line, on a text small enough for a few seconds."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cake_kda_jit.demo import main
from cake_kda_jit.demo.command import first_and_last
from cake_kda_jit.demo.figure import figure_path
from cake_kda_jit.demo.progress import make_progress

ROOT = Path(__file__).resolve().parents[2]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def threads_as_before():
    """The demo sets torch's number of threads; the tests after it keep theirs."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "verse.txt"
    path.write_text("".join(f"line {n}: the quick brown fox jumps over the lazy dog\n" for n in range(60)))
    return path


def arguments(text, *more: str) -> list[str]:
    # On matrices this small, waiting for a second thread costs more than it gives.
    small = ["--steps", "12", "--tokens", "192", "--max-length", "60", "--layers", "1", "--heads", "1"]
    return [*small, "--threads", "1", "--text", str(text), "--out", str(text.parent / "loss.png"), *more]


def run_json(capsys, argv: list[str]) -> dict:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_trains_draws_and_names_its_kernels(capsys, text):
    assert main(arguments(text)) == 0
    out = capsys.readouterr().out
    lines = out.strip().splitlines()
    assert any(line.startswith("step    12/12   loss ") and line.endswith("s left") for line in lines)
    assert any(line.startswith("loss in nats per byte: ") for line in lines)
    assert lines[-1].startswith("kernels: ") and "; cache: " in lines[-1]
    assert lines[-1].count("__bf16_k64 (cpu, ") >= 2, "an attention kernel forward, another backward"
    assert "conv_forward__bf16 (cpu, " in lines[-1] and "conv_backward__bf16 (cpu, " in lines[-1]
    assert (text.parent / "loss.png").read_bytes().startswith(PNG_SIGNATURE)


def test_the_loss_falls_and_neither_a_rerun_nor_replay_changes_a_bit(capsys, text):
    result = run_json(capsys, arguments(text))
    assert len(result["losses"]) == 12
    assert result["losses"][0] == pytest.approx(5.545, abs=1e-3), "ln 256: all bytes start equally likely"
    assert result["last_loss"] < result["first_loss"] - 0.5
    assert result["validation_loss"] < 5
    again = run_json(capsys, arguments(text, "--backward", "replay"))
    assert again["losses"] == result["losses"]
    assert {origin for _, _, origin in result["kernels"].values()} <= {"built", "cache", "prebuilt"}
    other = run_json(capsys, arguments(text, "--seed", "1"))
    assert other["losses"] != result["losses"]


def test_a_second_start_compiles_nothing(text):
    assert main(arguments(text)) == 0
    command = [sys.executable, "-m", "cake_kda_jit", "demo", *arguments(text, "--steps", "1")]
    second = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120)
    last_line = second.stdout.splitlines()[-1]
    assert last_line.count(", cache)") == last_line.count(" (cpu, ") >= 4


@pytest.mark.parametrize(
    "pipe, code, message",
    [
        ("| head -n 1", 0, ""),
        pytest.param("> /dev/full", 1, "cake-kda-jit demo: No space left on device\n",
                     marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")),
    ],
)  # fmt: skip
def test_output_that_cannot_be_written_is_no_traceback(text, pipe, code, message):
    words = [sys.executable, "-m", "cake_kda_jit", "demo", *arguments(text, "--steps", "1")]
    command = ["bash", "-o", "pipefail", "-c", f"{shlex.join(words)} {pipe}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (code, message)


@pytest.mark.parametrize(
    "more, message",
    [
        (["--text", "no/such/file"], "'no/such/file' does not exist"),
        (["--device", "nonsense"], "device 'nonsense' cannot be used"),
        (["--out", "/dev/null/loss.png"], "choose another --out"),
    ],
)
def test_wrong_use_is_exit_code_2_and_one_message(capsys, text, more, message):
    assert main(arguments(text, *more)) == 2
    assert message in capsys.readouterr().err


def test_a_folder_may_be_named_for_the_figure(tmp_path):
    assert figure_path(str(tmp_path / "new")) == tmp_path / "new" / "loss.png"
    assert figure_path(str(tmp_path / "curve.png")) == tmp_path / "curve.png"
    assert list((tmp_path / "new").iterdir()) == [], "nothing is written before there is a curve"


def test_an_empty_folder_is_wrong_use(capsys, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["--text", str(empty), "--out", str(tmp_path / "loss.png")]) == 2
    assert "no text found" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--steps", "0"], ["--head-dim", "32"], ["--learning-rate", "-1"], ["--unknown"]])
def test_bad_options_are_wrong_use(capsys, argv):
    assert main(argv) == 2
    assert argv[0] in capsys.readouterr().err


def test_a_missing_package_is_named_with_its_extra(capsys, text, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(arguments(text)) == 1
    assert "matplotlib" in (error := capsys.readouterr().err) and "pip install 'cake_kda_jit[demo]'" in error


def test_a_terminal_gets_a_bar():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    with make_progress(3, terminal) as progress:
        for _ in range(3):
            progress.step(2.5, 100)
    assert "3/3" in terminal.getvalue() and "loss 2.50" in terminal.getvalue() and "tokens/s" in terminal.getvalue()


def test_first_and_last_never_share_a_step():
    assert first_and_last([4.0]) == (4.0, 4.0)
    assert first_and_last([4.0, 3.0, 2.0]) == (4.0, 2.0)
    assert first_and_last([float(n) for n in range(20)]) == (2.0, 17.0)


def test_help_does_not_import_torch():
    code = "import sys\nfrom cake_kda_jit.demo import main\nassert main(['--help']) == 0 and 'torch' not in sys.modules"
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    )
    assert "--backward" in shown.stdout
