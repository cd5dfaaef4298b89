// An 8 x 8 matrix of 16-bit numbers transposed in the registers of a warp, for sm_75 and later. Lane l holds elements
// (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1), the first in the lower half.
#include <cstdint>

namespace {

__device__ __forceinline__ uint32_t transpose_8x8(uint32_t matrix) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(matrix));
  return transposed;
}

}  // namespace
