// One chunk of one (document, value head): its inputs, its decays, the products inside it and the values it writes.
// Both directions compute these from the inputs, with this code, so the backward sees the forward's own bits. Included
// after args.jinja, the constants kHeadDim, kChunk and kDtype, and the other shared files.
#include <initializer_list>

namespace {

// Where a chunk lies: rows [token, token + rows) of the pack. Only valid rows exist in a tile; none are padded.
struct Place {
  int64_t token;
  int rows;
  int head;      // value head
  int key_head;  // head * H / HV
};

struct Chunk {
  Row q[kChunk], k[kChunk];              // after the l2norm
  float q_rstd[kChunk], k_rstd[kChunk];  // 1 without it
  Row v[kChunk];
  float beta[kChunk], beta_raw[kChunk];
  Row x[kChunk];         // argument of the gate
  Row g[kChunk];         // log decay
  Row decay[kChunk];     // d = e^g, in [0, 1]
  Row to_start[kChunk];  // e^G = d_0 ... d_i
  Row to_end[kChunk];    // e^(G_last - G) = d_(i+1) ... d_last
  Row ke[kChunk], qg[kChunk], kg[kChunk];
  float Akk[kChunk][kChunk];  // strictly lower triangle
  float Aqk[kChunk][kChunk];  // lower triangle
  Row v_new[kChunk];          // v'

