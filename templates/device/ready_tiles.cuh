// Tiles that one kernel writes and the next one, which has begun beside it, reads as they become ready. The next kernel
// is launched behind, see host/launch_behind.hpp, and the first one lets it begin when all of its own CTAs run: so none
// of them waits for a processor that a reader holds. Included after args.jinja.
#include <cstdint>

#include <cuda_runtime.h>

namespace {

// What args.ready points to: counts of what the first kernel shares out, then a word for each tile, 1 when it is there.
constexpr int kItemsTaken = 0, kCtasGone = 1, kFirstFlag = 2;

__device__ __forceinline__ uint32_t* ready_words(const Args& args) { return static_cast<uint32_t*>(args.ready); }

// Ahead of the first kernel in its stream.
[[maybe_unused]] cudaError_t clear_ready_words(const Args& args, int64_t num_tiles, cudaStream_t stream) {
  return cudaMemsetAsync(args.ready, 0, (kFirstFlag + num_tiles) * sizeof(uint32_t), stream);
}

__device__ __forceinline__ void let_next_kernel_begin() {
  asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}

// Until the kernel ahead has ended: whoever waits for this one then waits for both.
__device__ __forceinline__ void await_kernel_ahead() { asm volatile("griddepcontrol.wait;" : : : "memory"); }

// The next item that nobody has taken. Which CTA takes it changes no bit.
__device__ __forceinline__ unsigned take_next_item(const Args& args) {
  return atomicAdd(ready_words(args) + kItemsTaken, 1u);
}

// Whether a CTA is among the first `most` that ask: so many may go, whatever is left to do.
__device__ __forceinline__ bool may_go(const Args& args, unsigned most) {
  return atomicAdd(ready_words(args) + kCtasGone, 1u) < most;
}

// By one thread, behind a barrier at which all that wrote the tile have arrived. The next kernel reads by bulk copies,
// which are another proxy than the stores: both sides fence it.
__device__ __forceinline__ void publish_tile(const Args& args, int64_t tile) {
  __threadfence();
  asm volatile("fence.proxy.async;" : : : "memory");
  asm volatile("st.release.gpu.global.u32 [%0], %1;" : : "l"(ready_words(args) + kFirstFlag + tile), "r"(1) : "memory");
}

// Chunks become ready in order, heads of one side by side: to ask for several costs no more than for one.
constexpr int kAskedFor = 8;

// By a warp: until tiles [first, first + count) are there, for count up to 32.
__device__ __forceinline__ void await_tiles(const Args& args, int64_t first, int count) {
  constexpr unsigned kAllLanes = 0xffffffffu;
  const int lane = threadIdx.x % 32;
  const uint32_t* const flag = ready_words(args) + kFirstFlag + first + (lane < count ? lane : 0);
  uint32_t is_there;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(is_there) : "l"(flag) : "memory");
  } while (!__all_sync(kAllLanes, is_there != 0));
  __syncwarp();  // one lane copies what another one has seen to be there
  asm volatile("fence.proxy.async;" : : : "memory");
}

}  // namespace
