// Registers handed from one warpgroup to another, for sm_90a. A kernel that does so says in its launch bounds that one
// CTA of it runs on a processor; all warps of a warpgroup execute the same instruction.
namespace {

// More registers per thread than the launch dealt out; waits until another warpgroup has given up enough.
template <int kRegisters>
__device__ __forceinline__ void extend_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

// Fewer of them.
template <int kRegisters>
__device__ __forceinline__ void limit_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

}  // namespace
