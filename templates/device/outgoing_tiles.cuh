// What 64 value columns of a chunk leave, on its way from the registers of a consumer warpgroup through shared memory
// to the tiles in global memory: the producer warpgroup stores it, so that its consumers wait for no address and no
// store. Included after stmatrix.cuh, wgmma.cuh and state_step.cuh.
#include <cstdint>

namespace {

// z in fp32: column c of token r stands in place c ^ (r / 2 % 4 * 8).
struct alignas(256) GradientSums {
  float element[kChunk][64];
};

struct SplitRows {
  SharedTile<64> high, low;
};

struct OutgoingTiles {
  SharedTile<kHeadDim> state;  // 64 rows of h or dS
  union {
    SplitRows v_new;
    GradientSums z;
  };
};

// The consumer's side: a warp's 16 columns, from warp_column on.
[[maybe_unused]] __device__ __forceinline__ void stage_state(SharedTile<kHeadDim>& tile, const StateFactor& S,
                                                             int warp_column) {
  const int lane = threadIdx.x % 32, row = warp_column + lane % 16;
  const uint32_t address = shared_address(&tile.piece[row][(lane / 16) ^ (row % 8)]);
#pragma unroll
  for (int k = 0; k < kStateSteps; ++k) stmatrix_x4(address ^ k * 32, S[k]);
}

__device__ __forceinline__ void stage_tokens(SharedTile<64>& tile, const TokenFactor& tokens, int warp_column) {
  const int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8;
  const uint32_t address = shared_address(&tile.piece[row][(warp_column / 8 + lane / 8 % 2) ^ (row % 8)]);
#pragma unroll
  for (int k = 0; k < kTokenSteps; ++k) stmatrix_x4_trans(address + k * 16 * SharedTile<64>::kRowBytes, tokens[k]);
}

[[maybe_unused]] __device__ __forceinline__ void stage_gradients(GradientSums& tile, const TokenSums& z,
                                                                 int warp_column) {
  const int row = threadIdx.x % 4 * 2, column = (warp_column + threadIdx.x % 32 / 4) ^ (row * 4);
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    for (int i = 0; i < 4; ++i) tile.element[8 * n + row + i % 2][column ^ (i / 2 * 8)] = z[n][i];
  }
}

// The producer's side: kThreads threads store tiles. Where their registers are few, what depends on a thread's number
// is formed anew each time, and fewer rows are on their way at once.
template <int kThreads, bool kFewRegisters>
struct TileStores {
  static constexpr int kRowsAhead = kFewRegisters ? 2 : 8;

  __device__ __forceinline__ static int thread() {
    int number = threadIdx.x;
    if constexpr (kFewRegisters) asm volatile("" : "+r"(number));
    return number;
  }

  // kChunk rows of kColumns to rows of kHeadDim bf16, the first from first_element on.
  template <int kColumns>
  __device__ __forceinline__ static void rows(void* target, int64_t first_element, const SharedTile<kColumns>& tile) {
    constexpr int kPieces = SharedTile<kColumns>::kPieces, kRowsAtOnce = kThreads / kPieces;
    static_assert(kRowsAtOnce % 8 == 0, "a thread's rows differ by multiples of 8, so its place in a row is the same");
    const int row = thread() / kPieces, piece = thread() % kPieces;
    const uint4* source = &tile.piece[row][piece ^ (row % 8)];
    uint4* pieces = static_cast<uint4*>(target) + (first_element + row * kHeadDim) / 8 + piece;
#pragma unroll kRowsAhead
    for (int i = 0; i < kChunk; i += kRowsAtOnce) pieces[i * kHeadDim / 8] = source[i * kPieces];
  }

  // 64 columns of tile number `index` of z, from `column` on: z rounded, and behind it the bytes that it lacks, both as
  // write_gradient_tile says.
  __device__ __forceinline__ static void gradients(void* tiles, int64_t index, int column, const GradientSums& tile) {
    const auto above = [](float number, uint32_t rounded_bits) {
      return min(__float_as_uint(number) - rounded_bits + 0x8080u, 0xffffu);  // in its second byte
    };
    const int token = thread() / 8, first = thread() % 8 * 8;
    const float4* source = reinterpret_cast<const float4*>(&tile.element[token][first ^ (token / 2 % 4 * 8)]);
    const int64_t row = index * (3 * kChunk / 2);
    uint4* rows = static_cast<uint4*>(tiles) + ((row + token) * kHeadDim + column + first) / 8;
    uint2* bytes = static_cast<uint2*>(tiles) + ((2 * (row + kChunk) + token) * kHeadDim + column + first) / 8;
#pragma unroll kRowsAhead / 2
    for (int i = 0; i < kChunk; i += kThreads / 8) {
      uint32_t rounded[4], lacking[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 z = source[i * 16 + half];
        const float element[4] = {z.x, z.y, z.z, z.w};
        for (int p = 0; p < 2; ++p) {
          const float left = element[2 * p], right = element[2 * p + 1];
          const uint32_t bits = pack_bf16(left, right);
          rounded[2 * half + p] = bits;
          lacking[2 * half + p] = __byte_perm(above(left, bits << 16), above(right, bits & 0xffff0000u), 0x0051);
        }
      }
      rows[i * kHeadDim / 8] = make_uint4(rounded[0], rounded[1], rounded[2], rounded[3]);
      bytes[i * kHeadDim / 8] =
          make_uint2(__byte_perm(lacking[0], lacking[1], 0x5410), __byte_perm(lacking[2], lacking[3], 0x5410));
    }
  }
};

}  // namespace
