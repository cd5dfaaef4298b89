// What a CUDA library of the walk refuses. The program defines kMaxChains, the chains that its grid can hold.
namespace {

constexpr int kMaxGridY = 65535;

Status refuse_pointer(const char* name, const void* pointer) {
  return fail(kBadArgument, "%s is %p; give a tensor whose address is a multiple of 16", name, pointer);
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

Status check(const Args& args) {
  if (args.num_value_heads < 1) {
    return fail(kBadArgument, "num_value_heads is %d; give at least one head", args.num_value_heads);
  }
  const int num_heads_left = args.num_value_heads - args.first_head;
  if (args.first_head < 0 || args.num_block_heads < 1 || args.num_block_heads > num_heads_left) {
    return fail(kBadArgument, "heads %d to %d are asked for; there are %d", args.first_head,
                args.first_head + args.num_block_heads - 1, args.num_value_heads);
  }
  if (args.head_dim != 64 && args.head_dim != 128) {
    return fail(kBadArgument, "head_dim is %d; K = V must be 64 or 128", args.head_dim);
  }
  if (args.transpose != 0 && args.transpose != 1) {
    return fail(kBadArgument, "transpose is %d; give 0 or 1", args.transpose);
  }
  if (args.num_block_heads > kMaxGridY) {
    return fail(kBadArgument, "num_block_heads is %d; a grid has at most %d", args.num_block_heads, kMaxGridY);
  }
  if (args.num_chains < 0 || args.num_chains > kMaxChains) {
    return fail(kBadArgument, "num_chains is %lld; give 0 to %lld", static_cast<long long>(args.num_chains),
                static_cast<long long>(kMaxChains));
  }
  if (args.num_chains == 0) return kOk;
  if (!args.offsets) return fail(kBadArgument, "offsets is null; give the first fragment of each chain");
  if (!is_aligned(args.exit)) return refuse_pointer("exit", args.exit);
  if (!is_aligned(args.initial)) return refuse_pointer("initial", args.initial);
  // Tensors without any fragment have null addresses: then every chain is taken as empty.
  if (!args.M && !args.B && !args.entry) return kOk;
  if (!args.M || !is_aligned(args.M)) return refuse_pointer("M", args.M);
  if (!args.B || !is_aligned(args.B)) return refuse_pointer("B", args.B);
  if (!args.entry || !is_aligned(args.entry)) return refuse_pointer("entry", args.entry);
  return kOk;
}

}  // namespace
