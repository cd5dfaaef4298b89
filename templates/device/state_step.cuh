// One chunk's step of a state S [K, V], held transposed in the registers of the warps that own its value columns:
//
//     x = v - ke S          v' = Tinv (beta x)          S <- diag(e^G_last) S + kg^T v'
//
// The scan, the replay of its states and the summary B of a segment all run this code: from the same state they get the
// same bits. S is rounded to bf16 where it is a factor and stays fp32 where it is updated. beta x and v' are sums of
// two bf16 numbers as factors: Tinv takes errors of beta x along with it, and where keys are alike its rows cancel them
// only if all of an error is there; an error of v' stays in S. Included after shared_tiles.cuh and the constant
// kHeadDim.
#include <cstdint>

namespace {

constexpr int kStateTiles = kHeadDim / 8;
constexpr int kStateSteps = kHeadDim / 16;

using State = float[kStateTiles][4];
using StateFactor = uint32_t[kStateSteps][4];

// A left factor in two parts.
struct SplitTokens {
  TokenFactor high, low;
};

// Accumulators as two left factors: rounded to bf16, and what that takes from them.
template <int kSteps>
__device__ __forceinline__ void split(uint32_t (&high)[kSteps][4], uint32_t (&low)[kSteps][4],
                                      const float (&sum)[2 * kSteps][4]) {
#pragma unroll
  for (int n = 0; n < 2 * kSteps; ++n) {
    for (int half = 0; half < 2; ++half) {
      const float first = sum[n][2 * half], second = sum[n][2 * half + 1];
      const uint32_t pair = pack_bf16(first, second);
      high[n / 2][n % 2 * 2 + half] = pair;
      low[n / 2][n % 2 * 2 + half] =
          pack_bf16(first - __uint_as_float(pair << 16), second - __uint_as_float(pair & 0xffff0000u));
    }
  }
}

// An accumulator's columns, each times the factor of its own.
__device__ __forceinline__ void scale_columns(TokenSums& sum, float sign, const float2* per_column) {
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    const float2 factor = columns_of_lane(per_column, n);
    for (int i = 0; i < 4; ++i) sum[n][i] *= sign * (i % 2 ? factor.y : factor.x);
  }
}

// -Tinv (beta x) in parts, given x, which is used up.
__device__ __forceinline__ void solve_tokens(SplitTokens& solved, TokenSums& x, const SharedTile<kChunk>& Tinv,
                                             const float2* beta) {
  scale_columns(x, -1.0f, beta);
  TokenFactor high, low;
  split(high, low, x);
  TokenSums sum{};
  multiply_lower_rows(sum, low, high, Tinv);
  split(solved.high, solved.low, sum);
}

// v' from S and -v, which is used up.
__device__ __forceinline__ void solve_values(SplitTokens& v_new, TokenSums& negative_v, const StateFactor& S,
                                             const SharedTile<kHeadDim>& ke, const SharedTile<kChunk>& Tinv,
                                             const float2* beta) {
  multiply_rows<kHeadDim>(negative_v, S, ke);
  solve_tokens(v_new, negative_v, Tinv, beta);
}

// S <- diag(e^G_last) S, for the state and, backwards, for its gradient.
__device__ __forceinline__ void decay_state(State& S, const float2* decay_total) {
#pragma unroll
  for (int n = 0; n < kStateTiles; ++n) {
    const float2 decay = columns_of_lane(decay_total, n);
    for (int i = 0; i < 4; ++i) S[n][i] *= i % 2 ? decay.y : decay.x;
  }
}

__device__ __forceinline__ void advance_state(State& S, const SplitTokens& v_new, const SharedTile<kHeadDim>& kg,
                                              const float2* decay_total) {
  decay_state(S, decay_total);
  multiply_columns<kHeadDim>(S, v_new.low, v_new.high, kg);
}

}  // namespace
