// A CTA's tile of the convolution: tile_tokens tokens of kBlockChannels channels, and the documents that it meets.
//
// A document of L tokens is preceded by W - 1 tokens of initial_state (zeros where that is null). In that extended
// sequence, ext, token t stands at t + W - 1, slot j of initial_state at j and slot j of final_state at L + j: a
// document shorter than W - 1 needs no case of its own. Included after conv_rows.cuh.
#include <cstdint>

namespace {

constexpr int kMaxWidth = 4;

// The first part is always there.
inline bool has_part(const Args& args, int part) { return part == 0 || args.num_channels[part] != 0; }

inline int64_t num_blocks(const Args& args, int part) {
  return (args.num_channels[part] + kBlockChannels - 1) / kBlockChannels;
}

// A pack without tokens has a tile too: its documents have states.
inline int64_t num_tiles(const Args& args, int part) {
  return args.num_tokens == 0 ? 1 : (args.num_tokens - 1) / args.tile_tokens[part] + 1;
}

// Each part's first CTA in the grid.
struct FirstCtas {
  unsigned of_part[kParts];

  // The part of this CTA. One that is not there starts where the next one does, or the grid ends.
  __device__ __forceinline__ Part part_of_cta(const Args& args) const {
    int index = 0;
    for (int p = 1; p < kParts; ++p) index += blockIdx.x >= of_part[p];
    return {args, index};
  }

  __device__ __forceinline__ unsigned cta_in(const Part& part) const { return blockIdx.x - of_part[part.index]; }
};

// The channel blocks of one run of tokens are neighbours in the grid: whole rows of x are read at about one time.
struct Tile {
  unsigned block;
  int64_t index;
  int64_t begin;  // first token
  int64_t left;   // tokens of the pack from there on; rows past them may hold anything
  int count;      // the tile's tokens
  bool is_last;   // of the tensor: it also has the empty documents at its end

  __device__ __forceinline__ Tile(const Part& part, unsigned cta) {
    const Args& args = part.args;
    const unsigned blocks = static_cast<unsigned>((part.num_channels() + kBlockChannels - 1) / kBlockChannels);
    const int tokens = args.tile_tokens[part.index];
    block = cta % blocks;
    index = cta / blocks;
    begin = index * tokens;
    is_last = begin + tokens >= args.num_tokens;
    const int64_t end = static_cast<const int64_t*>(args.cu_seqlens)[args.num_documents];
    left = max(min(end, args.num_tokens) - begin, int64_t{0});
    count = static_cast<int>(min(left, int64_t{tokens}));
  }
};

// Document `index`, tokens [start, end), of which the tile has [begin, stop). All are counted from the tile's first
// token; a start or an end that no tap reaches is moved to where none reaches it either.
struct Piece {
  int index;
  int start, end;
  int begin, stop;

  __device__ __forceinline__ Piece(const Tile& tile, int index, int64_t first, int64_t last)
      : index(index),
        start(static_cast<int>(max(first, int64_t{-kMaxWidth}))),
        end(static_cast<int>(min(last, int64_t{tile.count} + kMaxWidth))),
        begin(max(start, 0)),
        stop(min(end, tile.count)) {}
};

// Calls visit(piece) for the documents that have tokens in the tile or none at all at one of its positions, in order.
// An empty document stands where its successor starts, the last ones behind the last token.
template <typename Visit>
__device__ __forceinline__ void for_each_document(const Part& part, const Tile& tile, const Visit& visit) {
  const Args& args = part.args;
  const auto* cu_seqlens = static_cast<const int64_t*>(args.cu_seqlens);
  int low = 0, high = static_cast<int>(args.num_documents);  // the first document that starts in the tile or later
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (cu_seqlens[middle] < tile.begin) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low > 0 && cu_seqlens[low] > tile.begin) --low;  // one goes on from the tile before
  int64_t first = cu_seqlens[low] - tile.begin;
  for (int n = low; n < static_cast<int>(args.num_documents); ++n) {
    if (first >= args.tile_tokens[part.index] && !tile.is_last) break;
    const int64_t last = cu_seqlens[n + 1] - tile.begin;
    visit(Piece(tile, n, first, last));
    first = last;
  }
}

