// SiLU and its derivative, two special-function operations each, within a few units of fp32's last place.
{% include "device/special_functions.cuh" %}

namespace {

// The larger one; NaN if either is, where fmaxf would drop it.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// silu(x) = x s with s = 1 / (1 + e), e = exp(-x).
__device__ __forceinline__ float silu(float x) {
  return x * reciprocal(1.0f + exp2_approximate(-kLog2E * x));
}

// silu'(x) = s (1 + x (1 - s)), with 1 - s as e s, which does not cancel. Below -80, where it is 0, e would overflow.
__device__ __forceinline__ float silu_derivative(float x) {
  x = max_or_nan(x, -80.0f);
  const float e = exp2_approximate(-kLog2E * x), s = reciprocal(1.0f + e);
  return s * fmaf(x, e * s, 1.0f);
}

}  // namespace
