// Rows of bf16, fp16 and fp32 tensors as fp32. A dtype is a run-time code: 0 bf16, 1 fp16, 2 fp32. Offsets, strides and
// counts are in elements. Storing rounds to nearest even, overflows to infinity and keeps NaN. The conversions hold
// with denormals flushed to zero: a denormal fp16 is a normal fp32.
#include <cstdint>
#include <cstring>

namespace {

enum Dtype : int { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

[[maybe_unused]] inline bool is_dtype(int code) { return code == kBf16 || code == kFp16 || code == kFp32; }

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

struct Bf16 {
  using Storage = uint16_t;
  static float load(Storage half) { return float_of_bits(uint32_t{half} << 16); }
  static Storage store(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40u;
    return static_cast<Storage>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
  }
};

struct Fp16 {
  using Storage = uint16_t;
  static float load(Storage half) {
    const uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    const uint32_t exponent_shift = (magnitude >= 0x7c00u ? 224u : 112u) << 23;
    const uint32_t normal = (magnitude << 13) + exponent_shift;
    const uint32_t denormal = bits_of_float(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    return float_of_bits(sign | (magnitude < 0x400u ? denormal : normal));
  }
  static Storage store(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // One half's denormal step, 2^-24, is the last place of numbers just above 0.5: the addition rounds.
    const uint32_t denormal = bits_of_float(float_of_bits(magnitude) + 0.5f) - bits_of_float(0.5f);
    uint32_t half = magnitude < 0x38800000u ? denormal : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;
    half = magnitude > 0x7f800000u ? 0x7e00u : half;
    return static_cast<Storage>(sign | half);
  }
};

struct Fp32 {
  using Storage = float;
  static float load(Storage value) { return value; }
  static Storage store(float value) { return value; }
};

template <typename Element>
void load_elements(float* row, const void* tensor, int64_t offset, int64_t stride, int64_t count) {
  const auto* source = static_cast<const typename Element::Storage*>(tensor) + offset;
  if (stride == 1) {
    for (int64_t i = 0; i < count; ++i) row[i] = Element::load(source[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) row[i] = Element::load(source[i * stride]);
  }
}

template <typename Element>
void store_elements(void* tensor, int64_t offset, int64_t stride, const float* row, int64_t count) {
  auto* target = static_cast<typename Element::Storage*>(tensor) + offset;
  if (stride == 1) {
    for (int64_t i = 0; i < count; ++i) target[i] = Element::store(row[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) target[i * stride] = Element::store(row[i]);
  }
}

// row[i] = tensor[offset + i * stride] for i < count.
inline void load_row(float* row, const void* tensor, int dtype, int64_t offset, int64_t stride, int64_t count) {
  if (dtype == kBf16) return load_elements<Bf16>(row, tensor, offset, stride, count);
  if (dtype == kFp16) return load_elements<Fp16>(row, tensor, offset, stride, count);
  load_elements<Fp32>(row, tensor, offset, stride, count);
}

// tensor[offset + i * stride] = row[i] for i < count.
inline void store_row(void* tensor, int dtype, int64_t offset, int64_t stride, const float* row, int64_t count) {
  if (dtype == kBf16) return store_elements<Bf16>(tensor, offset, stride, row, count);
  if (dtype == kFp16) return store_elements<Fp16>(tensor, offset, stride, row, count);
  store_elements<Fp32>(tensor, offset, stride, row, count);
}

[[maybe_unused]] inline float load_element(const void* tensor, int dtype, int64_t offset) {
  float value;
  load_row(&value, tensor, dtype, offset, 1, 1);
  return value;
}

[[maybe_unused]] inline void store_element(void* tensor, int dtype, int64_t offset, float value) {
  store_row(tensor, dtype, offset, 1, &value, 1);
}

}  // namespace