  // e^G_last, from the last valid row.
  const float* total(int rows) const { return to_start[rows - 1]; }
};

inline void load_rows(Row* tile, const void* tensor, int dtype, const int64_t* strides, int64_t token, int head,
                      int rows) {
  for (int i = 0; i < rows; ++i) {
    load_row(tile[i], tensor, dtype, (token + i) * strides[0] + head * strides[1], strides[2], kHeadDim);
  }
}

// Rows [token, token + rows) of one head of a contiguous [T, heads, kHeadDim] tensor.
inline void store_rows(void* tensor, int dtype, int64_t token, int head, int heads, const Row* tile, int rows) {
  for (int i = 0; i < rows; ++i) {
    store_row(tensor, dtype, ((token + i) * heads + head) * kHeadDim, 1, tile[i], kHeadDim);
  }
}

// State number `index` of a contiguous [*, kHeadDim, kHeadDim] fp32 tensor; null stands for zeros.
inline void read_state(Row* S, const void* states, int64_t index) {
  for (int d = 0; d < kHeadDim; ++d) {
    if (states) {
      const float* source = static_cast<const float*>(states) + (index * kHeadDim + d) * kHeadDim;
      std::memcpy(S[d], source, kHeadDim * sizeof(float));
    } else {
      std::memset(S[d], 0, kHeadDim * sizeof(float));
    }
  }
}

inline void write_state(void* states, int64_t index, const Row* S) {
  for (int d = 0; d < kHeadDim; ++d) {
    float* target = static_cast<float*>(states) + (index * kHeadDim + d) * kHeadDim;
    std::memcpy(target, S[d], kHeadDim * sizeof(float));
  }
}

inline void load_queries_and_keys(Chunk& c, const Args& args, const Place& at) {
  load_rows(c.q, args.q, kDtype, args.q_strides, at.token, at.key_head, at.rows);
  load_rows(c.k, args.k, kDtype, args.k_strides, at.token, at.key_head, at.rows);
  for (int i = 0; i < at.rows; ++i) {
    c.q_rstd[i] = args.use_qk_l2norm ? l2norm(c.q[i]) : 1.0f;
    c.k_rstd[i] = args.use_qk_l2norm ? l2norm(c.k[i]) : 1.0f;
  }
}

inline void load_values_and_beta(Chunk& c, const Args& args, const Place& at) {
  load_rows(c.v, args.v, kDtype, args.v_strides, at.token, at.head, at.rows);
  for (int i = 0; i < at.rows; ++i) {
    const int64_t offset = (at.token + i) * args.beta_strides[0] + at.head * args.beta_strides[1];
    c.beta_raw[i] = load_element(args.beta, args.beta_dtype, offset);
    c.beta[i] = beta_of(args.beta_form, c.beta_raw[i]);
  }
}

inline Gate gate_of(const Args& args, int head) {
  return gate_of_head(args.gate_form, args.lower_bound, static_cast<const float*>(args.A_log),
                      static_cast<const float*>(args.dt_bias), head);
}

// g, d, and the products of d towards either end of the chunk: never the exponential of a difference of sums, so g =
// -inf resets exactly and no later gate touches an earlier row.
inline void gate_and_decays(Chunk& c, const Args& args, const Gate& gate, const Place& at) {
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
  for (int i = 0; i <= last; ++i) {
    for (int d = 0; d < kHeadDim; ++d) {
      c.ke[i][d] = c.k[i][d] * c.to_start[i][d];
      c.qg[i][d] = args.scale * (c.q[i][d] * c.to_start[i][d]);
      c.kg[i][d] = c.k[i][d] * c.to_end[i][d];
    }
  }
}

// Akk and Aqk from y_j(i) = k_j d_(j+1) ... d_i, which decays by one more factor from row to row.
inline void intra_products(Chunk& c, float scale, int rows) {
  for (int j = 0; j < rows; ++j) {
    Row y;
    std::memcpy(y, c.k[j], sizeof y);
    c.Aqk[j][j] = scale * dot(c.q[j], y);
    for (int i = j + 1; i < rows; ++i) {
      Lanes key_sum{}, query_sum{};
      for (int d = 0; d < kHeadDim; d += kLanes) {
        const Lanes decayed = load(y + d) * load(c.decay[i] + d);
        store(y + d, decayed);
        key_sum += load(c.k[i] + d) * decayed;
        query_sum += load(c.q[i] + d) * decayed;
      }
      c.Akk[i][j] = c.beta[i] * sum_lanes(key_sum);
      c.Aqk[i][j] = scale * sum_lanes(query_sum);
    }
  }
}

// x = v - ke S; v' = (I + Akk)^-1 (beta x).
inline void solve_values(Chunk& c, const Row* S, int rows) {
  std::memcpy(c.v_new, c.v, sizeof(Row) * rows);
  multiply<Update::kSubtract>(c.v_new, rows, rows_of(c.ke), S, kHeadDim);
  for (int i = 0; i < rows; ++i) {
    for (int d = 0; d < kHeadDim; ++d) c.v_new[i][d] *= c.beta[i];
  }
  solve_lower(c.v_new, c.Akk, rows);
}

// S <- diag(e^G_last) S, for the state and, backwards, for its gradient.
inline void decay_state(Row* S, const float* total) {
  for (int d = 0; d < kHeadDim; ++d) {
    for (int n = 0; n < kHeadDim; ++n) S[d][n] *= total[d];
  }
}

inline int64_t num_chunks(int64_t tokens) { return (tokens + kChunk - 1) / kChunk; }

inline int64_t document_begin(const Args& args, int64_t document) {
  return static_cast<const int64_t*>(args.cu_seqlens)[document];
}

inline int64_t first_chunk(const Args& args, int64_t document) {
  return static_cast<const int64_t*>(args.chunk_offsets)[document];
}

// Chunk number `index` of a document, counted from the document's first token; the last one may be short.
inline Place place_of(const Args& args, int64_t document, int64_t index, int head) {
  const int64_t token = document_begin(args, document) + index * kChunk;
  const int64_t left = document_begin(args, document + 1) - token;
  return {token, static_cast<int>(std::min<int64_t>(left, kChunk)), head,
          head / (args.num_value_heads / args.num_heads)};
}

inline Status check_pack(const Args& args) {
  if (args.num_documents < 0) {
    return fail(kBadArgument, "num_documents is %lld; it must not be negative", (long long)args.num_documents);
  }
  if (!args.cu_seqlens || !args.chunk_offsets) {
    const char* missing = args.cu_seqlens ? "chunk_offsets" : "cu_seqlens";
    return fail(kBadArgument, "%s is null; give num_documents + 1 int64", missing);
  }
  if (document_begin(args, 0) != 0 || first_chunk(args, 0) != 0) {
    return fail(kBadArgument, "cu_seqlens and chunk_offsets start at %lld and %lld; both must start at 0",
                (long long)document_begin(args, 0), (long long)first_chunk(args, 0));
  }
  for (int64_t n = 0; n < args.num_documents; ++n) {
    const int64_t tokens = document_begin(args, n + 1) - document_begin(args, n);
    if (tokens < 0) {
      return fail(kBadArgument, "cu_seqlens decreases from %lld to %lld at document %lld; it must never decrease",
                  (long long)document_begin(args, n), (long long)document_begin(args, n + 1), (long long)n);
    }
    const int64_t chunks = first_chunk(args, n + 1) - first_chunk(args, n);
    if (chunks != num_chunks(tokens)) {
      return fail(kBadArgument,
                  "document %lld of %lld tokens has %lld chunks in chunk_offsets; %d tokens each give %lld",
                  (long long)n, (long long)tokens, (long long)chunks, kChunk, (long long)num_chunks(tokens));
    }
  }
  return kOk;
}

inline Status check_transforms(const Args& args) {
  if (!is_dtype(args.g_dtype) || !is_dtype(args.beta_dtype)) {
    return fail(kBadArgument, "g_dtype is %d and beta_dtype is %d; use 0 (bf16), 1 (fp16) or 2 (fp32)", args.g_dtype,
                args.beta_dtype);
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
  if (args.beta_form < kBetaReady || args.beta_form > kBetaTwiceSigmoid) {
    return fail(kBadArgument, "beta_form is %d; use 0 (ready), 1 (sigmoid) or 2 (twice sigmoid)", args.beta_form);
  }
  return kOk;
}

struct Named {
  const char* name;
  const void* tensor;
};

// Tensors that a pack with tokens needs. A tensor of no tokens may have no memory.
inline Status check_tensors(const Args& args, std::initializer_list<Named> tensors) {
  const int64_t tokens = document_begin(args, args.num_documents);
  for (const Named& named : tensors) {
    if (!named.tensor && tokens > 0) {
      return fail(kBadArgument, "%s is null; the pack has %lld tokens", named.name, (long long)tokens);
    }
  }
  return kOk;
}

// What both programs refuse.
inline Status check_inputs(const Args& args) {
  if (args.num_heads < 1) return fail(kBadArgument, "num_heads is %d; it must be at least 1", args.num_heads);
  if (args.num_value_heads < 1 || args.num_value_heads % args.num_heads != 0) {
    return fail(kBadArgument, "num_value_heads is %d; it must be a positive multiple of num_heads, which is %d",
                args.num_value_heads, args.num_heads);
  }
  if (args.num_threads < 1) return fail(kBadArgument, "num_threads is %d; it must be at least 1", args.num_threads);
  const Status pack = check_pack(args);
  if (pack != kOk) return pack;
  const Status tensors = check_tensors(args, {Named{"q", args.q}, Named{"k", args.k}, Named{"v", args.v},
                                              Named{"g", args.g}, Named{"beta", args.beta}});
  if (tensors != kOk) return tensors;
  return check_transforms(args);
}

}  // namespace
