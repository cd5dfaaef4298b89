// Chunks, tiles and states of the chunk pipeline, and what all its programs refuse. A tile tensor is [HB, chunks, rows,
// columns] of TileElement, contiguous; its heads count from first_head. Rows past a short chunk's last token are stored
// as 0 and never read. Public tensors and states are indexed by the absolute value head.
//
// Included after args.jinja, the constants kHeadDim and kDtype, the type TileElement (Bf16 or Fp32), and dtype, matrix,
// transforms and tables.hpp.
#include <algorithm>
#include <initializer_list>
#include <type_traits>

{% include "host/head_block.hpp" %}

namespace {

// One (chunk, value head of the block).
struct Place {
  int64_t token;  // rows [token, token + rows) of the pack
  int rows;       // 0: the chunk table's row is not in use
  int head;       // value head, absolute
  int key_head;   // head * H / HV
  int64_t tile;   // index of its tile
};

inline ChunkRow chunk_row(const Args& args, int64_t chunk) {
  return static_cast<const ChunkRow*>(args.chunk_table)[chunk];
}

inline Place place_of(const Args& args, int64_t chunk, int64_t block_head) {
  const ChunkRow row = chunk_row(args, chunk);
  const int head = args.first_head + static_cast<int>(block_head);
  return {row.token, row.document == kNoDocument ? 0 : row.rows, head,
          head / (args.num_value_heads / args.num_heads), block_head * args.num_chunks + chunk};
}

[[maybe_unused]] inline const SegmentRow* segment_rows(const void* segment_table) {
  return static_cast<const SegmentRow*>(segment_table);
}

[[maybe_unused]] inline bool is_first_segment(const void* segment_table, int64_t segment) {
  const SegmentRow* rows = segment_rows(segment_table);
  return segment == 0 || rows[segment - 1].document != rows[segment].document;
}

[[maybe_unused]] inline bool is_last_segment(const void* segment_table, int64_t segment, int64_t num_segments) {
  const SegmentRow* rows = segment_rows(segment_table);
  return segment + 1 == num_segments || rows[segment + 1].document != rows[segment].document;
}

// Rows of one head of a strided [T, heads, kHeadDim] tensor.
inline void load_rows(Row* rows, const void* tensor, int dtype, const int64_t* strides, int64_t token, int head,
                      int count) {
  for (int i = 0; i < count; ++i) {
    load_row(rows[i], tensor, dtype, (token + i) * strides[0] + head * strides[1], strides[2], kHeadDim);
  }
}

// Rows of one head of a contiguous [T, heads, kHeadDim] tensor.
[[maybe_unused]] inline void store_rows(void* tensor, int dtype, int64_t token, int head, int heads, const Row* rows,
                                        int count) {
  for (int i = 0; i < count; ++i) {
    store_row(tensor, dtype, ((token + i) * heads + head) * kHeadDim, 1, rows[i], kHeadDim);
  }
}

// beta as it enters the products; with `raw`, also as it was given.
inline void load_beta(float* beta, const Args& args, const Place& at, float* raw = nullptr) {
  for (int i = 0; i < at.rows; ++i) {
    const int64_t offset = (at.token + i) * args.beta_strides[0] + at.head * args.beta_strides[1];
    const float given = load_element(args.beta, args.beta_dtype, offset);
    beta[i] = beta_of(args.beta_form, given);
    if (raw) raw[i] = given;
  }
}

[[maybe_unused]] inline float round_to_tile(float x) { return TileElement::load(TileElement::store(x)); }

// What a tile would give back: a value that is used beside its stored copy is rounded first.
[[maybe_unused]] inline void round_to_tile(Row* rows, int count) {
  for (int i = 0; i < count; ++i) {
    for (int d = 0; d < kHeadDim; ++d) rows[i][d] = round_to_tile(rows[i][d]);
  }
}

// The first `rows` rows of tile number `index` of [*, kRows, kColumns], from and to scratch of the given pitch.
template <int kRows, int kColumns, int kScratchPitch>
void load_tile(float* scratch, const void* tiles, int64_t index, int rows) {
  for (int64_t i = 0; i < rows; ++i) {
    load_elements<TileElement>(scratch + i * kScratchPitch, tiles, (index * kRows + i) * kColumns, 1, kColumns);
  }
}

template <int kRows, int kColumns, int kScratchPitch>
void store_tile(void* tiles, int64_t index, const float* scratch, int rows) {
  for (int64_t i = 0; i < rows; ++i) {
    store_elements<TileElement>(tiles, (index * kRows + i) * kColumns, 1, scratch + i * kScratchPitch, kColumns);
  }
  auto* padding = static_cast<typename TileElement::Storage*>(tiles) + (index * kRows + rows) * kColumns;
  std::fill_n(padding, int64_t{kRows - rows} * kColumns, typename TileElement::Storage{});
}

// [HB, chunks, 64, kHeadDim]: ke, qg, kg.
[[maybe_unused]] inline void load_token_tile(Row* tile, const void* tiles, const Place& at) {
  load_tile<kChunk, kHeadDim, kPitch>(tile[0], tiles, at.tile, at.rows);
}

[[maybe_unused]] inline void store_token_tile(void* tiles, const Place& at, const Row* tile) {
  store_tile<kChunk, kHeadDim, kPitch>(tiles, at.tile, tile[0], at.rows);
}

// Tiles of bf16 hold v' and z in two parts, so that no more than 2^-16 of a number is lost. Behind the 64 rows of
// rounded numbers, a tile of v' has 64 of what that took from them: [HB, chunks, 128, kHeadDim]. A tile of z has bytes
// there, [64, kHeadDim]: by how much z's bits, as an integer, are above those of the rounded z, in units of 0x100 and
// from -0x8000 on: [HB, chunks, 96, kHeadDim]. Tiles of fp32 are [HB, chunks, 64, kHeadDim].
constexpr bool kHasParts = std::is_same_v<TileElement, Bf16>;
constexpr int64_t kPartBytes = int64_t{kChunk} * kHeadDim * sizeof(TileElement::Storage);
constexpr int64_t kValueTileBytes = kHasParts ? 2 * kPartBytes : kPartBytes;
constexpr int64_t kGradientTileBytes = kHasParts ? 3 * kPartBytes / 2 : kPartBytes;

// Where the parts of a tile begin; there is a second one only with kHasParts.
[[maybe_unused]] inline char* part_of_tile(const void* tiles, const Place& at, int64_t tile_bytes, int part) {
  return static_cast<char*>(const_cast<void*>(tiles)) + at.tile * tile_bytes + part * kPartBytes;
}

// What the second part of a tile of v' takes.
[[maybe_unused]] inline void keep_rest(Row* rest, const Row* rows, int count) {
  for (int i = 0; i < count; ++i) {
    for (int d = 0; d < kHeadDim; ++d) rest[i][d] = rows[i][d] - round_to_tile(rows[i][d]);
  }
}

// v' is used as its tile holds it, as the sum of both parts. `rest` is scratch.
[[maybe_unused]] inline void round_to_value_tile(Row* rows, int count, Row* rest) {
  if constexpr (kHasParts) {
    keep_rest(rest, rows, count);
    for (int i = 0; i < count; ++i) {
      for (int d = 0; d < kHeadDim; ++d) rows[i][d] = round_to_tile(rows[i][d]) + round_to_tile(rest[i][d]);
    }
  }
}

[[maybe_unused]] inline void store_value_tile(void* tiles, const Place& at, const Row* rows, Row* rest) {
  store_tile<kChunk, kHeadDim, kPitch>(part_of_tile(tiles, at, kValueTileBytes, 0), 0, rows[0], at.rows);
  if constexpr (kHasParts) {
    keep_rest(rest, rows, at.rows);
    store_tile<kChunk, kHeadDim, kPitch>(part_of_tile(tiles, at, kValueTileBytes, 1), 0, rest[0], at.rows);
  }
}

// The sum of both parts, and the first one.
[[maybe_unused]] inline void load_value_tile(Row* whole, Row* rounded, const void* tiles, const Place& at) {
  load_tile<kChunk, kHeadDim, kPitch>(rounded[0], part_of_tile(tiles, at, kValueTileBytes, 0), 0, at.rows);
  if constexpr (kHasParts) {
    load_tile<kChunk, kHeadDim, kPitch>(whole[0], part_of_tile(tiles, at, kValueTileBytes, 1), 0, at.rows);
  }
  for (int i = 0; i < at.rows; ++i) {
    for (int d = 0; d < kHeadDim; ++d) whole[i][d] = kHasParts ? rounded[i][d] + whole[i][d] : rounded[i][d];
  }
}

[[maybe_unused]] inline void store_gradient_tile(void* tiles, const Place& at, const Row* rows) {
  store_tile<kChunk, kHeadDim, kPitch>(part_of_tile(tiles, at, kGradientTileBytes, 0), 0, rows[0], at.rows);
  if constexpr (kHasParts) {
    auto* bytes = reinterpret_cast<uint8_t*>(part_of_tile(tiles, at, kGradientTileBytes, 1));
    for (int i = 0; i < kChunk; ++i) {
      for (int d = 0; d < kHeadDim; ++d) {
        const float z = i < at.rows ? rows[i][d] : 0.0f;
        const uint32_t above = bits_of_float(z) - bits_of_float(round_to_tile(z)) + 0x8080u;
        bytes[i * kHeadDim + d] = static_cast<uint8_t>(std::min(above, 0xffffu) >> 8);
      }
    }
  }
}

// z but for its last eight bits, and as it was rounded.
[[maybe_unused]] inline void load_gradient_tile(Row* whole, Row* rounded, const void* tiles, const Place& at) {
  load_tile<kChunk, kHeadDim, kPitch>(rounded[0], part_of_tile(tiles, at, kGradientTileBytes, 0), 0, at.rows);
  const auto* bytes = reinterpret_cast<const uint8_t*>(part_of_tile(tiles, at, kGradientTileBytes, 1));
  for (int i = 0; i < at.rows; ++i) {
    for (int d = 0; d < kHeadDim; ++d) {
      whole[i][d] = kHasParts ? float_of_bits(bits_of_float(rounded[i][d]) + (bytes[i * kHeadDim + d] << 8) - 0x8000u)
                              : rounded[i][d];
    }
  }
}

// [HB, chunks, 64, 64]: Aqk, Tinv.
using Square = float[kChunk];

[[maybe_unused]] inline void load_square_tile(Square* tile, const void* tiles, const Place& at) {
  load_tile<kChunk, kChunk, kChunk>(tile[0], tiles, at.tile, at.rows);
}

[[maybe_unused]] inline void store_square_tile(void* tiles, const Place& at, const Square* tile) {
  store_tile<kChunk, kChunk, kChunk>(tiles, at.tile, tile[0], at.rows);
}

// A state S has its K rows in scratch; its tile, h or dS [HB, chunks, V, K], is the transpose of that.
[[maybe_unused]] inline void store_state_tile(void* tiles, const Place& at, const Row* S, Row* transposed) {
  transpose(transposed, S);
  store_tile<kHeadDim, kHeadDim, kPitch>(tiles, at.tile, transposed[0], kHeadDim);
}

// State number `index` of a contiguous [*, kHeadDim, kHeadDim] fp32 tensor; null stands for zeros. Public states are
// [*, HV, K, V], index = row * HV + head.
[[maybe_unused]] inline void read_state(Row* S, const void* states, int64_t index) {
  for (int d = 0; d < kHeadDim; ++d) {
    if (states) {
      const float* source = static_cast<const float*>(states) + (index * kHeadDim + d) * kHeadDim;
      std::memcpy(S[d], source, kHeadDim * sizeof(float));
    } else {
      std::memset(S[d], 0, kHeadDim * sizeof(float));
    }
  }
}

[[maybe_unused]] inline void write_state(void* states, int64_t index, const Row* S) {
  for (int d = 0; d < kHeadDim; ++d) {
    float* target = static_cast<float*>(states) + (index * kHeadDim + d) * kHeadDim;
    std::memcpy(target, S[d], kHeadDim * sizeof(float));
  }
}

// A checkpoint [rows, HV, V, K] is a state's transpose, unrounded. Those of a segment start at `first_checkpoint`; the
// j-th one is the state entering its chunk j * checkpoint_chunks.
[[maybe_unused]] inline int64_t first_checkpoint(const SegmentRow& row, int64_t segment, int checkpoint_chunks) {
  return row.first_chunk / checkpoint_chunks + segment;
}

[[maybe_unused]] inline void read_checkpoint(Row* S, const void* checkpoints, int64_t index, Row* transposed) {
  read_state(transposed, checkpoints, index);
  transpose(S, transposed);
}

[[maybe_unused]] inline void write_checkpoint(void* checkpoints, int64_t index, const Row* S, Row* transposed) {
  transpose(transposed, S);
  write_state(checkpoints, index, transposed);
}

struct Named {
  const char* name;
  const void* tensor;
};

// Refuses a null among tensors that this pack needs. A tensor of no rows may have no memory: then `needed` is false.
inline Status check_given(bool needed, std::initializer_list<Named> tensors) {
  for (const Named& named : tensors) {
    if (needed && !named.tensor) {
      return fail(kBadArgument, "%s is null; this pack needs it", named.name);
    }
  }
  return kOk;
}

inline Status check_beta(const Args& args) {
  if (!is_dtype(args.beta_dtype)) {
    return fail(kBadArgument, "beta_dtype is %d; use 0 (bf16), 1 (fp16) or 2 (fp32)", args.beta_dtype);
  }
  if (args.beta_form < kBetaReady || args.beta_form > kBetaTwiceSigmoid) {
    return fail(kBadArgument, "beta_form is %d; use 0 (ready), 1 (sigmoid) or 2 (twice sigmoid)", args.beta_form);
  }
  return kOk;
}

inline Status check_chunk_table(const Args& args) {
  if (args.num_chunks < 0) {
    return fail(kBadArgument, "num_chunks is %lld; it must not be negative", (long long)args.num_chunks);
  }
  const Status given = check_given(args.num_chunks > 0, {Named{"chunk_table", args.chunk_table}});
  if (given != kOk) return given;
  for (int64_t chunk = 0; chunk < args.num_chunks; ++chunk) {
    const ChunkRow row = chunk_row(args, chunk);
    if (row.document == kNoDocument) continue;
    if (row.document < 0 || row.token < 0 || row.rows < 1 || row.rows > kChunk) {
      return fail(kBadArgument, "chunk_table[%lld] is document %d, token %d, %d tokens; pack_tables writes 1 to %d",
                  (long long)chunk, row.document, row.token, row.rows, kChunk);
    }
  }
  return kOk;
}

// What every program of the pipeline refuses.
inline Status check_block(const Args& args) {
  const Status head_block = check_head_block(args);
  if (head_block != kOk) return head_block;
  if (args.num_threads < 1) return fail(kBadArgument, "num_threads is %d; it must be at least 1", args.num_threads);
  const Status beta = check_beta(args);
  if (beta != kOk) return beta;
  return check_chunk_table(args);
}

// For the programs that walk segments.
[[maybe_unused]] inline Status check_segment_table(const void* segment_table, int64_t num_segments,
                                                   int64_t num_chunks) {
  if (num_segments < 0) {
    return fail(kBadArgument, "num_segments is %lld; it must not be negative", (long long)num_segments);
  }
  const Status given = check_given(num_segments > 0, {Named{"segment_table", segment_table}});
  if (given != kOk) return given;
  for (int64_t segment = 0; segment < num_segments; ++segment) {
    const SegmentRow row = segment_rows(segment_table)[segment];
    if (row.document == kNoDocument) continue;
    const int64_t end = int64_t{row.first_chunk} + row.chunks;
    if (row.document < 0 || row.first_chunk < 0 || row.chunks < 0 || end > num_chunks) {
      return fail(kBadArgument, "segment_table[%lld] is document %d, chunks [%d, %d + %d); there are %lld chunks",
                  (long long)segment, row.document, row.first_chunk, row.first_chunk, row.chunks,
                  (long long)num_chunks);
    }
  }
  return kOk;
}

}  // namespace
