// A warp's part of the walk's matrices in registers, and its way from and to global memory.
//
// Rows and columns are dealt so that a lane's neighbours in memory are its own. With g = lane / 4 and t = lane % 4, in
// the layout of accumulators that mma.sync and wgmma share
//   rows g and g + 8 are rows 2 g and 2 g + 1 of the warp's 16;
//   columns 2 t, 2 t + 1 of the tiles 2 p and 2 p + 1 are columns 16 p + 4 t + 0, 1 and 16 p + 4 t + 2, 3.
#include <cstdint>

namespace {

struct Lane {
  uint32_t g;       // lane / 4
  uint32_t t;       // lane % 4
  uint32_t row;     // first row of the warp in S and in M
  uint32_t column;  // first column of the warp in S
};

// 16 rows of S or of a sum, in the accumulator layout: tile[n] is the n-th 16 x 8 tile.
template <int kNumTiles>
struct WarpTile {
  float tile[kNumTiles][4];
};

// A lane's share of 16 x 16 numbers of M: value[half] lies in row 2 g + half.
struct MatrixTile {
  float value[2][4];
};

// Matrices are addressed in quads of 16 bytes, 4 floats. This is the first quad of the one in a row.
template <int kHeadDim>
__device__ __forceinline__ int64_t quad_of_row(int row) {
  return int64_t{row} * (kHeadDim * kHeadDim / 4);
}

template <int kHeadDim>
__device__ __forceinline__ uint32_t quad_of_lane(const Lane& lane) {
  return ((lane.row + 2 * lane.g) * kHeadDim + lane.column + 4 * lane.t) / 4;
}

template <int kHeadDim, int kNumTiles>
__device__ __forceinline__ void load_tile(WarpTile<kNumTiles>& S, const Lane& lane, const void* source, int row) {
  const float4* quads =
      static_cast<const float4*>(source) + (quad_of_row<kHeadDim>(row) + quad_of_lane<kHeadDim>(lane));
#pragma unroll
  for (int n = 0; n < kNumTiles; n += 2) {
    for (int half = 0; half < 2; ++half) {
      const float4 quad = __ldg(quads + half * kHeadDim / 4 + 2 * n);
      S.tile[n][2 * half] = quad.x;
      S.tile[n][2 * half + 1] = quad.y;
      S.tile[n + 1][2 * half] = quad.z;
      S.tile[n + 1][2 * half + 1] = quad.w;
    }
  }
}

// The i-th quad of a lane: row half i % 2, tiles i / 2 * 2 and the next.
template <int kHeadDim, int kNumTiles>
__device__ __forceinline__ void store_quad(void* target, const Lane& lane, int row, const WarpTile<kNumTiles>& S,
                                           int i) {
  float4* quads = static_cast<float4*>(target) + (quad_of_row<kHeadDim>(row) + quad_of_lane<kHeadDim>(lane));
  const int n = i / 2 * 2, half = i % 2;
  quads[half * kHeadDim / 4 + 2 * n] = make_float4(S.tile[n][2 * half], S.tile[n][2 * half + 1],
                                                   S.tile[n + 1][2 * half], S.tile[n + 1][2 * half + 1]);
}

template <int kHeadDim, int kNumTiles>
__device__ __forceinline__ void store_tile(void* target, const Lane& lane, int row, const WarpTile<kNumTiles>& S) {
#pragma unroll
  for (int i = 0; i < kNumTiles; ++i) store_quad<kHeadDim>(target, lane, row, S, i);
}

}  // namespace
