// Normalised queries and keys, the gate, and the decays of one (chunk, value head), in fp32. With d = e^g:
//
//     e^G_i = d_0 ... d_i          e^(G_last - G_i) = d_(i+1) ... d_last          last = the last valid row
//
// Decays are products, never the exponential of a difference of sums: g = -inf resets exactly and no later gate touches
// an earlier row. Included after tiles.hpp.

namespace {

struct alignas(64) Decays {
  Row x[kChunk];         // argument of the gate
  Row g[kChunk];         // log decay
  Row decay[kChunk];     // d, in [0, 1]
  Row to_start[kChunk];  // e^G
  Row to_end[kChunk];    // e^(G_last - G)

  // e^G_last, from the last valid row.
  const float* total(int rows) const { return to_start[rows - 1]; }
};

inline Gate gate_of(const Args& args, int head) {
  return gate_of_head(args.gate_form, args.lower_bound, static_cast<const float*>(args.A_log),
                      static_cast<const float*>(args.dt_bias), head);
}

inline void gate_and_decays(Decays& c, const Args& args, const Gate& gate, const Place& at) {
  load_rows(c.x, args.g, args.g_dtype, args.g_strides, at.token, at.head, at.rows);
  const int last = at.rows - 1;
  for (int i = 0; i <= last; ++i) {
    for (int d = 0; d < kHeadDim; ++d) {
      c.x[i][d] = gate.shifted(c.x[i][d], d);
      c.g[i][d] = gate.log_decay(c.x[i][d]);
      c.decay[i][d] = std::exp(c.g[i][d]);
    }
    for (int d = 0; d < kHeadDim; ++d) c.to_start[i][d] = i ? c.to_start[i - 1][d] * c.decay[i][d] : c.decay[i][d];
  }
  for (int i = last; i >= 0; --i) {
    for (int d = 0; d < kHeadDim; ++d) c.to_end[i][d] = i < last ? c.decay[i + 1][d] * c.to_end[i + 1][d] : 1.0f;
  }
}

// q or k of the key head; rstd is what the l2norm multiplied each row with, 1 without it.
inline void load_normalised(Row* rows, float* rstd, const void* tensor, const int64_t* strides, const Args& args,
                            const Place& at) {
  load_rows(rows, tensor, kDtype, strides, at.token, at.key_head, at.rows);
  for (int i = 0; i < at.rows; ++i) rstd[i] = args.use_qk_l2norm ? l2norm(rows[i]) : 1.0f;
}

inline Status check_gate(const Args& args) {
  if (!is_dtype(args.g_dtype)) {
    return fail(kBadArgument, "g_dtype is %d; use 0 (bf16), 1 (fp16) or 2 (fp32)", args.g_dtype);
  }
  if (args.gate_form < kGateReady || args.gate_form > kGateBounded) {
    return fail(kBadArgument, "gate_form is %d; use 0 (ready), 1 (softplus) or 2 (bounded)", args.gate_form);
  }
  if (args.gate_form == kGateSoftplus && !args.A_log) {
    return fail(kBadArgument, "A_log is null; the softplus gate (gate_form 1) needs it");
  }
  if (args.gate_form == kGateBounded && !(args.lower_bound >= -5.0f && args.lower_bound < 0.0f)) {
    return fail(kBadArgument, "lower_bound is %g; the bounded gate (gate_form 2) needs [-5, 0)", args.lower_bound);
  }
  return kOk;
}

}  // namespace
