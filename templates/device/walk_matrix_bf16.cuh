// M as the left factor of bf16 products: 16 x 16 numbers of it from global memory, and their parts.
//
// The inner index is dealt as rows are: indices g and g + 8 of a 16-deep tile are columns 2 g and 2 g + 1 of M and rows
// 2 g and 2 g + 1 of S. A lane needs the indices 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of M: columns 4 t to 4 t + 3.
namespace {

template <int kHeadDim, bool kTransposed>
__device__ __forceinline__ void load_matrix(MatrixTile& M, const Lane& lane, const void* source, int row, int k) {
  const int64_t matrix = quad_of_row<kHeadDim>(row);
  if constexpr (kTransposed) {
    const float2* pairs =
        static_cast<const float2*>(source) + (2 * matrix + 2 * lane.t * kHeadDim + lane.row / 2 + lane.g);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 pair = __ldg(pairs + (k + e) * kHeadDim / 2);
      M.value[0][e] = pair.x;
      M.value[1][e] = pair.y;
    }
  } else {
    const float4* quads =
        static_cast<const float4*>(source) + (matrix + (lane.row + 2 * lane.g) * kHeadDim / 4 + lane.t);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 quad = __ldg(quads + (half * kHeadDim + k) / 4);
      M.value[half][0] = quad.x;
      M.value[half][1] = quad.y;
      M.value[half][2] = quad.z;
      M.value[half][3] = quad.w;
    }
  }
}

// The left factor of mma_bf16 and of a warpgroup's product, per part.
struct MatrixParts {
  uint32_t fragment[3][4];

  __device__ __forceinline__ void split(const MatrixTile& M) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t parts[3];
      split_bf16x3(parts, M.value[i % 2][i / 2], M.value[i % 2][i / 2 + 2]);
      for (int p = 0; p < 3; ++p) fragment[p][i] = parts[p];
    }
  }
};

}  // namespace
