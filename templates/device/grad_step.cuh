// One chunk's step of a state's gradient dS [K, V], from the end of the chunk to its start, held transposed as a state
// is:
//
//     dv' = Aqk^T do + kg dS          z = Tinv^T dv'          dS <- diag(e^G_last) dS + qg^T do - ke^T (beta z)
//
// The reverse scan and the summary D of a segment both run this code. dS and dv' are sums of two bf16 numbers as
// factors of kg and Tinv: at a document's end, kg dS is most of z, and a single token's dbeta averages no error of dS.
// beta z is rounded once. Included after state_step and token_rows.cuh.
#include <cstdint>

namespace {

// dS as a factor in two parts.
struct SplitState {
  StateFactor high, low;
};

// dv', from zeros, given the gradient of the state that leaves the chunk.
__device__ __forceinline__ void sum_value_gradients(TokenSums& dv, const SplitState& dS, const TokenFactor& do_,
                                                    const SharedTile<kHeadDim>& kg, const SharedTile<kChunk>& Aqk) {
  multiply_lower_columns(dv, do_, Aqk);
  multiply_rows<kHeadDim>(dv, dS.low, dS.high, kg);
}

__device__ __forceinline__ void solve_value_gradients(TokenSums& z, const TokenSums& dv,
                                                      const SharedTile<kChunk>& Tinv) {
  TokenFactor high, low;
  split(high, low, dv);
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    for (int i = 0; i < 4; ++i) z[n][i] = 0.0f;
  }
  multiply_lower_columns(z, low, high, Tinv);
}

// -beta z, rounded.
__device__ __forceinline__ void weigh_gradients(TokenFactor& weighed, const TokenSums& z, const float2* beta) {
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    const float2 factor = columns_of_lane(beta, n);
    for (int half = 0; half < 2; ++half) {
      weighed[n / 2][n % 2 * 2 + half] = pack_bf16(-factor.x * z[n][2 * half], -factor.y * z[n][2 * half + 1]);
    }
  }
}

// dS <- diag(e^G_last) dS + qg^T do: the part of the step that does not wait for z.
__device__ __forceinline__ void add_query_gradients(State& dS, const TokenFactor& do_, const SharedTile<kHeadDim>& qg,
                                                    const float2* decay_total) {
  decay_state(dS, decay_total);
  multiply_columns<kHeadDim>(dS, do_, qg);
}

// dS <- dS - ke^T (beta z).
__device__ __forceinline__ void subtract_key_gradients(State& dS, const TokenFactor& weighed_z,
                                                       const SharedTile<kHeadDim>& ke) {
  multiply_columns<kHeadDim>(dS, weighed_z, ke);
}

}  // namespace
