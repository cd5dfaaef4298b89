{% import "macros/wgmma.jinja" as wgmma %}
// The tiles of a chunk in shared memory as the bulk copy engine writes them and wgmma reads them, and a warpgroup's
// products with them. Included after shared_tiles.cuh and wgmma.cuh.
//
// A warpgroup owns 64 rows of everything, a warp 16 of them, laid out as shared_tiles.cuh says; an accumulator, packed,
// is a left factor. Each function starts products and ends their group.
#include <cstdint>

namespace {

constexpr int kPanelColumns = 64;
constexpr uint32_t kPanelRowBytes = 2 * kPanelColumns;
constexpr uint32_t kPanelBytes = kChunk * kPanelRowBytes;

// kChunk rows of kColumns bf16 in panels of 64 columns. Piece p, of 16 bytes, of row r stands in place p ^ (r % 8).
template <int kColumns>
struct alignas(1024) PanelTile {
  static constexpr int kPanels = kColumns / kPanelColumns;
  uint4 piece[kPanels][kChunk][8];
};

// How wgmma reads a tile: from one panel to the next, and from eight rows to the next ones. In a cluster the upper bits
// of an address are the CTA's number, which the description has no place for.
template <int kColumns>
__device__ __forceinline__ uint64_t right_factor(const PanelTile<kColumns>& tile) {
  constexpr uint32_t kOwnAddress = 0x3ffff;
  return describe_rows(kPanelRowBytes, kPanelBytes, 8 * kPanelRowBytes) + (shared_address(&tile) & kOwnAddress) / 16;
}

// Products by name: of rows, whose tile's rows are columns of the sum, and of columns, whose columns are.
{{ wgmma.register_product("wgmma_minus_rows_64", 64, 16, "bf16", "1, -1, 0") }}
{{ wgmma.register_product("wgmma_rows_64", 64, 16, "bf16", "1, 1, 0") }}
{{ wgmma.register_product("wgmma_columns_%d" % head_dim, head_dim, 16, "bf16", "1, 1, 1") }}

// 16 columns of a tile, from 16 k on, as what is summed over.
__device__ __forceinline__ uint64_t step_of_columns(uint64_t right, int k) {
  return right + (k / 4 * kPanelBytes + k % 4 * 32) / 16;
}

// 16 rows of a tile, from 16 k on.
__device__ __forceinline__ uint64_t step_of_rows(uint64_t right, int k) { return right + k * 16 * kPanelRowBytes / 16; }

// A step's 16 columns of an accumulator as a left factor in two parts, as split does it.
__device__ __forceinline__ void split_step(uint32_t (&high)[4], uint32_t (&low)[4], const float (&first)[4],
                                           const float (&second)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float(&tile)[4] = i < 2 ? first : second;
    const float left = tile[i % 2 * 2], right = tile[i % 2 * 2 + 1];
    high[i] = pack_bf16(left, right);
    low[i] = pack_bf16(left - __uint_as_float(high[i] << 16), right - __uint_as_float(high[i] & 0xffff0000u));
  }
}

// Starts sum += left tile^T; kStarts: from zero.
template <bool kStarts, int kSteps>
__device__ __forceinline__ void start_rows(TokenSums& sum, const uint32_t (&left)[kSteps][4], uint64_t right) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) wgmma_rows_64(sum, left[k], step_of_columns(right, k), k > 0 || !kStarts);
  wgmma_commit();
}

// The same for a left factor in two parts.
template <bool kStarts>
__device__ __forceinline__ void start_rows(TokenSums& sum, const TokenFactor& low, const TokenFactor& high,
                                           uint64_t right) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kTokenSteps; ++k) {
    wgmma_rows_64(sum, low[k], step_of_columns(right, k), k > 0 || !kStarts);
    wgmma_rows_64(sum, high[k], step_of_columns(right, k), 1);
  }
  wgmma_commit();
}

}  // namespace
