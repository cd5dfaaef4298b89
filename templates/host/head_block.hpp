// What every program on a block of value heads refuses, whatever its family. Included after args.jinja.
namespace {

inline Status check_head_block(const Args& args) {
  if (args.num_heads < 1) return fail(kBadArgument, "num_heads is %d; it must be at least 1", args.num_heads);
  if (args.num_value_heads < 1 || args.num_value_heads % args.num_heads != 0) {
    return fail(kBadArgument, "num_value_heads is %d; it must be a positive multiple of num_heads, which is %d",
                args.num_value_heads, args.num_heads);
  }
  const int group = args.num_value_heads / args.num_heads;
  if (args.first_head < 0 || args.num_block_heads < 1 ||
      args.first_head > args.num_value_heads - args.num_block_heads) {
    return fail(kBadArgument, "the head block is [%d, %d + %d); it must be part of the %d value heads, and not empty",
                args.first_head, args.first_head, args.num_block_heads, args.num_value_heads);
  }
  if (args.first_head % group != 0 || args.num_block_heads % group != 0) {
    return fail(kBadArgument, "the head block is [%d, %d + %d); it must hold whole groups of %d value heads",
                args.first_head, args.first_head, args.num_block_heads, group);
  }
  return kOk;
}

}  // namespace
