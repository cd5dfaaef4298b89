// An fp32 number as a sum of narrower ones: each part is the rest rounded to nearest, and every rest is exact.
#include <cstdint>
#include <cstring>

#include <cuda_bf16.h>

namespace {

// parts[p] holds part p of x in its lower half and of y in its upper half. Three parts of 8 bits hold fp32's 24.
__device__ __forceinline__ void split_bf16x3(uint32_t (&parts)[3], float x, float y) {
  for (int p = 0; p < 3; ++p) {
    const __nv_bfloat162 rounded = __floats2bfloat162_rn(x, y);
    memcpy(&parts[p], &rounded, sizeof rounded);
    x -= __uint_as_float(parts[p] << 16);
    y -= __uint_as_float(parts[p] & 0xffff0000u);
  }
}

}  // namespace
