{% import "macros/wgmma.jinja" as wgmma %}
// One chunk's step of the map M [K, K], held transposed in the registers of the warpgroups that own its columns:
//
//     M <- diag(e^G_last) M - kg^T Tinv (beta (ke M))
//
// What is split, and the order of every sum, is that of map_step.cuh; the two are compared bit by bit in
// tests/gpu/test_segment_summary_gpu.py. Included after map_step and warpgroup_tiles.cuh.
#include <cstdint>

namespace {

{{ wgmma.register_product("wgmma_rows_32", 32, 16, "bf16", "1, 1, 0") }}

// Starts x = ke M. M is taken apart step by step; only so many steps' parts are kept in registers.
__device__ __forceinline__ void start_map_rows(TokenSums& x, const State& M, uint64_t ke) {
  constexpr int kStepsUnderWay = 4;
#pragma unroll
  for (int k = 0; k < kStateSteps; ++k) {
    StepParts left;
    split_step(left, M[2 * k], M[2 * k + 1]);
    if (k >= kStepsUnderWay) wgmma_wait<kStepsUnderWay - 1>();
    wgmma_fence();
    wgmma_rows_64(x, left[1], step_of_columns(ke, k), k > 0);
    wgmma_rows_64(x, left[0], step_of_columns(ke, k), 1);
    wgmma_commit();
  }
}

// Sums of tokens in two halves of columns.
struct HalfSums {
  float half[2][kTokenTiles / 2][4];

  __device__ __forceinline__ const float (&tile(int n) const)[4] { return half[n / 4][n % 4]; }
};

__device__ __forceinline__ void settle(HalfSums& sums) {
  for (auto& half : sums.half) settle(half);
}

// Starts y = -Tinv (beta x). Of Tinv, lower triangular, the quarter of zeros is left out.
__device__ __forceinline__ void start_map_solution(HalfSums& y, const TokenSums& x, const float2* beta, uint64_t Tinv) {
#pragma unroll
  for (int k = 0; k < kTokenSteps; ++k) {
    float weighed[2][4];
    for (int n = 0; n < 2; ++n) {
      const float2 factor = columns_of_lane(beta, 2 * k + n);
      for (int i = 0; i < 4; ++i) weighed[n][i] = x[2 * k + n][i] * (i % 2 ? -factor.y : -factor.x);
    }
    StepParts left;
    split_step(left, weighed[0], weighed[1]);
    wgmma_fence();
    for (int half = k / 2; half < 2; ++half) {
      const uint64_t right = step_of_columns(step_of_rows(Tinv, 2 * half), k);
      wgmma_rows_32(y.half[half], left[1], right, k > 0);
      wgmma_rows_32(y.half[half], left[0], right, 1);
    }
  }
  wgmma_commit();
}

// Starts sum = kg^T y, and takes y apart. A product starts as soon as its factor's step is known.
__device__ __forceinline__ void start_map_products(State& sum, SplitTokens& parts, const HalfSums& y, uint64_t kg) {
#pragma unroll
  for (int k = 0; k < kTokenSteps; ++k) {
    split_step(parts.high[k], parts.low[k], y.tile(2 * k), y.tile(2 * k + 1));
    wgmma_fence();
    wgmma_columns_{{ head_dim }}(sum, parts.low[k], step_of_rows(kg, k), k > 0);
    wgmma_columns_{{ head_dim }}(sum, parts.high[k], step_of_rows(kg, k), 1);
  }
  wgmma_commit();
}

// M <- diag(e^G_last) M + sum.
__device__ __forceinline__ void advance_map(State& M, const State& sum, const float2* decay_total) {
#pragma unroll
  for (int n = 0; n < kStateTiles; ++n) {
    const float2 decay = columns_of_lane(decay_total, n);
    for (int e = 0; e < 4; ++e) M[n][e] = fmaf(e % 2 ? decay.y : decay.x, M[n][e], sum[n][e]);
  }
}

}  // namespace
