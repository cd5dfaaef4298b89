"""The forward's bench: shapes, the slice that results are checked on, and peers that are not there."""

from __future__ import annotations

import pytest
import torch

from cake_kda_jit.bench import forward, peers
from cake_kda_jit.bench.problems import relative_error
from cake_kda_jit.errors import UnsupportedProblemError

CPU = torch.device("cpu")


def test_documents_of_a_shape():
    """Lengths by weights 1, 1.74, 2.48, 1.37, rounded down to 32; what is left goes to the last."""
    shape = forward.Shape.parse("32768,32,4,strong")
    boundaries = shape.boundaries()
    assert boundaries == [0, 4960, 13600, 25920, 32768]
    assert shape.name == "T 32768, H 32, 4 documents, strong gates"
    with pytest.raises(ValueError, match="'mild'; use strong or weak"):
        forward.Shape.parse("32768,32,4,mild")


@pytest.mark.parametrize("gates", ["strong", "weak"])
def test_our_arm_agrees_with_the_exact_slice(gates):
    """The slice is a prefix of the first document, so later tokens and other heads do not matter."""
    tensors, keywords = forward.make_inputs(forward.Shape.parse(f"320,3,2,{gates}"), CPU)
    arm = forward.our_arm(tensors, keywords)
    tokens = 96
    expected = forward.exact_slice(tensors, keywords, tokens)
    assert expected.shape == (tokens, 2, 128)
    assert relative_error(arm.run()[:tokens, [0, -1]], expected) < 2e-3  # o's rounding to bf16 is 1.7e-3
    assert "chunk_prepare" in arm.engine and "chunk_scan" in arm.engine
    assert arm.bytes == 320 * 3 * (forward.STATED_BYTES["chunk_prepare"] + forward.STATED_BYTES["chunk_scan"])


@pytest.mark.parametrize("peer", peers.PACKAGES)
def test_a_peer_that_is_not_installed_is_refused_by_name(peer, monkeypatch):
    def absent(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(peers, "import_module", absent)
    tensors, keywords = forward.make_inputs(forward.Shape.parse("64,1,1,strong"), CPU)
    with pytest.raises(
        UnsupportedProblemError, match=rf"--peers {peer}: .*No module named.*install {peers.PACKAGES[peer][0]}=="
    ):
        peers.make_arms([peer], tensors, keywords, [0, 64])


def test_an_unknown_peer_is_refused(capsys):
    with pytest.raises(SystemExit):
        forward.main(["--peers", "fla,flashier"])
    assert "--peers names flashier; there are fla, cudnn" in capsys.readouterr().err
