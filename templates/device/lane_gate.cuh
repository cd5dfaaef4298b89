// The gate of one head: the decay d = e^g of x = raw + dt_bias, and backwards. With a = e^A_log
//     ready      g = x                         dg/dx = 1
//     softplus   g = -a softplus(x)            dg/dx = -a sigmoid(x)                 dA_log = sum dg g
//     bounded    g = lower_bound sigmoid(a x)  dg/dx = lower_bound a s (1 - s)       dA_log = sum dx x
// Included after gate_forms.cuh.
#include <cfloat>

namespace {

constexpr float kLn2 = 0.69314718055994531f;

template <int kForm>
__device__ __forceinline__ float gate_decay(float x, float amplitude, float lower_bound) {
  if constexpr (kForm == kGateReady) return exp2_approximate(kLog2E * x);
  if constexpr (kForm == kGateSoftplus) return exp2_approximate(-amplitude * softplus2(kLog2E * x));
  const float sigmoid = reciprocal(1.0f + exp2_approximate(-kLog2E * amplitude * x));
  return exp2_approximate(kLog2E * lower_bound * sigmoid);
}

// dx from dg, and the amplitude's term added to its sum. Behind a decay of exactly 0 dx is 0, and where dx is 0, the
// term is: x and g may be infinite there, so both are selected. The slope is finite, and exactly 0 far out.
template <int kForm>
__device__ __forceinline__ float gate_backward(float dg, float x, float amplitude, float lower_bound,
                                               float& amplitude_sum) {
  if constexpr (kForm == kGateBounded) {
    const float e = exp2_approximate(-fabsf(kLog2E * amplitude * x)), r = reciprocal(1.0f + e);
    const float dx = dg * (e * r * (r * fmaxf(lower_bound * amplitude, -FLT_MAX)));
    amplitude_sum = fmaf(dx, dx == 0.0f ? 0.0f : x, amplitude_sum);
    return dx;
  }
  if constexpr (kForm == kGateSoftplus) {
    const float g2 = -amplitude * softplus2(kLog2E * x);
    const float slope = -amplitude * reciprocal(1.0f + exp2_approximate(-kLog2E * x));
    const float dx = exp2_approximate(g2) == 0.0f ? 0.0f : dg * slope;
    amplitude_sum = fmaf(dg, dx == 0.0f ? 0.0f : kLn2 * g2, amplitude_sum);
    return dx;
  }
  return exp2_approximate(kLog2E * x) == 0.0f ? 0.0f : dg;
}

}  // namespace
