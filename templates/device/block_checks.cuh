// What every program on a block of value heads refuses. Tables stand in device memory, so nothing here can look into
// them before the launch. Included after args.jinja and beta_value.cuh.
#include <cstdint>
#include <initializer_list>

{% include "host/head_block.hpp" %}

namespace {

struct Named {
  const char* name;
  const void* tensor;
};

// Refuses what a kernel cannot read or write in 16-byte pieces; where `needed`, also null.
Status check_tensors(bool needed, std::initializer_list<Named> tensors) {
  for (const Named& named : tensors) {
    if (needed && !named.tensor) return fail(kBadArgument, "%s is null; this pack needs it", named.name);
    if (reinterpret_cast<uintptr_t>(named.tensor) % 16 != 0) {
      return fail(kBadArgument, "%s is %p; give a tensor whose address is a multiple of 16", named.name, named.tensor);
    }
  }
  return kOk;
}

Status check_beta(const Args& args) {
  if (args.beta_dtype < kBf16 || args.beta_dtype > kFp32) {
    return fail(kBadArgument, "beta_dtype is %d; use 0 (bf16), 1 (fp16) or 2 (fp32)", args.beta_dtype);
  }
  if (args.beta_form < kBetaReady || args.beta_form > kBetaTwiceSigmoid) {
    return fail(kBadArgument, "beta_form is %d; use 0 (ready), 1 (sigmoid) or 2 (twice sigmoid)", args.beta_form);
  }
  return kOk;
}

}  // namespace
