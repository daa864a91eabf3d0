#include "gemm.hpp"

#include <utility>

#include "api.hpp"
#include "pool.hpp"

namespace interlock {
namespace {

template <class Kind, int M>
void packed_tile(const float* a, const float* panel, int64_t rows, float* c, Ahead ahead) {
  tile<Kind, Sum::CHAINS, M, Kind::LANES * M, M, 1>(a, panel, rows, c, ahead);
}

template <class Kind, int... M>
TileFunction packed_entry(int m, std::integer_sequence<int, M...>) {
  static constexpr TileFunction table[] = {packed_tile<Kind, M + 1>...};
  return table[m - 1];
}

template <int M>
void strided_tile(const float* a, const float* panel, int64_t rows, float* c, Ahead ahead) {
  tile<Float32, Sum::LINKS, M, 1, 1, P>(a, panel, rows, c, ahead);
}

template <int... M>
TileFunction strided_entry(int m, std::integer_sequence<int, M...>) {
  static constexpr TileFunction table[] = {strided_tile<M + 1>...};
  return table[m - 1];
}

template <class O>
void write_panel(const float* c, int64_t rows, int64_t columns, O* out, int64_t out_stride) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = 0; j < columns; j += VW)
      store_up_to(out + r * out_stride + j, load(c + r * P + j), columns - j);
}

template <class X, class W, class O>
void linear(const X* x, int64_t x_stride, int64_t n, const float* panels, int64_t N, int64_t K, O* out, int threads) {
  using Kind = KindOf<X, W>;
  int64_t blocks = (n + BLOCK_ROWS - 1) / BLOCK_ROWS;
  int64_t columns = (N + P - 1) / P;
  parallel_for(threads, blocks * columns, K * P * (n < BLOCK_ROWS ? n : BLOCK_ROWS), [&](int64_t unit, int64_t end) {
    float* c = scratch(0, BLOCK_ROWS * P);
    while (unit < end) {
      int64_t block = unit / columns;
      int64_t first = n * block / blocks;
      Tiles tiles(n * (block + 1) / blocks - first);
      auto row = [&](int r) { return x + (first + r) * x_stride; };
      const float* packed = packed_operand<Kind, X>(tiles, K, row, scratch(1, BLOCK_ROWS * operand_lanes<Kind>(K)));
      for (; unit < end && unit / columns == block; ++unit) {
        int64_t column = unit % columns;
        multiply_panel<Kind>(tiles, K, packed, panels + column * panel_lanes<W>(K), c);
        write_panel(c, tiles.rows, N - column * P < P ? N - column * P : P, out + first * N + column * P, N);
      }
    }
  });
}

}  // namespace

template <class Kind>
TileFunction packed_tile_for(int m) {
  return packed_entry<Kind>(m, std::make_integer_sequence<int, MR>{});
}
template TileFunction packed_tile_for<Float32>(int);
template TileFunction packed_tile_for<Widened>(int);
#ifdef __AVX512BF16__
template TileFunction packed_tile_for<Paired>(int);
#endif

TileFunction strided_tile_for(int m) { return strided_entry(m, std::make_integer_sequence<int, MR>{}); }

template <class W>
void pack_panels(const W* weight, int64_t row_stride, int64_t rows, int64_t width, float* panels, int64_t panel_step) {
  constexpr int depth = KindOf<float, W>::DEPTH;
  for (int64_t panel = 0; panel * P < rows; ++panel) {
    float* lanes = panels + panel * panel_step;
    std::memset(lanes, 0, panel_lanes<W>(width) * sizeof(float));
    char* to = reinterpret_cast<char*>(lanes);
    for (int column = 0; column < P && panel * P + column < rows; ++column) {
      const W* from = weight + (panel * P + column) * row_stride;
      for (int64_t k = 0; k < width; ++k)
        std::memcpy(to + ((k / depth * P + column) * depth + k % depth) * sizeof(W), from + k, sizeof(W));
    }
  }
}
template void pack_panels<float>(const float*, int64_t, int64_t, int64_t, float*, int64_t);
template void pack_panels<bf16>(const bf16*, int64_t, int64_t, int64_t, float*, int64_t);

}  // namespace interlock

using namespace interlock;

extern "C" int interlock_pack_linear(const void* weight, int type, int64_t row_stride, int64_t N, int64_t K,
                                     void* panels) {
  return with_type(type, [&](auto w) {
    using W = decltype(w);
    pack_panels(static_cast<const W*>(weight), row_stride, N, K, static_cast<float*>(panels), panel_lanes<W>(K));
    return OK;
  });
}

extern "C" int interlock_linear(const void* x, int64_t x_stride, int64_t n, const void* panels, int64_t N, int64_t K,
                                void* out, int x_type, int w_type, int out_type, int threads) {
  return with_type(x_type, [&](auto xt) {
    return with_type(w_type, [&](auto wt) {
      return with_type(out_type, [&](auto ot) {
        using X = decltype(xt);
        using W = decltype(wt);
        using O = decltype(ot);
        linear<X, W>(static_cast<const X*>(x), x_stride, n, static_cast<const float*>(panels), N, K,
                     static_cast<O*>(out), threads);
        return OK;
      });
    });
  });
}
