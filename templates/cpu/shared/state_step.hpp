// One chunk's step of a state S [K, V], from the chunk's tiles:
//
//     x = v - ke S          v' = Tinv (beta x)          S <- diag(e^G_last) S + kg^T v'
//
// The scan, the replay of its states and the summary B of a segment all run this code: from the same state they get the
// same bits. v' is used as its tile holds it. Included after tiles.hpp.

namespace {

struct alignas(64) StateStep {
  Row ke[kChunk], kg[kChunk];
  Square Tinv[kChunk];
  float decay_total[kHeadDim];
  float beta[kChunk];
  Row x[kChunk];  // v, then beta (v - ke S)
  Row v_new[kChunk];
  Row rest[kChunk];  // of v', beside its rounded part
};

// decay_total [HB, chunks, K] is fp32, whatever the tiles are.
inline void load_decay_total(float* total, const Args& args, const Place& at) {
  std::memcpy(total, static_cast<const float*>(args.decay_total) + at.tile * kHeadDim, kHeadDim * sizeof(float));
}

// All but v.
inline void load_map(StateStep& step, const Args& args, const Place& at) {
  load_token_tile(step.ke, args.ke, at);
  load_token_tile(step.kg, args.kg, at);
  load_square_tile(step.Tinv, args.Tinv, at);
  load_decay_total(step.decay_total, args, at);
  load_beta(step.beta, args, at);
}

inline void load_step(StateStep& step, const Args& args, const Place& at) {
  load_map(step, args, at);
  load_rows(step.x, args.v, kDtype, args.v_strides, at.token, at.head, at.rows);
}

// v', given the state that enters the chunk.
inline void solve_values(StateStep& step, const Row* S, int rows) {
  multiply<Update::kSubtract>(step.x, rows, rows_of(step.ke), S, kHeadDim);
  for (int i = 0; i < rows; ++i) {
    for (int n = 0; n < kHeadDim; ++n) step.x[i][n] *= step.beta[i];
  }
  multiply<Update::kSet, Terms::kUpToRow>(step.v_new, rows, {step.Tinv[0], kChunk, 1}, step.x, rows);
  round_to_value_tile(step.v_new, rows, step.rest);
}

// S <- diag(e^G_last) S, for the state and, backwards, for its gradient.
inline void decay_state(Row* S, const float* total) {
  for (int d = 0; d < kHeadDim; ++d) {
    for (int n = 0; n < kHeadDim; ++n) S[d][n] *= total[d];
  }
}

inline void advance_state(const StateStep& step, Row* S, int rows) {
  decay_state(S, step.decay_total);
  multiply<Update::kAdd>(S, kHeadDim, columns_of(step.kg), step.v_new, rows);
}

}  // namespace
