// Rows of [T, D] tensors of 16-bit numbers as the convolutions read and write them: a thread owns kChannels adjacent
// channels and meets its tokens in order. Included after args.jinja, number.cuh, async_copy.cuh and the constants
// kDtype and kThreads.
//
// *Dense* rows are 16 aligned bytes a thread. They come through a ring in shared memory, in which copies run kRingRows
// tokens ahead without holding registers; a thread reads only what it copied itself, so there are no barriers. Other
// rows are read and written number by number.
#include <cstdint>

namespace {

constexpr int kChannels = 8;
constexpr int kBlockChannels = kThreads * kChannels;  // of a CTA
constexpr int kRingRows = 8;
constexpr int kParts = 3;  // convolutions of a launch at most

using Row = float[kChannels];

__device__ __forceinline__ void clear(Row& row) {
#pragma unroll
  for (int c = 0; c < kChannels; ++c) row[c] = 0.0f;
}

// One convolution of a launch. What each has of its own are arrays of the argument block.
struct Part {
  const Args& args;
  int index;

  __device__ __forceinline__ int64_t num_channels() const { return args.num_channels[index]; }
};

// A thread's channels: [first, first + count). Those past D, from count on, are 0 and are stored nowhere.
struct Channels {
  int first;
  int count;
};

// A count of 0: the thread has no channel.
template <bool kIsDense>
__device__ __forceinline__ Channels channels_of_thread(const Part& part, unsigned block) {
  const int64_t first = int64_t{block} * kBlockChannels + threadIdx.x * kChannels;
  const int64_t left = part.num_channels() - first;
  if (left <= 0) return {0, 0};
  return {static_cast<int>(first), kIsDense || left > kChannels ? kChannels : static_cast<int>(left)};
}

// Numbers of a parameter or a state, kStride apart, for a thread's channels. They are fp32 or have x's dtype.
template <int kStride>
__device__ __forceinline__ void load_numbers(Row& row, const void* tensor, int dtype, int64_t offset, int count) {
  // One branch for all: the loads then follow each other, and none waits for the one before it.
  if (dtype == kFp32) {
    const float* numbers = static_cast<const float*>(tensor) + offset;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) row[c] = c < count ? __ldg(numbers + c * kStride) : 0.0f;
  } else {
    const auto* numbers = static_cast<const unsigned short*>(tensor) + offset;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      row[c] = c < count ? to_float<kDtype>(__ldg(numbers + c * kStride)) : 0.0f;
    }
  }
}

template <int kStride>
__device__ __forceinline__ void store_numbers(void* tensor, int dtype, int64_t offset, int count, const Row& row) {
  if (dtype == kFp32) {
    float* numbers = static_cast<float*>(tensor) + offset;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      if (c < count) numbers[c * kStride] = row[c];
    }
  } else {
    auto* numbers = static_cast<unsigned short*>(tensor) + offset;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      if (c < count) numbers[c * kStride] = to_16_bits<kDtype>(row[c]);
    }
  }
}

struct TokenView {
  const void* tensor;
  int64_t token_stride, channel_stride;  // in elements

  // A part's tensor, among those of all parts.
  __device__ __forceinline__ TokenView(void* const (&tensors)[kParts], const int64_t (&strides)[2 * kParts],
                                       const Part& part)
      : tensor(tensors[part.index]),
        token_stride(strides[2 * part.index]),
        channel_stride(strides[2 * part.index + 1]) {}
};

__device__ __forceinline__ void unpack(Row& row, const uint4& packed) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_pair<kDtype>(words[i]);
    row[2 * i] = pair.x;
    row[2 * i + 1] = pair.y;
  }
}

__device__ __forceinline__ uint4 pack(const Row& row) {
  return make_uint4(pack_pair<kDtype>(row[0], row[1]), pack_pair<kDtype>(row[2], row[3]),
                    pack_pair<kDtype>(row[4], row[5]), pack_pair<kDtype>(row[6], row[7]));
}

