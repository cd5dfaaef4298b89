// Input transforms, each with its derivative: q, k <- x * rsqrt(sum x^2 + 1e-6); beta as it is, sigmoid or twice
// sigmoid; the gate, whose log decay g is, with x = g_raw + dt_bias and a = exp(A_log),
//     ready      g = g_raw
//     softplus   g = -a softplus(x)             dg/dx = -a sigmoid(x)             dA_log = sum dg g
//     bounded    g = lower_bound sigmoid(a x)   dg/dx = lower_bound a s (1 - s)   dA_log = sum dx x
// Included after matrix.hpp.
#include <algorithm>
#include <cmath>

namespace {

enum GateForm : int { kGateReady = 0, kGateSoftplus = 1, kGateBounded = 2 };
enum BetaForm : int { kBetaReady = 0, kBetaSigmoid = 1, kBetaTwiceSigmoid = 2 };

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// s (1 - s) without the cancellation near s = 1; exactly 0 far out on either side.
inline float sigmoid_slope(float x) {
  const float e = std::exp(-std::fabs(x));
  return e / ((1.0f + e) * (1.0f + e));
}

// log(1 + e^x). log(1 + u) would be exactly 0 below x = -16.6; log1p keeps every digit.
inline float softplus(float x) { return std::max(x, 0.0f) + std::log1p(std::exp(-std::fabs(x))); }

// One head's gate. The amplitude a is kept finite: an infinite one would make 0 * inf of a saturated gate's gradient.
struct Gate {
  int form;
  float lower_bound;
  float amplitude;
  const float* bias;  // [K] or null

  float shifted(float raw, int d) const { return bias ? raw + bias[d] : raw; }

  float log_decay(float x) const {
    if (form == kGateReady) return x;
    if (form == kGateSoftplus) return -amplitude * softplus(x);
    return lower_bound * sigmoid(amplitude * x);
  }

  float slope(float x) const {
    if (form == kGateReady) return 1.0f;
    if (form == kGateSoftplus) return -amplitude * sigmoid(x);
    return lower_bound * sigmoid_slope(amplitude * x) * amplitude;
  }
};

inline Gate gate_of_head(int form, float lower_bound, const float* A_log, const float* dt_bias, int head) {
  constexpr float kLargestExponent = 88.0f;
  const bool fused = form != kGateReady;
  const float amplitude = fused && A_log ? std::exp(std::min(A_log[head], kLargestExponent)) : 1.0f;
  return {form, lower_bound, amplitude, fused && dt_bias ? dt_bias + int64_t{head} * kHeadDim : nullptr};
}

inline float beta_of(int form, float raw) {
  if (form == kBetaReady) return raw;
  return form == kBetaSigmoid ? sigmoid(raw) : 2.0f * sigmoid(raw);
}

// The slope of beta relative to beta. Of a sigmoid that is no quotient.
[[maybe_unused]] inline float relative_beta_slope(int form, float raw) {
  return form == kBetaReady ? 1.0f / raw : sigmoid(-raw);
}

// Divides the row by its norm; returns the factor it was multiplied with.
inline float l2norm(float* x) {
  const float rstd = 1.0f / std::sqrt(dot(x, x) + 1e-6f);
  for (int d = 0; d < kHeadDim; ++d) x[d] *= rstd;
  return rstd;
}

// dx from dy in place: rstd (dy - y (dy . y)), y being the normalised row.
[[maybe_unused]] inline void l2norm_backward(float* dy, const float* y, float rstd) {
  const float along = dot(dy, y);
  for (int d = 0; d < kHeadDim; ++d) dy[d] = rstd * (dy[d] - y[d] * along);
}

}  // namespace
