"""The demo on several ranks: the loss of one."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from cake_kda_jit import CommunicationError
from cake_kda_jit.demo import main, ranks
from cake_kda_jit.demo.settings import LAYOUTS, parse

from .test_command import arguments, run_json, text, threads_as_before

assert text and threads_as_before  # fixtures


def test_several_ranks_have_the_loss_of_one(capsys, text):
    alone = run_json(capsys, arguments(text))
    shared = run_json(capsys, arguments(text, "--ranks", "2", "--layout", "per_document_zigzag"))
    assert not dist.is_initialized()
    # Sums in another order, rounded to bf16 on the kernels: 1e-4 of the loss after 12 steps.
    assert shared["losses"] == pytest.approx(alone["losses"], rel=1e-3)
    assert shared["validation_loss"] == pytest.approx(alone["validation_loss"], rel=1e-3)
    assert shared["settings"]["ranks"] == 2
    # A document is on rank 0, 1 and 0 again: it has an inner part, whose summary is walked over.
    assert "transfer_walk__bf16x3_hw64" in shared["kernels"]


def test_a_rank_that_ends_is_an_error_and_no_hang(capsys, text, monkeypatch):
    monkeypatch.setattr(ranks, "_run_other", _end)
    assert main(arguments(text, "--ranks", "2")) == 1
    assert "a rank of the demo has ended" in capsys.readouterr().err
    assert not dist.is_initialized()


def _end(index, settings, folder):
    """Join the others, and leave."""
    ranks._join_group(folder, index + 1, settings)


def test_devices(monkeypatch):
    """A device for each rank if there are enough; otherwise they share the one that is named."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for given, names in (
        (["--device", "cuda", "--ranks", "2"], ["cuda:0", "cuda:1"]),
        (["--device", "cuda", "--ranks", "3"], ["cuda"] * 3),
        (["--device", "cuda:1", "--ranks", "2"], ["cuda:1"] * 2),
        (["--device", "cuda"], ["cuda"]),
        (["--ranks", "2"], ["cpu"] * 2),
    ):
        settings = parse(given)
        assert [ranks.device_name(settings, rank) for rank in range(settings.ranks)] == names


def test_settings(capsys):
    assert (parse([]).ranks, parse([]).layout) == (1, "zigzag")
    assert parse(["--ranks", "2", "--layout", "contiguous"]).layout in LAYOUTS
    assert main(["--layout", "striped"]) == 2 and "--layout" in capsys.readouterr().err
    assert issubclass(CommunicationError, Exception)
