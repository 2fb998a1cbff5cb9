// Vectors of whole numbers, for quant.h: sixteen int32, or as many pairs of int16.
//
//   dot: to each sum the products of its pair of weights and the pair of activations that was spread
//   load_bytes: sixteen pairs of bytes    nibbles<AT>: of words of four codes the pair AT    load_half: sixteen f16, finite
//   store_low: the low 16 bits of every lane of two vectors, 64 bytes
#pragma once

#include "vec.h"
#if defined(FR_NEON)
#include "neon_ints.h"
#endif

namespace {

#if defined(__AVX512F__)

typedef int32_t Ints __attribute__((vector_size(64)));  // unlike __m512i it aliases nothing, and arrays of it stay in registers
struct I { Ints x; };

FR_INLINE I splat(int32_t a) { return {(Ints)_mm512_set1_epi32(a)}; }
FR_INLINE I dot(I sum, I w, I q) {
#if defined(__AVX512VNNI__)
    return {(Ints)_mm512_dpwssd_epi32((__m512i)sum.x, (__m512i)w.x, (__m512i)q.x)};
#else
    return {sum.x + (Ints)_mm512_madd_epi16((__m512i)w.x, (__m512i)q.x)};
#endif
}
FR_INLINE I operator+(I a, I b) { return {a.x + b.x}; }
FR_INLINE I operator-(I a, I b) { return {(Ints)_mm512_sub_epi32((__m512i)a.x, (__m512i)b.x)}; }
FR_INLINE I add_halves(I a, I b) { return {(Ints)_mm512_add_epi16((__m512i)a.x, (__m512i)b.x)}; }
FR_INLINE V to_float(I a) { return {_mm512_cvtepi32_ps((__m512i)a.x)}; }
FR_INLINE I load_bytes(const int8_t* p) { return {(Ints)_mm512_cvtepi8_epi16(_mm256_load_si256((const __m256i*)p))}; }
FR_INLINE I load_words(const uint16_t* p) { return {(Ints)_mm512_load_si512(p)}; }
template <int AT>
FR_INLINE I nibbles(I w) {
    if constexpr (AT == 3) return {(Ints)_mm512_srli_epi16((__m512i)w.x, 12)};
    return {(Ints)_mm512_and_si512(AT ? _mm512_srli_epi16((__m512i)w.x, 4 * AT) : (__m512i)w.x, _mm512_set1_epi16(15))};
}
FR_INLINE V load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_load_si256((const __m256i*)p))}; }
FR_INLINE void store_low(void* p, V a, V b) {
    alignas(64) static const int16_t EVEN[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                                 32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
    _mm512_storeu_si512(p, _mm512_permutex2var_epi16(_mm512_castps_si512(a.x), _mm512_load_si512(EVEN), _mm512_castps_si512(b.x)));
}

#elif defined(__AVX2__)

struct I { __m256i lo, hi; };

FR_INLINE I splat(int32_t a) { return {_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }
FR_INLINE I dot(I sum, I w, I q) {
    return {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(w.lo, q.lo)), _mm256_add_epi32(sum.hi, _mm256_madd_epi16(w.hi, q.hi))};
}
FR_INLINE I operator+(I a, I b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
FR_INLINE V to_float(I a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
FR_INLINE I load_bytes(const int8_t* p) {
    return {_mm256_cvtepi8_epi16(_mm_load_si128((const __m128i*)p)), _mm256_cvtepi8_epi16(_mm_load_si128((const __m128i*)(p + 16)))};
}
FR_INLINE I load_words(const uint16_t* p) { return {_mm256_load_si256((const __m256i*)p), _mm256_load_si256((const __m256i*)(p + 16))}; }
template <int AT>
FR_INLINE I nibbles(I w) {
    const __m256i mask = _mm256_set1_epi16(15);
    return {_mm256_and_si256(_mm256_srli_epi16(w.lo, 4 * AT), mask), _mm256_and_si256(_mm256_srli_epi16(w.hi, 4 * AT), mask)};
}
FR_INLINE __m256 half8(const uint16_t* p) {
    const __m256i h = _mm256_cvtepu16_epi32(_mm_load_si128((const __m128i*)p));
    const __m256 size = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_and_si256(h, _mm256_set1_epi32(0x7fff)), 13));
    const __m256 sign = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_and_si256(h, _mm256_set1_epi32(0x8000)), 16));
    return _mm256_or_ps(_mm256_mul_ps(size, _mm256_set1_ps(0x1p112f)), sign);
}
FR_INLINE V load_half(const uint16_t* p) { return {half8(p), half8(p + 8)}; }
FR_INLINE __m256i low_bits(V a) {
    const __m256i mask = _mm256_set1_epi32(0xffff);
    const __m256i lo = _mm256_and_si256(_mm256_castps_si256(a.lo), mask), hi = _mm256_and_si256(_mm256_castps_si256(a.hi), mask);
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8);  // packed quarter by quarter: the middle ones change places
}
FR_INLINE void store_low(void* p, V a, V b) {
    _mm256_storeu_si256((__m256i*)p, low_bits(a)), _mm256_storeu_si256((__m256i*)p + 1, low_bits(b));
}

#elif !defined(FR_NEON)  // neon_ints.h

struct I { int32_t x[LANES]; };

FR_INLINE I splat(int32_t a) {
    I r;
    for (int l = 0; l < LANES; ++l) r.x[l] = a;
    return r;
}
FR_INLINE I dot(I sum, I w, I q) {
    for (int l = 0; l < LANES; ++l) sum.x[l] += int16_t(w.x[l]) * int16_t(q.x[l]) + (w.x[l] >> 16) * (q.x[l] >> 16);
    return sum;
}
FR_INLINE I operator+(I a, I b) {
    for (int l = 0; l < LANES; ++l) a.x[l] += b.x[l];
    return a;
}
FR_INLINE V to_float(I a) { FR_EACH(float(a.x[l])); }
FR_INLINE I load_bytes(const int8_t* p) {
    I r;
    for (int l = 0; l < LANES; ++l) r.x[l] = int32_t(uint32_t(uint16_t(p[2 * l])) | uint32_t(p[2 * l + 1]) << 16);
    return r;
}
FR_INLINE I load_words(const uint16_t* p) {
    I r;
    for (int l = 0; l < LANES; ++l) r.x[l] = int32_t(uint32_t(p[2 * l]) | uint32_t(p[2 * l + 1]) << 16);
    return r;
}
template <int AT>
FR_INLINE I nibbles(I w) {
    for (int l = 0; l < LANES; ++l) w.x[l] = int32_t(uint32_t(w.x[l]) >> (4 * AT) & 0x000f000fu);
    return w;
}
// Finite numbers only, as scales are; a subnormal becomes exact through the multiplication.
FR_INLINE V load_half(const uint16_t* p) { FR_EACH(float_of(bits_of(float_of(uint32_t(p[l] & 0x7fff) << 13) * 0x1p112f) | uint32_t(p[l] & 0x8000) << 16)); }
FR_INLINE void store_low(void* p, V a, V b) {
    int16_t low[2 * LANES];
    for (int l = 0; l < LANES; ++l) low[l] = int16_t(bits_of(a.x[l])), low[LANES + l] = int16_t(bits_of(b.x[l]));
    memcpy(p, low, sizeof low);
}

#endif

}  // namespace
