// Powers of two and quotients by the special-function unit; results below fp32's normal numbers are 0.
namespace {

constexpr float kLog2E = 1.44269504088896341f;

// 2^x to about one unit in the last place.
__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to one unit in the last place; 0 of infinity.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace
