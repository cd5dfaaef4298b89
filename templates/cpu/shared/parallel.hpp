// Tasks on threads. Included after host/args.jinja, whose Status and fail() it uses.
#include <atomic>
#include <cstdint>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {

// While it lives, this thread's denormal operands and results are zero: products of many decays underflow, and denormal
// arithmetic is up to a hundred times slower. The destructor restores what the thread had.
class FlushToZero {
 public:
#if defined(__x86_64__)
  FlushToZero() : kept_(_mm_getcsr()) { _mm_setcsr(kept_ | 0x8040u); }
  ~FlushToZero() { _mm_setcsr(kept_); }

 private:
  unsigned kept_;
#elif defined(__aarch64__)
  FlushToZero() {
    asm volatile("mrs %0, fpcr" : "=r"(kept_));
    asm volatile("msr fpcr, %0" : : "r"(kept_ | (uint64_t{1} << 24)));
  }
  ~FlushToZero() { asm volatile("msr fpcr, %0" : : "r"(kept_)); }

 private:
  uint64_t kept_;
#else
#error "no flush-to-zero for this processor"
#endif

 public:
  FlushToZero(const FlushToZero&) = delete;
  FlushToZero& operator=(const FlushToZero&) = delete;
};

// Calls worker(task) once for every task in [0, num_tasks), on num_threads threads of which the calling one is the
// first. Each thread makes its own worker with make_worker(), once: that is where scratch is allocated. Tasks are
// pulled in order, so which thread runs a task is not fixed; a task must write only what it owns.
template <typename MakeWorker>
Status run_tasks(int64_t num_tasks, int num_threads, MakeWorker make_worker) {
  std::atomic<int64_t> next_task{0};
  std::atomic<bool> out_of_memory{false};
  const auto work = [&] {
    const FlushToZero flush_to_zero;
    try {
      auto worker = make_worker();
      for (int64_t task = next_task++; task < num_tasks && !out_of_memory; task = next_task++) worker(task);
    } catch (const std::bad_alloc&) {
      out_of_memory = true;
    }
  };
  if (num_tasks < 1) return kOk;
  const int64_t num_helpers = (num_tasks < num_threads ? num_tasks : num_threads) - 1;
  std::vector<std::thread> helpers;
  try {
    helpers.reserve(static_cast<size_t>(num_helpers));
    for (int64_t i = 0; i < num_helpers; ++i) helpers.emplace_back(work);
  } catch (const std::bad_alloc&) {
    out_of_memory = true;
  } catch (const std::system_error&) {
    // The system gives no more threads: those that exist share the tasks.
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  if (out_of_memory) return fail(kLaunchFailed, "out of memory for the scratch of %d threads", num_threads);
  return kOk;
}

}  // namespace
