// A chunk cut into blocks of 16 tokens, a block's numbers dealt to the lanes of a warp, 16 channels at a time: with
// g = lane / 4 and t = lane % 4 a lane has tokens 4 t .. 4 t + 3 of channels g and g + 8, as number [e][2 c + r] token
// 4 t + 2 e + r of channel g + 8 c.
//
// This is a sum of mma.sync whose rows are channels and whose column n of tile e is token 4 (n / 2) + 2 e + n % 2 of
// the block; so tiles in shared memory are dealt: token 4 a + 2 e + r of a block stands in row 8 e + 2 a + r. It is
// also a TF32 left factor whose inner indices t and t + 4 of step e are tokens 4 t + 2 e and 4 t + 2 e + 1. So a sum
// becomes a factor, a lane has runs of successive tokens, and nothing moves between lanes. Included after shared_tiles,
// async_copy, ldmatrix and mma_tf32.cuh.
#include <cstdint>
#include <cstring>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

constexpr int kBlockRows = 16;
constexpr int kNumBlocks = kChunk / kBlockRows;

using BlockValues = float[2][4];

// The lane's number, asked for anew, lest what depends on it is kept in registers from one use to the next.
__device__ __forceinline__ int lane_anew() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

__device__ __forceinline__ int lane_group() { return threadIdx.x % 32 / 4; }  // g
__device__ __forceinline__ int lane_part() { return threadIdx.x % 4; }        // t

// The token, of the chunk, in a row of a dealt tile.
__device__ __forceinline__ int dealt_token(int row) {
  return (row & ~15) | (row & 6) << 1 | (row & 8) >> 2 | (row & 1);
}

// Rows of 16-bit numbers in memory, for kThreads threads of the CTA side by side. A thread has one piece of eight
// channels of a row of every block; with has_pieces a piece is 16 aligned bytes. Strides are in elements.
template <int kWidth>
struct DealtRows {
  using Tile = SharedTile<kWidth>;
  static constexpr int kThreads = 2 * kWidth;
  static_assert(kThreads / Tile::kPieces == kBlockRows, "the threads have one piece of every row of a block each");

  const unsigned short* first;  // of the chunk's first token
  int64_t token_stride;
  int64_t channel_stride;
  bool has_pieces;

  static __device__ __forceinline__ int thread() { return threadIdx.x % kThreads; }
  static __device__ __forceinline__ int piece() { return thread() % Tile::kPieces; }

  // The thread's row in a block of a dealt tile, its token, and where its piece of the first block stands.
  static __device__ __forceinline__ int row() { return thread() / Tile::kPieces; }
  static __device__ __forceinline__ int token() { return dealt_token(row()); }
  static __device__ __forceinline__ uint4* place(Tile& tile) { return &tile.piece[row()][piece() ^ row() % 8]; }

  __device__ __forceinline__ uint4 read(int token) const {
    const unsigned short* const elements = first + (token * token_stride + piece() * 8 * channel_stride);
    if (has_pieces) return __ldg(reinterpret_cast<const uint4*>(elements));
    uint32_t pair[4];
    for (int p = 0; p < 4; ++p) {
      pair[p] = elements[2 * p * channel_stride] | uint32_t{elements[(2 * p + 1) * channel_stride]} << 16;
    }
    return make_uint4(pair[0], pair[1], pair[2], pair[3]);
  }

