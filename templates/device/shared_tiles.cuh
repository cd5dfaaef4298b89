// The tiles of a chunk in shared memory, and a warp's products with them. Included after async_copy, ldmatrix and
// mma_bf16.cuh and the constant kChunk.
//
// A warp owns 16 rows of everything: rows of S^T and of x^T are value columns. Accumulators stand as array[column tile
// of 8][4], left factors as array[inner step of 16][4], both as mma_bf16.cuh lays them out; so an accumulator, packed,
// is a left factor with no move between lanes.
#include <cstdint>
#include <cstring>

#include <cuda_bf16.h>

namespace {

constexpr int kTokenTiles = kChunk / 8;
constexpr int kTokenSteps = kChunk / 16;

using TokenSums = float[kTokenTiles][4];       // columns are the chunk's tokens
using TokenFactor = uint32_t[kTokenSteps][4];  // tokens are summed over

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&fragment)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(row_address));
}

// kChunk rows of kColumns 16-bit numbers. Piece p, of 16 bytes, of row r stands in place p ^ (r % 8): the same piece of
// eight successive rows, which is what a matrix of ldmatrix reads, lies in different banks.
template <int kColumns>
struct alignas(256) SharedTile {
  static constexpr int kPieces = kColumns / 8;
  static constexpr int kRowBytes = 2 * kColumns;
  uint4 piece[kChunk][kPieces];
};

// Starts copying tile number `index` of [*, kChunk, kColumns] bf16, by all kThreads threads of the CTA.
template <int kThreads, int kColumns>
__device__ __forceinline__ void copy_tile(SharedTile<kColumns>& tile, const void* tiles, int64_t index) {
  constexpr int kPieces = SharedTile<kColumns>::kPieces, kRowsAtOnce = kThreads / kPieces;
  static_assert(kRowsAtOnce % 8 == 0, "a thread's rows differ by multiples of 8, so its place in a row is the same");
  const int row = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
  const uint4* source = static_cast<const uint4*>(tiles) + (index * kChunk * kPieces + threadIdx.x);
  const uint32_t target = shared_address(&tile.piece[row][piece ^ (row % 8)]);
#pragma unroll
  for (int i = 0; i < kChunk / kRowsAtOnce; ++i) {
    copy_async_16(target + i * kThreads * 16, source + i * kThreads);
  }
}

// Starts copying row number `index` of [*, kHeadDim] fp32, by the first threads.
template <int kPairs>
__device__ __forceinline__ void copy_row(float2 (&row)[kPairs], const void* rows, int64_t index) {
  constexpr int kPieces = kPairs / 2;
  const int piece = threadIdx.x;
  if (piece < kPieces) {
    copy_async_16(shared_address(row) + 16 * piece, static_cast<const float4*>(rows) + (index * kPieces + piece));
  }
}

// A lane's address in the first 16 rows of a tile. The four matrices of 16 columns from 16 c and 16 rows from 16 r lie
// at the address XOR 32 c, plus 16 r rows. With lane_rows they come as (rows, columns) 0 0, 0 8, 8 0, 8 8, with
// lane_columns as 0 0, 8 0, 0 8, 8 8.
template <int kColumns>
__device__ __forceinline__ uint32_t lane_rows(const SharedTile<kColumns>& tile) {
  const int lane = threadIdx.x % 32;
  return shared_address(&tile.piece[lane / 16 * 8 + lane % 8][(lane / 8 % 2) ^ (lane % 8)]);
}

template <int kColumns>
__device__ __forceinline__ uint32_t lane_columns(const SharedTile<kColumns>& tile) {
  const int lane = threadIdx.x % 32;
  return shared_address(&tile.piece[lane / 8 % 2 * 8 + lane % 8][(lane / 16) ^ (lane % 8)]);
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}

// Accumulators rounded to bf16, as a left factor.
template <int kSteps>
__device__ __forceinline__ void pack(uint32_t (&left)[kSteps][4], const float (&sum)[2 * kSteps][4]) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    for (int i = 0; i < 4; ++i) {
      const float(&tile)[4] = sum[2 * k + i / 2];
      left[k][i] = pack_bf16(tile[i % 2 * 2], tile[i % 2 * 2 + 1]);
    }
  }
}

// Columns 2 t and 2 t + 1 of accumulator tile n, of one number per column in shared memory.
__device__ __forceinline__ float2 columns_of_lane(const float2* per_column, int n) {
  return per_column[4 * n + threadIdx.x % 4];
}

// sum += left tile^T: the tile's rows, tokens, are columns of the sum; its columns are summed over.
template <int kColumns>
__device__ __forceinline__ void multiply_rows(TokenSums& sum, const uint32_t (&left)[kColumns / 16][4],
                                              const SharedTile<kColumns>& tile) {
  const uint32_t address = lane_rows(tile);
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k) {
    for (int n = 0; n < kTokenSteps; ++n) {
      uint32_t right[4];
      ldmatrix_x4(right, (address ^ 32 * k) + n * 16 * SharedTile<kColumns>::kRowBytes);
      mma_bf16(sum[2 * n], left[k], right[0], right[1]);
      mma_bf16(sum[2 * n + 1], left[k], right[2], right[3]);
    }
  }
}

