// Matrix product with weights packed in column panels.
//
// A weight [N, K] is stored as [ceil(N / P)][rows][P] lanes of 32 bits, zero padded. A row holds one k of float32, or
// two neighbouring k of bfloat16 in the low and high half of each lane. Rows of the other operand are packed into tiles
// of M <= MR rows. Every element of the result is a sum of chains over CHAIN panel rows each, in order of k,
// accumulated in float32, whatever the tile, the thread or the slice of N it is computed in, so its bits depend on
// nothing else. Short chains round less than one long chain.
#pragma once

#include <cstdint>
#include <type_traits>

#include "vector.hpp"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace interlock {

constexpr int P = 32;                     // columns of a panel
constexpr int MR = VW == 16 ? 12 : 6;     // rows of the largest tile
constexpr int BLOCK_ROWS = 96;            // rows that share one pass over a panel
constexpr int CHAIN = 64;                // rows of a panel that are summed before they join the result
constexpr int BLOCK_K = 256;             // rows of a panel that stays in the cache for all tiles
constexpr int TWO_TILES_K = 64;          // the same for two tiles, which need the memory as much as the arithmetic
constexpr int FETCH_AHEAD = 512;         // bytes that a single tile fetches ahead of itself
static_assert(BLOCK_ROWS % MR == 0, "a block is made of whole tiles");
static_assert(BLOCK_K % CHAIN == 0 && TWO_TILES_K % CHAIN == 0, "chains begin at the same k in every tile");

// Vectors of a panel row that a tile of M rows processes at once, within the register file.
constexpr int vectors_at_once(int m) {
  int nv = P / VW;
  while (nv > 2 && m * nv + 3 > REGS) nv /= 2;
  return nv;
}

// How one panel row is multiplied. DEPTH: k in a row. LANES: 32-bit lanes of the other operand that meet a row.
// `a(j)` gives lane j of the operand of one result row; `acc` is NV vectors of that result row.

// Float32 weights: one fused multiply-add.
struct Float32 {
  static constexpr int DEPTH = 1, LANES = 1;
  template <int NV, class A>
  static inline void multiply(vf (&acc)[NV], A&& a, const vf (&row)[NV]) {
    vf x = splat(a(0));
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) acc[v] += x * row[v];
  }
};

// Bfloat16 weights widened to float32: two fused multiply-adds in order of k.
struct Widened {
  static constexpr int DEPTH = 2, LANES = 2;
  template <int NV, class A>
  static inline void multiply(vf (&acc)[NV], A&& a, const vf (&row)[NV]) {
    vf first = splat(a(0)), second = splat(a(1));
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      vu pair = bit_cast<vu>(row[v]);
      acc[v] += first * bit_cast<vf>(pair << 16);
      acc[v] += second * bit_cast<vf>(pair & 0xffff0000u);
    }
  }
};

#ifdef __AVX512BF16__
// Bfloat16 pairs on both sides: the CPU's own dot product of pairs, twice as fast (it flushes subnormals to zero).
struct Paired {
  static constexpr int DEPTH = 2, LANES = 1;
  template <int NV, class A>
  static inline void multiply(vf (&acc)[NV], A&& a, const vf (&row)[NV]) {
    vf x = splat(a(0));
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v)
      acc[v] = bit_cast<vf>(
          _mm512_dpbf16_ps(bit_cast<__m512>(acc[v]), bit_cast<__m512bh>(x), bit_cast<__m512bh>(row[v])));
  }
};
#else
using Paired = Widened;
#endif

template <class X, class W>
using KindOf = std::conditional_t<std::is_same_v<W, float>, Float32,
                                  std::conditional_t<std::is_same_v<X, bf16>, Paired, Widened>>;

template <class Kind>
constexpr int64_t panel_rows(int64_t width) {
  return (width + Kind::DEPTH - 1) / Kind::DEPTH;
}

// Lanes that a packed operand row of `width` elements takes.
template <class Kind>
constexpr int64_t operand_lanes(int64_t width) {
  return panel_rows<Kind>(width) * Kind::LANES;
}

// Lanes of one panel of weights, which are the same for every kind of operand.
template <class W>
constexpr int64_t panel_lanes(int64_t width) {
  return panel_rows<KindOf<float, W>>(width) * P;
}

// Memory to fetch while a tile is computed: `step` bytes from `at` for each row.
struct Ahead {
  const char* at;
  int64_t step;
};

// How a tile joins what c holds: as whole chains, or as links of the one chain that c is.
enum class Sum { CHAINS, LINKS };

// c[m][0..P) += sum over `rows` panel rows of operand times row; lane j of result row m is a[r * AR + j * AJ + m * AM].
template <class Kind, Sum SUM, int M, int AR, int AJ, int AM>
inline void tile(const float* __restrict a, const float* __restrict panel, int64_t rows, float* __restrict c,
                 Ahead ahead) {
  constexpr int NV = vectors_at_once(M);
  for (int first = 0; first < P; first += NV * VW) {
    const float *from = panel + first, *operand = a;
    for (int64_t begin = 0; begin < rows; begin += CHAIN) {
      const int64_t end = rows - begin < CHAIN ? rows : begin + CHAIN;
      vf acc[M][NV];
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v)
          acc[m][v] = SUM == Sum::LINKS ? load(c + m * P + first + v * VW) : splat(0.0f);
      for (int64_t r = begin; r < end; ++r, from += P, operand += AR, ahead.at += ahead.step) {
        __builtin_prefetch(ahead.at);
        __builtin_prefetch(ahead.at + ahead.step / 2);
        vf row[NV];
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) row[v] = load(from + v * VW);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) Kind::multiply(acc[m], [&](int j) { return operand[j * AJ + m * AM]; }, row);
      }
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) {
          float* to = c + m * P + first + v * VW;
          store(to, SUM == Sum::LINKS ? acc[m][v] : load(to) + acc[m][v]);
        }
    }
  }
}

