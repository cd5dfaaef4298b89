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

// 64 rows of tokens, [*, V] bf16, from row `row` and channel `channel` of the lane on.
[[maybe_unused]] __device__ __forceinline__ void write_token_rows(void* rows, int64_t row, int channel,
                                                                  const TokenFactor& tokens) {
  uint2* quads = static_cast<uint2*>(rows) + ((row + threadIdx.x % 32 / 4) * kHeadDim + channel) / 4;
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    quads[2 * n * kHeadDim] = token_quad(tokens[n / 2][n % 2 * 2], tokens[n / 2][n % 2 * 2 + 1]);
  }
}

// v' as a tile [*, 2 kChunk, V]: v' rounded, and what that took from it. Rows past a chunk's end, products with zeros,
// are 0 in both.
[[maybe_unused]] __device__ __forceinline__ void write_value_tile(void* tiles, int64_t index, int channel,
                                                                  const SplitTokens& v_new) {
  write_token_rows(tiles, index * 2 * kChunk, channel, v_new.high);
  write_token_rows(tiles, index * 2 * kChunk + kChunk, channel, v_new.low);
}

// z as a tile [*, 3 kChunk / 2, V]: z rounded, and behind it the bytes [kChunk, V] that it lacks: by how much z's bits,
// as an integer, are above those of the rounded z, in units of 0x100 and from -0x8000 on. So the number with the bits
// (rounded << 16) + (byte << 8) - 0x8000 is z but for its last eight bits.
[[maybe_unused]] __device__ __forceinline__ void write_gradient_tile(void* tiles, int64_t index, int channel,
                                                                     const TokenSums& z) {
  const int64_t row = index * (3 * kChunk / 2);
  TokenFactor rounded;
  pack(rounded, z);
  write_token_rows(tiles, row, channel, rounded);
  const auto above = [](float number, uint32_t rounded_bits) {
    return min(__float_as_uint(number) - rounded_bits + 0x8080u, 0xffffu);  // in its second byte
  };
  // A transposed word has channels 2 t, 2 t + 8, 2 t + 1, 2 t + 9; of two of them, t and t ^ 1 make quads.
  const uint32_t own_quad = threadIdx.x % 2 ? 0x3175 : 0x6420;
  const int64_t byte = 2 * (row + kChunk) * kHeadDim + threadIdx.x % 32 / 4 * kHeadDim + channel;
  uint32_t* quads = static_cast<uint32_t*>(tiles) + byte / 4;
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    const uint32_t first = rounded[n / 2][n % 2 * 2], second = rounded[n / 2][n % 2 * 2 + 1];
    const uint32_t even = __byte_perm(above(z[n][0], first << 16), above(z[n][2], second << 16), 0x0051);
    const uint32_t odd = __byte_perm(above(z[n][1], first & 0xffff0000u), above(z[n][3], second & 0xffff0000u), 0x0051);
    const uint32_t word = transpose_8x8(__byte_perm(even, odd, 0x5410));
    quads[2 * n * kHeadDim] = __byte_perm(word, __shfl_xor_sync(0xffffffffu, word, 1), own_quad);
  }
}

}  // namespace
