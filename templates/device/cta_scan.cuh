// Prefix sums over the threads of a CTA of 1,024.
namespace {

constexpr int kScanThreads = 1024;
constexpr int kScanWarps = kScanThreads / 32;

// Counts of one document, or of all documents before one.
struct Counts {
  int chunks;
  int segments;
  int summaries;
};

__device__ __forceinline__ Counts operator+(const Counts& a, const Counts& b) {
  return {a.chunks + b.chunks, a.segments + b.segments, a.summaries + b.summaries};
}

__device__ __forceinline__ Counts shuffle_up(const Counts& from, int distance) {
  constexpr unsigned kAllLanes = 0xffffffffu;
  return {__shfl_up_sync(kAllLanes, from.chunks, distance), __shfl_up_sync(kAllLanes, from.segments, distance),
          __shfl_up_sync(kAllLanes, from.summaries, distance)};
}

// The sum up to and including this lane.
__device__ __forceinline__ Counts sum_up_to_lane(Counts own) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const Counts other = shuffle_up(own, distance);
    if (lane >= distance) own = own + other;
  }
  return own;
}

// The sum up to and including this thread. `warp_sums` is shared scratch that no one may be reading.
__device__ __forceinline__ Counts sum_up_to_thread(const Counts& own, Counts (&warp_sums)[kScanWarps]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Counts within_warp = sum_up_to_lane(own);
  if (lane == 31) warp_sums[warp] = within_warp;
  __syncthreads();
  if (warp == 0) warp_sums[lane] = sum_up_to_lane(warp_sums[lane]);
  __syncthreads();
  return warp == 0 ? within_warp : within_warp + warp_sums[warp - 1];
}

}  // namespace