// The same for a left factor in two parts: the smaller one first.
template <int kColumns>
__device__ __forceinline__ void multiply_rows(TokenSums& sum, const uint32_t (&low)[kColumns / 16][4],
                                              const uint32_t (&high)[kColumns / 16][4],
                                              const SharedTile<kColumns>& tile) {
  const uint32_t address = lane_rows(tile);
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k) {
    for (int n = 0; n < kTokenSteps; ++n) {
      uint32_t right[4];
      ldmatrix_x4(right, (address ^ 32 * k) + n * 16 * SharedTile<kColumns>::kRowBytes);
      for (int row = 0; row < 2; ++row) {
        mma_bf16(sum[2 * n + row], low[k], right[2 * row], right[2 * row + 1]);
        mma_bf16(sum[2 * n + row], high[k], right[2 * row], right[2 * row + 1]);
      }
    }
  }
}

// The same for a lower triangular tile [token, token], without the blocks of zeros.
__device__ __forceinline__ void multiply_lower_rows(TokenSums& sum, const TokenFactor& low, const TokenFactor& high,
                                                    const SharedTile<kChunk>& tile) {
  const uint32_t address = lane_rows(tile);
#pragma unroll
  for (int k = 0; k < kTokenSteps; ++k) {
    for (int n = k; n < kTokenSteps; ++n) {
      uint32_t right[4];
      ldmatrix_x4(right, (address ^ 32 * k) + n * 16 * SharedTile<kChunk>::kRowBytes);
      for (int row = 0; row < 2; ++row) {
        mma_bf16(sum[2 * n + row], low[k], right[2 * row], right[2 * row + 1]);
        mma_bf16(sum[2 * n + row], high[k], right[2 * row], right[2 * row + 1]);
      }
    }
  }
}

// sum += left tile for a lower triangular tile [token, token], without the blocks of zeros.
[[maybe_unused]] __device__ __forceinline__ void multiply_lower_columns(TokenSums& sum, const TokenFactor& left,
                                                                        const SharedTile<kChunk>& tile) {
  const uint32_t address = lane_columns(tile);
#pragma unroll
  for (int k = 0; k < kTokenSteps; ++k) {
    for (int n = 0; n <= k; ++n) {
      uint32_t right[4];
      ldmatrix_x4_trans(right, (address ^ 32 * n) + k * 16 * SharedTile<kChunk>::kRowBytes);
      mma_bf16(sum[2 * n], left[k], right[0], right[1]);
      mma_bf16(sum[2 * n + 1], left[k], right[2], right[3]);
    }
  }
}

// The same for a left factor in two parts.
[[maybe_unused]] __device__ __forceinline__ void multiply_lower_columns(TokenSums& sum, const TokenFactor& low,
                                                                        const TokenFactor& high,
                                                                        const SharedTile<kChunk>& tile) {
  const uint32_t address = lane_columns(tile);
#pragma unroll
  for (int k = 0; k < kTokenSteps; ++k) {
    for (int n = 0; n <= k; ++n) {
      uint32_t right[4];
      ldmatrix_x4_trans(right, (address ^ 32 * n) + k * 16 * SharedTile<kChunk>::kRowBytes);
      for (int column = 0; column < 2; ++column) {
        mma_bf16(sum[2 * n + column], low[k], right[2 * column], right[2 * column + 1]);
        mma_bf16(sum[2 * n + column], high[k], right[2 * column], right[2 * column + 1]);
      }
    }
  }
}

// sum += left tile: the tile's rows, tokens, are summed over; its columns are those of the sum.
template <int kColumns>
__device__ __forceinline__ void multiply_columns(float (&sum)[kColumns / 8][4], const TokenFactor& left,
                                                 const SharedTile<kColumns>& tile) {
  const uint32_t address = lane_columns(tile);
#pragma unroll
  for (int k = 0; k < kTokenSteps; ++k) {
    for (int n = 0; n < kColumns / 16; ++n) {
      uint32_t right[4];
      ldmatrix_x4_trans(right, (address ^ 32 * n) + k * 16 * SharedTile<kColumns>::kRowBytes);
      mma_bf16(sum[2 * n], left[k], right[0], right[1]);
      mma_bf16(sum[2 * n + 1], left[k], right[2], right[3]);
    }
  }
}

// The same for a left factor in two parts.
template <int kColumns>
__device__ __forceinline__ void multiply_columns(float (&sum)[kColumns / 8][4], const TokenFactor& low,
                                                 const TokenFactor& high, const SharedTile<kColumns>& tile) {
  const uint32_t address = lane_columns(tile);
#pragma unroll
  for (int k = 0; k < kTokenSteps; ++k) {
    for (int n = 0; n < kColumns / 16; ++n) {
      uint32_t right[4];
      ldmatrix_x4_trans(right, (address ^ 32 * n) + k * 16 * SharedTile<kColumns>::kRowBytes);
      for (int column = 0; column < 2; ++column) {
        mma_bf16(sum[2 * n + column], low[k], right[2 * column], right[2 * column + 1]);
        mma_bf16(sum[2 * n + column], high[k], right[2 * column], right[2 * column + 1]);
      }
    }
  }
}

}  // namespace
