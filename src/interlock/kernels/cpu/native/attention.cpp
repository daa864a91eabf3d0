// Causal attention over paged keys and values, with an online softmax over blocks of P keys.
//
// Blocks begin at absolute multiples of P, and a block that a query does not see leaves its state untouched, so a
// query's bits depend on its own visible keys only. All query heads of a key-value head and a tile of tokens share
// one gathered block: keys transposed to [hd][P], values as panels of P channels, so that both products are the
// panel product of gemm.hpp.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "api.hpp"
#include "gemm.hpp"
#include "pool.hpp"

namespace interlock {
namespace {

constexpr int TILE_ROWS = 96;  // (token, head) pairs that share one gathered block

struct Problem {
  const void *q, *k_cache, *v_cache;
  void* out;
  int64_t q_token, q_head, n, nh, hd, pages, page_size, kvh, vd;
  const int32_t* page_table;
  int64_t table_stride, table_columns;
  const int32_t *query_start, *kv_len;
  int64_t sequences;
  float scale;
  int64_t window;  // 0: none
  const float* sinks;

  int64_t group() const { return nh / kvh; }
  int64_t first_visible(int64_t position) const { return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0; }
};

int check(const Problem& p) {
  if (p.query_start[0] != 0 || p.query_start[p.sequences] > p.n) return BAD_QUERY_START;
  for (int64_t s = 0; s < p.sequences; ++s) {
    int64_t count = int64_t(p.query_start[s + 1]) - p.query_start[s];
    if (count < 0) return BAD_QUERY_START;
    if (count == 0) continue;
    if (p.kv_len[s] < count) return BAD_KV_LEN;
    int64_t first = p.first_visible(p.kv_len[s] - count) / p.page_size, last = (p.kv_len[s] - 1) / p.page_size;
    if (last >= p.table_columns) return BAD_KV_LEN;
    for (int64_t page = first; page <= last; ++page) {
      int32_t id = p.page_table[s * p.table_stride + page];
      if (id < 0 || id >= p.pages) return BAD_PAGE;
    }
  }
  return OK;
}

// Scratch of one tile of queries.
struct Tile {
  Tiles rows;
  int64_t channels;  // vd rounded up to whole panels
  float *q, *keys, *values, *scores, *out, *top, *total;

