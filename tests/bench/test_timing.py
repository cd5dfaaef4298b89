"""The timing script: its formats, and the memory that it states."""

from __future__ import annotations

import json

import pytest
import torch

from cake_kda_jit import make_plan
from cake_kda_jit.bench import timing
from cake_kda_jit.bench.problems import make_problem


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("timing") / "timing.json"
    before = torch.get_num_threads()
    assert timing.main(["--runs", "2", "--threads", "1", "--tokens", "64", "--json", str(path)]) == 0
    assert torch.get_num_threads() == before
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_file_has_the_keys_of_a_measurement(report):
    assert list(report) == ["schema", "what", "script", "commit", "date", "machine", "rows"]
    assert report["schema"] == 1 and report["what"] == timing.WHAT
    assert list(report["machine"]) == ["device", "driver", "cuda", "torch"]
    assert "1 threads" in report["machine"]["device"]
    assert [row["arm"] for row in report["rows"]] == list(timing.ARMS)
    for row in report["rows"]:
        assert list(row) == ["case", "arm", "engine", "ms", "bytes", "error"]
        assert 0 < row["ms"]["min"] <= row["ms"]["median"] <= row["ms"]["max"] and row["ms"]["runs"] == 2


def test_the_command_prints_both_tables(capsys):
    timing.main(["--runs", "1", "--tokens", "64"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(timing.WHAT) and f"torch {torch.__version__}" in lines[0]
    for arm in timing.ARMS:
        assert sum(line.startswith(f"| T 64, H = HV = 4, K = V = 128 | {arm} | ") for line in lines) == 1
    assert "| 128 | fp32 | 3592 | 2048 | 1280 | 384 | 272 |" in lines
    assert "| 128 | bf16 | 2056 | 1280 | 1152 | 256 | 144 |" in lines


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", [timing.SAVED, timing.KEPT, timing.REPLAY[512]])
def test_kept_bytes_are_those_of_the_contexts_shapes(options, head_dim):
    problem = make_problem((4096,), heads=1, head_dim=head_dim)
    plan = make_plan(problem.cu_seqlens, num_heads=1, head_dim=head_dim, device="cpu", segment_tokens=0)
    stated = timing.kept_bytes(head_dim, options) * 4096
    # one checkpoint row more for the segment's own start
    extra = 4 * head_dim * head_dim if options.backward == "replay" else 0
    assert timing.context_bytes(problem, plan, options) == stated + extra
    assert timing.context_bytes(problem, plan, None) == 0
