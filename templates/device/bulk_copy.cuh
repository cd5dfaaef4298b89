// Copies by the bulk copy engine of sm_90: one thread starts them. To shared memory a barrier of the CTA that receives
// counts their bytes; barriers are given by their addresses. Included after ldmatrix.cuh and mbarrier.cuh.
#include <cstdint>

#include <cuda.h>

namespace {

// As many bytes, a multiple of 16; both addresses are multiples of 16.
__device__ __forceinline__ void copy_bulk(void* target, const void* source, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               : : "r"(shared_address(target)), "l"(source), "r"(bytes), "r"(barrier) : "memory");
}

// The box of a tensor map at (column, row, tile): to the same place in all kNumCtas CTAs of the cluster, and counted by
// the barrier at the same place in each.
template <int kNumCtas>
__device__ __forceinline__ void copy_box(void* target, const CUtensorMap& map, int column, int row, int tile,
                                         uint32_t barrier) {
  if constexpr (kNumCtas == 1) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, { %3, %4, %5}], [%2];"
        : : "r"(shared_address(target)), "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(tile)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, { %3, %4, %5}], [%2], %6;"
        : : "r"(shared_address(target)), "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(tile),
          "h"(static_cast<uint16_t>((1 << kNumCtas) - 1))
        : "memory");
  }
}

// From shared memory to the box of a tensor map at (column, row, tile). Who wrote there has fenced it for the engine.
[[maybe_unused]] __device__ __forceinline__ void store_box(const CUtensorMap& map, int column, int row, int tile,
                                                           const void* source) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, { %2, %3, %4}], [%1];"
               : : "l"(&map), "r"(shared_address(source)), "r"(column), "r"(row), "r"(tile) : "memory");
}

// Until what this thread's stores read may be overwritten.
[[maybe_unused]] __device__ __forceinline__ void wait_for_stores_to_read() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" : : : "memory");
}

// Arrives, and the phase does not end before as many bytes have been copied.
__device__ __forceinline__ void mbarrier_arrive_and_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(barrier), "r"(bytes) : "memory");
}

// Arrives as soon as all of this thread's copies by cp.async have ended.
__device__ __forceinline__ void mbarrier_arrive_behind_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" : : "r"(barrier) : "memory");
}

// Arrives at the same barrier of the cluster's CTA number `rank`, for memory that was read: nothing is made visible.
__device__ __forceinline__ void mbarrier_arrive_in_cluster(uint32_t barrier, unsigned rank) {
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; "
      "mbarrier.arrive.shared::cluster.b64 _, [remote]; }"
      : : "r"(barrier), "r"(rank) : "memory");
}

// Makes initialised barriers visible to the cluster and to copies; a barrier of threads follows.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

__device__ __forceinline__ unsigned rank_in_cluster() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all CTAs of the cluster.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" : : : "memory");
}

}  // namespace
