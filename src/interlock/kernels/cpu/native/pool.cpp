#include "pool.hpp"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>

namespace interlock {
namespace {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spin until ready() or until `limit` is over; true when ready. After `alone`, offer the core to others between
// looks: on a busy machine the thread that is waited for may sit on this very core.
template <class Ready>
bool spin(Ready&& ready, std::chrono::microseconds alone, std::chrono::microseconds limit) {
  auto start = std::chrono::steady_clock::now();
  for (;;) {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      relax();
    }
    auto spent = std::chrono::steady_clock::now() - start;
    if (spent > limit) return false;
    if (spent > alone) std::this_thread::yield();
  }
}

constexpr std::chrono::microseconds ALONE{4};
constexpr std::chrono::microseconds AWAKE{200};  // longer than the gap between two kernel calls of a step

class Pool {
 public:
  void run(int threads, void (*task)(void*, int, int), void* context) {
    std::lock_guard<std::mutex> one_job(job_mutex_);
    while (workers_ < threads - 1) {
      ++workers_;
      std::thread(&Pool::work, this, workers_, epoch_.load()).detach();
    }
    task_ = task;
    context_ = context;
    threads_ = threads;
    pending_.store(workers_);
    epoch_.fetch_add(1);
    if (sleepers_.load() > 0) {
      std::lock_guard<std::mutex> lock(sleep_mutex_);
      wake_.notify_all();
    }
    task(context, 0, threads);
    auto finished = [this] { return pending_.load(std::memory_order_acquire) == 0; };
    while (!spin(finished, ALONE, AWAKE)) {}
  }

 private:
  void work(int index, uint32_t seen) {
    for (;;) {
      auto called = [&] { return epoch_.load(std::memory_order_acquire) != seen; };
      if (!spin(called, ALONE, AWAKE)) {
        std::unique_lock<std::mutex> lock(sleep_mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, called);
        sleepers_.fetch_sub(1);
      }
      ++seen;
      if (index < threads_) task_(context_, index, threads_);
      pending_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::mutex job_mutex_, sleep_mutex_;
  std::condition_variable wake_;
  std::atomic<uint32_t> epoch_{0};
  std::atomic<int> sleepers_{0}, pending_{0};
  int workers_ = 0, threads_ = 0;
  void (*task_)(void*, int, int) = nullptr;
  void* context_ = nullptr;
};

// Never destroyed: detached workers may still look at it while the process exits. A forked child starts anew.
Pool* pool() {
  static std::atomic<Pool*> instance{nullptr};
  static std::once_flag once;
  std::call_once(once, [] {
    instance.store(new Pool);
    pthread_atfork(nullptr, nullptr, [] { instance.store(new Pool); });
  });
  return instance.load(std::memory_order_acquire);
}

struct Buffer {
  void* data = nullptr;
  size_t size = 0;
  ~Buffer() { std::free(data); }
};

}  // namespace

void run_parallel(int threads, void (*task)(void*, int, int), void* context) {
  pool()->run(threads, task, context);
}

void* scratch_bytes(int slot, size_t bytes) {
  static thread_local Buffer buffers[SCRATCH_SLOTS];
  Buffer& buffer = buffers[slot];
  if (buffer.size < bytes) {
    size_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    std::free(buffer.data);
    buffer.size = 0;
    buffer.data = std::aligned_alloc(4096, size);
    if (buffer.data == nullptr) std::abort();
    buffer.size = size;
  }
  return buffer.data;
}

}  // namespace interlock
