// Numbers in memory: dtypes as run-time codes, and pairs of 16-bit numbers in a word, the lower one first.
#include <cstdint>
#include <cstring>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

enum Dtype : int { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

template <int kDtype>
__device__ __forceinline__ float to_float(unsigned short bits) {
  return kDtype == kFp16 ? __half2float(__ushort_as_half(bits)) : __bfloat162float(__ushort_as_bfloat16(bits));
}

template <int kDtype>
__device__ __forceinline__ unsigned short to_16_bits(float value) {
  return kDtype == kFp16 ? __half_as_ushort(__float2half_rn(value)) : __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

template <int kDtype>
__device__ __forceinline__ float2 unpack_pair(uint32_t word) {
  if constexpr (kDtype == kFp16) {
    __half2 pair;
    memcpy(&pair, &word, sizeof pair);
    return __half22float2(pair);
  } else {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
  }
}

template <int kDtype>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  uint32_t word;
  if constexpr (kDtype == kFp16) {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&word, &pair, sizeof word);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&word, &pair, sizeof word);
  }
  return word;
}

}  // namespace
