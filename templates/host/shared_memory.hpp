// A kernel's leave to have more dynamic shared memory than the 48 KiB that every kernel has. Made on the host.
#include <atomic>
#include <cstddef>
#include <cstdint>

#include <cuda_runtime.h>

namespace {

// kKernel may be launched with kBytes of dynamic shared memory on the current device. The runtime keeps that with the
// kernel until the device is reset, and takes microseconds to be asked: in a process it is asked once for each device.
// What it refuses is asked again. A kernel has one size; a smaller second one would take the first one's leave away.
template <auto kKernel, size_t kBytes>
cudaError_t allow_shared_memory() {
  static std::atomic<uint64_t> allowed{0};  // a bit for each of the first 64 devices; the others are asked every time
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (allowed.load(std::memory_order_acquire) & bit) return cudaSuccess;
  error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error == cudaSuccess) allowed.fetch_or(bit, std::memory_order_release);
  return error;
}

}  // namespace
