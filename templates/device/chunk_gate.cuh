// The gate of one head, a lane's four channels of it: from its argument x = raw + dt_bias to the decay d = e^g, with
//     ready g = raw          softplus g = -e^A_log softplus(x)          bounded g = lower_bound sigmoid(e^A_log x)
// Everything is a power of two: rounding g log2(e) moves a product of many d by no more than rounding g itself does.
// Included after args.jinja and channel_quads.cuh.
{% include "device/gate_forms.cuh" %}

namespace {

struct Gate {
  float amplitude;
  float lower_bound;
  float4 bias;

  __device__ __forceinline__ Gate(const Args& args, int head, int num_channels, int channel)
      : amplitude(gate_amplitude(args, head)),
        lower_bound(args.lower_bound),
        bias(make_float4(0.0f, 0.0f, 0.0f, 0.0f)) {
    if (args.gate_form != kGateReady && args.dt_bias) {
      const float* own = static_cast<const float*>(args.dt_bias) + (int64_t{head} * num_channels + channel);
      bias = make_float4(own[0], own[1], own[2], own[3]);
    }
  }

  template <int kForm>
  __device__ __forceinline__ float decay(float x) const {
    if constexpr (kForm == kGateReady) return exp2_approximate(kLog2E * x);
    if constexpr (kForm == kGateSoftplus) return exp2_approximate(-amplitude * softplus2(kLog2E * x));
    // A quotient by 1 + e^-(amplitude x) is the inverse of a sum of two quotients, which are finite.
    const float quotient = fmaxf(reciprocal(kLog2E * lower_bound), -3e38f);
    return exp2_approximate(reciprocal(fmaf(quotient, exp2_approximate(-kLog2E * amplitude * x), quotient)));
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

}  // namespace
