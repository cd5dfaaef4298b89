// One chunk's step of a state S [K, V], held transposed in the registers of the warps that own its value columns:
//
//     x = v - ke S          v' = Tinv (beta x)          S <- diag(e^G_last) S + kg^T v'
//
// The scan, the replay of its states and the summary B of a segment all run this code: from the same state they get the
// same bits. S is rounded to bf16 where it is a factor and stays fp32 where it is updated; beta x is rounded to bf16,
// and v' too: the tile that is stored is the one that is used. Included after shared_tiles.cuh and the constant
// kHeadDim.
#include <cstdint>

namespace {

constexpr int kStateTiles = kHeadDim / 8;
constexpr int kStateSteps = kHeadDim / 16;

using State = float[kStateTiles][4];
using StateFactor = uint32_t[kStateSteps][4];

// -beta x of an accumulator x, rounded, as a left factor.
__device__ __forceinline__ void weigh_tokens(TokenFactor& weighed, const TokenSums& x, const float2* beta) {
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    const float2 factor = columns_of_lane(beta, n);
    weighed[n / 2][n % 2 * 2] = pack_bf16(-factor.x * x[n][0], -factor.y * x[n][1]);
    weighed[n / 2][n % 2 * 2 + 1] = pack_bf16(-factor.x * x[n][2], -factor.y * x[n][3]);
  }
}

// v' from S and -v, which is used up.
__device__ __forceinline__ void solve_values(TokenFactor& v_new, TokenSums& negative_v, const StateFactor& S,
                                             const SharedTile<kHeadDim>& ke, const SharedTile<kChunk>& Tinv,
                                             const float2* beta) {
  multiply_rows<kHeadDim>(negative_v, S, ke);
  TokenFactor weighed;
  weigh_tokens(weighed, negative_v, beta);
  TokenSums sum{};
  multiply_lower_rows(sum, weighed, Tinv);
  pack(v_new, sum);
}

// S <- diag(e^G_last) S, for the state and, backwards, for its gradient.
__device__ __forceinline__ void decay_state(State& S, const float2* decay_total) {
#pragma unroll
  for (int n = 0; n < kStateTiles; ++n) {
    const float2 decay = columns_of_lane(decay_total, n);
    for (int i = 0; i < 4; ++i) S[n][i] *= i % 2 ? decay.y : decay.x;
  }
}

__device__ __forceinline__ void advance_state(State& S, const TokenFactor& v_new, const SharedTile<kHeadDim>& kg,
                                              const float2* decay_total) {
  decay_state(S, decay_total);
  multiply_columns<kHeadDim>(S, v_new, kg);
}

}  // namespace
