// Where a consumer warp's columns are. Included after chunk_ring.cuh.
namespace {

struct WarpPlace {
  int part;         // of the CTA's 64 columns
  int warp_column;  // in the part
  int column;       // of the lane in the state or the matrix

  template <typename Block>
  __device__ __forceinline__ explicit WarpPlace(const Block& block)
      : part(threadIdx.x / kGroupThreads - 1),
        warp_column(threadIdx.x % kGroupThreads / 32 * 16),
        column(block.first_column + part * 64 + warp_column + threadIdx.x % 32 / 4) {}
};

}  // namespace
