// How a consumer warpgroup hands what a chunk leaves in shared memory to the producer warpgroup, which has it stored.
// Included after chunk_ring.cuh.
#include <cstdint>

namespace {

// That tiles lie there to be stored, and that the next ones may: at the latter those arrive that store.
struct OutgoingBarriers {
  uint64_t full, empty;

  __device__ __forceinline__ void init(int num_storing) {
    mbarrier_init(shared_address(&full), kGroupThreads);
    mbarrier_init(shared_address(&empty), num_storing);
  }
};

// A consumer warp's side: writes tiles once a chunk.
struct Outlet {
  OutgoingBarriers& barriers;
  unsigned parity = 1;

  __device__ __forceinline__ void begin() const { mbarrier_wait(shared_address(&barriers.empty), parity); }

  // Without __syncwarp() ptxas serialises a walk's wgmma (C7511).
  __device__ __forceinline__ void end() {
    __syncwarp();
    mbarrier_arrive(shared_address(&barriers.full));
    parity ^= 1;
  }
};

}  // namespace
