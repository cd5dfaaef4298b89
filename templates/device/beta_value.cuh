// The write strength beta as it enters the products. Dtypes are run-time codes.
#include <cstdint>

#include <cuda_fp16.h>

namespace {

enum Dtype : int { kBf16 = 0, kFp16 = 1, kFp32 = 2 };
enum BetaForm : int { kBetaReady = 0, kBetaSigmoid = 1, kBetaTwiceSigmoid = 2 };

// An element's bits, to be converted when they are needed: a conversion would wait for the load.
__device__ __forceinline__ uint32_t load_bits(const void* tensor, int dtype, int64_t offset) {
  if (dtype == kFp32) return __ldg(static_cast<const unsigned*>(tensor) + offset);
  return __ldg(static_cast<const unsigned short*>(tensor) + offset);
}

__device__ __forceinline__ float float_of_bits(int dtype, uint32_t bits) {
  if (dtype == kFp32) return __uint_as_float(bits);
  if (dtype == kBf16) return __uint_as_float(bits << 16);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

__device__ __forceinline__ float beta_of(int form, float given) {
  if (form == kBetaReady) return given;
  const float sigmoid = 1.0f / (1.0f + expf(-given));
  return form == kBetaSigmoid ? sigmoid : 2.0f * sigmoid;
}

}  // namespace
