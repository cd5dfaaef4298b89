// Rows of a [tokens, channels] tensor of 16-bit numbers, as the transposed tiles of a warp: accumulator columns are
// tokens, and rows are channels dealt so that rows g and g + 8 of a warp's 16 are channels 2 g and 2 g + 1. A warp reads
// and writes 32 bytes, a whole sector, of each token. Included after movmatrix.cuh.
#include <cstdint>

namespace {

// Four channels of a token, in memory order.
struct ChannelQuad {
  uint32_t low;
  uint32_t high;
};

// Lane l's quad of every tile of 8 tokens: token l / 4 of the tile, channels 4 (l % 4) to 4 (l % 4) + 3 of the warp's.
template <int kTiles>
struct TokenQuads {
  ChannelQuad quad[kTiles];
};

// One head of a strided [T, heads, channels] tensor, at the lane's first channel.
struct TokenRows {
  const void* tensor;
  int64_t offset;  // of token 0, in elements
  int64_t token_stride;
  int64_t channel_stride;
  bool has_quads;  // four channels are 8 aligned bytes

  __device__ __forceinline__ TokenRows(const void* tensor, const int64_t* strides, int head, int channel)
      : tensor(tensor),
        offset(head * strides[1] + channel * strides[2]),
        token_stride(strides[0]),
        channel_stride(strides[2]),
        has_quads(channel_stride == 1 && strides[0] % 4 == 0 && strides[1] % 4 == 0 &&
                  reinterpret_cast<uintptr_t>(tensor) % 8 == 0) {}

  __device__ __forceinline__ ChannelQuad load_quad(int64_t token, int channel) const {
    const int64_t first = offset + token * token_stride + channel * channel_stride;
    if (has_quads) {
      const uint2 quad = __ldg(static_cast<const uint2*>(tensor) + first / 4);
      return {quad.x, quad.y};
    }
    const auto* elements = static_cast<const unsigned short*>(tensor) + first;
    uint32_t value[4];
    for (int i = 0; i < 4; ++i) value[i] = __ldg(elements + i * channel_stride);
    return {value[0] | value[1] << 16, value[2] | value[3] << 16};
  }

  // Tokens [token, token + rows), `channel` channels on; the tokens past them, which may hold anything, are not read
  // and count as 0.
  template <int kTiles>
  __device__ __forceinline__ void load(TokenQuads<kTiles>& quads, int64_t token, int rows, int channel) const {
    const int first = threadIdx.x % 32 / 4;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int row = 8 * n + first;
      quads.quad[n] = row < rows ? load_quad(token + row, channel) : ChannelQuad{0, 0};
    }
  }
};

// Two channels of an accumulator tile: `even` holds row g, `odd` row g + 8, each columns 2 t and 2 t + 1.
struct ChannelPair {
  uint32_t even;
  uint32_t odd;
};

__device__ __forceinline__ ChannelPair rows_of_quad(const ChannelQuad& quad) {
  return {transpose_8x8(__byte_perm(quad.low, quad.high, 0x5410)),
          transpose_8x8(__byte_perm(quad.low, quad.high, 0x7632))};
}

__device__ __forceinline__ ChannelQuad quad_of_rows(const ChannelPair& rows) {
  const uint32_t even = transpose_8x8(rows.even), odd = transpose_8x8(rows.odd);
  return {__byte_perm(even, odd, 0x5410), __byte_perm(even, odd, 0x7632)};
}

__device__ __forceinline__ void store_quad(void* tensor, int64_t offset, const ChannelQuad& quad) {
  static_cast<uint2*>(tensor)[offset / 4] = make_uint2(quad.low, quad.high);
}

}  // namespace
