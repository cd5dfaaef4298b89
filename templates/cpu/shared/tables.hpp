// Rows of a pack's tables: what pack_tables writes and the other programs of the chunk pipeline read. Chunks and
// segments are counted from their document's first token; every document has a segment, an empty one of no chunks.
#include <cstdint>

namespace {

constexpr int kChunk = 64;  // tokens

constexpr int kNoDocument = -1;    // of a row that a pack of this size does not use
constexpr int kNoSummaryRow = -1;  // of a segment that needs no summary

struct ChunkRow {
  int32_t document;
  int32_t token;  // the chunk's first one
  int32_t rows;   // its tokens: kChunk, fewer in a document's last chunk
  int32_t segment;
};

struct SegmentRow {
  int32_t document;
  int32_t first_chunk;
  int32_t chunks;
  int32_t summary_row;
};

static_assert(sizeof(ChunkRow) == 16 && sizeof(SegmentRow) == 16, "a table's row is four int32");

}  // namespace
