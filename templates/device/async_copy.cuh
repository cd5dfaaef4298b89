// Copies from global to shared memory that run beside the code, for sm_80 and later. A thread's copies are committed in
// groups; groups end in order. What a thread copied is seen by the others after its wait and a barrier.
#include <cstdint>

namespace {

// 16 bytes; both addresses are multiples of 16.
__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(shared), "l"(global) : "memory");
}

// 16 bytes, or as many zeros: then nothing is read.
__device__ __forceinline__ void copy_async_16_or_zeros(uint32_t shared, const void* global, bool is_copied) {
  const int bytes = is_copied ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(shared), "l"(global), "r"(bytes) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }

// Waits until at most kPending of this thread's groups, the latest ones, are under way.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kPending) : "memory");
}

}  // namespace
