"""Inside CUDA graph capture nothing may be compiled: a cold call is refused, a warm one passes."""

from __future__ import annotations

import pytest
import torch

from cake_kda_jit import config, errors
from cake_kda_jit.runtime import launch as launch_module
from cake_kda_jit.runtime import load

from .test_build import run_tiny
from .tiny import HOST_ARCH, tiny_record


@pytest.fixture
def capturing(data, monkeypatch):
    """The device's stream is being captured; a call is (record, value of ``count``)."""
    monkeypatch.setattr(launch_module, "is_capturing", lambda device: True)
    monkeypatch.setattr(load, "_kernels", {})
    record = tiny_record("cpu")
    values = torch.tensor([1.0, 2.0, 3.0])

    def call():
        launch_module.launch(record, "named", {"values": values.data_ptr(), "count": 3, "factor": 2.0}, values.device)
        return values.tolist()

    monkeypatch.setattr(type(record.entry), "pack", _pack_without_threads(type(record.entry).pack))
    return call


def _pack_without_threads(pack):
    # The tiny kernel has one thread and no field for their number.
    return lambda self, values: pack(self, {name: v for name, v in values.items() if name != "num_threads"})


def test_cold_call_in_capture_is_refused_and_compiles_nothing(capturing, fake_cxx, cache_dir):
    fake = fake_cxx()
    with pytest.raises(errors.ColdCallInCapture, match="tiny__fp32 was first called inside CUDA graph capture.*warm"):
        capturing()
    assert fake.num_calls == 0 and not cache_dir.exists()


def test_even_a_built_kernel_is_not_loaded_in_capture(capturing, data):
    from cake_kda_jit.compiler.build import build

    assert run_tiny(build(tiny_record(), HOST_ARCH).library, 1.0) == [2.0, 4.0, 6.0]
    with pytest.raises(errors.ColdCallInCapture):
        capturing()


def test_warm_call_in_capture_passes(capturing, monkeypatch):
    monkeypatch.setattr(launch_module, "is_capturing", lambda device: False)
    assert capturing() == [4.0, 8.0, 12.0]
    monkeypatch.setattr(launch_module, "is_capturing", lambda device: True)
    assert capturing() == [16.0, 32.0, 48.0]
    assert [one.program for one in launch_module.last_launches()][-1] == "tiny"
    assert config.read("DISABLE") is False
