// A warp's 16 rows of a transposed state, S^T [V, K], to and from memory. `column` is the lane's first value column,
// that of accumulator row g; the other is column + 8. Included after state_step and token_rows.cuh.
#include <cstdint>

namespace {

// Public states [*, K, V] fp32: matrix number `index`.
__device__ __forceinline__ int64_t first_element(int64_t index, int column) {
  return (index * kHeadDim + threadIdx.x % 4 * 2) * kHeadDim + column;
}

[[maybe_unused]] __device__ __forceinline__ void read_state(State& S, const void* states, int64_t index, int column) {
  const float* source = static_cast<const float*>(states) + first_element(index, column);
#pragma unroll
  for (int n = 0; n < kStateTiles; ++n) {
    for (int i = 0; i < 4; ++i) S[n][i] = __ldg(source + (8 * n + i % 2) * kHeadDim + i / 2 * 8);
  }
}

[[maybe_unused]] __device__ __forceinline__ void write_state(void* states, int64_t index, int column, const State& S) {
  float* target = static_cast<float*>(states) + first_element(index, column);
#pragma unroll
  for (int n = 0; n < kStateTiles; ++n) {
    for (int i = 0; i < 4; ++i) target[(8 * n + i % 2) * kHeadDim + i / 2 * 8] = S[n][i];
  }
}

// Checkpoints [*, V, K] fp32.
[[maybe_unused]] __device__ __forceinline__ void write_checkpoint(void* checkpoints, int64_t index, int column,
                                                                  const State& S) {
  float2* pairs = static_cast<float2*>(checkpoints) + (index * kHeadDim + column) * kHeadDim / 2 + threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    for (int n = 0; n < kStateTiles; ++n) {
      pairs[8 * half * kHeadDim / 2 + 4 * n] = make_float2(S[n][2 * half], S[n][2 * half + 1]);
    }
  }
}

// Tiles h, dS [*, V, K] bf16.
[[maybe_unused]] __device__ __forceinline__ void write_state_tile(void* tiles, int64_t index, int column,
                                                                  const StateFactor& S) {
  uint2* quads = static_cast<uint2*>(tiles) + ((index * kHeadDim + column) * kHeadDim + quad_column()) / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    for (int k = 0; k < kStateSteps; ++k) {
      quads[(8 * half * kHeadDim + 16 * k) / 4] = trade_for_quad(S[k][half], S[k][2 + half]);
    }
  }
}

}  // namespace
