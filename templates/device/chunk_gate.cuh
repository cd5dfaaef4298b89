// The gate of one head, a lane's four channels of it: from its argument x = raw + dt_bias to the decay d = e^g, with
//     ready g = raw          softplus g = -e^A_log softplus(x)          bounded g = lower_bound sigmoid(e^A_log x)
// Everything is a power of two: rounding g log2(e) moves a product of many d by no more than rounding g itself does.
// Included after args.jinja and channel_quads.cuh.
#include <cstdint>

namespace {

enum GateForm : int { kGateReady = 0, kGateSoftplus = 1, kGateBounded = 2 };

constexpr float kLog2E = 1.44269504088896341f;

// 2^x to about one unit in the last place; what is below fp32's normal numbers is 0.
__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to one unit in the last place; 0 of infinity.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float4 reciprocal(const float4& x) {
  return make_float4(reciprocal(x.x), reciprocal(x.y), reciprocal(x.z), reciprocal(x.w));
}

// log(1 + e^x). log(1 + u) would be exactly 0 below x = -16.6; log1p keeps every digit.
__device__ __forceinline__ float softplus(float x) {
  return fmaxf(x, 0.0f) + log1pf(exp2_approximate(-kLog2E * fabsf(x)));
}

struct Gate {
  float amplitude;
  float lower_bound;
  float4 bias;

  // The amplitude is kept finite: an infinite one would make 0 * inf of a saturated gate.
  __device__ __forceinline__ Gate(const Args& args, int head, int num_channels, int channel)
      : amplitude(1.0f), lower_bound(args.lower_bound), bias(make_float4(0.0f, 0.0f, 0.0f, 0.0f)) {
    constexpr float kLargestExponent = 88.0f;
    if (args.gate_form == kGateReady) return;
    if (args.A_log) amplitude = expf(fminf(static_cast<const float*>(args.A_log)[head], kLargestExponent));
    if (args.dt_bias) {
      const float* own = static_cast<const float*>(args.dt_bias) + (int64_t{head} * num_channels + channel);
      bias = make_float4(own[0], own[1], own[2], own[3]);
    }
  }

  template <int kForm>
  __device__ __forceinline__ float decay(float x) const {
    if constexpr (kForm == kGateReady) return exp2_approximate(kLog2E * x);
    if constexpr (kForm == kGateSoftplus) return exp2_approximate(-kLog2E * amplitude * softplus(x));
    const float sigmoid = reciprocal(1.0f + exp2_approximate(-kLog2E * amplitude * x));
    return exp2_approximate(kLog2E * lower_bound * sigmoid);
  }

  // Raw gates become decays.
  template <int kForm, int kCount>
  __device__ __forceinline__ void decay_rows(float4 (&rows)[kCount]) const {
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      const float4 raw = rows[r];
      rows[r] = make_float4(decay<kForm>(raw.x + bias.x), decay<kForm>(raw.y + bias.y),
                            decay<kForm>(raw.z + bias.z), decay<kForm>(raw.w + bias.w));
    }
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