  // Starts copying the first `rows` tokens. The tile's other rows may be another document's or nobody's: they become 0
  // unread.
  __device__ __forceinline__ void copy(Tile& tile, int rows) const {
    uint4* const target = place(tile);
    if (has_pieces) {
      const unsigned short* source = first + (token() * token_stride + piece() * 8);
#pragma unroll
      for (int i = 0; i < kChunk; i += kBlockRows) {
        copy_async_16_or_zeros(shared_address(target + i * Tile::kPieces), source, token() + i < rows);
        source += kBlockRows * token_stride;
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kChunk; i += kBlockRows) {
      target[i * Tile::kPieces] = token() + i < rows ? read(token() + i) : make_uint4(0, 0, 0, 0);
    }
  }
};

// Starts copying tile number `index` of [*, kWidth, kWidth], row by row, by kThreads threads side by side.
template <int kWidth>
__device__ __forceinline__ void copy_square(SharedTile<kWidth> (&tiles)[kWidth / kChunk], const void* squares,
                                            int64_t index) {
  using Rows = DealtRows<kWidth>;
  constexpr int kSquarePieces = kWidth * kWidth / 8;
  const uint4* const source = static_cast<const uint4*>(squares) + (index * kSquarePieces + Rows::thread());
  const uint32_t target = shared_address(Rows::place(tiles[0]));
#pragma unroll
  for (int i = 0; i < kSquarePieces; i += Rows::kThreads) copy_async_16(target + 16 * i, source + i);
}

// A lane's place for ldmatrix and stmatrix in the first 16 rows and columns of a tile, in bytes: matrices are rows 0,
// columns 0; rows 0, columns 8; rows 8, columns 0; rows 8, columns 8. 16 n columns further on is the place XOR 32 n.
template <int kWidth>
__device__ __forceinline__ uint32_t lane_place() {
  const int lane = threadIdx.x % 32;
  return (lane / 16 * 8 + lane % 8) * SharedTile<kWidth>::kRowBytes + ((lane / 8 % 2) ^ (lane % 8)) * 16;
}

template <bool kFromFp16>
__device__ __forceinline__ float2 unpack_word(uint32_t word) {
  if constexpr (!kFromFp16) return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
  __half2 pair;
  memcpy(&pair, &word, sizeof pair);
  return __half22float2(pair);
}

template <bool kToFp16>
__device__ __forceinline__ uint32_t pack_word(float low, float high) {
  if constexpr (!kToFp16) return pack_bf16(low, high);
  const __half2 pair = __floats2half2_rn(low, high);
  uint32_t word;
  memcpy(&word, &pair, sizeof word);
  return word;
}

// The lane's numbers of a block of a dealt tile. Word 2 e + c has the pairs of tokens.
template <bool kFromFp16>
__device__ __forceinline__ void load_block(BlockValues& values, uint32_t address) {
  uint32_t words[4];
  ldmatrix_x4_trans(words, address);
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float2 pair = unpack_word<kFromFp16>(words[w]);
    values[w / 2][w % 2 * 2] = pair.x;
    values[w / 2][w % 2 * 2 + 1] = pair.y;
  }
}

// Rounded, to their place in a dealt tile.
template <bool kToFp16>
__device__ __forceinline__ void store_block(uint32_t address, const BlockValues& values) {
  uint32_t words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) words[w] = pack_word<kToFp16>(values[w / 2][w % 2 * 2], values[w / 2][w % 2 * 2 + 1]);
  stmatrix_x4_trans(address, words);
}

// The lane's four tokens of a block, of one number per token of the chunk.
struct TokenQuad {
  float token[4];

  __device__ __forceinline__ TokenQuad(const float* per_token, int block) {
    const float4 quad = *reinterpret_cast<const float4*>(per_token + block * kBlockRows + 4 * lane_part());
    token[0] = quad.x;
    token[1] = quad.y;
    token[2] = quad.z;
    token[3] = quad.w;
  }

  __device__ __forceinline__ TokenQuad(const TokenQuad& a, float b)
      : token{a.token[0] * b, a.token[1] * b, a.token[2] * b, a.token[3] * b} {}

  __device__ __forceinline__ TokenQuad(const TokenQuad& a, const TokenQuad& b)
      : token{a.token[0] * b.token[0], a.token[1] * b.token[1], a.token[2] * b.token[2], a.token[3] * b.token[3]} {}

  // Of number [e][i].
  __device__ __forceinline__ float at(int e, int i) const { return token[2 * e + i % 2]; }
};

