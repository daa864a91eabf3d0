// Copies many strided blocks of bytes in one call, so that nobody waits for Python between them.

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

// Six int64 for each block, in this order.
struct Block {
    int64_t source;
    int64_t target;
    int64_t length;
    int64_t rows;
    int64_t source_stride;
    int64_t target_stride;
};

constexpr size_t line = 64;
constexpr size_t shortest_stream = 4 * line;
constexpr int64_t rows_ahead = 4;

using Copy = void (*)(char* target, const char* source, size_t length);

void plain(char* target, const char* source, size_t length) { std::memcpy(target, source, length); }

#if defined(__AVX__)
void stream_line(char* target, const char* source) {
    const auto* from = reinterpret_cast<const __m256i*>(source);
    auto* to = reinterpret_cast<__m256i*>(target);
    const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
    _mm256_stream_si256(to, a);
    _mm256_stream_si256(to + 1, b);
}
#elif defined(__SSE2__)
void stream_line(char* target, const char* source) {
    const auto* from = reinterpret_cast<const __m128i*>(source);
    auto* to = reinterpret_cast<__m128i*>(target);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
}
#endif

// Past the caches: memory is not read before it is written over, as memcpy does it for large blocks.
void streamed(char* target, const char* source, size_t length) {
#if defined(__SSE2__)
    if (length < shortest_stream) return plain(target, source, length);
    const size_t head = (line - reinterpret_cast<uintptr_t>(target) % line) % line;
    std::memcpy(target, source, head);
    size_t at = head;
    for (; at + line <= length; at += line) {
        stream_line(target + at, source + at);
    }
    std::memcpy(target + at, source + at, length - at);
#else
    plain(target, source, length);
#endif
}

void prefetch(const char* source, size_t length) {
    for (size_t at = 0; at < length; at += line) __builtin_prefetch(source + at, 0, 2);
}

void copy_block(const Block& block, Copy copy) {
    const char* source = reinterpret_cast<const char*>(block.source);
    char* target = reinterpret_cast<char*>(block.target);
    const auto length = static_cast<size_t>(block.length);
    const size_t ahead = length < 4096 ? length : 0;
    for (int64_t row = 0; row < block.rows; ++row) {
        if (row + rows_ahead < block.rows) prefetch(source + rows_ahead * block.source_stride, ahead);
        copy(target, source, length);
        source += block.source_stride;
        target += block.target_stride;
    }
}

}  // namespace

// stream_bytes: from this many bytes on, the target will not fit the caches.
extern "C" int interlock_copy_blocks(const int64_t* blocks, int64_t count, int64_t stream_bytes) {
    const auto* all = reinterpret_cast<const Block*>(blocks);
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i) total += all[i].length * all[i].rows;
    const Copy copy = total >= stream_bytes ? streamed : plain;
    for (int64_t i = 0; i < count; ++i) copy_block(all[i], copy);
#if defined(__SSE2__)
    _mm_sfence();
#endif
    return 0;
}
