// One chunk's step of the map M [K, K] that a segment makes of a state, held transposed as a state is, in FP32:
//
//     M <- diag(e^G_last) M - kg^T Tinv (beta (ke M))
//
// Every product has one factor that is bf16 as it stands, a tile, and one that is fp32: this one is the sum of three
// bf16 parts. Tensor cores truncate when they accumulate: products with the smaller parts have an accumulator of their
// own, or come first, always from zero, and a chunk's product is added to the decayed M in fp32. Included after
// state_step and split_bf16x3.cuh.
#include <cstdint>

namespace {

constexpr int kParts = 3;

using StepParts = uint32_t[kParts][4];  // of one inner step
using TokenParts = StepParts[kTokenSteps];

__device__ __forceinline__ void split_step(StepParts& left, const float (&first)[4], const float (&second)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float(&tile)[4] = i < 2 ? first : second;
    uint32_t parts[kParts];
    split_bf16x3(parts, tile[i % 2 * 2], tile[i % 2 * 2 + 1]);
    for (int p = 0; p < kParts; ++p) left[p][i] = parts[p];
  }
}

// Adds the product of one step and the fragments of two column tiles, smallest part first.
__device__ __forceinline__ void multiply_parts(float (&main)[2][4], float (&low)[2][4], const StepParts& left,
                                               const uint32_t (&right)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    for (int p = kParts - 1; p > 0; --p) mma_bf16(low[i], left[p], right[2 * i], right[2 * i + 1]);
    mma_bf16(main[i], left[0], right[2 * i], right[2 * i + 1]);
  }
}

// x = ke M, transposed.
__device__ __forceinline__ void multiply_map(TokenSums& x, const State& M, const SharedTile<kHeadDim>& ke) {
  float main[kTokenSteps][2][4] = {}, low[kTokenSteps][2][4] = {};
  const uint32_t address = lane_rows(ke);
#pragma unroll
  for (int k = 0; k < kStateSteps; ++k) {
    StepParts left;
    split_step(left, M[2 * k], M[2 * k + 1]);
    for (int n = 0; n < kTokenSteps; ++n) {
      uint32_t right[4];
      ldmatrix_x4(right, (address ^ 32 * k) + n * 16 * SharedTile<kHeadDim>::kRowBytes);
      multiply_parts(main[n], low[n], left, right);
    }
  }
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    for (int i = 0; i < 4; ++i) x[n][i] = main[n / 2][n % 2][i] + low[n / 2][n % 2][i];
  }
}

// y = -Tinv (beta x) in parts, given x, which is used up.
__device__ __forceinline__ void solve_map(TokenParts& y, TokenSums& x, const SharedTile<kChunk>& Tinv,
                                          const float2* beta) {
  TokenParts left;
#pragma unroll
  for (int k = 0; k < kTokenSteps; ++k) {
    for (int n = 2 * k; n < 2 * k + 2; ++n) {
      const float2 factor = columns_of_lane(beta, n);
      for (int i = 0; i < 4; ++i) x[n][i] *= i % 2 ? -factor.y : -factor.x;
    }
    split_step(left[k], x[2 * k], x[2 * k + 1]);
  }
  const uint32_t address = lane_rows(Tinv);
#pragma unroll
  for (int n = 0; n < kTokenSteps; ++n) {
    float main[2][4] = {}, low[2][4] = {};
    for (int k = 0; k <= n; ++k) {
      uint32_t right[4];
      ldmatrix_x4(right, (address ^ 32 * k) + n * 16 * SharedTile<kChunk>::kRowBytes);
      multiply_parts(main, low, left[k], right);
    }
    for (int i = 0; i < 2; ++i) {
      for (int e = 0; e < 4; ++e) main[i][e] += low[i][e];
    }
    split_step(y[n], main[0], main[1]);
  }
}

// M <- diag(e^G_last) M + kg^T y. One accumulator takes all small products before the first large one.
__device__ __forceinline__ void advance_map(State& M, const TokenParts& y, const SharedTile<kHeadDim>& kg,
                                            const float2* decay_total) {
  const uint32_t address = lane_columns(kg);
#pragma unroll
  for (int n = 0; n < kStateTiles; n += 2) {
    uint32_t right[kTokenSteps][4];
    for (int k = 0; k < kTokenSteps; ++k) {
      ldmatrix_x4_trans(right[k], (address ^ 16 * n) + k * 16 * SharedTile<kHeadDim>::kRowBytes);
    }
    for (int i = 0; i < 2; ++i) {
      float sum[4] = {};
      for (int p = kParts - 1; p >= 0; --p) {
        for (int k = 0; k < kTokenSteps; ++k) mma_bf16(sum, y[k][p], right[k][2 * i], right[k][2 * i + 1]);
      }
      const float2 decay = columns_of_lane(decay_total, n + i);
      for (int e = 0; e < 4; ++e) M[n + i][e] = fmaf(e % 2 ? decay.y : decay.x, M[n + i][e], sum[e]);
    }
  }
}

}  // namespace
