"""Test compilers for real: compile and link a small library, and look at what came out."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ..arch import ARCHES
from .diagnose import first_error
from .discover import knows
from .elf import NotALibrary, read_library
from .toolchain import Toolchain, run_tool

_CPU_SOURCE = """\
#include <cmath>
#include <thread>
#include <vector>
extern "C" float probe(float x) {
  std::vector<std::thread> threads;
  threads.emplace_back([&] { x = std::sqrt(x); });
  for (auto& thread : threads) thread.join();
  return x;
}
"""
_CUDA_SOURCE = """\
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
__global__ void kernel(__nv_bfloat16* x) { x[threadIdx.x] = __hadd(x[threadIdx.x], x[0]); }
extern "C" int probe(__nv_bfloat16* x, cudaStream_t stream) {
  kernel<<<1, 32, 0, stream>>>(x);
  return cudaGetLastError();
}
"""


def probe_host(toolchain: Toolchain) -> str | None:
    """Compile and link a threaded C++ library with the host compiler; returns what is wrong, or None."""
    return _probe(_CPU_SOURCE, "probe.cpp", [toolchain.host.path, "-std=c++17", "-O1", "-pthread", "-fPIC", "-shared"])


def probe_nvcc(toolchain: Toolchain, arch: str | None = None) -> str | None:
    """Compile and link a library with the bf16 headers and the static CUDA runtime; returns what is wrong, or None.

    ``arch`` None takes the first target that the nvcc knows.
    """
    nvcc = toolchain.nvcc
    if arch is None:
        arch = next((name for name, a in ARCHES.items() if a.is_cuda and knows(nvcc, a)), None)
        if arch is None:
            return "it knows none of our targets"
    directory = nvcc.facts["library_directory"]
    command = [nvcc.path, "-std=c++17", "-O1", f"-gencode={ARCHES[arch].gencode}", "-shared", "-cudart=static",
               f"-ccbin={toolchain.host.path}", "-Xcompiler=-fPIC", "-Xlinker=-z,defs"]  # fmt: skip
    if directory:
        command.append(f"-L{os.path.join(nvcc.facts['root'], directory)}")
    return _probe(_CUDA_SOURCE, "probe.cu", command)


def _probe(source: str, name: str, command: list[str]) -> str | None:
    with tempfile.TemporaryDirectory(prefix="cake_kda_jit-probe-") as directory:
        (Path(directory) / name).write_text(source, encoding="utf-8")
        status, out, err = run_tool([*command, "-o", "probe.so", name], cwd=directory, seconds=300.0)
        if status:
            return first_error(err + out) or f"exit status {status}"
        try:
            library = read_library(Path(directory) / "probe.so")
        except (OSError, NotALibrary) as error:
            return f"it returned success, but its output is {error}"
        return None if "probe" in library.functions else "its output does not export the function"
