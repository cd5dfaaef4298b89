// d += a b on the tensor cores, by one warp, for sm_80 and later. With g = lane / 4 and t = lane % 4 a lane holds
//   d  rows g (d[0], d[1]) and g + 8 (d[2], d[3]), columns 2 t and 2 t + 1;
//   a  rows g (a[0], a[2]) and g + 8 (a[1], a[3]);    b  column g;
// inner index t in a[0], a[1], b0 and t + 4 in a[2], a[3], b1.
#include <cstdint>

namespace {

__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{ %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace
