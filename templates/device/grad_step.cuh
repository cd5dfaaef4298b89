// One chunk's step of a state's gradient dS [K, V], from the end of the chunk to its start, held transposed as a state
// is:
//
//     dv' = Aqk^T do + kg dS          z = Tinv^T dv'          dS <- diag(e^G_last) dS + qg^T do - ke^T (beta z)
//
// The reverse scan and the summary D of a segment both run this code. dS is rounded to bf16 where it is a factor, as
// are z and beta z; the z that is stored is the one that is used. dv' is the sum of two bf16 numbers as a factor, for
// the reason that beta x is forwards. Included after state_step and token_rows.cuh.
#include <cstdint>

namespace {

// z, given the gradient of the state that leaves the chunk.
__device__ __forceinline__ void solve_value_gradients(TokenFactor& z, const StateFactor& dS, const TokenFactor& do_,
                                                      const SharedTile<kHeadDim>& kg, const SharedTile<kChunk>& Aqk,
                                                      const SharedTile<kChunk>& Tinv) {
  TokenSums sum{};
  multiply_lower_columns(sum, do_, Aqk);
  multiply_rows<kHeadDim>(sum, dS, kg);
  TokenFactor high, low;
  split(high, low, sum);
  TokenSums solved{};
  multiply_lower_columns(solved, low, high, Tinv);
  pack(z, solved);
}

// -beta z, rounded.
__device__ __forceinline__ void weigh_gradients(TokenFactor& weighed, const TokenFactor& z, const float2* beta) {
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    const float2 factor = columns_of_lane(beta, n);
    for (int half = 0; half < 2; ++half) {
      const uint32_t pair = z[n / 2][n % 2 * 2 + half];
      weighed[n / 2][n % 2 * 2 + half] =
          pack_bf16(-factor.x * __uint_as_float(pair << 16), -factor.y * __uint_as_float(pair & 0xffff0000u));
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
