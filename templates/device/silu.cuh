// SiLU and its derivative, two special-function operations each, within a few units of fp32's last place.
namespace {

constexpr float kLog2E = 1.44269504f;

// 2^x and 1 / x; subnormal results are 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return reciprocal;
}

// The larger one; NaN if either is, where fmaxf would drop it.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// silu(x) = x s with s = 1 / (1 + e), e = exp(-x).
__device__ __forceinline__ float silu(float x) {
  return x * reciprocal_approx(1.0f + exp2_approx(-kLog2E * x));
}

// silu'(x) = s (1 + x (1 - s)), with 1 - s as e s, which does not cancel. Below -80, where it is 0, e would overflow.
__device__ __forceinline__ float silu_derivative(float x) {
  x = max_or_nan(x, -80.0f);
  const float e = exp2_approx(-kLog2E * x), s = reciprocal_approx(1.0f + e);
  return s * fmaf(x, e * s, 1.0f);
}

}  // namespace
