// The write strength beta as it enters the products. Dtypes are run-time codes.
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

enum Dtype : int { kBf16 = 0, kFp16 = 1, kFp32 = 2 };
enum BetaForm : int { kBetaReady = 0, kBetaSigmoid = 1, kBetaTwiceSigmoid = 2 };

__device__ __forceinline__ float load_as_float(const void* tensor, int dtype, int64_t offset) {
  if (dtype == kBf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(tensor)[offset]);
  if (dtype == kFp16) return __half2float(static_cast<const __half*>(tensor)[offset]);
  return static_cast<const float*>(tensor)[offset];
}

__device__ __forceinline__ float beta_of(int form, float given) {
  if (form == kBetaReady) return given;
  const float sigmoid = 1.0f / (1.0f + expf(-given));
  return form == kBetaSigmoid ? sigmoid : 2.0f * sigmoid;
}

}  // namespace
