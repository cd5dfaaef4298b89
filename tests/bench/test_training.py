"""The training run: the same losses for the same seed, a file per run, a picture of several files."""

from __future__ import annotations

import itertools
import json

import pytest

from cake_kda_jit.bench import training


def run(path, *options: str) -> dict[str, object]:
    assert training.main(["--steps", "3", "--json", str(path), *options]) == 0
    return json.loads(path.read_text(encoding="utf-8"))


def test_losses_follow_the_seed_alone(tmp_path):
    first, again, other = (run(tmp_path / f"{n}.json", "--seed", seed) for n, seed in enumerate("001"))
    losses = [[row["loss"] for row in report["rows"]] for report in (first, again, other)]
    assert losses[0] == losses[1] != losses[2]
    assert [row["step"] for row in first["rows"]] == [1, 2, 3] and first["what"] == training.WHAT
    assert losses[0][0] == pytest.approx(5.545, abs=1e-3), "256 bytes are equally likely at first: ln 256"
    assert losses[0] == sorted(losses[0], reverse=True)


def test_both_backwards_train_alike(tmp_path):
    saved, replay = (run(tmp_path / f"{mode}.json", "--backward", mode) for mode in ("saved", "replay"))
    assert saved["rows"] == replay["rows"]


def test_a_picture_of_several_runs(tmp_path):
    files = [tmp_path / "bf16.json", tmp_path / "fp32.json"]
    for path in files:
        run(path, "--kernel-dtype", path.stem)
    picture = tmp_path / "training.png"
    assert training.main(["--draw", str(picture), *map(str, files)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        training.main(["--draw", str(picture)])


def test_documents_are_of_six_words():
    one, other = (list(itertools.islice(training.documents(seed), 20)) for seed in (0, 0))
    assert one == other
    assert all(len(set(text.split())) <= training.WORDS and 20 <= len(text.split()) <= 60 for text in one)
    assert len({word for text in one for word in text.split()}) > 30
