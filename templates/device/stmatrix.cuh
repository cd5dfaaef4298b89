// 8 x 8 matrices of 16-bit numbers from the registers of a warp to shared memory: what ldmatrix_x4_trans would read.
#include <cstdint>

namespace {

// Lane l gives the address of row l % 8 of matrix l / 8; fragment[i] goes to elements (2 t, g) and (2 t + 1, g) of
// matrix i.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t row_address, const uint32_t (&fragment)[4]) {
{% if arch.capability >= (9, 0) %}
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], { %1, %2, %3, %4};"
               :
               : "r"(row_address), "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
{% else %}
  constexpr unsigned kAllLanes = 0xffffffffu;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(fragment[i]));
    const uint32_t address = __shfl_sync(kAllLanes, row_address, 8 * i + lane / 4) + lane % 4 * 4;
    asm volatile("st.shared.b32 [%0], %1;" : : "r"(address), "r"(transposed) : "memory");
  }
{% endif %}
}

}  // namespace
