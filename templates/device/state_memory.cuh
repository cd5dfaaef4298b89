// A warp's rows of a transposed state, S^T [V, K], to and from memory. Rows g and g + 8 of a row tile are value columns
// 2 g and 2 g + 1 of its 16; `column` is the lane's first one, 2 g included. Included after state_step.cuh.
#include <cstdint>

namespace {

// Public states [*, K, V] fp32: matrix number `index`.
template <int kRowTiles>
__device__ __forceinline__ void read_state(State<kRowTiles>& S, const void* states, int64_t index, int column) {
  const float2* pairs = static_cast<const float2*>(states) + (index * kHeadDim * kHeadDim + column) / 2;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    for (int n = 0; n < kStateTiles; ++n) {
      for (int e = 0; e < 2; ++e) {
        const int k = 8 * n + 2 * (threadIdx.x % 4) + e;
        const float2 pair = __ldg(pairs + k * kHeadDim / 2 + 8 * m);
        S[m][n][e] = pair.x;
        S[m][n][2 + e] = pair.y;
      }
    }
  }
}

template <int kRowTiles>
__device__ __forceinline__ void write_state(void* states, int64_t index, int column, const State<kRowTiles>& S) {
  float2* pairs = static_cast<float2*>(states) + (index * kHeadDim * kHeadDim + column) / 2;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    for (int n = 0; n < kStateTiles; ++n) {
      for (int e = 0; e < 2; ++e) {
        const int k = 8 * n + 2 * (threadIdx.x % 4) + e;
        pairs[k * kHeadDim / 2 + 8 * m] = make_float2(S[m][n][e], S[m][n][2 + e]);
      }
    }
  }
}

// Checkpoints [*, V, K] fp32.
template <int kRowTiles>
__device__ __forceinline__ void write_checkpoint(void* checkpoints, int64_t index, int column,
                                                 const State<kRowTiles>& S) {
  float2* pairs = static_cast<float2*>(checkpoints) + (index * kHeadDim + column) * kHeadDim / 2 + threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    for (int half = 0; half < 2; ++half) {
      for (int n = 0; n < kStateTiles; ++n) {
        pairs[(16 * m + half) * kHeadDim / 2 + 4 * n] = make_float2(S[m][n][2 * half], S[m][n][2 * half + 1]);
      }
    }
  }
}

// Tiles h, dS [*, V, K] bf16. Lanes t and t ^ 1 trade halves, so that each stores 8 bytes and four of them a sector.
template <int kRowTiles>
__device__ __forceinline__ void write_state_tile(void* tiles, int64_t index, int column,
                                                 const StateFactor<kRowTiles>& S) {
  const int t = threadIdx.x % 4;
  const bool is_odd = t % 2;
  uint2* quads = static_cast<uint2*>(tiles) + (index * kHeadDim + column) * kHeadDim / 4 + t % 2 * 2 + t / 2;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    for (int half = 0; half < 2; ++half) {
      for (int k = 0; k < kStateSteps; ++k) {
        const uint32_t first = S[m][k][half], second = S[m][k][2 + half];
        const uint32_t received = __shfl_xor_sync(0xffffffffu, is_odd ? first : second, 1);
        quads[(16 * m + half) * kHeadDim / 4 + 4 * k] =
            is_odd ? make_uint2(received, second) : make_uint2(first, received);
      }
    }
  }
}

}  // namespace
