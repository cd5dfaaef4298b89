// What both convolution programs share. Included after host/args.jinja, cpu/shared/dtype.hpp and kDtype.
//
// A document of L tokens is preceded by W - 1 tokens of initial_state (zeros where that is null). In that extended
// sequence `ext`, token t stands at t + W - 1, slot j of initial_state at j and slot j of final_state at L + j: a
// document shorter than W - 1 needs no case of its own.
#include <algorithm>

namespace {

constexpr int kChannels = 128;  // of one task; fixed, so that bits do not depend on the number of threads
constexpr int kMaxWidth = 4;
using Row = float[kChannels];

constexpr int kParts = 3;  // convolutions of a launch at most; what each has of its own are arrays of the block

// The first part is always there.
inline bool has_part(const Args& args, int part) { return part == 0 || args.num_channels[part] != 0; }

// Channels [first, first + count) of one task, of the convolution `part`.
struct Block {
  int part;
  int64_t first;
  int64_t count;
};

inline int64_t num_blocks(const Args& args, int part) { return (args.num_channels[part] + kChannels - 1) / kChannels; }

// Tasks are blocks of the first part, then of the next ones.
inline Block block_of_task(const Args& args, int64_t task) {
  int part = 0;
  for (; task >= num_blocks(args, part); ++part) task -= num_blocks(args, part);
  const int64_t first = task * kChannels;
  return {part, first, std::min<int64_t>(kChannels, args.num_channels[part] - first)};
}

// weight [W][channel] and bias in fp32. Channels past the block's are zero and stored nowhere.
struct Taps {
  Row weight[kMaxWidth] = {};
  Row bias = {};

  void load(const Args& args, const Block& block) {
    const void* weights = args.weight[block.part];
    const void* biases = args.bias[block.part];
    for (int w = 0; w < args.width; ++w) {
      load_row(weight[w], weights, args.weight_dtype, block.first * args.width + w, args.width, block.count);
    }
    if (biases) load_row(bias, biases, args.weight_dtype, block.first, 1, block.count);
  }
};

// Of the block's part among the tensors of all parts, as below.
inline void load_tokens(Row& row, void* const tokens[kParts], const int64_t strides[2 * kParts], int64_t t,
                        const Block& block) {
  const int64_t* of_part = strides + 2 * block.part;
  const int64_t offset = t * of_part[0] + block.first * of_part[1];
  load_row(row, tokens[block.part], kDtype, offset, of_part[1], block.count);
}

inline void store_tokens(void* const tokens[kParts], int64_t t, const Args& args, const Row& row, const Block& block) {
  store_row(tokens[block.part], kDtype, t * args.num_channels[block.part] + block.first, 1, row, block.count);
}

// Slot j of document n in a state [N, D, W - 1]: an offset, and W - 1 as stride.
inline int64_t state_offset(const Args& args, int64_t n, int slot, const Block& block) {
  return (n * args.num_channels[block.part] + block.first) * (args.width - 1) + slot;
}

inline void load_state(Row& row, void* const states[kParts], const Args& args, int64_t n, int slot,
                       const Block& block) {
  if (const void* state = states[block.part]) {
    load_row(row, state, args.state_dtype, state_offset(args, n, slot, block), args.width - 1, block.count);
  } else {
    std::fill_n(row, kChannels, 0.0f);
  }
}

inline void store_state(void* const states[kParts], const Args& args, int64_t n, int slot, const Row& row,
                        const Block& block) {
  store_row(states[block.part], args.state_dtype, state_offset(args, n, slot, block), args.width - 1, row, block.count);
}

// The last W rows of ext: row e stands at e mod W.
template <int kWidth>
struct Window {
  Row rows[kWidth] = {};

