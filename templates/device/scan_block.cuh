// What the programs that walk segments share: a CTA's place in the grid, a segment's chunks, and what they refuse.
// Included after args.jinja, tables.hpp, beta_value.cuh and block_checks.cuh.
#include <cstdint>

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

// Counts, codes and tables. `ctas_per_segment` are those of all heads of the block.
Status check_pack(const Args& args, int64_t ctas_per_segment) {
  const Status beta = check_beta(args);
  if (beta != kOk) return beta;
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
