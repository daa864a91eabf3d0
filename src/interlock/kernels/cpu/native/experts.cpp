// Expert MLP: gather rows, gate and up, silu * mul, down, weight, scatter.
//
// Work is a list of row blocks (rows of one expert). Phase one computes the activations of all blocks, phase two
// their outputs; each phase is one list of (block, panel) units that is cut into equal shares for the threads, so
// one token's experts keep all cores streaming weights and many tokens are balanced too.
#include <algorithm>
#include <vector>

#include "api.hpp"
#include "gemm.hpp"
#include "pool.hpp"

namespace interlock {
namespace {

struct Block {
  int64_t expert, first, rows;
  int64_t activation;  // offset of its packed activations, in lanes
};

constexpr int64_t ACTIVATION_FLOATS = int64_t(1) << 24;  // activations held at once (64 MiB)

inline int64_t panels_of(int64_t columns) { return (columns + P - 1) / P; }

// Cost of one panel for a block: few rows cost the streaming of the weights.
inline int64_t cost(const Block& block) { return std::max<int64_t>(block.rows, 6); }

// Call body(block, first unit, end unit) for this thread's share of blocks x units.
template <class F>
void for_share(const std::vector<Block>& blocks, int64_t units, int thread, int threads, F&& body) {
  int64_t total = 0;
  for (const Block& block : blocks) total += cost(block) * units;
  int64_t low = total * thread / threads, high = total * (thread + 1) / threads, at = 0;
  for (const Block& block : blocks) {
    int64_t each = cost(block);
    auto units_below = [&](int64_t bound) {  // units of this block that start before `bound`
      return bound <= at ? 0 : std::min<int64_t>((bound - at + each - 1) / each, units);
    };
    int64_t begin = units_below(low), end = units_below(high);
    if (begin < end) body(block, begin, end);
    at += each * units;
  }
}

template <class X, class W, class O>
struct Mlp {
  using Kind = KindOf<X, W>;
  const X* x;
  int64_t x_stride;
  const float* gate_up;  // [E][panels of i][gate, up][panel over h]
  const float* down;     // [E][panels of h][panel over i]
  int64_t h, i;
  const int64_t* source;
  const int64_t* target;
  const float* weight;
  O* out;
  int64_t out_stride;
  int threads;

  void activate(const Block& block, int64_t begin, int64_t end, float* activations) const {
    Tiles tiles(block.rows);
    float* gate = scratch(0, 2 * BLOCK_ROWS * P);
    float* up = gate + BLOCK_ROWS * P;
    auto row = [&](int r) { return x + source[block.first + r] * x_stride; };
    const float* packed = packed_operand<Kind, X>(tiles, h, row, scratch(1, BLOCK_ROWS * operand_lanes<Kind>(h)));
    const int64_t step = panel_lanes<W>(h);
    const float* weights = gate_up + block.expert * panels_of(i) * 2 * step;
    for (int64_t panel = begin; panel < end; ++panel) {
      multiply_panel<Kind>(tiles, h, packed, weights + panel * 2 * step, gate);
      multiply_panel<Kind>(tiles, h, packed, weights + (panel * 2 + 1) * step, up);
      int64_t columns = std::min<int64_t>(P, panel_rows<Kind>(i) * Kind::DEPTH - panel * P);
      for (int t = 0; t < tiles.count; ++t) {
        int size = tiles.size(t);
        float* to = activations + block.activation + tiles.begin(t) * operand_lanes<Kind>(i);
        for (int m = 0; m < size; ++m) {
          int64_t r = tiles.begin(t) + m;
          for (int64_t j = 0; j < columns; j += VW) {
            vf value = rounded_to(vsilu(load(gate + r * P + j)) * load(up + r * P + j), X{});
            put_operand<Kind>(to, size, m, panel * P + j, value, std::min<int64_t>(VW, columns - j));
          }
        }
      }
    }
  }

  void project(const Block& block, int64_t begin, int64_t end, const float* activations) const {
    Tiles tiles(block.rows);
    float* c = scratch(0, 2 * BLOCK_ROWS * P);
    const int64_t step = panel_lanes<W>(i);
    const float* weights = down + block.expert * panels_of(h) * step;
    for (int64_t panel = begin; panel < end; ++panel) {
      multiply_panel<Kind>(tiles, i, activations + block.activation, weights + panel * step, c);
      int64_t columns = std::min<int64_t>(P, h - panel * P);
      for (int64_t r = 0; r < block.rows; ++r) {
        O* to = out + target[block.first + r] * out_stride + panel * P;
        float factor = weight[block.first + r];
        for (int64_t j = 0; j < columns; j += VW) store_up_to(to + j, load(c + r * P + j) * factor, columns - j);
      }
    }
  }

