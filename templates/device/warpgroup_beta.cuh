// A chunk's beta on its way to shared memory, by the CTA's first warpgroup. Included after scan_block.cuh.
#include <cstdint>

namespace {

// A warp's lanes have two tokens each of a chunk, loaded kWarps chunks before they are needed: the warps take turns.
struct BetaOfWarpgroup {
  static constexpr int kWarps = 4;
  uint32_t bits[2] = {};

  __device__ __forceinline__ static int token(int i) { return 2 * (threadIdx.x % 32) + i; }

  __device__ __forceinline__ void load(const Args& args, const SegmentChunks& chunks, int n, int head) {
    if (n >= chunks.count) return;
    for (int i = 0; i < 2; ++i) {
      const int64_t row = chunks.token(n) + min(token(i), chunks.rows(n) - 1);
      bits[i] = load_bits(args.beta, args.beta_dtype, row * args.beta_strides[0] + head * args.beta_strides[1]);
    }
  }

  // 0 past the chunk's tokens.
  __device__ __forceinline__ void publish(float2* beta, const Args& args, int rows) const {
    float value[2];
    for (int i = 0; i < 2; ++i) {
      value[i] = token(i) < rows ? beta_of(args.beta_form, float_of_bits(args.beta_dtype, bits[i])) : 0.0f;
    }
    beta[threadIdx.x % 32] = make_float2(value[0], value[1]);
  }
};

}  // namespace
