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

[[maybe_unused]] __device__ __forceinline__ void read_checkpoint(State& S, const void* checkpoints, int64_t index,
                                                                 int column) {
  const float2* pairs =
      static_cast<const float2*>(checkpoints) + (index * kHeadDim + column) * kHeadDim / 2 + threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    for (int n = 0; n < kStateTiles; ++n) {
      const float2 pair = __ldg(pairs + 8 * half * kHeadDim / 2 + 4 * n);
      S[n][2 * half] = pair.x;
      S[n][2 * half + 1] = pair.y;
    }
  }
}

// Tiles h, dS [*, V, K] bf16. Lanes t and t ^ 2 trade quads of two steps, so that each stores 16 bytes.
[[maybe_unused]] __device__ __forceinline__ void write_state_tile(void* tiles, int64_t index, int column,
                                                                  const StateFactor& S) {
  const bool is_upper = threadIdx.x % 4 / 2;
  const int channel = is_upper * 16 + threadIdx.x % 2 * 8;
  uint4* pieces = static_cast<uint4*>(tiles) + ((index * kHeadDim + column) * kHeadDim + channel) / 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    for (int k = 0; k < kStateSteps; k += 2) {
      const uint2 quad = trade_for_quad(S[k][half], S[k][2 + half]);
      const uint2 next = trade_for_quad(S[k + 1][half], S[k + 1][2 + half]);
      const uint2 given = is_upper ? quad : next;
      const uint32_t x = __shfl_xor_sync(0xffffffffu, given.x, 2), y = __shfl_xor_sync(0xffffffffu, given.y, 2);
      pieces[(8 * half * kHeadDim + 16 * k) / 8] = is_upper ? make_uint4(x, y, next.x, next.y)
                                                            : make_uint4(quad.x, quad.y, x, y);
    }
  }
}

// v' or z as a tile [*, kChunk, V], from channel `channel` of the lane on; its padded rows, products with zeros, are 0.
[[maybe_unused]] __device__ __forceinline__ void write_token_tile(void* tiles, int64_t index, int channel,
                                                                  const TokenFactor& rows) {
  const int token = threadIdx.x % 32 / 4;
  uint2* quads = static_cast<uint2*>(tiles) + ((index * kChunk + token) * kHeadDim + channel) / 4;
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    quads[2 * n * kHeadDim] = token_quad(rows[n / 2][n % 2 * 2], rows[n / 2][n % 2 * 2 + 1]);
  }
}

}  // namespace
