// Launches that may begin before the kernel ahead of them in the stream has ended, once that one lets them.
#include <cuda_runtime.h>

namespace {

inline cudaError_t launch_behind(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                                 cudaStream_t stream, bool may_begin) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = may_begin ? 1 : 0;
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

}  // namespace
