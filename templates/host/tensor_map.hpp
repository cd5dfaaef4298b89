// Descriptions of tile tensors for the bulk copy engine, made on the host. Included after args.jinja.
#include <cstdint>

#include <cuda.h>
#include <cuda_runtime.h>

namespace {

// The driver's encoder, by the run-time library: nothing links with the driver.
Status find_encoder(decltype(&cuTensorMapEncodeTiled)& encoder) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    return fail(kLaunchFailed, "cuTensorMapEncodeTiled is not in this driver (%s)", cudaGetErrorName(error));
  }
  encoder = reinterpret_cast<decltype(encoder)>(found);
  return kOk;
}

// Describes a tensor of 16-bit numbers in three dimensions, the innermost contiguous; result is the driver's. It asks
// for a context, which a thread that has not used the device yet, as one of autograd's, does not have: the run-time
// library then gives it the one that it works with itself.
Status encode(CUresult& result, CUtensorMap& map, const void* tensor, const cuuint64_t* size, const cuuint64_t* strides,
              const cuuint32_t* box, CUtensorMapSwizzle swizzle) {
  static decltype(&cuTensorMapEncodeTiled) encoder = nullptr;
  if (!encoder) {
    const Status status = find_encoder(encoder);
    if (status != kOk) return status;
  }
  const cuuint32_t steps[3] = {1, 1, 1};
  const auto call = [&] {
    return encoder(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(tensor), size, strides, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  result = call();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    const cudaError_t error = cudaFree(nullptr);
    if (error != cudaSuccess) return fail(kLaunchFailed, "%s (%s)", cudaGetErrorString(error), cudaGetErrorName(error));
    result = call();
  }
  return kOk;
}

// [num_tiles, rows, columns] bf16, contiguous, in boxes of box_rows x 64 whose 16-byte pieces are exchanged among 8
// rows. No tiles: nothing is described.
Status describe_tiles(CUtensorMap& map, const void* tiles, int64_t num_tiles, int rows, int columns, int box_rows) {
  if (num_tiles == 0) return kOk;
  const cuuint64_t size[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(num_tiles)};
  const cuuint64_t strides[2] = {2 * size[0], 2 * size[0] * size[1]};
  const cuuint32_t box[3] = {64, static_cast<cuuint32_t>(box_rows), 1};
  CUresult result = CUDA_SUCCESS;
  const Status status = encode(result, map, tiles, size, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
  if (status != kOk || result == CUDA_SUCCESS) return status;
  return fail(kLaunchFailed, "cuTensorMapEncodeTiled refuses %lld tiles of %d x %d at %p (CUresult %d)",
              static_cast<long long>(num_tiles), rows, columns, tiles, static_cast<int>(result));
}

// Rows of one head of a strided [tokens, heads, columns] tensor of 16-bit numbers, in boxes of box_rows tokens as they
// are. How many tokens there are is not known here: a box must lie within them.
Status describe_rows(CUtensorMap& map, const void* tensor, const int64_t* strides, int heads, int columns,
                     int box_rows) {
  constexpr cuuint64_t kMostTokens = 0x7fffffff;
  const cuuint64_t size[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(heads), kMostTokens};
  const cuuint64_t bytes[2] = {static_cast<cuuint64_t>(2 * strides[1]), static_cast<cuuint64_t>(2 * strides[0])};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(columns), 1, static_cast<cuuint32_t>(box_rows)};
  CUresult result = CUDA_SUCCESS;
  const Status status = encode(result, map, tensor, size, bytes, box, CU_TENSOR_MAP_SWIZZLE_NONE);
  if (status != kOk || result == CUDA_SUCCESS) return status;
  return fail(kLaunchFailed, "cuTensorMapEncodeTiled refuses rows of %d heads at %p (CUresult %d)", heads, tensor,
              static_cast<int>(result));
}

}  // namespace
