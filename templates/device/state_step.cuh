// One chunk's step of a state S [K, V], held transposed in the registers of the warps that own its value columns:
//
//     x = v - ke S          v' = Tinv (beta x)          S <- diag(e^G_last) S + kg^T v'
//
// The scan, the replay of its states and the summary B of a segment all run this code: from the same state they get the
// same bits, whatever the number of row tiles. S is rounded to bf16 where it is a factor and stays fp32 where it is
// updated; beta x is rounded to bf16, and v' too: the tile that is stored is the one that is used. Included after
// shared_tiles.cuh and the constant kHeadDim.
#include <cstdint>

namespace {

constexpr int kStateTiles = kHeadDim / 8;
constexpr int kStateSteps = kHeadDim / 16;

template <int kRowTiles>
using State = float[kRowTiles][kStateTiles][4];
template <int kRowTiles>
using StateFactor = uint32_t[kRowTiles][kStateSteps][4];
template <int kRowTiles>
using TokenSums = float[kRowTiles][kTokenTiles][4];
template <int kRowTiles>
using TokenFactor = uint32_t[kRowTiles][kTokenSteps][4];

// Column 2 t, 2 t + 1 of accumulator tile n, of one number per column in shared memory.
__device__ __forceinline__ float2 columns_of_lane(const float2* per_column, int n) {
  return per_column[4 * n + threadIdx.x % 4];
}

// The left factor diag(beta) x, rounded; with kSign = -1 of -x.
template <int kSign, int kRowTiles>
__device__ __forceinline__ void weigh_tokens(TokenFactor<kRowTiles>& weighed, const TokenSums<kRowTiles>& x,
                                             const float2* beta) {
#pragma unroll
  for (int k = 0; k < kTokenSteps; ++k) {
    const float2 first = columns_of_lane(beta, 2 * k), second = columns_of_lane(beta, 2 * k + 1);
    for (int m = 0; m < kRowTiles; ++m) {
      for (int i = 0; i < 4; ++i) {
        const float2 factor = i < 2 ? first : second;
        const float low = x[m][2 * k + i / 2][2 * (i % 2)], high = x[m][2 * k + i / 2][2 * (i % 2) + 1];
        weighed[m][k][i] = pack_bf16(kSign * factor.x * low, kSign * factor.y * high);
      }
    }
  }
}

// v' from -v, which is used up.
template <int kRowTiles>
__device__ __forceinline__ void solve_values(TokenFactor<kRowTiles>& v_new, TokenSums<kRowTiles>& negative_v,
                                             const StateFactor<kRowTiles>& S, const SharedTile<kHeadDim>& ke,
                                             const SharedTile<kChunk>& Tinv, const float2* beta) {
  multiply_rows<kRowTiles, kHeadDim>(negative_v, S, ke);
  TokenFactor<kRowTiles> weighed;
  weigh_tokens<-1>(weighed, negative_v, beta);
  TokenSums<kRowTiles> sum{};
  multiply_lower_rows(sum, weighed, Tinv);
  pack(v_new, sum);
}

// S <- diag(e^G_last) S, for the state and, backwards, for its gradient.
template <int kRowTiles>
__device__ __forceinline__ void decay_state(State<kRowTiles>& S, const float2* decay_total) {
#pragma unroll
  for (int n = 0; n < kStateTiles; ++n) {
    const float2 decay = columns_of_lane(decay_total, n);
    for (int m = 0; m < kRowTiles; ++m) {
      for (int i = 0; i < 4; ++i) S[m][n][i] *= i % 2 ? decay.y : decay.x;
    }
  }
}

template <int kRowTiles>
__device__ __forceinline__ void advance_state(State<kRowTiles>& S, const TokenFactor<kRowTiles>& v_new,
                                              const SharedTile<kHeadDim>& kg, const float2* decay_total) {
  decay_state<kRowTiles>(S, decay_total);
  multiply_columns<kRowTiles, kHeadDim>(S, v_new, kg);
}

}  // namespace
