// Products of tiles in fp32. Included after kHeadDim. Every sum runs in one fixed order, whatever the register width,
// the blocking or the thread: an element of a product adds its terms one by one in order, a dot product adds in 8
// lanes.
#include <cstdint>
#include <cstring>

// Functions that pass vectors are all inlined, so their calling convention never matters.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace {

constexpr int kLanes = 8;
using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));

inline Lanes load(const float* source) {
  Lanes value;
  std::memcpy(&value, source, sizeof value);
  return value;
}

inline void store(float* target, const Lanes& value) { std::memcpy(target, &value, sizeof value); }

inline Lanes splat(float x) { return Lanes{x, x, x, x, x, x, x, x}; }

inline float sum_lanes(const Lanes& x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

// A row of kHeadDim floats in scratch. Its pitch is an odd number of cache lines, so that a column of rows does not
// fall into a few sets of the cache.
constexpr int kPitch = kHeadDim + 16;
using Row = float[kPitch];

inline float dot(const float* a, const float* b) {
  Lanes sum{};
  for (int d = 0; d < kHeadDim; d += kLanes) sum += load(a + d) * load(b + d);
  return sum_lanes(sum);
}

// The left factor of a product: element (m, k) is data[m * row_step + k * term_step], so a transpose is a view.
struct Left {
  const float* data;
  int64_t row_step;
  int64_t term_step;

  float at(int m, int k) const { return data[m * row_step + k * term_step]; }
};

inline Left rows_of(const Row* a) { return {a[0], kPitch, 1}; }
inline Left columns_of(const Row* a) { return {a[0], 1, kPitch}; }

enum class Update { kSet, kAdd, kSubtract };

// Which terms k a row m of a product has. The others are not read: a mask selects, it does not multiply by zero.
enum class Terms { kAll, kUpToRow, kBeforeRow, kFromRow };

constexpr int kBlockRows = 4;
constexpr int kBlockColumns = 2 * kLanes;

// Terms [begin, end) of kRows rows from m and of kBlockColumns columns from n. kStep is the distance of rows in b and
// c.
template <Update kUpdate, int kRows, int kStep>
inline void multiply_block(float* c, const Left& a, const float* b, int m, int n, int begin, int end) {
  Lanes sum[kRows][2];
  for (int r = 0; r < kRows; ++r) {
    const float* row = c + int64_t{m + r} * kStep + n;
    sum[r][0] = kUpdate == Update::kSet ? Lanes{} : load(row);
    sum[r][1] = kUpdate == Update::kSet ? Lanes{} : load(row + kLanes);
  }
  for (int k = begin; k < end; ++k) {
    const float* row = b + int64_t{k} * kStep + n;
    const Lanes left_half = load(row), right_half = load(row + kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Lanes factor = splat(kUpdate == Update::kSubtract ? -a.at(m + r, k) : a.at(m + r, k));
      sum[r][0] += factor * left_half;
      sum[r][1] += factor * right_half;
    }
  }
  for (int r = 0; r < kRows; ++r) {
    float* row = c + int64_t{m + r} * kStep + n;
    store(row, sum[r][0]);
    store(row + kLanes, sum[r][1]);
  }
}

// c = (or +=, or -=) a b for `rows` rows of c and `depth` rows of b. Rows are finished in order, so with kBeforeRow c
// may be b: that is forward substitution.
template <Update kUpdate, Terms kTerms, int kStep>
void multiply_rows(float* c, int rows, const Left& a, const float* b, int depth) {
  constexpr Update kMore = kUpdate == Update::kSubtract ? Update::kSubtract : Update::kAdd;
  const auto begin = [](int m) { return kTerms == Terms::kFromRow ? m : 0; };
  const auto end = [depth](int m) {
    return kTerms == Terms::kUpToRow ? m + 1 : kTerms == Terms::kBeforeRow ? m : depth;
  };
  for (int n = 0; n < kHeadDim; n += kBlockColumns) {
    int m = 0;
    for (; m + kBlockRows <= rows; m += kBlockRows) {
      // The terms that all rows of the block have, between those at either end that only some have.
      const int last = m + kBlockRows - 1, common_begin = begin(last), common_end = end(m);
      if (kTerms == Terms::kFromRow) {
        for (int r = m; r <= last; ++r) multiply_block<kUpdate, 1, kStep>(c, a, b, r, n, begin(r), common_begin);
        multiply_block<kMore, kBlockRows, kStep>(c, a, b, m, n, common_begin, common_end);
      } else {
        multiply_block<kUpdate, kBlockRows, kStep>(c, a, b, m, n, common_begin, common_end);
        for (int r = m; r <= last; ++r) multiply_block<kMore, 1, kStep>(c, a, b, r, n, common_end, end(r));
      }
    }
    for (; m < rows; ++m) multiply_block<kUpdate, 1, kStep>(c, a, b, m, n, begin(m), end(m));
  }
}

template <Update kUpdate, Terms kTerms = Terms::kAll>
void multiply(Row* c, int rows, const Left& a, const Row* b, int depth) {
  multiply_rows<kUpdate, kTerms, kPitch>(c[0], rows, a, b[0], depth);
}

// x <- (I + A)^-1 x, A strictly lower triangular, by forward substitution: no inverse is formed.
template <int kWidth>
void solve_lower(Row* x, const float (*A)[kWidth], int rows) {
  multiply_rows<Update::kSubtract, Terms::kBeforeRow, kPitch>(x[0], rows, {A[0], kWidth, 1}, x[0], rows);
}

// x <- (I + A)^-T x: the same substitution, walked from the last row to the first.
template <int kWidth>
void solve_lower_transposed(Row* x, const float (*A)[kWidth], int rows) {
  const Left reversed{&A[rows - 1][rows - 1], -1, -kWidth};
  multiply_rows<Update::kSubtract, Terms::kBeforeRow, -kPitch>(x[rows - 1], rows, reversed, x[rows - 1], rows);
}

// b = a^T, both kHeadDim x kHeadDim.
[[maybe_unused]] inline void transpose(Row* b, const Row* a) {
  for (int block = 0; block < kHeadDim; block += kLanes) {
    for (int m = 0; m < kHeadDim; ++m) {
      for (int n = block; n < block + kLanes; ++n) b[m][n] = a[n][m];
    }
  }
}

}  // namespace
