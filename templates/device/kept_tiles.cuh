// What is kept of 64 value columns of a chunk, on its way from the registers of a consumer warpgroup through shared
// memory to the tiles in global memory, which the bulk copy engine writes: consumers wait for no address and no store.
// Included after bulk_copy, warpgroup_tiles and outgoing_tiles.cuh.
#include <cstdint>

namespace {

struct KeptTiles {
  PanelTile<kHeadDim> state;  // 64 rows of h
  SplitRows v_new;            // lie as panels do
};

// Of kParts warpgroups, if any.
template <int kParts>
struct KeptParts {
  KeptTiles of_part[kParts];
};

template <>
struct KeptParts<0> {};

// The consumer's side: a warp's 16 columns, from warp_column on.
__device__ __forceinline__ void stage_kept(KeptTiles& tiles, const StateFactor& S, const SplitTokens& v_new,
                                           int warp_column) {
  const int lane = threadIdx.x % 32, row = warp_column + lane % 16;
  const uint32_t address = shared_address(&tiles.state.piece[0][row][(lane / 16) ^ (row % 8)]);
#pragma unroll
  for (int k = 0; k < kStateSteps; ++k) stmatrix_x4((address ^ k % 4 * 32) + k / 4 * kPanelBytes, S[k]);
  stage_tokens(tiles.v_new.high, v_new.high, warp_column);
  stage_tokens(tiles.v_new.low, v_new.low, warp_column);
  fence_shared_for_wgmma();  // and for the engine
}

// One thread starts the stores of value columns from `column` on in tiles number `index` of h and v_new, those that are
// wanted, and waits until they have been read.
__device__ __forceinline__ void store_kept(const KeptTiles& tiles, const CUtensorMap* h, const CUtensorMap* v_new,
                                           int index, int column) {
  if (h) {
    for (int panel = 0; panel < kHeadDim / 64; ++panel) {
      store_box(*h, panel * 64, column, index, tiles.state.piece[panel]);
    }
  }
  if (v_new) {
    store_box(*v_new, column, 0, index, &tiles.v_new.high);
    store_box(*v_new, column, kChunk, index, &tiles.v_new.low);
  }
  wait_for_stores_to_read();
}

}  // namespace
