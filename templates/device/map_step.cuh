// One chunk's step of the map M [K, K] that a segment makes of a state, held transposed as a state is:
//
//     M <- diag(e^G_last) M - kg^T Tinv (beta (ke M))
//
// M is FP32. Every product has one factor that is bf16 as it stands, a tile, and one that is fp32: this one is the sum
// of two bf16 parts, 16 bits, which is 2^7 times as exact as the tiles are. Tensor cores truncate when they accumulate:
// a product starts from zero, the smaller part's first, and a chunk's is added to the decayed M in fp32. Included after
// state_step.
#include <cstdint>

namespace {

constexpr int kParts = 2;

using StepParts = uint32_t[kParts][4];  // of one inner step, the larger one first

__device__ __forceinline__ void split_step(StepParts& left, const float (&first)[4], const float (&second)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* pair = (i < 2 ? first : second) + i % 2 * 2;
    left[0][i] = pack_bf16(pair[0], pair[1]);
    left[1][i] = pack_bf16(pair[0] - __uint_as_float(left[0][i] << 16),
                           pair[1] - __uint_as_float(left[0][i] & 0xffff0000u));
  }
}

// x += ke M, transposed. M is taken apart step by step.
__device__ __forceinline__ void multiply_map(TokenSums& x, const State& M, const SharedTile<kHeadDim>& ke) {
  const uint32_t address = lane_rows(ke);
#pragma unroll
  for (int k = 0; k < kStateSteps; ++k) {
    StepParts left;
    split_step(left, M[2 * k], M[2 * k + 1]);
    for (int n = 0; n < kTokenSteps; ++n) {
      uint32_t right[4];
      ldmatrix_x4(right, (address ^ 32 * k) + n * 16 * SharedTile<kHeadDim>::kRowBytes);
      for (int i = 0; i < 2; ++i) {
        for (int p = kParts - 1; p >= 0; --p) mma_bf16(x[2 * n + i], left[p], right[2 * i], right[2 * i + 1]);
      }
    }
  }
}

// M <- diag(e^G_last) M + kg^T y.
__device__ __forceinline__ void advance_map(State& M, const SplitTokens& y, const SharedTile<kHeadDim>& kg,
                                            const float2* decay_total) {
  const uint32_t address = lane_columns(kg);
#pragma unroll
  for (int n = 0; n < kStateTiles; n += 2) {
    float sum[2][4] = {};
    for (int k = 0; k < kTokenSteps; ++k) {
      uint32_t right[4];
      ldmatrix_x4_trans(right, (address ^ 16 * n) + k * 16 * SharedTile<kHeadDim>::kRowBytes);
      for (int i = 0; i < 2; ++i) {
        mma_bf16(sum[i], y.low[k], right[2 * i], right[2 * i + 1]);
        mma_bf16(sum[i], y.high[k], right[2 * i], right[2 * i + 1]);
      }
    }
    for (int i = 0; i < 2; ++i) {
      const float2 decay = columns_of_lane(decay_total, n + i);
      for (int e = 0; e < 4; ++e) M[n + i][e] = fmaf(e % 2 ? decay.y : decay.x, M[n + i][e], sum[i][e]);
    }
  }
}

}  // namespace
