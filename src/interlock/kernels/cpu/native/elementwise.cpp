// Row-wise kernels: norms, gated activation, rotary embedding with the cache write, sum over lanes.
#include <algorithm>
#include <atomic>
#include <cmath>

#include "api.hpp"
#include "pool.hpp"

namespace interlock {
namespace {

template <class X>
float inverse_rms(const X* x, int64_t h, float eps) {
  vf squares{};
  for (int64_t j = 0; j < h; j += VW) {
    vf v = load_up_to(x + j, h - j);
    squares += v * v;
  }
  return 1.0f / std::sqrt(sum(squares) / static_cast<float>(h) + eps);
}

template <class X, class W>
void normalise_row(const X* x, const W* weight, int64_t h, float eps, X* out) {
  float factor = inverse_rms(x, h, eps);
  for (int64_t j = 0; j < h; j += VW) {
    vf v = rounded_to(load_up_to(x + j, h - j) * factor, X{});
    store_up_to(out + j, v * load_up_to(weight + j, h - j), h - j);
  }
}

template <class X>
void add_row(const X* x, const X* residual, int64_t h, X* out) {
  for (int64_t j = 0; j < h; j += VW)
    store_up_to(out + j, load_up_to(x + j, h - j) + load_up_to(residual + j, h - j), h - j);
}

template <class X>
void silu_row(const X* gate_up, int64_t i, X* out) {
  for (int64_t j = 0; j < i; j += VW)
    store_up_to(out + j, vsilu(load_up_to(gate_up + j, i - j)) * load_up_to(gate_up + i + j, i - j), i - j);
}

template <class X, class O>
void sum_row(const X* rows, int64_t lane_stride, const int64_t* ids, int64_t k, int64_t h, O* out) {
  for (int64_t j = 0; j < h; j += VW) {
    vf total{};
    for (int64_t lane = 0; lane < k; ++lane)
      if (ids[lane] >= 0) total += load_up_to(rows + lane * lane_stride + j, h - j);
    store_up_to(out + j, total, h - j);
  }
}

// Rotate the first 2 * half channels (half-split pairs), copy the others.
template <class X, class O>
void rotate_head(const X* x, const float* cos_sin, int64_t half, int64_t width, O* out) {
  for (int64_t j = 0; j < half; j += VW) {
    vf a = load_up_to(x + j, half - j), b = load_up_to(x + half + j, half - j);
    vf c = load_up_to(cos_sin + j, half - j), s = load_up_to(cos_sin + half + j, half - j);
    store_up_to(out + j, a * c - b * s, half - j);
    store_up_to(out + half + j, b * c + a * s, half - j);
  }
  for (int64_t j = 2 * half; j < width; j += VW) store_up_to(out + j, load_up_to(x + j, width - j), width - j);
}

template <class X, class O>
void scale_head(const X* x, float scale, int64_t width, O* out) {
  for (int64_t j = 0; j < width; j += VW) store_up_to(out + j, load_up_to(x + j, width - j) * scale, width - j);
}

}  // namespace
}  // namespace interlock

using namespace interlock;

// Rows are (a, b) for a < outer, b < inner, at x + a * outer_stride + b * inner_stride; out is dense.
extern "C" int interlock_rms_norm(const void* x, int64_t outer, int64_t outer_stride, int64_t inner,
                                  int64_t inner_stride, int64_t h, const void* weight, float eps, void* out,
                                  int x_type, int w_type, int threads) {
  return with_type(x_type, [&](auto xt) {
    return with_type(w_type, [&](auto wt) {
      using X = decltype(xt);
      using W = decltype(wt);
      parallel_for(threads, outer * inner, h, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
          normalise_row(static_cast<const X*>(x) + r / inner * outer_stride + r % inner * inner_stride,
                        static_cast<const W*>(weight), h, eps, static_cast<X*>(out) + r * h);
      });
      return OK;
    });
  });
}

extern "C" int interlock_add_rms_norm(const void* x, int64_t x_stride, const void* residual, int64_t residual_stride,
                                      int64_t n, int64_t h, const void* weight, float eps, void* out, void* total,
                                      int x_type, int w_type, int threads) {
  return with_type(x_type, [&](auto xt) {
    return with_type(w_type, [&](auto wt) {
      using X = decltype(xt);
      using W = decltype(wt);
      parallel_for(threads, n, h, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          X* sum_row = static_cast<X*>(total) + r * h;
          add_row(static_cast<const X*>(x) + r * x_stride, static_cast<const X*>(residual) + r * residual_stride, h,
                  sum_row);
          normalise_row(sum_row, static_cast<const W*>(weight), h, eps, static_cast<X*>(out) + r * h);
        }
      });
      return OK;
    });
  });
}

extern "C" int interlock_silu_and_mul(const void* gate_up, int64_t stride, int64_t n, int64_t i, void* out, int type,
                                      int threads) {
  return with_type(type, [&](auto xt) {
    using X = decltype(xt);
    parallel_for(threads, n, i * 4, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        silu_row(static_cast<const X*>(gate_up) + r * stride, i, static_cast<X*>(out) + r * i);
    });
    return OK;
  });
}

extern "C" int interlock_sum_lanes(const void* rows, int64_t row_stride, int64_t lane_stride, const int64_t* ids,
                                   int64_t n, int64_t k, int64_t h, void* out, int x_type, int out_type,
                                   int threads) {
  return with_type(x_type, [&](auto xt) {
    return with_type(out_type, [&](auto ot) {
      using X = decltype(xt);
      using O = decltype(ot);
      parallel_for(threads, n, k * h, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
          sum_row(static_cast<const X*>(rows) + r * row_stride, lane_stride, ids + r * k, k, h,
                  static_cast<O*>(out) + r * h);
      });
      return OK;
    });
  });
}

extern "C" int interlock_rope_and_store(const void* q, int64_t q_token, int64_t q_head, const void* k,
                                        int64_t k_token, int64_t k_head, const void* v, int64_t v_token,
                                        int64_t v_head, int64_t n, int64_t nh, int64_t kvh, int64_t hd, int64_t vd,
                                        const int64_t* positions, const float* cos_sin, int64_t max_position,
                                        int64_t rotary, void* k_cache, void* v_cache, const int64_t* slots,
                                        int64_t num_slots, float value_scale, void* q_out, int x_type,
                                        int cache_type, int threads) {
  for (int64_t t = 0; t < n; ++t) {
    if (positions[t] < 0 || positions[t] >= max_position) return BAD_POSITION;
    if (slots[t] < -1 || slots[t] >= num_slots) return BAD_SLOT;
  }
  return with_type(x_type, [&](auto xt) {
    return with_type(cache_type, [&](auto ct) {
      using X = decltype(xt);
      using C = decltype(ct);
      parallel_for(threads, n, (nh + kvh) * hd + kvh * vd, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          const float* angles = cos_sin + positions[t] * rotary;
          for (int64_t head = 0; head < nh; ++head)
            rotate_head(static_cast<const X*>(q) + t * q_token + head * q_head, angles, rotary / 2, hd,
                        static_cast<X*>(q_out) + (t * nh + head) * hd);
          if (slots[t] < 0) continue;
          for (int64_t head = 0; head < kvh; ++head) {
            int64_t row = slots[t] * kvh + head;
            rotate_head(static_cast<const X*>(k) + t * k_token + head * k_head, angles, rotary / 2, hd,
                        static_cast<C*>(k_cache) + row * hd);
            scale_head(static_cast<const X*>(v) + t * v_token + head * v_head, value_scale, vd,
                       static_cast<C*>(v_cache) + row * vd);
          }
        }
      });
      return OK;
    });
  });
}