// weight [W][channel] and bias in fp32.
template <int kWidth>
struct Taps {
  Row weight[kWidth];
  Row bias;

  __device__ __forceinline__ Taps(const Part& part, const Channels& own) {
    const void* weights = part.args.weight[part.index];
    const void* biases = part.args.bias[part.index];
    const int dtype = part.args.weight_dtype;
#pragma unroll
    for (int w = 0; w < kWidth; ++w) {
      load_numbers<kWidth>(weight[w], weights, dtype, int64_t{own.first} * kWidth + w, own.count);
    }
    clear(bias);
    if (biases) load_numbers<1>(bias, biases, dtype, own.first, own.count);
  }
};

// Slot `slot` of document `index` in a state [N, D, W - 1].
template <int kWidth>
__device__ __forceinline__ void load_state(Row& row, const void* state, const Part& part, const Channels& own,
                                           int index, int slot) {
  clear(row);
  if (!state) return;
  const int64_t offset = (int64_t{index} * part.num_channels() + own.first) * (kWidth - 1) + slot;
  load_numbers<kWidth - 1>(row, state, part.args.state_dtype, offset, own.count);
}

template <int kWidth>
__device__ __forceinline__ void store_state(void* state, const Part& part, const Channels& own, int index,
                                            int slot, const Row& row) {
  const int64_t offset = (int64_t{index} * part.num_channels() + own.first) * (kWidth - 1) + slot;
  store_numbers<kWidth - 1>(state, part.args.state_dtype, offset, own.count, row);
}

// W - 1 successive rows, oldest first.
template <int kWidth>
struct Window {
  Row row[kWidth - 1];

  // The oldest row makes room for the newest.
  __device__ __forceinline__ void push(const Row& newest) {
#pragma unroll
    for (int j = 0; j < kWidth - 1; ++j) {
      for (int c = 0; c < kChannels; ++c) row[j][c] = j + 1 < kWidth - 1 ? row[j + 1][c] : newest[c];
    }
  }

  // What precedes the piece in ext.
  template <bool kIsDense>
  __device__ __forceinline__ void enter(const Part& part, const TokenView& x, const Channels& own, const Tile& tile,
                                        const Piece& piece) {
#pragma unroll
    for (int j = 0; j < kWidth - 1; ++j) {
      const int token = piece.begin - (kWidth - 1) + j;
      if (token >= piece.start) {
        unpack(row[j], load_packed<kIsDense>(x, tile.begin + token, own));
      } else {
        const void* states = part.args.initial_state[part.index];
        load_state<kWidth>(row[j], states, part, own, piece.index, token - piece.start + kWidth - 1);
      }
    }
  }
};

// z = bias + weight[0] ext[t] + ... + weight[W - 1] ext[t + W - 1], in this order.
template <int kWidth>
__device__ __forceinline__ void convolve(Row& z, const Taps<kWidth>& taps, const Window<kWidth>& window,
                                         const Row& newest) {
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    z[c] = taps.bias[c];
    for (int w = 0; w < kWidth - 1; ++w) z[c] = fmaf(taps.weight[w][c], window.row[w][c], z[c]);
    z[c] = fmaf(taps.weight[kWidth - 1][c], newest[c], z[c]);
  }
}

constexpr int64_t kMost = 0x7fffffff;

// Whether every thread's share of a row is 16 aligned bytes, in all parts; strides null: of a contiguous tensor.
bool have_dense_rows(const Args& args, void* const tensors[kParts], const int64_t* strides) {
  for (int p = 0; p < kParts; ++p) {
    if (!has_part(args, p)) continue;
    const int64_t token = strides ? strides[2 * p] : args.num_channels[p];
    const int64_t channel = strides ? strides[2 * p + 1] : 1;
    if (args.num_channels[p] % kChannels || token % kChannels || channel != 1) return false;
    if (token / kChannels > kMost) return false;
    if (reinterpret_cast<uintptr_t>(tensors[p]) % 16) return false;
  }
  return true;
}