template <bool kIsDense>
__device__ __forceinline__ uint4 load_packed(const TokenView& view, int64_t token, const Channels& own) {
  if constexpr (kIsDense) {
    return __ldg(static_cast<const uint4*>(view.tensor) + (token * view.token_stride + own.first) / kChannels);
  }
  const int64_t offset = token * view.token_stride + own.first * view.channel_stride;
  const auto* elements = static_cast<const unsigned short*>(view.tensor) + offset;
  uint32_t words[4] = {};
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    if (c < own.count) words[c / 2] |= uint32_t{__ldg(elements + c * view.channel_stride)} << 16 * (c % 2);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// A thread's part of a contiguous [T, D] tensor, from a first token on.
template <bool kIsDense>
struct OutputRows {
  void* first;
  int stride;
  int count;

  __device__ __forceinline__ OutputRows(void* tensor, int64_t token, const Part& part, const Channels& own)
      : first(static_cast<unsigned short*>(tensor) + (token * part.num_channels() + own.first)),
        stride(static_cast<int>(part.num_channels())),
        count(own.count) {}

  // Writes the row of a token, counted from the first one.
  __device__ __forceinline__ void store(int token, const Row& row) const {
    const uint4 packed = pack(row);
    if constexpr (kIsDense) {
      static_cast<uint4*>(first)[int64_t{token} * (stride / kChannels)] = packed;
    } else {
      const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
      auto* elements = static_cast<unsigned short*>(first) + int64_t{token} * stride;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        if (c < count) elements[c] = static_cast<unsigned short>(words[c / 2] >> 16 * (c % 2));
      }
    }
  }
};

template <int kTensors>
struct Ring {
  uint4 row[kRingRows][kTensors][kThreads];
};

// `count` rows of one or two tensors from a token on, taken in order. What was taken makes room once it is used:
// refill() then asks for as many rows, kRingRows further on.
template <bool kIsDense, int kTensors>
struct RowStream {
  const TokenView* views;
  const Channels& own;
  int64_t token;  // the next one to be taken

  __device__ __forceinline__ RowStream(Ring<kTensors>&, const TokenView (&views)[kTensors], const Channels& own,
                                       int64_t token, int)
      : views(views), own(own), token(token) {}

  template <int kCount>
  __device__ __forceinline__ void take(uint4 (&rows)[kCount][kTensors]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      for (int v = 0; v < kTensors; ++v) rows[i][v] = load_packed<kIsDense>(views[v], token + i, own);
    }
    token += kCount;
  }

  template <int kCount>
  __device__ __forceinline__ void refill() {}
};

template <int kTensors>
struct RowStream<true, kTensors> {
  uint4 (*slots)[kTensors][kThreads];
  const uint4* next[kTensors];  // rows to be asked for
  int step[kTensors];           // from a row to the next one
  int left;                     // rows not asked for yet
  unsigned taken = 0;

  __device__ __forceinline__ RowStream(Ring<kTensors>& ring, const TokenView (&views)[kTensors], const Channels& own,
                                       int64_t token, int count)
      : slots(ring.row), left(count) {
#pragma unroll
    for (int v = 0; v < kTensors; ++v) {
      step[v] = static_cast<int>(views[v].token_stride / kChannels);
      next[v] = static_cast<const uint4*>(views[v].tensor) + (token * views[v].token_stride + own.first) / kChannels;
    }
    for (unsigned row = 0; row < kRingRows; ++row) ask(row);
  }

  __device__ __forceinline__ void ask(unsigned slot) {
    if (left > 0) {
#pragma unroll
      for (int v = 0; v < kTensors; ++v) {
        copy_async_16(static_cast<uint32_t>(__cvta_generic_to_shared(&slots[slot][v][threadIdx.x])), next[v]);
        next[v] += step[v];
      }
      --left;
    }
    commit_copies();  // also where there is nothing left: the number of groups says which ones are awaited
  }

  template <int kCount>
  __device__ __forceinline__ void take(uint4 (&rows)[kCount][kTensors]) {
    wait_for_copies<kRingRows - kCount>();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      for (int v = 0; v < kTensors; ++v) rows[i][v] = slots[(taken + i) % kRingRows][v][threadIdx.x];
    }
    taken += kCount;
  }

  template <int kCount>
  __device__ __forceinline__ void refill() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) ask((taken - kCount + i) % kRingRows);
  }
};

}  // namespace
