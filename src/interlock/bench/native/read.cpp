// Read memory as fast as this machine can, to know the limit of kernels that stream weights.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {
typedef float vf __attribute__((vector_size(64)));
volatile float sink;

void read_range(const char* data, int64_t bytes) {
  vf sums[8] = {};
  for (int64_t at = 0; at + 512 <= bytes; at += 512)
    for (int i = 0; i < 8; ++i) {
      vf v;
      std::memcpy(&v, data + at + i * 64, 64);
      sums[i] += v;
    }
  float total = 0;
  for (auto& sum : sums)
    for (int lane = 0; lane < 16; ++lane) total += sum[lane];
  sink = total;
}
}  // namespace

// Shortest time in seconds of reading one of `units` neighbouring ranges of `bytes` with `threads` threads.
extern "C" double read_memory(const char* data, int64_t bytes, int64_t units, int threads) {
  double best = 1e9;
  std::atomic<int64_t> arrived{0};
  auto work = [&](int t) {
    int64_t begin = bytes / 512 * t / threads * 512, end = bytes / 512 * (t + 1) / threads * 512;
    for (int64_t unit = 0; unit < units; ++unit) {
      arrived.fetch_add(1);
      while (arrived.load() < (2 * unit + 1) * threads) {}
      auto start = std::chrono::steady_clock::now();
      read_range(data + unit * bytes + begin, end - begin);
      arrived.fetch_add(1);
      while (arrived.load() < (2 * unit + 2) * threads) {}
      std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
      if (t == 0) best = std::min(best, taken.count());
    }
  };
  std::vector<std::thread> workers;
  for (int t = 1; t < threads; ++t) workers.emplace_back(work, t);
  work(0);
  for (auto& worker : workers) worker.join();
  return best;
}