Status refuse_null(const char* name) { return fail(kBadArgument, "%s is null; give a tensor", name); }

struct Size {
  const char* name;
  int64_t value, least, most;
};

template <int kCount>
Status check_sizes(const Size (&sizes)[kCount]) {
  for (const Size& size : sizes) {
    if (size.value >= size.least && size.value <= size.most) continue;
    return fail(kBadArgument, "%s is %lld; give %lld to %lld", size.name, static_cast<long long>(size.value),
                static_cast<long long>(size.least), static_cast<long long>(size.most));
  }
  return kOk;
}

Status check_part(const Args& args, int part) {
  const Status status = check_sizes({Size{"num_channels", args.num_channels[part], 1, kMost},
                                     Size{"tile_tokens", args.tile_tokens[part], 1, kMost - kMaxWidth}});
  if (status != kOk) return status;
  if (num_tiles(args, part) > kMost / kParts / num_blocks(args, part)) {
    return fail(kBadArgument, "tile_tokens is %d; %lld tokens and %lld channels make more than (2^31 - 1) / %d CTAs",
                args.tile_tokens[part], static_cast<long long>(args.num_tokens),
                static_cast<long long>(args.num_channels[part]), kParts);
  }
  if (!args.weight[part]) return refuse_null("weight");
  return args.num_tokens > 0 && !args.x[part] ? refuse_null("x") : kOk;
}

Status check_sizes_and_inputs(const Args& args) {
  const Status status = check_sizes({Size{"num_documents", args.num_documents, 0, kMost},
                                     Size{"num_tokens", args.num_tokens, 0, INT64_MAX / kMost}});
  if (status != kOk) return status;
  if (args.width < 2 || args.width > kMaxWidth) {
    return fail(kBadArgument, "width is %d; the convolution has 2 to %d taps", args.width, kMaxWidth);
  }
  for (const int dtype : {args.weight_dtype, args.state_dtype}) {
    if (dtype == kDtype || dtype == kFp32) continue;
    return fail(kBadArgument, "weight_dtype is %d and state_dtype %d; give %d (as x) or %d (fp32)", args.weight_dtype,
                args.state_dtype, kDtype, kFp32);
  }
  if (!args.cu_seqlens) return refuse_null("cu_seqlens");
  for (int p = 0; p < kParts; ++p) {
    if (!has_part(args, p)) continue;
    const Status found = check_part(args, p);
    if (found != kOk) return found;
  }
  return kOk;
}

// Sets each part's first CTA and returns how many all have, of ctas_of(part) for each.
template <typename Count>
unsigned place_parts(const Args& args, FirstCtas& first, const Count& ctas_of) {
  unsigned ctas = 0;
  for (int p = 0; p < kParts; ++p) {
    first.of_part[p] = ctas;
    if (has_part(args, p)) ctas += static_cast<unsigned>(ctas_of(p));
  }
  return ctas;
}

unsigned place_tiles(const Args& args, FirstCtas& first) {
  return place_parts(args, first, [&](int part) { return num_tiles(args, part) * num_blocks(args, part); });
}

void grid_size(const Args& args, int64_t size[3]) {
  FirstCtas first;
  size[0] = place_tiles(args, first);
  size[1] = size[2] = 1;
}

// Calls launcher.template run<W, is_dense>() for the launch.
template <typename Launcher>
cudaError_t run_for_width(const Launcher& launcher, int width, bool is_dense) {
  if (width == 2) return is_dense ? launcher.template run<2, true>() : launcher.template run<2, false>();
  if (width == 3) return is_dense ? launcher.template run<3, true>() : launcher.template run<3, false>();
  return is_dense ? launcher.template run<4, true>() : launcher.template run<4, false>();
}

}  // namespace
