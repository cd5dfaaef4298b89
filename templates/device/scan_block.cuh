// What the programs that walk segments share: a CTA's place in the grid, a segment's chunks, and what they refuse. The
// tables stand in device memory, so nothing here can look into them before the launch. Included after args.jinja,
// tables.hpp and beta_value.cuh.
#include <cstdint>
#include <initializer_list>

namespace {

__device__ __forceinline__ SegmentRow load_segment(const void* segment_table, int64_t segment) {
  const int4 row = __ldg(static_cast<const int4*>(segment_table) + segment);
  return {row.x, row.y, row.z, row.w};
}

__device__ __forceinline__ bool is_first_segment(const void* segment_table, int64_t segment, int document) {
  return segment == 0 || load_segment(segment_table, segment - 1).document != document;
}

__device__ __forceinline__ bool is_last_segment(const void* segment_table, int64_t segment, int64_t num_segments,
                                                int document) {
  return segment + 1 == num_segments || load_segment(segment_table, segment + 1).document != document;
}

// A segment's chunks, n = 0, 1, ... in sequence order. All but a document's last one have kChunk tokens. Tiles and
// tokens are fewer than 2^31, and registers are scarce; what is multiplied with a tile's or a token's size is wider.
struct SegmentChunks {
  int first_tile;   // of the segment, in [HB, chunks, ...]
  int first_token;  // in the pack
  int count;
  int last_rows;

  __device__ __forceinline__ SegmentChunks(const Args& args, const SegmentRow& segment, int block_head)
      : first_tile(block_head * static_cast<int>(args.num_chunks) + segment.first_chunk),
        first_token(0),
        count(segment.chunks),
        last_rows(0) {
    if (count == 0) return;
    const int4* rows = static_cast<const int4*>(args.chunk_table) + segment.first_chunk;
    first_token = __ldg(rows).y;
    last_rows = __ldg(rows + (count - 1)).z;
  }

  __device__ __forceinline__ int64_t tile(int n) const { return first_tile + n; }
  __device__ __forceinline__ int64_t token(int n) const { return first_token + n * kChunk; }
  __device__ __forceinline__ int rows(int n) const { return n + 1 < count ? kChunk : last_rows; }
};

// A chunk's beta for the products, between its load and its use. Thread i < kChunk has token i's.
struct BetaOfChunk {
  uint32_t bits = 0;

  __device__ __forceinline__ void load(const Args& args, int64_t token, int rows, int head) {
    if (threadIdx.x >= kChunk) return;
    const int64_t row = token + min(static_cast<int>(threadIdx.x), rows - 1);
    bits = load_bits(args.beta, args.beta_dtype, row * args.beta_strides[0] + head * args.beta_strides[1]);
  }

  // 0 past the chunk's tokens.
  __device__ __forceinline__ void publish(float2* shared_beta, const Args& args, int rows) const {
    const int thread = threadIdx.x;
    if (thread >= kChunk) return;
    const float beta = beta_of(args.beta_form, float_of_bits(args.beta_dtype, bits));
    float2& pair = shared_beta[thread / 2];
    (thread % 2 ? pair.y : pair.x) = thread < rows ? beta : 0.0f;
  }
};

struct Named {
  const char* name;
  const void* tensor;
};

// Refuses what a kernel cannot read: null where `needed`, and addresses that are not multiples of 16.
Status check_tensors(bool needed, std::initializer_list<Named> tensors) {
  for (const Named& named : tensors) {
    if (needed && !named.tensor) return fail(kBadArgument, "%s is null; this pack needs it", named.name);
    if (reinterpret_cast<uintptr_t>(named.tensor) % 16 != 0) {
      return fail(kBadArgument, "%s is %p; give a tensor whose address is a multiple of 16", named.name, named.tensor);
    }
  }
  return kOk;
}

Status check_head_block(const Args& args) {
  if (args.num_heads < 1) return fail(kBadArgument, "num_heads is %d; it must be at least 1", args.num_heads);
  if (args.num_value_heads < 1 || args.num_value_heads % args.num_heads != 0) {
    return fail(kBadArgument, "num_value_heads is %d; it must be a positive multiple of num_heads, which is %d",
                args.num_value_heads, args.num_heads);
  }
  const int group = args.num_value_heads / args.num_heads;
  if (args.first_head < 0 || args.num_block_heads < 1 ||
      args.first_head > args.num_value_heads - args.num_block_heads) {
    return fail(kBadArgument, "the head block is [%d, %d + %d); it must be part of the %d value heads, and not empty",
                args.first_head, args.first_head, args.num_block_heads, args.num_value_heads);
  }
  if (args.first_head % group != 0 || args.num_block_heads % group != 0) {
    return fail(kBadArgument, "the head block is [%d, %d + %d); it must hold whole groups of %d value heads",
                args.first_head, args.first_head, args.num_block_heads, group);
  }
  return kOk;
}

// Counts, codes and tables. `ctas_per_segment` are those of all heads of the block.
Status check_pack(const Args& args, int64_t ctas_per_segment) {
  if (args.beta_dtype < kBf16 || args.beta_dtype > kFp32) {
    return fail(kBadArgument, "beta_dtype is %d; use 0 (bf16), 1 (fp16) or 2 (fp32)", args.beta_dtype);
  }
  if (args.beta_form < kBetaReady || args.beta_form > kBetaTwiceSigmoid) {
    return fail(kBadArgument, "beta_form is %d; use 0 (ready), 1 (sigmoid) or 2 (twice sigmoid)", args.beta_form);
  }
  constexpr int64_t kMaxTiles = 0x7fffffff, kMaxCtas = 0x7fffffff;
  if (args.num_chunks < 0) {
    return fail(kBadArgument, "num_chunks is %lld; it must not be negative", static_cast<long long>(args.num_chunks));
  }
  if (args.num_chunks > kMaxTiles / args.num_block_heads) {
    return fail(kBadArgument, "num_chunks is %lld with %d heads; give at most 2^31 - 1 tiles",
                static_cast<long long>(args.num_chunks), args.num_block_heads);
  }
  if (args.num_segments < 0 || args.num_segments > kMaxCtas / ctas_per_segment) {
    return fail(kBadArgument, "num_segments is %lld with %d heads; give zero or more, and at most 2^31 - 1 CTAs",
                static_cast<long long>(args.num_segments), args.num_block_heads);
  }
  const Status chunks = check_tensors(args.num_chunks > 0, {Named{"chunk_table", args.chunk_table}});
  if (chunks != kOk) return chunks;
  return check_tensors(args.num_segments > 0, {Named{"segment_table", args.segment_table}});
}

}  // namespace
