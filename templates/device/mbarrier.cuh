// Barriers in shared memory at which some threads arrive and others wait, for sm_90 and later. A barrier completes a
// phase when as many have arrived as it was made for; phases alternate in parity, from 0.
#include <cstdint>

namespace {

// By one thread; a __syncthreads() follows before anybody uses the barrier.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(barrier), "r"(num_arrivals) : "memory");
}

// What this thread wrote before is seen by those that wait for the phase.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(barrier) : "memory");
}

// Until the phase of that parity is complete. The one before phase 0 counts as complete.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
{% if arch.capability >= (9, 0) %}
      "{ .reg .pred done; wait: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra wait; }"
{% else %}
      "{ .reg .pred done; wait: mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra wait; }"
{% endif %}
      : : "r"(barrier), "r"(parity) : "memory");
}

}  // namespace
