// What both programs of the gated norm share. Included after host/args.jinja, cpu/shared/dtype.hpp, kDtype and
// kHeadDim. A row is one head of one token: T HV of them, tokens first.
#include <cmath>
#include <cstdint>

namespace {

using Row = float[kHeadDim];

inline int64_t num_rows(const Args& args) { return args.num_tokens * args.num_value_heads; }

// A row of a strided [T, HV, D] tensor.
inline void load_norm_row(Row& row, const void* tensor, const int64_t strides[3], const Args& args, int64_t index) {
  const int64_t token = index / args.num_value_heads, head = index % args.num_value_heads;
  load_row(row, tensor, kDtype, token * strides[0] + head * strides[1], strides[2], kHeadDim);
}

// A row of a contiguous tensor.
inline void store_norm_row(void* tensor, int64_t index, const Row& row) {
  store_row(tensor, kDtype, index * kHeadDim, 1, row, kHeadDim);
}

// 1 / sqrt(mean of x^2 + eps).
inline float inverse_rms(const Row& x, float eps) {
  float squares = 0.0f;
  for (const float value : x) squares += value * value;
  return 1.0f / std::sqrt(squares / kHeadDim + eps);
}

inline Status refuse_null(const char* name) { return fail(kBadArgument, "%s is null; give a tensor", name); }

inline Status check_norm(const Args& args) {
  constexpr int64_t kMostRows = 0x7fffffff;
  if (args.num_value_heads < 1) {
    return fail(kBadArgument, "num_value_heads is %d; it must be at least 1", args.num_value_heads);
  }
  if (args.num_tokens < 0 || args.num_tokens > kMostRows / args.num_value_heads) {
    return fail(kBadArgument, "num_tokens is %lld; give 0 to 2^31 - 1 rows, tokens times %d heads",
                (long long)args.num_tokens, args.num_value_heads);
  }
  if (!is_dtype(args.weight_dtype)) {
    return fail(kBadArgument, "weight_dtype is %d; give 0 (bf16), 1 (fp16) or 2 (fp32)", args.weight_dtype);
  }
  if (!(args.eps >= 0.0f)) return fail(kBadArgument, "eps is %g; it must not be negative", args.eps);
  if (args.num_threads < 1) return fail(kBadArgument, "num_threads is %d; it must be at least 1", args.num_threads);
  if (!args.weight) return refuse_null("weight");
  if (args.num_tokens == 0) return kOk;
  if (!args.x) return refuse_null("x");
  return args.gate ? kOk : refuse_null("gate");
}

}  // namespace
