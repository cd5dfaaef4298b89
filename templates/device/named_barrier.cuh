// Barriers between some warps of a CTA, for sm_70 and later. Barrier 0 is that of __syncthreads. A barrier completes
// when kThreads threads, whole warps, have come to it. What a thread wrote to shared memory before it came is seen by
// those that waited.
namespace {

template <int kThreads>
__device__ __forceinline__ void wait_at_barrier(int barrier) {
  asm volatile("bar.sync %0, %1;" : : "r"(barrier), "n"(kThreads) : "memory");
}

// Comes to the barrier and goes on.
template <int kThreads>
__device__ __forceinline__ void arrive_at_barrier(int barrier) {
  asm volatile("bar.arrive %0, %1;" : : "r"(barrier), "n"(kThreads) : "memory");
}

}  // namespace
