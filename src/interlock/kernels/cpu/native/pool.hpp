// A thread pool for kernels of a few microseconds: workers spin for a moment, then sleep.
#pragma once

#include <cstddef>
#include <cstdint>

namespace interlock {

// Run task(context, thread, threads) for thread = 0 .. threads - 1 and wait; the caller is thread 0.
// threads == 1 calls the task directly and touches no pool.
void run_parallel(int threads, void (*task)(void*, int, int), void* context);

template <class F>
inline void parallel(int threads, F&& body) {
  if (threads <= 1) return body(0, 1);
  run_parallel(
      threads, [](void* context, int thread, int count) { (*static_cast<F*>(context))(thread, count); }, &body);
}

// Split [0, items) into one contiguous range a thread; uses fewer threads when there are few items of `work`
// elementary operations each.
template <class F>
inline void parallel_for(int threads, int64_t items, int64_t work, F&& body) {
  constexpr int64_t work_per_thread = 16384;
  int64_t useful = items * work / work_per_thread;
  if (useful < threads) threads = useful < 1 ? 1 : static_cast<int>(useful);
  parallel(threads, [&](int thread, int count) { body(items * thread / count, items * (thread + 1) / count); });
}

// Aligned memory that belongs to the calling thread and grows; one buffer for each `slot`.
constexpr int SCRATCH_SLOTS = 8;
void* scratch_bytes(int slot, size_t bytes);

inline float* scratch(int slot, size_t floats) {
  return static_cast<float*>(scratch_bytes(slot, floats * sizeof(float)));
}

}  // namespace interlock
