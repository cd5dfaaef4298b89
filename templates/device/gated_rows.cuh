// What both programs of the gated norm share: rows of kHeadDim channels, each one head of one token, as kLanes lanes
// hold them. A lane has kOwn channels of its row, in pieces of 16 bytes; a CTA has kGroups rows at a time. Included
// after number.cuh, kDtype, kHeadDim and kThreads.
#include <cstdint>

namespace {

constexpr int kOwn = 8;
constexpr int kLanes = kHeadDim / kOwn;                // of a row
constexpr int kGroups = kThreads / kLanes;             // rows that a CTA has at a time
constexpr int kElementBytes = kDtype == kFp32 ? 4 : 2;
constexpr int kPiece = 16 / kElementBytes;             // channels of 16 bytes
constexpr int kPieces = kOwn / kPiece;

using Row = float[kOwn];

// A lane's part of a row as it is in memory.
struct Packed {
  uint4 piece[kPieces];
};

__device__ __forceinline__ int lane_of_row() { return threadIdx.x % kLanes; }

__device__ __forceinline__ int group_of_thread() { return threadIdx.x / kLanes; }

// The first channel of a lane's piece: the lanes' pieces are neighbours in memory.
__device__ __forceinline__ int first_channel(int piece) { return (piece * kLanes + lane_of_row()) * kPiece; }

__device__ __forceinline__ void unpack(Row& row, const Packed& packed) {
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const uint32_t words[4] = {packed.piece[p].x, packed.piece[p].y, packed.piece[p].z, packed.piece[p].w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (kDtype == kFp32) {
        row[4 * p + w] = __uint_as_float(words[w]);
      } else {
        const float2 pair = unpack_pair<kDtype>(words[w]);
        row[2 * w] = pair.x;
        row[2 * w + 1] = pair.y;
      }
    }
  }
}

__device__ __forceinline__ Packed pack(const Row& row) {
  Packed packed;
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (kDtype == kFp32) {
        words[w] = __float_as_uint(row[4 * p + w]);
      } else {
        words[w] = pack_pair<kDtype>(row[2 * w], row[2 * w + 1]);
      }
    }
    packed.piece[p] = make_uint4(words[0], words[1], words[2], words[3]);
  }
  return packed;
}

__device__ __forceinline__ uint32_t load_bits(const void* tensor, int64_t element) {
  if constexpr (kDtype == kFp32) return __ldg(static_cast<const uint32_t*>(tensor) + element);
  return __ldg(static_cast<const unsigned short*>(tensor) + element);
}

// The lane's part of the rows of a strided [T, HV, D] tensor. kIsDense: every piece is 16 aligned bytes.
template <bool kIsDense>
struct InputRows {
  const void* tensor;
  const int64_t* strides;
  unsigned num_heads;
  bool is_joined;  // rows lie at one distance

  __device__ __forceinline__ InputRows(const void* tensor, const int64_t* strides, const Args& args)
      : tensor(tensor),
        strides(strides),
        num_heads(args.num_value_heads),
        is_joined(strides[0] == args.num_value_heads * strides[1]) {}

