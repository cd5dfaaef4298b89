{% import "macros/wgmma.jinja" as wgmma %}
// One chunk's step of a state's gradient dS [K, V], held transposed in the registers of the warpgroups that own its
// value columns:
//
//     dv' = Aqk^T do + kg dS          z = Tinv^T dv'          dS <- diag(e^G_last) dS + qg^T do - ke^T (beta z)
//
// What is rounded, and the order of every sum, is that of grad_step.cuh; the two are compared bit by bit in
// tests/gpu/test_grad_scan_gpu.py. Included after grad_step.cuh and warpgroup_tiles.cuh.
#include <cstdint>

namespace {

{% for columns in (16, 32, 48, 64) if columns != head_dim %}
{{ wgmma.register_product("wgmma_columns_%d" % columns, columns, 16, "bf16", "1, 1, 1") }}
{% endfor %}
{{ wgmma.register_product("wgmma_minus_columns_%d" % head_dim, head_dim, 16, "bf16", "1, -1, 1") }}

template <int kTiles>
__device__ __forceinline__ float (&first_tiles(TokenSums& sum))[kTiles][4] {
  return reinterpret_cast<float(&)[kTiles][4]>(sum);
}

// Step k of sum += left tile for a lower triangular tile [token, token]: of the columns behind the step's rows nothing
// is added. The first product starts all of the sum.
__device__ __forceinline__ void wgmma_lower_columns(TokenSums& sum, const uint32_t (&left)[4], uint64_t tile, int k,
                                                    bool starts) {
  const uint64_t right = step_of_rows(tile, k);
  if (starts || k == 3) {
    wgmma_columns_64(sum, left, right, !starts);
  } else if (k == 0) {
    wgmma_columns_16(first_tiles<2>(sum), left, right, 1);
  } else if (k == 1) {
    wgmma_columns_32(first_tiles<4>(sum), left, right, 1);
  } else {
    wgmma_columns_48(first_tiles<6>(sum), left, right, 1);
  }
}

using StepWeights = float2[2];  // of a step's columns that are the lane's

__device__ __forceinline__ void load_weights(StepWeights& weights, const float2* per_column, int k) {
  for (int i = 0; i < 2; ++i) weights[i] = columns_of_lane(per_column, 2 * k + i);
}

// Starts dv' += kg dS, and takes dS apart. A product starts as soon as its factor's step is known.
__device__ __forceinline__ void start_state_rows(TokenSums& sum, SplitState& parts, const State& dS, uint64_t kg) {
#pragma unroll
  for (int k = 0; k < kStateSteps; ++k) {
    split_step(parts.high[k], parts.low[k], dS[2 * k], dS[2 * k + 1]);
    wgmma_fence();
    wgmma_rows_64(sum, parts.low[k], step_of_columns(kg, k), 1);
    wgmma_rows_64(sum, parts.high[k], step_of_columns(kg, k), 1);
  }
  wgmma_commit();
}

// Starts dv' = Aqk^T do.
__device__ __forceinline__ void start_output_gradients(TokenSums& sum, const TokenFactor& do_, uint64_t Aqk) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kTokenSteps; ++k) wgmma_lower_columns(sum, do_[k], Aqk, k, k == 0);
  wgmma_commit();
}

// Starts z = Tinv^T dv', dv' in two parts.
__device__ __forceinline__ void start_solution(TokenSums& z, const TokenSums& sum, uint64_t Tinv) {
#pragma unroll
  for (int k = 0; k < kTokenSteps; ++k) {
    uint32_t high[4], low[4];
    split_step(high, low, sum[2 * k], sum[2 * k + 1]);
    wgmma_fence();
    wgmma_lower_columns(z, low, Tinv, k, k == 0);
    wgmma_lower_columns(z, high, Tinv, k, false);
  }
  wgmma_commit();
}

// Starts dS += qg^T do.
__device__ __forceinline__ void start_query_gradients(State& dS, const TokenFactor& do_, uint64_t qg) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kTokenSteps; ++k) wgmma_columns_{{ head_dim }}(dS, do_[k], step_of_rows(qg, k), 1);
  wgmma_commit();
}

// Starts dS -= ke^T (beta z), and rounds beta z. `weights` are beta's of the first step.
__device__ __forceinline__ void start_key_gradients(State& dS, const TokenSums& z, StepWeights& weights,
                                                    const float2* beta, uint64_t ke) {
#pragma unroll
  for (int k = 0; k < kTokenSteps; ++k) {
    uint32_t weighed[4];
    for (int i = 0; i < 4; ++i) {
      const float(&tile)[4] = z[2 * k + i / 2];
      weighed[i] = pack_bf16(weights[i / 2].x * tile[i % 2 * 2], weights[i / 2].y * tile[i % 2 * 2 + 1]);
    }
    if (k + 1 < kTokenSteps) load_weights(weights, beta, k + 1);
    wgmma_fence();
    wgmma_minus_columns_{{ head_dim }}(dS, weighed, step_of_rows(ke, k), 1);
  }
  wgmma_commit();
}

}  // namespace
