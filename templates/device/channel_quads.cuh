// Quads: four successive channels of a row, as fp32 (float4) or as 16-bit numbers (uint2, two to a word, the lower one
// first). Included after beta_value.cuh.
#include <cstdint>
#include <cstring>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

__device__ __forceinline__ float4 operator*(const float4& a, const float4& b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}

__device__ __forceinline__ float4 operator*(float a, const float4& b) {
  return make_float4(a * b.x, a * b.y, a * b.z, a * b.w);
}

__device__ __forceinline__ float4 ones() { return make_float4(1.0f, 1.0f, 1.0f, 1.0f); }

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
__device__ __forceinline__ float4 unpack(const uint2& quad) {
  const float2 low = unpack_pair<kDtype>(quad.x), high = unpack_pair<kDtype>(quad.y);
  return make_float4(low.x, low.y, high.x, high.y);
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t word;
  memcpy(&word, &pair, sizeof word);
  return word;
}

__device__ __forceinline__ uint2 pack_bf16(const float4& quad) {
  return make_uint2(pack_bf16(quad.x, quad.y), pack_bf16(quad.z, quad.w));
}

__device__ __forceinline__ uint32_t pack_fp16(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  uint32_t word;
  memcpy(&word, &pair, sizeof word);
  return word;
}

__device__ __forceinline__ uint2 pack_fp16(const float4& quad) {
  return make_uint2(pack_fp16(quad.x, quad.y), pack_fp16(quad.z, quad.w));
}

__device__ __forceinline__ uint32_t multiply_fp16(uint32_t a, uint32_t b) {
  __half2 left, right;
  memcpy(&left, &a, sizeof a);
  memcpy(&right, &b, sizeof b);
  const __half2 product = __hmul2(left, right);
  memcpy(&a, &product, sizeof a);
  return a;
}

__device__ __forceinline__ uint2 multiply_fp16(const uint2& a, const uint2& b) {
  return make_uint2(multiply_fp16(a.x, b.x), multiply_fp16(a.y, b.y));
}

// One head of a strided [T, heads, channels] tensor, from `channel` on. row_bytes is what dense_row_bytes says of it.
struct HeadRows {
  const char* tensor;
  const int64_t* strides;
  uint32_t row_bytes;
  int64_t offset;  // of the head and the channel, in elements

  __device__ __forceinline__ HeadRows(const void* tensor, const int64_t* strides, uint32_t row_bytes, int head,
                                      int channel)
      : tensor(static_cast<const char*>(tensor)),
        strides(strides),
        row_bytes(row_bytes),
        offset(head * strides[1] + channel * strides[2]) {}

  // Rows [token, token + kCount), as 16-bit numbers (uint2) or fp32 (float4). Those from `valid` on, which may hold
  // anything, are not read and count as 0.
  template <int kCount, typename Quad>
  __device__ __forceinline__ void load(Quad (&quads)[kCount], int token, int valid) const {
    constexpr int kBytes = sizeof(Quad) / 4;  // of an element
    const char* const first = tensor + kBytes * (offset + token * strides[0]);
    if (row_bytes != 0 && valid >= kCount) {
#pragma unroll
      for (int r = 0; r < kCount; ++r) {
        quads[r] = __ldg(reinterpret_cast<const Quad*>(first + uint64_t{row_bytes} * static_cast<uint32_t>(r)));
      }
      return;
    }
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      quads[r] = Quad{};
      if (r < valid) load_elements(quads[r], first + kBytes * r * strides[0]);
    }
  }

  __device__ __forceinline__ void load_elements(uint2& quad, const char* first) const {
    const auto* const elements = reinterpret_cast<const unsigned short*>(first);
    uint32_t value[4];
    for (int c = 0; c < 4; ++c) value[c] = __ldg(elements + c * strides[2]);
    quad = make_uint2(value[0] | value[1] << 16, value[2] | value[3] << 16);
  }

  __device__ __forceinline__ void load_elements(float4& quad, const char* first) const {
    const auto* const elements = reinterpret_cast<const float*>(first);
    quad = make_float4(__ldg(elements), __ldg(elements + strides[2]), __ldg(elements + 2 * strides[2]),
                       __ldg(elements + 3 * strides[2]));
  }
};

// Bytes from row to row where every quad of a [T, heads, channels] tensor is one aligned vector, otherwise 0.
inline uint32_t dense_row_bytes(const void* tensor, const int64_t* strides, int dtype) {
  const int64_t bytes = dtype == kFp32 ? 4 : 2, row_bytes = bytes * strides[0];
  const bool is_dense = strides[2] == 1 && strides[0] % 4 == 0 && strides[1] % 4 == 0 &&
                        reinterpret_cast<uintptr_t>(tensor) % (4 * bytes) == 0;
  return is_dense && row_bytes > 0 && row_bytes <= 0xffffffff ? static_cast<uint32_t>(row_bytes) : 0;
}

}  // namespace