  void run(const std::vector<Block>& blocks, int64_t rows) const {
    float* activations = scratch(2, rows * operand_lanes<Kind>(i));
    int useful = static_cast<int>(std::min<int64_t>(threads, 1 + rows * h * i / 16384));
    parallel(useful, [&](int thread, int count) {
      for_share(blocks, panels_of(i), thread, count, [&](const Block& block, int64_t begin, int64_t end) {
        activate(block, begin, end, activations);
      });
    });
    parallel(useful, [&](int thread, int count) {
      for_share(blocks, panels_of(h), thread, count, [&](const Block& block, int64_t begin, int64_t end) {
        project(block, begin, end, activations);
      });
    });
  }
};

template <class M>
void run_in_groups(const M& mlp, int64_t experts, const int64_t* offsets) {
  std::vector<Block> blocks;
  int64_t rows = 0;
  const int64_t lanes = operand_lanes<typename M::Kind>(mlp.i);
  for (int64_t expert = 0; expert < experts; ++expert) {
    int64_t count = offsets[expert + 1] - offsets[expert];
    int64_t parts = (count + BLOCK_ROWS - 1) / BLOCK_ROWS;
    for (int64_t part = 0; part < parts; ++part) {
      int64_t begin = count * part / parts, end = count * (part + 1) / parts;
      if (rows > 0 && (rows + end - begin) * lanes > ACTIVATION_FLOATS) {
        mlp.run(blocks, rows);
        blocks.clear();
        rows = 0;
      }
      blocks.push_back({expert, offsets[expert] + begin, end - begin, rows * lanes});
      rows += end - begin;
    }
  }
  if (rows > 0) mlp.run(blocks, rows);
}

int check_rows(int64_t experts, const int64_t* offsets, int64_t listed, const int64_t* source, int64_t x_rows,
               const int64_t* target, int64_t out_rows) {
  if (offsets[0] < 0 || offsets[experts] > listed) return BAD_OFFSETS;
  for (int64_t e = 0; e < experts; ++e)
    if (offsets[e] > offsets[e + 1]) return BAD_OFFSETS;
  for (int64_t r = offsets[0]; r < offsets[experts]; ++r) {
    if (source[r] < 0 || source[r] >= x_rows) return BAD_SOURCE;
    if (target[r] < 0 || target[r] >= out_rows) return BAD_TARGET;
  }
  return OK;
}

template <class W>
void pack_expert_weights(const W* gate_up, const W* down, int64_t experts, int64_t h, int64_t i, float* packed_gate_up,
                         float* packed_down) {
  const int64_t over_h = panel_lanes<W>(h), over_i = panel_lanes<W>(i);
  for (int64_t e = 0; e < experts; ++e) {
    float* to = packed_gate_up + e * panels_of(i) * 2 * over_h;
    pack_panels(gate_up + e * 2 * i * h, h, i, h, to, 2 * over_h);
    pack_panels(gate_up + e * 2 * i * h + i * h, h, i, h, to + over_h, 2 * over_h);
    pack_panels(down + e * h * i, i, h, i, packed_down + e * panels_of(h) * over_i, over_i);
  }
}

}  // namespace
}  // namespace interlock

using namespace interlock;

extern "C" int interlock_pack_experts(const void* gate_up, const void* down, int type, int64_t experts, int64_t h,
                                      int64_t i, void* packed_gate_up, void* packed_down) {
  return with_type(type, [&](auto w) {
    using W = decltype(w);
    pack_expert_weights(static_cast<const W*>(gate_up), static_cast<const W*>(down), experts, h, i,
                        static_cast<float*>(packed_gate_up), static_cast<float*>(packed_down));
    return OK;
  });
}

extern "C" int interlock_expert_mlp(const void* x, int64_t x_rows, int64_t x_stride, const void* gate_up,
                                    const void* down, int64_t experts, int64_t h, int64_t i, const int64_t* offsets,
                                    int64_t listed, const int64_t* source, const int64_t* target,
                                    const float* weight, void* out, int64_t out_rows, int64_t out_stride, int x_type,
                                    int w_type, int out_type, int threads) {
  int status = check_rows(experts, offsets, listed, source, x_rows, target, out_rows);
  if (status != OK) return status;
  return with_type(x_type, [&](auto xt) {
    return with_type(w_type, [&](auto wt) {
      return with_type(out_type, [&](auto ot) {
        using X = decltype(xt);
        using W = decltype(wt);
        using O = decltype(ot);
        Mlp<X, W, O> mlp{static_cast<const X*>(x), x_stride, static_cast<const float*>(gate_up),
                         static_cast<const float*>(down), h, i, source, target, weight, static_cast<O*>(out), out_stride,
                         threads};
        run_in_groups(mlp, experts, offsets);
        return OK;
      });
    });
  });
}
