// One chunk's step of a state's gradient dS [K, V], from the end of the chunk to its start:
//
//     dv' = Aqk^T do + kg dS          z = Tinv^T dv'          dS <- diag(e^G_last) dS + qg^T do - ke^T (beta z)
//
// The reverse scan and the summary D of a segment both run this code. Included after state_step.hpp, for decay_state()
// and load_decay_total().

namespace {

struct alignas(64) GradStep {
  Row ke[kChunk], qg[kChunk], kg[kChunk];
  Square Aqk[kChunk], Tinv[kChunk];
  float decay_total[kHeadDim];
  float beta[kChunk];
  Row do_[kChunk];
  Row x[kChunk];  // dv', then beta z
  Row z[kChunk];
};

inline void load_step(GradStep& step, const Args& args, const Place& at) {
  load_token_tile(step.ke, args.ke, at);
  load_token_tile(step.qg, args.qg, at);
  load_token_tile(step.kg, args.kg, at);
  load_square_tile(step.Aqk, args.Aqk, at);
  load_square_tile(step.Tinv, args.Tinv, at);
  load_decay_total(step.decay_total, args, at);
  load_beta(step.beta, args, at);
  load_rows(step.do_, args.do_, kDtype, args.do_strides, at.token, at.head, at.rows);
}

// z, given the gradient of the state that leaves the chunk.
inline void solve_value_gradients(GradStep& step, const Row* dS, int rows) {
  multiply<Update::kSet, Terms::kFromRow>(step.x, rows, {step.Aqk[0], 1, kChunk}, step.do_, rows);
  multiply<Update::kAdd>(step.x, rows, rows_of(step.kg), dS, kHeadDim);
  multiply<Update::kSet, Terms::kFromRow>(step.z, rows, {step.Tinv[0], 1, kChunk}, step.x, rows);
}

inline void retreat_state_gradient(GradStep& step, Row* dS, int rows) {
  for (int i = 0; i < rows; ++i) {
    for (int n = 0; n < kHeadDim; ++n) step.x[i][n] = step.beta[i] * step.z[i][n];
  }
  decay_state(dS, step.decay_total);
  multiply<Update::kAdd>(dS, kHeadDim, columns_of(step.qg), step.do_, rows);
  multiply<Update::kSubtract>(dS, kHeadDim, columns_of(step.ke), step.x, rows);
}

}  // namespace
