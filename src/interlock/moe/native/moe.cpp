// Routing and row lists on the CPU in one pass each: what routing.py and layouts.py say in torch operations,
// whose call overhead would be a tenth of a decode step.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

// Unsigned order of floats: NaN first, then by value; 0 marks what cannot be chosen. -0 equals 0.
uint32_t key_of(float value) {
  if (std::isnan(value)) return 0xFFFFFFFFu;
  value += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

void scores_of(const float* logits, int64_t experts, bool sigmoid, float* scores) {
  if (sigmoid) {
    for (int64_t e = 0; e < experts; ++e)
      scores[e] = static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(logits[e]))));
    return;
  }
  double largest = -INFINITY, total = 0.0;
  for (int64_t e = 0; e < experts; ++e) largest = std::fmax(largest, logits[e]);
  for (int64_t e = 0; e < experts; ++e) total += std::exp(static_cast<double>(logits[e]) - largest);
  for (int64_t e = 0; e < experts; ++e)
    scores[e] = static_cast<float>(std::exp(static_cast<double>(logits[e]) - largest) / total);
}

}  // namespace

extern "C" {

// ids int64 [n, k] ascending with -1 last, weights float32 [n, k]; rows at and beyond `live` are unused.
void interlock_moe_route(const float* logits, const float* bias, int64_t tokens, int64_t live, int64_t experts,
                         int64_t top_k, int sigmoid, int normalise, float scale, int64_t* ids, float* weights) {
  std::vector<float> scores(experts);
  std::vector<uint32_t> keys(experts);
  std::vector<uint8_t> chosen(experts);
  for (int64_t token = 0; token < tokens; ++token, logits += experts, ids += top_k, weights += top_k) {
    int64_t filled = 0;
    if (token < live) {
      scores_of(logits, experts, sigmoid, scores.data());
      for (int64_t e = 0; e < experts; ++e)
        keys[e] = logits[e] == -INFINITY ? 0 : key_of(bias ? scores[e] + bias[e] : scores[e]);
      const uint32_t lowest = key_of(-INFINITY);
      std::memset(chosen.data(), 0, experts);
      for (int64_t lane = 0; lane < top_k; ++lane) {
        uint32_t best = lowest;
        int64_t at = -1;
        for (int64_t e = 0; e < experts; ++e)
          if (keys[e] > best) best = keys[e], at = e;
        if (at < 0) break;
        keys[at] = 0;
        chosen[at] = 1;
      }
      double total = 0.0;
      for (int64_t e = 0; e < experts; ++e) {
        if (!chosen[e]) continue;
        ids[filled] = e;
        weights[filled++] = scores[e];
        total += scores[e];
      }
      for (int64_t lane = 0; lane < filled; ++lane) {
        if (normalise) weights[lane] = static_cast<float>(weights[lane] / (total + 1e-20));
        weights[lane] *= scale;
      }
    }
    for (int64_t lane = filled; lane < top_k; ++lane) ids[lane] = -1, weights[lane] = 0.0f;
  }
}

// Lanes grouped by expert, in order: a counting sort. Returns the number of lanes, or -1 for an id out of range.
int64_t interlock_moe_group(const int64_t* ids, const float* weights, int64_t lanes, int64_t top_k,
                            int64_t experts, int64_t* offsets, int64_t* source, int64_t* target, float* weight) {
  std::memset(offsets, 0, (experts + 1) * sizeof(int64_t));
  for (int64_t i = 0; i < lanes; ++i) {
    if (ids[i] >= experts) return -1;
    if (ids[i] >= 0) ++offsets[ids[i] + 1];
  }
  for (int64_t e = 0; e < experts; ++e) offsets[e + 1] += offsets[e];
  std::vector<int64_t> next(offsets, offsets + experts);
  for (int64_t i = 0; i < lanes; ++i) {
    if (ids[i] < 0) continue;
    const int64_t at = next[ids[i]]++;
    source[at] = i / top_k;
    target[at] = i;
    weight[at] = weights ? weights[i] : 1.0f;
  }
  return offsets[experts];
}

// Rows of segments: slab_rows > 0 says that expert e starts at e * slab_rows, else starts are aligned. Returns
// the number of filled rows, or -1 when a segment does not fit its slab or the `rows` there are.
int64_t interlock_moe_segments(const int32_t* counts, const float* weights, int64_t experts, int64_t slab_rows,
                               int64_t alignment, int64_t rows, int64_t* offsets, int64_t* index, float* weight) {
  int64_t filled = 0, next = 0;
  offsets[0] = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t start = slab_rows ? e * slab_rows : (next + alignment - 1) / alignment * alignment;
    next = start + counts[e];
    if (counts[e] < 0 || next > rows || (slab_rows && counts[e] > slab_rows)) return -1;
    for (int64_t at = start; at < next; ++at, ++filled) {
      index[filled] = at;
      weight[filled] = weights ? weights[at] : 1.0f;
    }
    offsets[e + 1] = filled;
  }
  return filled;
}

}  // extern "C"
