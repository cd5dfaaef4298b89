// An fp32 number as a sum of narrower ones: each part is the rest rounded to nearest, and every rest is exact.
#include <cstdint>

namespace {

// The bits of x rounded to TF32, ties away from zero; the 13 bits that TF32 lacks are zero.
__device__ __forceinline__ uint32_t round_to_tf32(float x) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
  return rounded & 0xffffe000u;
}

__device__ __forceinline__ void split_tf32x2(uint32_t& high, uint32_t& low, float x) {
  high = round_to_tf32(x);
  low = round_to_tf32(x - __uint_as_float(high));
}

}  // namespace
