// One chunk's step of a state S [K, V], held transposed in the registers of the warpgroups that own its value columns:
//
//     x = v - ke S          v' = Tinv (beta x)          S <- diag(e^G_last) S + kg^T v'
//
// What is rounded, and the order of every sum, is that of state_step.cuh; the two are compared bit by bit in
// tests/gpu/test_chunk_scan_gpu.py. Included after state_step, token_rows and warpgroup_tiles.cuh.
#include <cstdint>

namespace {

// v^T in fp32.
__device__ __forceinline__ void load_values(TokenSums& x, const SharedTile<64>& tile, int channel) {
  TokenFactor v;
  load_token_factor(v, tile, channel);
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    for (int half = 0; half < 2; ++half) {
      const float2 pair = unpack_values(v[n / 2][n % 2 * 2 + half]);
      x[n][2 * half] = pair.x;
      x[n][2 * half + 1] = pair.y;
    }
  }
}

// Starts x = v - ke S, given v in x, and rounds S.
__device__ __forceinline__ void start_errors(TokenSums& x, StateFactor& rounded, const State& S, uint64_t ke) {
  pack(rounded, S);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kStateSteps; ++k) wgmma_minus_rows_64(x, rounded[k], step_of_columns(ke, k), 1);
  wgmma_commit();
}

// Starts S += kg^T v', and takes v' apart. A product starts as soon as its factor's step is known.
__device__ __forceinline__ void start_advance(State& S, SplitTokens& v_new, const TokenSums& sum, uint64_t kg) {
#pragma unroll
  for (int k = 0; k < kTokenSteps; ++k) {
    split_step(v_new.high[k], v_new.low[k], sum[2 * k], sum[2 * k + 1]);
    wgmma_fence();
    wgmma_columns_{{ head_dim }}(S, v_new.low[k], step_of_rows(kg, k), 1);
    wgmma_columns_{{ head_dim }}(S, v_new.high[k], step_of_rows(kg, k), 1);
  }
  wgmma_commit();
}

}  // namespace
