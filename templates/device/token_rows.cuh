// Rows of a [T, heads, channels] tensor of 16-bit numbers: into shared memory, and from there into registers, where the
// chunk's tokens are columns; from registers to a tensor's rows. Included after shared_tiles.cuh and kIsFp16: such a
// tensor is fp16, else bf16.
#include <cstdint>
#include <cstring>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

// One head of a strided tensor, at the CTA's first of kWidth channels. A CTA has a warp for every 16.
template <int kWidth>
struct TokenRows {
  using Tile = SharedTile<kWidth>;
  static constexpr int kThreads = 2 * kWidth;

  const void* tensor;
  int64_t offset;  // of the thread's channels in token 0, in elements
  int64_t token_stride;
  int64_t channel_stride;
  bool has_pieces;  // eight channels are 16 aligned bytes

  __device__ __forceinline__ TokenRows(const void* tensor, const int64_t* strides, int head, int channel)
      : tensor(tensor),
        offset(head * strides[1] + (channel + static_cast<int>(threadIdx.x) % Tile::kPieces * 8) * strides[2]),
        token_stride(strides[0]),
        channel_stride(strides[2]),
        has_pieces(strides[2] == 1 && strides[0] % 8 == 0 && strides[1] % 8 == 0 &&
                   reinterpret_cast<uintptr_t>(tensor) % 16 == 0) {}

  // Tokens [token, token + rows). The tile's other rows may be another document's or nobody's: they become 0 unread.
  __device__ __forceinline__ void copy(Tile& tile, int64_t token, int rows) const {
    constexpr int kRowsAtOnce = kThreads / Tile::kPieces;
    const int first = threadIdx.x / Tile::kPieces, piece = threadIdx.x % Tile::kPieces;
    uint4* target = &tile.piece[first][piece ^ (first % 8)];
    const int64_t source = offset + token * token_stride;
    if (has_pieces) {
      const auto* pieces = static_cast<const uint4*>(tensor) + source / 8;
#pragma unroll
      for (int i = 0; i < kChunk; i += kRowsAtOnce) {
        const int row = first + i;
        copy_async_16_or_zeros(shared_address(target + i * Tile::kPieces),
                               pieces + min(row, rows - 1) * (token_stride / 8), row < rows);
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kChunk; i += kRowsAtOnce) {
      uint32_t pair[4] = {};
      if (first + i < rows) {
        const auto* elements = static_cast<const unsigned short*>(tensor) + source + (first + i) * token_stride;
        for (int p = 0; p < 4; ++p) {
          pair[p] = elements[2 * p * channel_stride] | uint32_t{elements[(2 * p + 1) * channel_stride]} << 16;
        }
      }
      target[i * Tile::kPieces] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    }
  }
};

// The warp's 16 channels, from `channel` on, as rows of a left factor.
template <int kWidth>
__device__ __forceinline__ void load_token_factor(TokenFactor& left, const SharedTile<kWidth>& tile, int channel) {
  const int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8;
  const uint32_t address = shared_address(&tile.piece[row][(channel / 8 + lane / 8 % 2) ^ (row % 8)]);
#pragma unroll
  for (int k = 0; k < kTokenSteps; ++k) {
    ldmatrix_x4_trans(left[k], address + k * 16 * SharedTile<kWidth>::kRowBytes);
  }
}

// Two elements of such a tensor.
[[maybe_unused]] __device__ __forceinline__ uint32_t pack_values(float low, float high) {
  if constexpr (!kIsFp16) return pack_bf16(low, high);
  const __half2 pair = __floats2half2_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}

[[maybe_unused]] __device__ __forceinline__ float2 unpack_values(uint32_t bits) {
  if constexpr (!kIsFp16) return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
  __half2 pair;
  memcpy(&pair, &bits, sizeof pair);
  return __half22float2(pair);
}

// -v^T in fp32.
template <int kWidth>
__device__ __forceinline__ void load_negative_values(TokenSums& x, const SharedTile<kWidth>& tile, int channel) {
  TokenFactor v;
  load_token_factor(v, tile, channel);
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    for (int half = 0; half < 2; ++half) {
      const float2 pair = unpack_values(v[n / 2][n % 2 * 2 + half]);
      x[n][2 * half] = -pair.x;
      x[n][2 * half + 1] = -pair.y;
    }
  }
}

// do^T as a bf16 factor; fp16 is rounded.
template <int kWidth>
__device__ __forceinline__ void load_gradients(TokenFactor& do_, const SharedTile<kWidth>& tile, int channel) {
  load_token_factor(do_, tile, channel);
  if constexpr (kIsFp16) {
#pragma unroll
    for (int k = 0; k < kTokenSteps; ++k) {
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_values(do_[k][i]);
        do_[k][i] = pack_bf16(pair.x, pair.y);
      }
    }
  }
}

// An 8 x 8 matrix of 16-bit numbers transposed in a warp's registers. Lane l holds elements (l / 4, 2 (l % 4)) and
// (l / 4, 2 (l % 4) + 1), the first in the lower half.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t matrix) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(matrix));
  return transposed;
}

// A row's columns 2 t, 2 t + 1 and 2 t + 8, 2 t + 9 for four successive ones: lanes t and t ^ 1 trade halves, so that
// each stores 8 bytes and the four lanes of a row its 32. The quad begins at quad_column().
[[maybe_unused]] __device__ __forceinline__ uint2 trade_for_quad(uint32_t first, uint32_t second) {
  const bool is_odd = threadIdx.x % 2;
  const uint32_t received = __shfl_xor_sync(0xffffffffu, is_odd ? first : second, 1);
  return is_odd ? make_uint2(received, second) : make_uint2(first, received);
}

[[maybe_unused]] __device__ __forceinline__ int quad_column() { return threadIdx.x % 2 * 8 + threadIdx.x % 4 / 2 * 4; }

// Channels quad_column() .. + 3 of token l / 4 of a tile, from its packed accumulators: rows g, and rows g + 8.
[[maybe_unused]] __device__ __forceinline__ uint2 token_quad(uint32_t rows, uint32_t rows_8) {
  return trade_for_quad(transpose_8x8(rows), transpose_8x8(rows_8));
}

}  // namespace
