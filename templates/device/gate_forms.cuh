// The forms of the gate, and the functions they are made of. Included after args.jinja and beta_value.cuh.
#include <cstdint>

{% include "device/special_functions.cuh" %}

namespace {

enum GateForm : int { kGateReady = 0, kGateSoftplus = 1, kGateBounded = 2 };

// log2(1 + 2^x) to 2e-7 of itself: max(x, 0) + log2(1 + u) with u = 2^-|x|, and log2(1 + u) as u times the polynomial
// of degree 8 with the least relative error on [0, 1]. The logarithm of the sum would be exactly 0 below x = -24.
__device__ __forceinline__ float softplus2(float x) {
  constexpr float kCoefficients[] = {0.00754918220f, -0.0425670594f, 0.112856187f, -0.197118968f, 0.275641412f,
                                     -0.358408481f,  0.480692953f,   -0.721340179f, 1.44269502f};
  const float u = exp2_approximate(-fabsf(x));
  float quotient = kCoefficients[0];
#pragma unroll
  for (int n = 1; n < 9; ++n) quotient = fmaf(quotient, u, kCoefficients[n]);
  return fmaf(quotient, u, fmaxf(x, 0.0f));
}

// e^A_log of a head, kept finite: an infinite one would make 0 * inf of a saturated gate. 1 where there is no A_log.
__device__ __forceinline__ float gate_amplitude(const Args& args, int head) {
  constexpr float kLargestExponent = 88.0f;
  if (args.gate_form == kGateReady || !args.A_log) return 1.0f;
  return expf(fminf(static_cast<const float*>(args.A_log)[head], kLargestExponent));
}

Status check_gate(const Args& args) {
  if (args.g_dtype < kBf16 || args.g_dtype > kFp32) {
    return fail(kBadArgument, "g_dtype is %d; use 0 (bf16), 1 (fp16) or 2 (fp32)", args.g_dtype);
  }
  if (args.gate_form < kGateReady || args.gate_form > kGateBounded) {
    return fail(kBadArgument, "gate_form is %d; use 0 (ready), 1 (softplus) or 2 (bounded)", args.gate_form);
  }
  if (args.gate_form == kGateSoftplus && !args.A_log) {
    return fail(kBadArgument, "A_log is null; the softplus gate (gate_form 1) needs it");
  }
  if (args.gate_form == kGateBounded && !(args.lower_bound >= -5.0f && args.lower_bound < 0.0f)) {
    return fail(kBadArgument, "lower_bound is %g; the bounded gate (gate_form 2) needs [-5, 0)", args.lower_bound);
  }
  return kOk;
}

}  // namespace
