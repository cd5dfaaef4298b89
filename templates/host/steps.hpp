// A pass: launches in order by one call, which costs its caller less than one call for each. Included after args.jinja.
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

// No program here has a larger block, and CUDA hands a kernel none before its version 12.1.
constexpr size_t kMostArgumentBytes = 4096;
static_assert(sizeof(Args) <= kMostArgumentBytes, "a step's argument block is built on the stack");

// Where a pointer of a block leads: so many bytes behind one of the run's addresses.
struct StepPointer {
  int64_t address;
  int64_t offset;
};

// One launch: an entry function, of this or of any other library, null behind the last launch. It is followed by its
// StepPointers, and these by the bytes of its block behind the pointers.
struct Step {
  int (*entry)(const void* args, void* stream);
  int32_t num_pointers;
  int32_t rest_bytes;
};

constexpr int kStepStatuses = 256;

template <class T>
T read_next(const char*& from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  from += sizeof value;
  return value;
}

// Each block is this call's own, so that threads may run the same steps at once. Ends at the first status that is not
// kOk: returns it + kStepStatuses * the step's number, and the message is with that step's library.
inline int run_steps(const char* steps, const int64_t* addresses, void* stream) {
  alignas(8) char block[kMostArgumentBytes];
  for (int number = 0;; ++number) {
    const auto step = read_next<Step>(steps);
    if (!step.entry) return kOk;
    for (int32_t i = 0; i < step.num_pointers; ++i) {
      const auto pointer = read_next<StepPointer>(steps);
      const int64_t value = addresses[pointer.address] + pointer.offset;
      std::memcpy(block + i * sizeof value, &value, sizeof value);
    }
    std::memcpy(block + step.num_pointers * sizeof(int64_t), steps, step.rest_bytes);
    steps += step.rest_bytes;
    const int status = step.entry(block, stream);
    if (status != kOk) return status + kStepStatuses * number;
  }
}

}  // namespace