  Tile(int64_t count, int64_t hd, int64_t vd) : rows(count), channels((vd + P - 1) / P * P) {
    float* at = scratch(3, count * hd + hd * P + P * channels + count * (P + channels + 2) + 64);
    auto take = [&](int64_t floats) { return std::exchange(at, at + floats); };
    keys = take(hd * P);
    values = take(P * channels);
    scores = take(count * P);
    out = take(count * channels);
    q = take(count * hd);
    top = take(count);
    total = take(count);
  }
  float* out_panel(int64_t panel) const { return out + panel * rows.rows * P; }
};

// Gather keys base + [low, high) of a block; the others become zeros and are never read.
template <class C>
void gather(const Problem& p, int64_t sequence, int64_t head, int64_t base, int64_t low, int64_t high, const Tile& t) {
  const C *key[P], *value[P];
  for (int64_t j = 0; j < P; ++j) {
    key[j] = value[j] = nullptr;
    if (j < low || j >= high) continue;
    int64_t position = base + j;
    int64_t page = p.page_table[sequence * p.table_stride + position / p.page_size];
    int64_t row = (page * p.page_size + position % p.page_size) * p.kvh + head;
    key[j] = static_cast<const C*>(p.k_cache) + row * p.hd;
    value[j] = static_cast<const C*>(p.v_cache) + row * p.vd;
  }
  for (int64_t d = 0; d < p.hd; d += VW) {
    int64_t width = std::min<int64_t>(VW, p.hd - d);
    for (int j = 0; j < P; j += VW) {
      vf block[VW];
      for (int lane = 0; lane < VW; ++lane) block[lane] = key[j + lane] ? load_up_to(key[j + lane] + d, width) : vf{};
      transpose(block);
      for (int64_t c = 0; c < width; ++c) store(t.keys + (d + c) * P + j, block[c]);
    }
  }
  for (int64_t c = 0; c < t.channels; c += VW) {
    float* to = t.values + c / P * P * P + c % P;
    for (int64_t j = 0; j < P; ++j)
      store(to + j * P, value[j] && c < p.vd ? load_up_to(value[j] + c, p.vd - c) : vf{});
  }
}

// Turn a row of dot products into probabilities (zero outside [low, high)) and rescale what the row has summed.
__attribute__((noinline)) void soften(const Problem& p, const Tile& t, int row, int64_t low, int64_t high) {
  float* scores = t.scores + row * P;
  const float nothing = -std::numeric_limits<float>::infinity();
  vf best = splat(nothing);
  vi lane;
  for (int i = 0; i < VW; ++i) lane[i] = i;
  const vi from = lane * 0 + static_cast<int>(low), to = lane * 0 + static_cast<int>(high);
  for (int j = 0; j < P; j += VW) {
    vi visible = (lane + j >= from) & (lane + j < to);
    vf score = visible ? load(scores + j) * p.scale : splat(nothing);
    store(scores + j, score);
    best = vmax(best, score);
  }
  float top = std::max(t.top[row], max(best));
  vf sums{};
  for (int j = 0; j < P; j += VW) {
    vi visible = (lane + j >= from) & (lane + j < to);
    vf weight = visible ? vexp(load(scores + j) - top) : vf{};
    store(scores + j, weight);
    sums += weight;
  }
  float keep = vexp(splat(t.top[row] - top))[0];
  t.total[row] = t.total[row] * keep + sum(sums);
  t.top[row] = top;
  if (keep != 1.0f)
    for (int64_t c = 0; c < t.channels; c += P)
      for (int j = 0; j < P; j += VW) {
        float* at = t.out_panel(c / P) + row * P + j;
        store(at, load(at) * keep);
      }
}

struct Range {
  int64_t low, high;
};

// One block for the rows of one m-tile: dot products, softmax, values.
template <class Visible>
void attend(const Problem& p, const Tile& t, int index, Visible&& visible) {
  int first = t.rows.begin(index), size = t.rows.size(index);
  Range all{P, 0}, common{0, P}, seen[MR];
  for (int m = 0; m < size; ++m) {
    Range r = seen[m] = visible(first + m);
    all = {std::min(all.low, r.low), std::max(all.high, r.high)};
    common = {std::max(common.low, r.low), std::min(common.high, r.high)};
  }
  if (all.low >= all.high) return;
  const Ahead nothing{reinterpret_cast<const char*>(t.values), 0};
  float* scores = t.scores + first * P;
  std::memset(scores, 0, sizeof(float) * size * P);
  packed_tile_for<Float32>(size)(t.q + first * p.hd, t.keys, p.hd, scores, nothing);
  for (int m = 0; m < size; ++m)
    if (seen[m].low < seen[m].high) soften(p, t, first + m, seen[m].low, seen[m].high);
  bool shared = common.low < common.high;
  auto one_row = [&](int m, int64_t low, int64_t high) {
    if (low >= high) return;
    for (int64_t panel = 0; panel * P < t.channels; ++panel)
      strided_tile_for(1)(scores + m * P + low, t.values + (panel * P + low) * P, high - low,
                          t.out_panel(panel) + (first + m) * P, nothing);
  };
  for (int m = 0; m < size; ++m) one_row(m, seen[m].low, shared ? common.low : seen[m].high);
  if (!shared) return;
  for (int64_t panel = 0; panel * P < t.channels; ++panel)
    strided_tile_for(size)(scores + common.low, t.values + (panel * P + common.low) * P, common.high - common.low,
                           t.out_panel(panel) + first * P, nothing);
  for (int m = 0; m < size; ++m) one_row(m, common.high, seen[m].high);
}

// Queries [begin, end) of one sequence (as rows of q) and all query heads of one key-value head.
template <class X, class C>
void attend_tile(const Problem& p, int64_t sequence, int64_t head, int64_t begin, int64_t end) {
  int64_t group = p.group(), rows = (end - begin) * group;
  Tile t(rows, p.hd, p.vd);
  auto row_of = [&](int r) {
    return static_cast<const X*>(p.q) + (begin + r / group) * p.q_token + (head * group + r % group) * p.q_head;
  };
  pack_rows<Float32, X>(t.rows, p.hd, row_of, t.q);
  std::memset(t.out, 0, sizeof(float) * rows * t.channels);
  for (int64_t r = 0; r < rows; ++r) {
    t.top[r] = p.sinks ? p.sinks[head * group + r % group] : -std::numeric_limits<float>::infinity();
    t.total[r] = p.sinks ? 1.0f : 0.0f;
  }
  int64_t shift = p.kv_len[sequence] - p.query_start[sequence + 1];  // position = row of q + shift
  int64_t first_key = p.first_visible(begin + shift), end_key = end + shift;
  for (int64_t base = first_key / P * P; base < end_key; base += P) {
    gather<C>(p, sequence, head, base, std::max<int64_t>(0, first_key - base), std::min<int64_t>(P, end_key - base), t);
    auto visible = [&](int r) {
      int64_t position = begin + shift + r / group;
      return Range{std::max<int64_t>(0, p.first_visible(position) - base), std::min<int64_t>(P, position + 1 - base)};
    };
    for (int index = 0; index < t.rows.count; ++index) attend(p, t, index, visible);
  }
  for (int64_t r = 0; r < rows; ++r) {
    X* to = static_cast<X*>(p.out) + ((begin + r / group) * p.nh + head * group + r % group) * p.vd;
    float total = t.total[r];
    for (int64_t c = 0; c < p.vd; c += VW)
      store_up_to(to + c, load(t.out_panel(c / P) + r * P + c % P) / total, p.vd - c);
  }
}

template <class X, class C>
void run(const Problem& p, int threads) {
  int64_t live = p.query_start[p.sequences];
  std::memset(static_cast<X*>(p.out) + live * p.nh * p.vd, 0, sizeof(X) * (p.n - live) * p.nh * p.vd);
  int64_t tokens = std::max<int64_t>(1, TILE_ROWS / p.group());
  int64_t items = 0, keys = 0;
  for (int64_t s = 0; s < p.sequences; ++s) {
    int64_t count = p.query_start[s + 1] - p.query_start[s];
    items += (count + tokens - 1) / tokens * p.kvh;
    int64_t seen = p.window > 0 ? std::min<int64_t>(p.kv_len[s], p.window + count) : p.kv_len[s];
    keys += count * seen;
  }
  if (keys * p.nh * (p.hd + p.vd) < 65536) threads = 1;
  std::atomic<int64_t> next{0};
  parallel(static_cast<int>(std::min<int64_t>(threads, std::max<int64_t>(items, 1))), [&](int, int) {
    int64_t mine = next.fetch_add(1), at = 0;
    for (int64_t s = 0; s < p.sequences; ++s) {
      int64_t count = p.query_start[s + 1] - p.query_start[s];
      int64_t here = (count + tokens - 1) / tokens * p.kvh;
      for (; mine < at + here; mine = next.fetch_add(1)) {
        int64_t begin = p.query_start[s] + (mine - at) / p.kvh * tokens;
        attend_tile<X, C>(p, s, (mine - at) % p.kvh, begin,
                          std::min<int64_t>(begin + tokens, p.query_start[s + 1]));
      }
      at += here;
    }
  });
}

}  // namespace
}  // namespace interlock

using namespace interlock;

extern "C" int interlock_paged_attention(const void* q, int64_t q_token, int64_t q_head, int64_t n, int64_t nh,
                                         int64_t hd, const void* k_cache, const void* v_cache, int64_t pages,
                                         int64_t page_size, int64_t kvh, int64_t vd, const int32_t* page_table,
                                         int64_t table_stride, int64_t table_columns, const int32_t* query_start,
                                         const int32_t* kv_len, int64_t sequences, float scale, int64_t window,
                                         const float* sinks, void* out, int x_type, int cache_type, int threads) {
  Problem p{q,         k_cache, v_cache,    out,          q_token,       q_head,      n,      nh,        hd,    pages,
            page_size, kvh,     vd,         page_table,   table_stride,  table_columns, query_start, kv_len,
            sequences, scale,   window,     sinks};
  int status = check(p);
  if (status != OK) return status;
  return with_type(x_type, [&](auto xt) {
    return with_type(cache_type, [&](auto ct) {
      run<decltype(xt), decltype(ct)>(p, threads);
      return OK;
    });
  });
}
