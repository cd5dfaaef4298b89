// 8 x 8 matrices of 16-bit numbers from shared memory to the registers of a warp, for sm_75 and later.
#include <cstdint>

namespace {

// Four 8 x 8 matrices of 16-bit numbers, transposed. Lane l gives the address of row l % 8 of matrix l / 8 and gets, of
// matrix i, elements (2 t, g) and (2 t + 1, g) in fragment[i], with g = lane / 4 and t = lane % 4.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&fragment)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(row_address));
}

}  // namespace
