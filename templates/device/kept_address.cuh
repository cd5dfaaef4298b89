// Addresses that a thread forms once. The compiler takes a thread's index for so cheap that it forms what depends on it
// anew before each use; what has passed through an assembler statement it keeps.
#include <cstdint>

namespace {

// The thread's index, anew at each call: so a loop does not keep all that depends on it from one turn to the next.
__device__ __forceinline__ unsigned thread_index() {
  unsigned index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// A place in shared memory, at which and behind which the thread stores quads.
struct KeptShared {
  uint32_t address;

  __device__ __forceinline__ explicit KeptShared(const void* pointer) {
    const auto given = static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
    asm volatile("mov.b32 %0, %1;" : "=r"(address) : "r"(given));
  }

  __device__ __forceinline__ void store(int bytes_behind, const float2& pair) const {
    asm volatile("st.shared.v2.f32 [%0], { %1, %2};"
                 :
                 : "r"(address + bytes_behind), "f"(pair.x), "f"(pair.y)
                 : "memory");
  }

  __device__ __forceinline__ void store(int bytes_behind, const uint4& quad) const {
    asm volatile("st.shared.v4.b32 [%0], { %1, %2, %3, %4};"
                 :
                 : "r"(address + bytes_behind), "r"(quad.x), "r"(quad.y), "r"(quad.z), "r"(quad.w)
                 : "memory");
  }
};

// A place in global memory.
struct KeptGlobal {
  uint64_t address;

  __device__ __forceinline__ explicit KeptGlobal(const void* pointer) {
    const auto given = static_cast<uint64_t>(__cvta_generic_to_global(pointer));
    asm volatile("mov.b64 %0, %1;" : "=l"(address) : "l"(given));
  }

  __device__ __forceinline__ void store(int bytes_behind, const uint2& words) const {
    asm volatile("st.global.v2.b32 [%0], { %1, %2};"
                 :
                 : "l"(address + bytes_behind), "r"(words.x), "r"(words.y)
                 : "memory");
  }
};

}  // namespace
