// A CTA's tile of the convolution: tile_tokens tokens of kBlockChannels channels, and the documents that it meets.
//
// A document of L tokens is preceded by W - 1 tokens of initial_state (zeros where that is null). In that extended
// sequence, ext, token t stands at t + W - 1, slot j of initial_state at j and slot j of final_state at L + j: a
// document shorter than W - 1 needs no case of its own. Included after conv_rows.cuh.
#include <cstdint>

namespace {

constexpr int kMaxWidth = 4;

inline int64_t num_blocks(const Args& args) { return (args.num_channels + kBlockChannels - 1) / kBlockChannels; }

// A pack without tokens has a tile too: its documents have states.
inline int64_t num_tiles(const Args& args) {
  return args.num_tokens == 0 ? 1 : (args.num_tokens - 1) / args.tile_tokens + 1;
}

// The channel blocks of one run of tokens are neighbours in the grid: whole rows of x are read at about one time.
struct Tile {
  unsigned block;
  int64_t index;
  int64_t begin;  // first token
  int64_t left;   // tokens of the pack from there on; rows past them may hold anything
  int count;      // the tile's tokens
  bool is_last;   // of the tensor: it also has the empty documents at its end

  __device__ __forceinline__ explicit Tile(const Args& args) {
    const unsigned blocks = static_cast<unsigned>((args.num_channels + kBlockChannels - 1) / kBlockChannels);
    block = blockIdx.x % blocks;
    index = blockIdx.x / blocks;
    begin = index * args.tile_tokens;
    is_last = begin + args.tile_tokens >= args.num_tokens;
    const int64_t end = static_cast<const int64_t*>(args.cu_seqlens)[args.num_documents];
    left = max(min(end, args.num_tokens) - begin, int64_t{0});
    count = static_cast<int>(min(left, int64_t{args.tile_tokens}));
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
__device__ __forceinline__ void for_each_document(const Args& args, const Tile& tile, const Visit& visit) {
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
    if (first >= args.tile_tokens && !tile.is_last) break;
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

  __device__ __forceinline__ Taps(const Args& args, const Channels& own) {
#pragma unroll
    for (int w = 0; w < kWidth; ++w) {
      load_numbers<kWidth>(weight[w], args.weight, args.weight_dtype, int64_t{own.first} * kWidth + w, own.count);
    }
    clear(bias);
    if (args.bias) load_numbers<1>(bias, args.bias, args.weight_dtype, own.first, own.count);
  }
};

// Slot `slot` of document `index` in a state [N, D, W - 1].
template <int kWidth>
__device__ __forceinline__ void load_state(Row& row, const void* state, const Args& args, const Channels& own,
                                           int index, int slot) {
  clear(row);
  if (!state) return;
  const int64_t offset = (int64_t{index} * args.num_channels + own.first) * (kWidth - 1) + slot;
  load_numbers<kWidth - 1>(row, state, args.state_dtype, offset, own.count);
}

template <int kWidth>
__device__ __forceinline__ void store_state(void* state, const Args& args, const Channels& own, int index,
                                            int slot, const Row& row) {
  const int64_t offset = (int64_t{index} * args.num_channels + own.first) * (kWidth - 1) + slot;
  store_numbers<kWidth - 1>(state, args.state_dtype, offset, own.count, row);
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
  __device__ __forceinline__ void enter(const Args& args, const TokenView& x, const Channels& own, const Tile& tile,
                                        const Piece& piece) {
#pragma unroll
    for (int j = 0; j < kWidth - 1; ++j) {
      const int token = piece.begin - (kWidth - 1) + j;
      if (token >= piece.start) {
        unpack(row[j], load_packed<kIsDense>(x, tile.begin + token, own));
      } else {
        load_state<kWidth>(row[j], args.initial_state, args, own, piece.index, token - piece.start + kWidth - 1);
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

// Whether every thread's part of a row is 16 aligned bytes.
bool has_dense_rows(const Args& args, const void* tensor, const int64_t strides[2]) {
  return args.num_channels % kChannels == 0 && strides[1] == 1 && strides[0] % kChannels == 0 &&
         reinterpret_cast<uintptr_t>(tensor) % 16 == 0;
}

Status refuse_null(const char* name) { return fail(kBadArgument, "%s is null; give a tensor", name); }

struct Size {
  const char* name;
  int64_t value, least, most;
};

Status check_sizes_and_inputs(const Args& args) {
  constexpr int64_t kMost = 0x7fffffff;
  const Size sizes[] = {
      Size{"num_channels", args.num_channels, 1, kMost},
      Size{"num_documents", args.num_documents, 0, kMost},
      Size{"num_tokens", args.num_tokens, 0, INT64_MAX / kMost},
      Size{"tile_tokens", args.tile_tokens, 1, kMost - kMaxWidth},
  };
  for (const Size& size : sizes) {
    if (size.value >= size.least && size.value <= size.most) continue;
    return fail(kBadArgument, "%s is %lld; give %lld to %lld", size.name, static_cast<long long>(size.value),
                static_cast<long long>(size.least), static_cast<long long>(size.most));
  }
  if (args.width < 2 || args.width > kMaxWidth) {
    return fail(kBadArgument, "width is %d; the convolution has 2 to %d taps", args.width, kMaxWidth);
  }
  for (const int dtype : {args.weight_dtype, args.state_dtype}) {
    if (dtype == kDtype || dtype == kFp32) continue;
    return fail(kBadArgument, "weight_dtype is %d and state_dtype %d; give %d (as x) or %d (fp32)", args.weight_dtype,
                args.state_dtype, kDtype, kFp32);
  }
  if (num_tiles(args) > kMost / num_blocks(args)) {
    return fail(kBadArgument, "tile_tokens is %d; %lld tokens and %lld channels make more than 2^31 - 1 CTAs",
                args.tile_tokens, static_cast<long long>(args.num_tokens), static_cast<long long>(args.num_channels));
  }
  if (!args.weight) return refuse_null("weight");
  if (!args.cu_seqlens) return refuse_null("cu_seqlens");
  return args.num_tokens > 0 && !args.x ? refuse_null("x") : kOk;
}

void grid_size(const Args& args, int64_t size[3]) {
  size[0] = num_tiles(args) * num_blocks(args);
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