  Row& at(int64_t e) { return rows[e % kWidth]; }
};

// sum[c] = bias[c] + weight[0][c] ext[t][c] + ... + weight[W - 1][c] ext[t + W - 1][c], in this order.
template <int kWidth>
inline void convolve(Row& sum, const Taps& taps, Window<kWidth>& ext, int64_t t) {
  const float* rows[kWidth];
  for (int w = 0; w < kWidth; ++w) rows[w] = ext.at(t + w);
  for (int c = 0; c < kChannels; ++c) {
    float z = taps.bias[c];
    for (int w = 0; w < kWidth; ++w) z += taps.weight[w][c] * rows[w][c];
    sum[c] = z;
  }
}

// e^x for x in [-87, 88], where it is a normal number, within 2 units in the last place: 2^n times a polynomial on
// |r| <= ln(2) / 2, in operations that vectorise. NaN stays NaN.
inline float exp_in_range(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the lowest bits
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 0.5f;
  p = p * (r * r) + r + 1.0f;
  return p * float_of_bits((bits_of_float(shifted) - bits_of_float(kRound) + 127u) << 23);
}

// e[c] = exp(-x[c]), x clamped to the range. Loops of their own: a compiler that saw the constants of the clamps beside
// the polynomial would branch to its values there, and vectorise nothing.
inline void exp_negative(Row& e, const Row& x) {
  for (int c = 0; c < kChannels; ++c) e[c] = x[c] > 87.0f ? -87.0f : -x[c];
  for (int c = 0; c < kChannels; ++c) e[c] = e[c] > 88.0f ? 88.0f : e[c];
  for (int c = 0; c < kChannels; ++c) e[c] = exp_in_range(e[c]);
}

// silu(x) = x s with s = 1 / (1 + e), e = exp(-x).
inline void silu(Row& x) {
  Row e;
  exp_negative(e, x);
  for (int c = 0; c < kChannels; ++c) x[c] = x[c] * (1.0f / (1.0f + e[c]));
}

// dy silu'(x) in place of dy; silu' = s (1 + x (1 - s)), with 1 - s as e s, which does not cancel.
inline void silu_backward(Row& dy, const Row& x) {
  Row e;
  exp_negative(e, x);
  for (int c = 0; c < kChannels; ++c) {
    const float s = 1.0f / (1.0f + e[c]);
    dy[c] *= s * (1.0f + x[c] * (e[c] * s));
  }
}

inline Status refuse_null(const char* name) {
  return fail(kBadArgument, "%s is null; give a tensor", name);
}

inline Status check_sizes_and_inputs(const Args& args) {
  if (args.num_documents < 0) {
    return fail(kBadArgument, "num_documents is %lld; give zero or more", static_cast<long long>(args.num_documents));
  }
  if (args.width < 2 || args.width > kMaxWidth) {
    return fail(kBadArgument, "width is %d; the convolution has 2 to %d taps", args.width, kMaxWidth);
  }
  if (!is_dtype(args.weight_dtype) || !is_dtype(args.state_dtype)) {
    return fail(kBadArgument, "weight_dtype is %d and state_dtype %d; give 0 (bf16), 1 (fp16) or 2 (fp32)",
                args.weight_dtype, args.state_dtype);
  }
  if (args.num_threads < 1) return fail(kBadArgument, "num_threads is %d; give at least one", args.num_threads);
  for (int p = 0; p < kParts; ++p) {
    if (!has_part(args, p)) continue;
    if (args.num_channels[p] < 1) {
      return fail(kBadArgument, "num_channels is %lld; give at least one",
                  static_cast<long long>(args.num_channels[p]));
    }
    if (!args.weight[p]) return refuse_null("weight");
  }
  if (!args.cu_seqlens) return refuse_null("cu_seqlens");
  const auto* cu_seqlens = static_cast<const int64_t*>(args.cu_seqlens);
  for (int64_t n = 0; n < args.num_documents; ++n) {
    const long long start = cu_seqlens[n], end = cu_seqlens[n + 1];
    if (start < 0 || end < start) {
      return fail(kBadArgument, "cu_seqlens[%lld..] is %lld, %lld; it starts at 0 and never decreases",
                  static_cast<long long>(n), start, end);
    }
  }
  return kOk;
}

// Whether any document has a token: without one, tensors of tokens may be null.
inline bool has_tokens(const Args& args) {
  return static_cast<const int64_t*>(args.cu_seqlens)[args.num_documents] > 0;
}

inline void grid_size(const Args& args, int64_t size[3]) {
  size[0] = 0;
  for (int p = 0; p < kParts; ++p) size[0] += num_blocks(args, p);
  size[1] = size[2] = 1;
}

// Calls worker.template run<W>(task) for the width of the launch.
template <typename Worker>
void run_for_width(Worker& worker, int width, int64_t task) {
  if (width == 2) return worker.template run<2>(task);
  if (width == 3) return worker.template run<3>(task);
  worker.template run<4>(task);
}

}  // namespace
