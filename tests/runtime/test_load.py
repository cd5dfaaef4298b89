"""Loading and the C ABI: verified first, refused by the library's own entry, accounted for."""

from __future__ import annotations

import ctypes
import dataclasses
import subprocess
import sys
import time

import pytest
import torch

from cake_kda_jit import UnsupportedProblemError, build, load
from cake_kda_jit.arch import host_arch
from cake_kda_jit.catalog import registry
from cake_kda_jit.errors import AbiMismatch, DriverTooOld, LoadError, ToolchainNotFound
from cake_kda_jit.record import Entry, Field
from cake_kda_jit.runtime import load as loading
from cake_kda_jit.runtime.load import get_kernel


def zeros(record) -> dict[str, object]:
    return {f.name: (0,) * f.count if f.is_array else 0 for f in record.entry.fields}


# One shipped cpu record of each program: the entries differ by program only.
ONE_OF_EACH = {r.program: r for r in reversed(registry().shipped()) if r.family == "cpu" and "k128" not in r.variant}


@pytest.mark.parametrize("record", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_every_entry_refuses_an_empty_argument_block(record):
    """Null pointers and sizes of 0: a code and a message, never a crash."""
    with pytest.raises(UnsupportedProblemError, match=f"{record.symbol}: .+"):
        get_kernel(record, host_arch()).launch(zeros(record))


def test_num_heads_0_is_refused_through_the_c_abi():
    """Called as any program would call it: the block's bytes, the entry, then the message."""
    record = registry().get("transfer_walk", "bf16x3_hw64", "cpu")
    library = ctypes.CDLL(str(build(record, host_arch()).library))
    values = zeros(record) | {"num_chains": 1, "head_dim": 128, "num_threads": 1, "num_value_heads": 0}
    block = record.entry.pack(values)
    status = library.transfer_walk__bf16x3_hw64(ctypes.c_char_p(block), None)
    error = library.transfer_walk__bf16x3_hw64__error
    error.restype = ctypes.c_char_p
    assert status == 1
    assert b"num_value_heads is 0" in error()


def test_another_argument_layout_is_refused():
    record = registry().get("transfer_walk", "bf16x3_hw64", "cpu")
    artifact = build(record, host_arch())
    other = dataclasses.replace(record, entry=Entry((*record.entry.fields, Field("more", "i32"))))
    with pytest.raises(AbiMismatch, match="remove the entry or rebuild it"):
        load(dataclasses.replace(artifact, record=other))


def cuda_walk():
    """A CUDA library, and an argument block that it launches or fails to."""
    record = registry().get("transfer_walk", "bf16x3_hw64", "smxx")
    addresses = dict.fromkeys(("M", "B", "initial", "offsets", "entry", "exit"), 0x1000)
    sizes = {"num_chains": 1, "num_value_heads": 1, "num_block_heads": 1, "head_dim": 128}
    try:
        return load(build(record, "sm_90a")), zeros(record) | addresses | sizes
    except ToolchainNotFound as error:
        pytest.skip(f"no nvcc: {error.cause}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the launch would succeed: this machine has a driver")
def test_a_machine_without_a_cuda_driver():
    kernel, values = cuda_walk()
    with pytest.raises(DriverTooOld, match=r"InsufficientDriver.*built with CUDA \d+\.\d+.*update the driver"):
        kernel.launch(values)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("CUDA driver version is insufficient for CUDA runtime version (cudaErrorInsufficientDriver)", DriverTooOld),
        ("cuTensorMapEncodeTiled is not in this driver (cudaErrorSymbolNotFound)", DriverTooOld),
        ("an illegal memory access was encountered (cudaErrorIllegalAddress)", LoadError),
    ],
)
def test_the_driver_is_blamed_for_what_it_lacks_alone(monkeypatch, said, kind):
    """An old driver as the library tells of it: launch fails, and __error has CUDA's words."""
    kernel, values = cuda_walk()
    monkeypatch.setattr(kernel, "_launch", lambda block, stream: 2)
    monkeypatch.setattr(kernel, "_error", said.encode)
    monkeypatch.setattr(loading, "_driver", lambda: "a driver for CUDA 12.4")
    with pytest.raises(LoadError) as caught:
        kernel.launch(values)
    assert type(caught.value) is kind and said in str(caught.value)
    assert ("this machine has a driver for CUDA 12.4" in str(caught.value)) == (kind is DriverTooOld)


def test_a_second_process_compiles_nothing_and_loads_fast():
    """Looked up, verified and loaded in under 100 ms once torch is imported, without jinja2 or ninja."""
    record = registry().get("transfer_walk", "bf16x3_hw64", "cpu")
    build(record, host_arch())
    code = (
        "import sys, time, torch\n"
        "from cake_kda_jit.runtime.load import get_kernel\n"
        "from cake_kda_jit.catalog import registry\n"
        "from cake_kda_jit.arch import host_arch\n"
        "began = time.perf_counter()\n"
        "record = registry().get('transfer_walk', 'bf16x3_hw64', 'cpu')\n"
        "kernel = get_kernel(record, host_arch())\n"
        "print(time.perf_counter() - began, kernel.origin, *({'jinja2', 'ninja'} & set(sys.modules)))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    seconds, origin, *heavy = run.stdout.split()
    assert origin == "cache" and not heavy
    assert float(seconds) < 0.1


def test_a_launch_costs_little():
    """Packing and calling: 5 us on an idle machine; the bound leaves room for a busy one."""
    record = registry().get("transfer_walk", "bf16x3_hw64", "cpu")
    kernel = get_kernel(record, host_arch())
    values = zeros(record)
    best = min(_seconds_per_call(kernel, values) for _ in range(5))
    assert best < 25e-6


def _seconds_per_call(kernel, values, calls=200):
    began = time.perf_counter()
    for _ in range(calls):
        block = kernel.record.entry.pack(values)
        kernel._launch(block, 0)
    return (time.perf_counter() - began) / calls
