"""host/shared_memory.hpp against a runtime that counts: what is asked of it, by whom, and what is remembered."""

from __future__ import annotations

import subprocess

from cake_kda_jit.compiler.discover import find_host_compiler
from cake_kda_jit.paths import templates_dir

# The two functions of the runtime that the header calls. Each thread has its own current device, as there.
RUNTIME = """
#pragma once
#include <atomic>
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorNoDevice = 100 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
inline std::atomic<int> questions{0};
inline std::atomic<int> bytes{0};
inline std::atomic<bool> refuses{false};
inline thread_local int current_device = 0;
inline cudaError_t cudaGetDevice(int* device) {
  if (current_device < 0) return cudaErrorNoDevice;
  *device = current_device;
  return cudaSuccess;
}
template <typename T>
cudaError_t cudaFuncSetAttribute(T*, cudaFuncAttribute, int value) {
  ++questions;
  bytes = value;
  return refuses ? cudaErrorInvalidValue : cudaSuccess;
}
"""

PROGRAM = """
#include "host/shared_memory.hpp"
#include <cstdio>
#include <thread>
#include <vector>
template <int> void kernel() {}

// What a call returns, and how many questions it asked.
template <int kNumber, size_t kBytes>
void call(int device) {
  current_device = device;
  const int before = questions;
  const cudaError_t error = allow_shared_memory<kernel<kNumber>, kBytes>();
  std::printf("%d:%d ", static_cast<int>(error), questions - before);
}

int main() {
  call<0, 100000>(0), call<0, 100000>(0), std::printf("bytes %d\\n", bytes.load());
  call<1, 200000>(0), call<1, 200000>(0), std::printf("bytes %d\\n", bytes.load());
  for (int device : {1, 63, 64, 1, 63, 64, 0}) call<0, 100000>(device);
  std::puts("");
  refuses = true, call<2, 300000>(0), call<2, 300000>(0);
  refuses = false, call<2, 300000>(0), call<2, 300000>(0), std::puts("");
  call<0, 100000>(-1), call<0, 100000>(0), std::puts("");

  questions = 0;
  std::vector<std::thread> threads;
  std::atomic<int> failed{0};
  for (int n = 0; n < 8; ++n) {
    threads.emplace_back([&, n] {
      current_device = n % 4;
      for (int i = 0; i < 10000; ++i) failed += allow_shared_memory<kernel<3>, 400000>() != cudaSuccess;
    });
  }
  for (std::thread& thread : threads) thread.join();
  const int asked = questions;
  for (int device = 0; device < 4; ++device) current_device = device, allow_shared_memory<kernel<3>, 400000>();
  std::printf("failed %d, asked for each device %d, at most once a thread %d, again %d\\n", failed.load(), asked >= 4,
              asked <= 8, questions - asked);
}
"""

EXPECTED = """\
0:1 0:0 bytes 100000
0:1 0:0 bytes 200000
0:1 0:1 0:1 0:0 0:0 0:1 0:0
1:1 1:1 0:1 0:0
100:0 0:0
failed 0, asked for each device 1, at most once a thread 1, again 0
"""
"""A line each: a kernel twice; another one with its own bytes; devices, of which the 65th is asked every time; a
refusal, which is returned and asked again; no device, which is returned; eight threads on four devices."""


def test_a_kernel_asks_once_for_each_device(tmp_path):
    (tmp_path / "cuda_runtime.h").write_text(RUNTIME)
    source, program = tmp_path / "program.cpp", tmp_path / "program"
    source.write_text(PROGRAM)
    flags = ("-std=c++17", "-O1", "-pthread", f"-I{tmp_path}", f"-I{templates_dir()}")
    subprocess.run([find_host_compiler().path, *flags, str(source), "-o", str(program)], check=True)
    found = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    assert [line.strip() for line in found.splitlines()] == EXPECTED.splitlines()
