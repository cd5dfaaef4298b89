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

__device__ __forceinline__ float sum_of_products(const float4& a, const float4& b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
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

// Rows [token, token + count) of one head of a strided [T, heads, channels] tensor, from `channel` on. With `is_dense`
// a quad of 16-bit numbers is 8 aligned bytes, one of fp32 16. Rows from `valid` on, which may hold anything, are not
// read and count as 0.
struct HeadRows {
  const void* tensor;
  int64_t offset;  // in elements
  int64_t token_stride;
  int64_t channel_stride;
  bool is_dense;

  __device__ __forceinline__ HeadRows(const void* tensor, const int64_t* strides, bool is_dense, int64_t token,
                                      int head, int channel)
      : tensor(tensor),
        offset(token * strides[0] + head * strides[1] + channel * strides[2]),
        token_stride(strides[0]),
        channel_stride(strides[2]),
        is_dense(is_dense) {}

  template <int kCount>
  __device__ __forceinline__ void load(uint2 (&quads)[kCount], int valid) const {
    if (is_dense) {
      const auto* source = static_cast<const uint2*>(tensor) + offset / 4;
#pragma unroll
      for (int r = 0; r < kCount; ++r) {
        quads[r] = r < valid ? __ldg(source + r * (token_stride / 4)) : make_uint2(0, 0);
      }
    } else {
      const auto* source = static_cast<const unsigned short*>(tensor) + offset;
#pragma unroll
      for (int r = 0; r < kCount; ++r) {
        uint32_t value[4];
        for (int c = 0; c < 4; ++c) {
          value[c] = r < valid ? __ldg(source + r * token_stride + c * channel_stride) : 0;
        }
        quads[r] = make_uint2(value[0] | value[1] << 16, value[2] | value[3] << 16);
      }
    }
  }

  template <int kCount>
  __device__ __forceinline__ void load(float4 (&quads)[kCount], int dtype, int valid) const {
    if (dtype == kFp32) {
      const auto* source = static_cast<const float*>(tensor) + offset;
#pragma unroll
      for (int r = 0; r < kCount; ++r) {
        const float* row = source + r * token_stride;
        if (r >= valid) {
          quads[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        } else if (is_dense) {
          quads[r] = __ldg(static_cast<const float4*>(tensor) + (offset + r * token_stride) / 4);
        } else {
          quads[r] = make_float4(__ldg(row), __ldg(row + channel_stride), __ldg(row + 2 * channel_stride),
                                 __ldg(row + 3 * channel_stride));
        }
      }
    } else {
      uint2 packed[kCount];
      load(packed, valid);
#pragma unroll
      for (int r = 0; r < kCount; ++r) {
        quads[r] = dtype == kBf16 ? unpack<kBf16>(packed[r]) : unpack<kFp16>(packed[r]);
      }
    }
  }
};

// Whether every quad of a [T, heads, channels] tensor is one aligned vector.
inline bool has_dense_quads(const void* tensor, const int64_t* strides, int dtype) {
  const uintptr_t bytes = dtype == kFp32 ? 16 : 8;
  return strides[2] == 1 && strides[0] % 4 == 0 && strides[1] % 4 == 0 &&
         reinterpret_cast<uintptr_t>(tensor) % bytes == 0;
}

}  // namespace
