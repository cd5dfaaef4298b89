// Products of a warpgroup, 128 threads, for sm_90a: wgmma with its left factor in registers.
//
// They run beside the threads. From the first one to the wait that ends its group, nobody touches their accumulators,
// and the fragments of the left factor are only read.
#include <cstdint>

namespace {

// Before the first product and after registers that products use have been written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }

// Until at most kPending groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kPending) : "memory");
}

// Keeps the compiler from reading accumulators ahead of the wait before it.
template <int kNumTiles>
__device__ __forceinline__ void settle(float (&d)[kNumTiles][4]) {
#pragma unroll
  for (int n = 0; n < kNumTiles; ++n) {
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[n][i]) : : "memory");
  }
}

// Makes what this thread wrote to shared memory visible to wgmma, which reads it as another proxy; a barrier follows.
__device__ __forceinline__ void fence_shared_for_wgmma() {
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

// How the right factor lies in shared memory, rows of it kRowBytes long and swizzled over as many bytes: 16-byte
// columns are exchanged among 8 rows. The address is added as address / 16.
__device__ constexpr uint64_t describe_rows(uint32_t row_bytes, uint32_t leading_bytes, uint32_t stride_bytes) {
  const uint64_t swizzle = row_bytes == 128 ? 1 : row_bytes == 64 ? 2 : 3;
  return uint64_t{leading_bytes / 16} << 16 | uint64_t{stride_bytes / 16} << 32 | swizzle << 62;
}

// Four 8 x 8 matrices of 16-bit numbers to shared memory. Lane l gives the address of row l % 8 of matrix l / 8 and
// holds, of matrix i, elements (g, 2 t) and (g, 2 t + 1) in words[i], with g = lane / 4 and t = lane % 4.
__device__ __forceinline__ void stmatrix_x4(uint32_t row_address, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4};"
               : : "r"(row_address), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}

}  // namespace
