// Sums over groups of lanes, in a fixed order.
namespace {

// kValues sums over each group of kLanes lanes, in about kValues shuffles: lane l of a group gets the sum of its lanes'
// values[l / (kLanes / kValues)]. At each step a lane gives away the half of its values that it will not return.
template <int kLanes, int kValues>
__device__ __forceinline__ float sum_over_lanes(float (&values)[kValues]) {
  static_assert(kValues <= kLanes, "a lane returns one sum");
  constexpr unsigned kAllLanes = 0xffffffffu;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int count = kValues / 2, distance = kLanes / 2; count >= 1; count /= 2, distance /= 2) {
    const bool keeps_upper = lane & distance;
#pragma unroll
    for (int v = 0; v < count; ++v) {
      const float given = keeps_upper ? values[v] : values[v + count];
      const float kept = keeps_upper ? values[v + count] : values[v];
      values[v] = kept + __shfl_xor_sync(kAllLanes, given, distance);
    }
  }
#pragma unroll
  for (int distance = kLanes / kValues / 2; distance >= 1; distance /= 2) {
    values[0] += __shfl_xor_sync(kAllLanes, values[0], distance);
  }
  return values[0];
}

}  // namespace
