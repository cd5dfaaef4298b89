// One chunk's step of the map M [K, K], held transposed in the registers of the warpgroups that own its columns:
//
//     M <- diag(e^G_last) M - kg^T Tinv (beta (ke M))
//
// What is split, and the order of every sum, is that of map_step.cuh; the two are compared bit by bit in
// tests/gpu/test_segment_summary_gpu.py. Included after map_step and warpgroup_tiles.cuh.
#include <cstdint>

namespace {

// An accumulator in two: products with the first part of the left factor, and with the smaller parts.
struct PartSums {
  TokenSums main, low;
};

__device__ __forceinline__ void settle(PartSums& sums) {
  settle(sums.main);
  settle(sums.low);
}

// Starts a step of sums += left tile^T, smallest part first; of the first step, from zero.
__device__ __forceinline__ void start_part_products(PartSums& sums, const StepParts& left, uint64_t right,
                                                    bool is_first) {
  for (int p = kParts - 1; p > 0; --p) wgmma_rows_64(sums.low, left[p], right, !is_first || p + 1 < kParts);
  wgmma_rows_64(sums.main, left[0], right, !is_first);
}

// Starts x = ke M. M is taken apart step by step; only so many steps' parts are kept in registers.
__device__ __forceinline__ void start_map_rows(PartSums& x, const State& M, uint64_t ke) {
  constexpr int kStepsUnderWay = 4;
#pragma unroll
  for (int k = 0; k < kStateSteps; ++k) {
    StepParts left;
    split_step(left, M[2 * k], M[2 * k + 1]);
    if (k >= kStepsUnderWay) wgmma_wait<kStepsUnderWay - 1>();
    wgmma_fence();
    start_part_products(x, left, step_of_columns(ke, k), k == 0);
    wgmma_commit();
  }
}

__device__ __forceinline__ float total(const PartSums& sums, int n, int i) { return sums.main[n][i] + sums.low[n][i]; }

// Starts y = -Tinv (beta x). All of Tinv is multiplied: a narrower product's accumulators would begin at registers that
// wgmma cannot begin at.
__device__ __forceinline__ void start_map_solution(PartSums& y, const PartSums& x, const float2* beta, uint64_t Tinv) {
#pragma unroll
  for (int k = 0; k < kTokenSteps; ++k) {
    float weighed[2][4];
    for (int n = 0; n < 2; ++n) {
      const float2 factor = columns_of_lane(beta, 2 * k + n);
      for (int i = 0; i < 4; ++i) weighed[n][i] = total(x, 2 * k + n, i) * (i % 2 ? -factor.y : -factor.x);
    }
    StepParts left;
    split_step(left, weighed[0], weighed[1]);
    wgmma_fence();
    start_part_products(y, left, step_of_columns(Tinv, k), k == 0);
  }
  wgmma_commit();
}

// Starts sum = kg^T y, all products with the smaller parts before the first large one.
__device__ __forceinline__ void start_map_products(State& sum, TokenParts& parts, const PartSums& y, uint64_t kg) {
#pragma unroll
  for (int k = 0; k < kTokenSteps; ++k) {
    float given[2][4];
    for (int n = 0; n < 2; ++n) {
      for (int i = 0; i < 4; ++i) given[n][i] = total(y, 2 * k + n, i);
    }
    split_step(parts[k], given[0], given[1]);
    wgmma_fence();
    wgmma_columns_{{ head_dim }}(sum, parts[k][kParts - 1], step_of_rows(kg, k), k > 0);
  }
#pragma unroll
  for (int p = kParts - 2; p >= 0; --p) {
    for (int k = 0; k < kTokenSteps; ++k) wgmma_columns_{{ head_dim }}(sum, parts[k][p], step_of_rows(kg, k), 1);
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