  // Rows from num_rows on count as 0.
  __device__ __forceinline__ Packed load(unsigned row, unsigned num_rows) const {
    Packed packed = {};
    if (row >= num_rows) return packed;
    int64_t first = row * strides[1];
    if (!is_joined) {
      const unsigned token = row / num_heads;
      first = token * strides[0] + (row - token * num_heads) * strides[1];
    }
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      if constexpr (kIsDense) {
        packed.piece[p] = __ldg(static_cast<const uint4*>(tensor) + (first + first_channel(p)) / kPiece);
      } else {
        packed.piece[p] = load_elements(first + first_channel(p) * strides[2]);
      }
    }
    return packed;
  }

  __device__ __forceinline__ uint4 load_elements(int64_t first) const {
    uint32_t words[4] = {};
#pragma unroll
    for (int c = 0; c < kPiece; ++c) {
      words[c * kElementBytes / 4] |= load_bits(tensor, first + c * strides[2]) << 8 * (c * kElementBytes % 4);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
};

// Writes the lane's part of a row of a contiguous tensor. kIsDense: it begins at a multiple of 16 bytes.
template <bool kIsDense>
__device__ __forceinline__ void store(void* tensor, unsigned row, const Row& values) {
  const Packed packed = pack(values);
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int64_t first = int64_t{row} * kHeadDim + first_channel(p);
    if constexpr (kIsDense) {
      static_cast<uint4*>(tensor)[first / kPiece] = packed.piece[p];
    } else {
      const uint32_t words[4] = {packed.piece[p].x, packed.piece[p].y, packed.piece[p].z, packed.piece[p].w};
#pragma unroll
      for (int c = 0; c < kPiece; ++c) {
        if constexpr (kDtype == kFp32) {
          static_cast<uint32_t*>(tensor)[first + c] = words[c];
        } else {
          static_cast<unsigned short*>(tensor)[first + c] = static_cast<unsigned short>(words[c / 2] >> 16 * (c % 2));
        }
      }
    }
  }
}

// The lane's channels of the weight, in fp32.
__device__ __forceinline__ void load_weight(Row& row, const Args& args) {
#pragma unroll
  for (int c = 0; c < kOwn; ++c) {
    const int channel = first_channel(c / kPiece) + c % kPiece;
    if (args.weight_dtype == kFp32) {
      row[c] = __ldg(static_cast<const float*>(args.weight) + channel);
    } else {
      const unsigned short bits = __ldg(static_cast<const unsigned short*>(args.weight) + channel);
      row[c] = args.weight_dtype == kFp16 ? to_float<kFp16>(bits) : to_float<kBf16>(bits);
    }
  }
}

// 1 / sqrt(mean of x^2 + eps) of the sum of squares.
__device__ __forceinline__ float inverse_rms(float squares, float eps) {
  return rsqrtf(fmaf(squares, 1.0f / kHeadDim, eps));
}

unsigned num_rows(const Args& args) { return static_cast<unsigned>(args.num_tokens * args.num_value_heads); }

// Whether every piece of a [T, HV, D] tensor is 16 aligned bytes.
bool has_dense_rows(const void* tensor, const int64_t strides[3]) {
  return strides[2] == 1 && strides[1] % kPiece == 0 && strides[0] % kPiece == 0 &&
         reinterpret_cast<uintptr_t>(tensor) % 16 == 0;
}

bool is_aligned(const void* tensor) { return reinterpret_cast<uintptr_t>(tensor) % 16 == 0; }

Status refuse_null(const char* name) { return fail(kBadArgument, "%s is null; give a tensor", name); }

Status check_norm(const Args& args) {
  constexpr int64_t kMostRows = 0x7fffffff;
  if (args.num_value_heads < 1) {
    return fail(kBadArgument, "num_value_heads is %d; it must be at least 1", args.num_value_heads);
  }
  if (args.num_tokens < 0 || args.num_tokens > kMostRows / args.num_value_heads) {
    return fail(kBadArgument, "num_tokens is %lld; give 0 to 2^31 - 1 rows, tokens times %d heads",
                static_cast<long long>(args.num_tokens), args.num_value_heads);
  }
  if (args.weight_dtype < kBf16 || args.weight_dtype > kFp32) {
    return fail(kBadArgument, "weight_dtype is %d; give 0 (bf16), 1 (fp16) or 2 (fp32)", args.weight_dtype);
  }
  if (!(args.eps >= 0.0f)) return fail(kBadArgument, "eps is %g; it must not be negative", args.eps);
  if (!args.weight) return refuse_null("weight");
  if (args.num_tokens == 0) return kOk;
  if (!args.x) return refuse_null("x");
  return args.gate ? kOk : refuse_null("gate");
}

}  // namespace