// A channel's product or sum over its four lanes: over those before this one, over those behind it, over all.
struct AcrossLanes {
  float before;
  float behind;
  float all;
};

__device__ __forceinline__ AcrossLanes multiply_across_lanes(float own) {
  constexpr unsigned kAllLanes = 0xffffffffu;
  const int t = lane_part();
  const float neighbour = __shfl_xor_sync(kAllLanes, own, 1), pair = own * neighbour;
  const float other_pair = __shfl_xor_sync(kAllLanes, pair, 2);
  const float low = t & 1 ? neighbour : 1.0f, high = t & 1 ? 1.0f : neighbour;
  return {t & 2 ? other_pair * low : low, t & 2 ? high : high * other_pair, pair * other_pair};
}

__device__ __forceinline__ AcrossLanes add_across_lanes(float own) {
  constexpr unsigned kAllLanes = 0xffffffffu;
  const int t = lane_part();
  const float neighbour = __shfl_xor_sync(kAllLanes, own, 1), pair = own + neighbour;
  const float other_pair = __shfl_xor_sync(kAllLanes, pair, 2);
  const float low = t & 1 ? neighbour : 0.0f, high = t & 1 ? 0.0f : neighbour;
  return {t & 2 ? other_pair + low : low, t & 2 ? high : high + other_pair, pair + other_pair};
}

// Four sums over the lanes with one t: lane l gets that of number channel_sum_of_lane().
__device__ __forceinline__ int channel_sum_of_lane() { return lane_group() / 2; }

__device__ __forceinline__ float sum_over_channels(float (&values)[4]) {
  constexpr unsigned kAllLanes = 0xffffffffu;
  const int lane = lane_anew();
#pragma unroll
  for (int count = 2, distance = 16; count >= 1; count /= 2, distance /= 2) {
    const bool keeps_upper = lane & distance;
#pragma unroll
    for (int v = 0; v < count; ++v) {
      const float given = keeps_upper ? values[v] : values[v + count];
      const float kept = keeps_upper ? values[v + count] : values[v];
      values[v] = kept + __shfl_xor_sync(kAllLanes, given, distance);
    }
  }
  return values[0] + __shfl_xor_sync(kAllLanes, values[0], 4);
}

// Finite numbers rounded to TF32, ties away from zero: mma ignores the 13 bits that TF32 lacks.
__device__ __forceinline__ uint32_t tf32_bits(float x) { return __float_as_uint(x) + 0x1000u; }

// What mma takes them for.
__device__ __forceinline__ float tf32_value(float x) { return __uint_as_float(tf32_bits(x) & 0xffffe000u); }

// A block of the lane's numbers as a left factor.
struct Tf32Block {
  uint32_t step[2][4];

  Tf32Block() = default;

  __device__ __forceinline__ explicit Tf32Block(const BlockValues& values) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      step[s][0] = tf32_bits(values[s][0]);
      step[s][1] = tf32_bits(values[s][2]);
      step[s][2] = tf32_bits(values[s][1]);
      step[s][3] = tf32_bits(values[s][3]);
    }
  }
};

// 16 x 16 TF32 numbers: rows are dealt, columns are tokens in their order, which are summed over.
struct alignas(128) PairBlock {
  uint32_t word[kBlockRows][kBlockRows];
};

// sums[channel, row] += left[channel, token] block[row, token], for kCount times 16 channels.
template <int kCount>
__device__ __forceinline__ void multiply_pairs(BlockValues (&sums)[kCount], const Tf32Block (&left)[kCount],
                                               const PairBlock& block) {
  const int g = lane_group(), t = lane_part();
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const uint4 right = *reinterpret_cast<const uint4*>(&block.word[8 * e + g][4 * t]);
#pragma unroll
    for (int n = 0; n < kCount; ++n) mma_tf32(sums[n][e], left[n].step[0], right.x, right.y);
#pragma unroll
    for (int n = 0; n < kCount; ++n) mma_tf32(sums[n][e], left[n].step[1], right.z, right.w);
  }
}

}  // namespace