using TileFunction = void (*)(const float*, const float*, int64_t, float*, Ahead);

// Tile of m rows packed as [panel rows][LANES][m].
template <class Kind>
TileFunction packed_tile_for(int m);

// Tile of m rows of stride P, against a float32 panel (probabilities times values). Its rows go on with the chain
// that c is: keys that only some rows of a tile see are added in calls of their own.
TileFunction strided_tile_for(int m);

// How a block of rows falls into tiles of nearly equal size.
struct Tiles {
  int rows, count;
  explicit Tiles(int64_t rows_) : rows(static_cast<int>(rows_)), count((rows + MR - 1) / MR) {}
  int begin(int t) const { return rows * t / count; }
  int size(int t) const { return begin(t + 1) - begin(t); }
};

// Write the elements k .. k + count - 1 of row m into a packed tile of `size` rows; count is VW or ends the row.
template <class Kind>
inline void put_operand(float* tile, int size, int m, int64_t k, vf values, int64_t count) {
  float lanes[VW];
  if constexpr (Kind::DEPTH == Kind::LANES) {
    store(lanes, values);
    for (int64_t j = 0; j < count; ++j) tile[(k + j) * size + m] = lanes[j];
  } else {
    store(lanes, bit_cast<vf>(round_bits(values)));
    char* pairs = reinterpret_cast<char*>(tile);
    for (int64_t j = 0; j < count; ++j)
      std::memcpy(pairs + (((k + j) / 2 * size + m) * 2 + (k + j) % 2) * 2, lanes + j, 2);
  }
}

// Pack rows into tiles of [panel rows][LANES][tile size], zero beyond the width. `row(r)` is a pointer to row r.
template <class Kind, class X, class Row>
inline void pack_rows(const Tiles& tiles, int64_t width, Row&& row, float* packed) {
  int64_t padded = panel_rows<Kind>(width) * Kind::DEPTH, lanes = operand_lanes<Kind>(width);
  for (int t = 0; t < tiles.count; ++t) {
    int size = tiles.size(t);
    float* to = packed + tiles.begin(t) * lanes;
    for (int m = 0; m < size; ++m) {
      const X* from = row(tiles.begin(t) + m);
      if constexpr (Kind::DEPTH != Kind::LANES && sizeof(X) == 2) {
        for (int64_t r = 0; r < width / 2; ++r) std::memcpy(to + r * size + m, from + 2 * r, 4);
        if (width % 2) put_operand<Kind>(to, size, m, width - 1, load_some(from + width - 1, 1), 2);
      } else {
        for (int64_t k = 0; k < padded; k += VW)
          put_operand<Kind>(to, size, m, k, load_up_to(from + k, width - k), padded - k < VW ? padded - k : VW);
      }
    }
  }
}

// c [rows][P] = packed rows times one panel. While a k range is in the cache for all tiles, they fetch the next one;
// a single tile fetches a little ahead of itself.
template <class Kind>
inline void multiply_panel(const Tiles& tiles, int64_t width, const float* packed, const float* panel, float* c) {
  std::memset(c, 0, sizeof(float) * P * tiles.rows);
  constexpr int64_t row_bytes = P * sizeof(float);
  const int64_t rows = panel_rows<Kind>(width);
  const int64_t step = tiles.count == 1 ? rows : tiles.count == 2 ? TWO_TILES_K : BLOCK_K;
  for (int64_t r = 0; r < rows; r += step) {
    int64_t count = rows - r < step ? rows - r : step;
    const char* at = reinterpret_cast<const char*>(panel + r * P);
    for (int t = 0; t < tiles.count; ++t) {
      int size = tiles.size(t);
      Ahead ahead = tiles.count == 1
                        ? Ahead{at + FETCH_AHEAD, row_bytes}
                        : Ahead{at + count * row_bytes + count * row_bytes * t / tiles.count, row_bytes / tiles.count};
      packed_tile_for<Kind>(size)(packed + (tiles.begin(t) * rows + r * size) * Kind::LANES, panel + r * P, count,
                                  c + tiles.begin(t) * P, ahead);
    }
  }
}

// The rows of a block as a packed operand: a single row that already has that form is used in place.
template <class Kind, class X, class Row>
inline const float* packed_operand(const Tiles& tiles, int64_t width, Row&& row, float* buffer) {
  if constexpr (sizeof(X) * Kind::DEPTH == sizeof(float) * Kind::LANES)
    if (tiles.rows == 1 && width % Kind::DEPTH == 0) return reinterpret_cast<const float*>(row(0));
  pack_rows<Kind, X>(tiles, width, row, buffer);
  return buffer;
}

// Pack rows of a matrix [rows, width] into panels of P rows each; `panel_step` lanes from panel to panel.
template <class W>
void pack_panels(const W* weight, int64_t row_stride, int64_t rows, int64_t width, float* panels, int64_t panel_step);

}  // namespace interlock
