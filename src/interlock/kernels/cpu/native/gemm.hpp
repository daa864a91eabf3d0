// Matrix product with weights packed in column panels.
//
// A weight [N, K] is stored as [ceil(N / P)][K][P], zero padded. Rows of the other operand are packed into tiles
// of M <= MR rows, [K][M]. Every element of the result is one chain of fused multiply-adds over ascending k in
// float32, whatever the tile, the thread or the slice of N it is computed in, so its bits depend on nothing else.
#pragma once

#include <cstdint>

#include "vector.hpp"

namespace interlock {

constexpr int P = 32;                     // columns of a panel
constexpr int MR = VW == 16 ? 12 : 6;     // rows of the largest tile
constexpr int BLOCK_ROWS = 96;            // rows that share one pass over a panel
constexpr int BLOCK_K = 256;             // k range of a panel that stays in the cache for all tiles
constexpr int TWO_TILES_K = 64;          // the same for two tiles, which need the memory as much as the arithmetic
constexpr int FETCH_AHEAD = 512;         // bytes that a single tile fetches ahead of itself
static_assert(BLOCK_ROWS % MR == 0, "a block is made of whole tiles");

// Vectors of a panel row that a tile of M rows processes at once, within the register file.
constexpr int vectors_at_once(int m) {
  int nv = P / VW;
  while (nv > 2 && m * nv + 3 > REGS) nv /= 2;
  return nv;
}

template <int NV>
inline void load_panel(const float* row, vf (&w)[NV]) {
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) w[v] = load(row + v * VW);
}

// A bfloat16 panel row holds column c and column c + VW in the low and high half of one 32-bit lane.
template <int NV>
inline void load_panel(const bf16* row, vf (&w)[NV]) {
#pragma GCC unroll 8
  for (int v = 0; v < NV; v += 2) {
    vu pair;
    std::memcpy(&pair, row + v * VW, sizeof(pair));
    w[v] = bit_cast<vf>(pair << 16);
    w[v + 1] = bit_cast<vf>(pair & 0xffff0000u);
  }
}

constexpr int bf16_panel_index(int column) {
  int pair = column / (2 * VW), rest = column % (2 * VW);
  return pair * 2 * VW + (rest % VW) * 2 + rest / VW;
}

// Memory to fetch while a tile is computed: `step` bytes from `at` for each k.
struct Ahead {
  const char* at;
  int64_t step;
};

// c[m][0..P) += sum over k in [0, count) of a(k, m) * panel[k][0..P), where a(k, m) = a[k * AK + m * AM].
template <class W, int M, int AK, int AM>
inline void tile(const float* __restrict a, const W* __restrict panel, int64_t count, float* __restrict c,
                 Ahead ahead) {
  constexpr int NV = vectors_at_once(M);
  for (int first = 0; first < P; first += NV * VW) {
    vf acc[M][NV];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) acc[m][v] = load(c + m * P + first + v * VW);
    const W* row = panel + first;
    const float* ak = a;
    for (int64_t k = 0; k < count; ++k, row += P, ak += AK, ahead.at += ahead.step) {
      __builtin_prefetch(ahead.at);
      if constexpr (sizeof(W) == sizeof(float)) __builtin_prefetch(ahead.at + ahead.step / 2);
      vf w[NV];
      load_panel<NV>(row, w);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        vf s = splat(ak[m * AM]);
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) acc[m][v] += s * w[v];
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) store(c + m * P + first + v * VW, acc[m][v]);
  }
}

using TileFunction = void (*)(const float*, const void*, int64_t, float*, Ahead);

template <class W, int M>
void packed_tile(const float* a, const void* panel, int64_t count, float* c, Ahead ahead) {
  tile<W, M, M, 1>(a, static_cast<const W*>(panel), count, c, ahead);
}

// Tile of m rows packed as [K][m].
template <class W>
TileFunction packed_tile_for(int m);

// Tile of m rows of stride P, against a float32 panel (probabilities times values).
TileFunction strided_tile_for(int m);

// How a block of rows falls into tiles of nearly equal size.
struct Tiles {
  int rows, count;
  explicit Tiles(int64_t rows_) : rows(static_cast<int>(rows_)), count((rows + MR - 1) / MR) {}
  int begin(int t) const { return rows * t / count; }
  int size(int t) const { return begin(t + 1) - begin(t); }
};

// Pack rows into tiles: packed[begin(t) * width + k * size(t) + m]. `row(r)` gives a pointer to row r.
template <class X, class Row>
inline void pack_rows(const Tiles& tiles, int64_t width, Row&& row, float* packed) {
  for (int t = 0; t < tiles.count; ++t) {
    int size = tiles.size(t);
    float* to = packed + tiles.begin(t) * width;
    for (int m = 0; m < size; ++m) {
      const X* from = row(tiles.begin(t) + m);
      for (int64_t k = 0; k < width; k += VW) {
        float lanes[VW];
        int count = width - k < VW ? static_cast<int>(width - k) : VW;
        store(lanes, load_up_to(from + k, width - k));
        for (int j = 0; j < count; ++j) to[(k + j) * size + m] = lanes[j];
      }
    }
  }
}

// c [rows][P] = packed rows times one panel. While a k range is in the cache for all tiles, they fetch the next one;
// a single tile fetches a little ahead of itself.
template <class W>
inline void multiply_panel(const Tiles& tiles, int64_t width, const float* packed, const W* panel, float* c) {
  std::memset(c, 0, sizeof(float) * P * tiles.rows);
  constexpr int64_t row_bytes = P * sizeof(W);
  int64_t step = tiles.count == 1 ? width : tiles.count == 2 ? TWO_TILES_K : BLOCK_K;
  for (int64_t k = 0; k < width; k += step) {
    int64_t count = width - k < step ? width - k : step;
    const char* at = reinterpret_cast<const char*>(panel + k * P);
    for (int t = 0; t < tiles.count; ++t) {
      int size = tiles.size(t);
      Ahead ahead = tiles.count == 1
                        ? Ahead{at + FETCH_AHEAD, row_bytes}
                        : Ahead{at + count * row_bytes + count * row_bytes * t / tiles.count, row_bytes / tiles.count};
      packed_tile_for<W>(size)(packed + tiles.begin(t) * width + k * size, panel + k * P, count,
                               c + tiles.begin(t) * P, ahead);
    }
  }
}

// The rows of a block as a packed operand: a single float32 row is used in place.
template <class X, class Row>
inline const float* packed_operand(const Tiles& tiles, int64_t width, Row&& row, float* buffer) {
  if constexpr (sizeof(X) == sizeof(float))
    if (tiles.rows == 1) return row(0);
  pack_rows<X>(tiles, width, row, buffer);
  return buffer;
}

// Pack rows of a matrix [rows, width] into panels of P rows each, [panel][width][P].
template <class W>
void pack_panels(const W* weight, int64_t row_stride, int64_t rows, int64_t width, W* panels, int64_t panel_step);

}  // namespace interlock
