// The tiles of a chunk in shared memory, and products of a warp's registers with them. Included after ldmatrix,
// mma_bf16 and async_copy.cuh and the constants kChunk and kThreads (of the CTA).
//
// A warp owns kRowTiles x 16 rows of everything: rows of S^T are value columns, and of x^T too. Accumulators stand as
// array[row tile][column tile of 8][4], left factors as array[row tile][inner step of 16][4], both as mma_bf16.cuh lays
// them out; so an accumulator, packed, is a left factor with no move between lanes.
#include <cstdint>
#include <cstring>

#include <cuda_bf16.h>

namespace {

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&fragment)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(row_address));
}

// kChunk rows of kColumns bf16. Piece p, of 16 bytes, of row r stands in place p ^ (r % 8): the same piece of eight
// successive rows, which is what a matrix of ldmatrix reads, lies in different banks.
template <int kColumns>
struct alignas(256) SharedTile {
  static constexpr int kPieces = kColumns / 8;
  static constexpr int kRowBytes = 2 * kColumns;
  uint4 piece[kChunk][kPieces];
};

// Starts copying tile number `index` of [*, kChunk, kColumns] bf16. All threads of the CTA take part.
template <int kColumns>
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

// A lane's address in the first 16 rows of a tile, as the two forms of ldmatrix want it. The matrices of 16 columns
// from 16 c lie at the address XOR 32 c, those of 16 rows from 16 r at r * 16 * kRowBytes behind.
template <int kColumns>
__device__ __forceinline__ uint32_t lane_rows(const SharedTile<kColumns>& tile) {
  const int lane = threadIdx.x % 32;
  return shared_address(&tile.piece[lane / 16 * 8 + lane % 8][lane / 8 % 2 ^ lane % 8]);
}

template <int kColumns>
__device__ __forceinline__ uint32_t lane_columns(const SharedTile<kColumns>& tile) {
  const int lane = threadIdx.x % 32;
  return shared_address(&tile.piece[lane / 8 % 2 * 8 + lane % 8][lane / 16 ^ lane % 8]);
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}

// The left factor of one step from the two column tiles that it covers.
__device__ __forceinline__ void pack_step(uint32_t (&left)[4], const float (&first)[4], const float (&second)[4]) {
  left[0] = pack_bf16(first[0], first[1]);
  left[1] = pack_bf16(first[2], first[3]);
  left[2] = pack_bf16(second[0], second[1]);
  left[3] = pack_bf16(second[2], second[3]);
}

template <int kRowTiles, int kSteps>
__device__ __forceinline__ void pack(uint32_t (&left)[kRowTiles][kSteps][4],
                                     const float (&sum)[kRowTiles][2 * kSteps][4]) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    for (int k = 0; k < kSteps; ++k) pack_step(left[m][k], sum[m][2 * k], sum[m][2 * k + 1]);
  }
}

constexpr int kTokenTiles = kChunk / 8;
constexpr int kTokenSteps = kChunk / 16;

// sum += left tile^T: the tile's rows, tokens, are columns of the sum; its columns are summed over.
template <int kRowTiles, int kColumns>
__device__ __forceinline__ void multiply_rows(float (&sum)[kRowTiles][kTokenTiles][4],
                                              const uint32_t (&left)[kRowTiles][kColumns / 16][4],
                                              const SharedTile<kColumns>& tile) {
  const uint32_t address = lane_rows(tile);
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k) {
    for (int n = 0; n < kTokenSteps; ++n) {
      uint32_t right[4];
      ldmatrix_x4(right, (address ^ 32 * k) + n * 16 * SharedTile<kColumns>::kRowBytes);
      for (int m = 0; m < kRowTiles; ++m) {
        mma_bf16(sum[m][2 * n], left[m][k], right[0], right[1]);
        mma_bf16(sum[m][2 * n + 1], left[m][k], right[2], right[3]);
      }
    }
  }
}

// The same for a lower triangular tile [token, token], without the blocks of zeros.
template <int kRowTiles>
__device__ __forceinline__ void multiply_lower_rows(float (&sum)[kRowTiles][kTokenTiles][4],
                                                    const uint32_t (&left)[kRowTiles][kTokenSteps][4],
                                                    const SharedTile<kChunk>& tile) {
  const uint32_t address = lane_rows(tile);
#pragma unroll
  for (int k = 0; k < kTokenSteps; ++k) {
    for (int n = k; n < kTokenSteps; ++n) {
      uint32_t right[4];
      ldmatrix_x4(right, (address ^ 32 * k) + n * 16 * SharedTile<kChunk>::kRowBytes);
      for (int m = 0; m < kRowTiles; ++m) {
        mma_bf16(sum[m][2 * n], left[m][k], right[0], right[1]);
        mma_bf16(sum[m][2 * n + 1], left[m][k], right[2], right[3]);
      }
    }
  }
}

// sum += left tile: the tile's rows, tokens, are summed over; its columns are those of the sum.
template <int kRowTiles, int kColumns>
__device__ __forceinline__ void multiply_columns(float (&sum)[kRowTiles][kColumns / 8][4],
                                                 const uint32_t (&left)[kRowTiles][kTokenSteps][4],
                                                 const SharedTile<kColumns>& tile) {
  const uint32_t address = lane_columns(tile);
#pragma unroll
  for (int k = 0; k < kTokenSteps; ++k) {
    for (int n = 0; n < kColumns / 16; ++n) {
      uint32_t right[4];
      ldmatrix_x4_trans(right, (address ^ 32 * n) + k * 16 * SharedTile<kColumns>::kRowBytes);
      for (int m = 0; m < kRowTiles; ++m) {
        mma_bf16(sum[m][2 * n], left[m][k], right[0], right[1]);
        mma_bf16(sum[m][2 * n + 1], left[m][k], right[2], right[3]);
      }
    }
  }
}

}  // namespace
