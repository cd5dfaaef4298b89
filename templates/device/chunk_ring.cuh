// How a producer warpgroup hands a chunk's tiles to its consumers, in this CTA and in the others of its cluster, for
// sm_90: a ring of stages in shared memory, whose tiles come and go in groups. Included after bulk_copy.cuh and
// warpgroup_tiles.cuh.
#include <cstdint>

namespace {

constexpr int kWarpThreads = 32;
constexpr int kGroupThreads = 128;  // of a warpgroup
constexpr int kGroups = 3;          // of a stage's tiles, by when they are read

// A stage's: of each group one that it is full and one that it is empty. At the former each lane that writes arrives
// for itself: that __syncwarp() and one lane's word order the others' writes is more than racecheck knows.
struct Barriers {
  uint64_t of_group[kGroups];

  __device__ __forceinline__ uint32_t operator[](int group) const { return shared_address(&of_group[group]); }
};

// The place of a chunk in the ring of stages, and the parity of the phase in which it is filled.
template <int kStages>
struct Turn {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// What one CTA of a cluster of kCluster copies of a tile for all: panels, or rows of a tile of one panel.
template <int kCluster, int kColumns>
__device__ __forceinline__ void copy_tile_share(PanelTile<kColumns>& tile, const CUtensorMap& map, int64_t index,
                                                uint32_t full) {
  constexpr int kPanels = PanelTile<kColumns>::kPanels;
  const int rank = kCluster > 1 ? rank_in_cluster() : 0;
  if constexpr (kPanels == 1) {
    const int row = rank * (kChunk / kCluster);
    copy_box<kCluster>(&tile.piece[0][row][0], map, 0, row, static_cast<int>(index), full);
  } else {
#pragma unroll
    for (int i = 0; i < kPanels / kCluster; ++i) {
      const int panel = i * kCluster + rank;
      copy_box<kCluster>(&tile.piece[panel][0][0], map, panel * 64, 0, static_cast<int>(index), full);
    }
  }
}

// What a consumer warp has read of a group may be overwritten, by each CTA that copies for it.
template <int kCluster>
__device__ __forceinline__ void release(uint32_t empty) {
  __syncwarp();
  if constexpr (kCluster > 1) {
    if (threadIdx.x % 32 < kCluster) mbarrier_arrive_in_cluster(empty, threadIdx.x % 32);
  } else {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
  }
}

// The same by every lane for itself. __syncwarp() and one lane's word order the others' reads too, before what threads
// write there next, but that is more than racecheck knows.
template <int kCluster>
__device__ __forceinline__ void release_by_lanes(uint32_t empty) {
  __syncwarp();
  if constexpr (kCluster > 1) {
#pragma unroll
    for (int rank = 0; rank < kCluster; ++rank) mbarrier_arrive_in_cluster(empty, rank);
  } else {
    mbarrier_arrive(empty);
  }
}

// All threads of all CTAs of the cluster.
template <int kCluster>
__device__ __forceinline__ void sync_ctas() {
  if constexpr (kCluster > 1) {
    sync_cluster();
  } else {
    __syncthreads();
  }
}

}  // namespace
