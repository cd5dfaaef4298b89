// The gate of one head, a lane's four channels of it: from its argument x = raw + dt_bias to the decay d = e^g, with
//     ready g = raw          softplus g = -e^A_log softplus(x)          bounded g = lower_bound sigmoid(e^A_log x)
// Included after args.jinja.
#include <cstdint>

namespace {

enum GateForm : int { kGateReady = 0, kGateSoftplus = 1, kGateBounded = 2 };

// log(1 + e^x). log(1 + u) would be exactly 0 below x = -16.6; log1p keeps every digit.
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// The reciprocal is refined by one Newton step, which needs a finite denominator; a NaN stays one.
__device__ __forceinline__ float sigmoid(float x) {
  constexpr float kLargest = 1e37f;
  const float e = expf(-x), denominator = 1.0f + (e > kLargest ? kLargest : e);
  const float estimate = __fdividef(1.0f, denominator);
  return fmaf(estimate, fmaf(-denominator, estimate, 1.0f), estimate);
}

struct Gate {
  int form;
  float lower_bound;
  float amplitude;
  float4 bias;

  // The amplitude is kept finite: an infinite one would make 0 * inf of a saturated gate.
  __device__ __forceinline__ Gate(const Args& args, int head, int num_channels, int channel)
      : form(args.gate_form), lower_bound(args.lower_bound), amplitude(1.0f), bias(make_float4(0.f, 0.f, 0.f, 0.f)) {
    constexpr float kLargestExponent = 88.0f;
    if (form == kGateReady) return;
    if (args.A_log) amplitude = expf(fminf(static_cast<const float*>(args.A_log)[head], kLargestExponent));
    if (args.dt_bias) {
      const float* own = static_cast<const float*>(args.dt_bias) + (int64_t{head} * num_channels + channel);
      bias = make_float4(own[0], own[1], own[2], own[3]);
    }
  }

  __device__ __forceinline__ float decay(float x) const {
    if (form == kGateSoftplus) return expf(-amplitude * softplus(x));
    if (form == kGateBounded) return expf(lower_bound * sigmoid(amplitude * x));
    return expf(x);
  }

  __device__ __forceinline__ float4 decay(const float4& raw) const {
    return make_float4(decay(raw.x + bias.x), decay(raw.y + bias.y), decay(raw.z + bias.z), decay(raw.w + bias.w));
  }
};

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
