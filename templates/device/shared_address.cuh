// A pointer into shared memory as instructions of that space want it.
#include <cstdint>

namespace {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace
