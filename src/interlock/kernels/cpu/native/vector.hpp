// SIMD vocabulary: GCC/Clang vector extensions of the machine's own width, bfloat16 conversion, exp.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace interlock {

#if defined(__AVX512F__)
constexpr int VW = 16;    // floats in a vector
constexpr int REGS = 32;  // vector registers
#elif defined(__AVX__)
constexpr int VW = 8;
constexpr int REGS = 16;
#elif defined(__aarch64__)
constexpr int VW = 4;
constexpr int REGS = 32;
#else
constexpr int VW = 4;
constexpr int REGS = 16;
#endif

typedef float vf __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef uint32_t vu __attribute__((vector_size(VW * 4)));
typedef uint16_t vh __attribute__((vector_size(VW * 2)));

struct bf16 {
  uint16_t bits;
};

// x - 0 is x for every x, -0 and NaN included, so compilers fold this into a plain broadcast.
inline vf splat(float x) { return x - vf{}; }

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

inline vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline vf load(const bf16* p) {
  vh h;
  std::memcpy(&h, p, sizeof(h));
  return bit_cast<vf>(__builtin_convertvector(h, vu) << 16);
}

inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof(v)); }

// float32 -> bfloat16 bits in the low half of each lane, round to nearest even, every NaN to 0x7fc0.
inline vu round_bits(vf v) {
  vu u = bit_cast<vu>(v);
  vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  vu nan = bit_cast<vu>(v != v);
  return (nan & 0x7fc0u) | (~nan & rounded);
}

inline void store(bf16* p, vf v) {
  vh h = __builtin_convertvector(round_bits(v), vh);
  std::memcpy(p, &h, sizeof(h));
}

template <class T>
inline vf load_some(const T* p, int count) {
  T buffer[VW] = {};
  std::memcpy(buffer, p, sizeof(T) * count);
  return load(buffer);
}

template <class T>
inline void store_some(T* p, vf v, int count) {
  T buffer[VW];
  store(buffer, v);
  std::memcpy(p, buffer, sizeof(T) * count);
}

template <class T>
inline vf load_up_to(const T* p, int64_t count) {
  return count >= VW ? load(p) : load_some(p, static_cast<int>(count));
}

template <class T>
inline void store_up_to(T* p, vf v, int64_t count) {
  count >= VW ? store(p, v) : store_some(p, v, static_cast<int>(count));
}

inline vf rounded_to(vf v, float) { return v; }
inline vf rounded_to(vf v, bf16) { return bit_cast<vf>(round_bits(v) << 16); }

inline vf vmax(vf a, vf b) { return a > b ? a : b; }

inline float sum(vf v) {
  float lanes[VW];
  store(lanes, v);
  for (int width = VW / 2; width >= 1; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

inline float max(vf v) {
  float lanes[VW];
  store(lanes, v);
  for (int width = VW / 2; width >= 1; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
}

// exp with a relative error of about 1e-7 (polynomial of Cephes' expf). Exact at the ends: 0 below -104,
// infinity above 88.73, NaN stays NaN. The power of two is applied in two factors so that both ends work.
inline vf vexp(vf x) {
  const vf low = splat(-104.0f), high = splat(88.8f);
  x = x < low ? low : x;
  x = x > high ? high : x;
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  vf shifted = x * 1.44269504088896341f + magic;
  vf n = shifted - magic;
  vf r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  vi exponent = bit_cast<vi>(shifted) - bit_cast<vi>(magic);
  vi half = exponent >> 1;
  vf scale_a = bit_cast<vf>((half + 127) << 23);
  vf scale_b = bit_cast<vf>((exponent - half + 127) << 23);
  return p * scale_a * scale_b;
}

inline vf vsilu(vf x) { return x / (1.0f + vexp(-x)); }

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define INTERLOCK_HAS_SHUFFLE 1
#endif
#endif

#ifdef INTERLOCK_HAS_SHUFFLE
template <int S, int... J>
inline void exchange(vf& a, vf& b, std::integer_sequence<int, J...>) {
  vf low = __builtin_shufflevector(a, b, ((J & S) ? VW + J - S : J)...);
  vf high = __builtin_shufflevector(a, b, ((J & S) ? VW + J : J + S)...);
  a = low;
  b = high;
}

template <int S>
inline void transpose_stage(vf (&r)[VW]) {
#pragma GCC unroll 16
  for (int i = 0; i < VW; ++i)
    if (!(i & S)) exchange<S>(r[i], r[i + S], std::make_integer_sequence<int, VW>{});
  if constexpr (S * 2 < VW) transpose_stage<S * 2>(r);
}

// Transpose a VW x VW block held in registers.
inline void transpose(vf (&r)[VW]) { transpose_stage<1>(r); }
#else
inline void transpose(vf (&r)[VW]) {
  vf t[VW];
  for (int i = 0; i < VW; ++i)
    for (int j = 0; j < VW; ++j) t[i][j] = r[j][i];
  for (int i = 0; i < VW; ++i) r[i] = t[i];
}
#endif

}  // namespace interlock
