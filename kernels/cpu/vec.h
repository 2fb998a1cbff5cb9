// Sixteen floats at once, the same operations on every instruction set.
//
// A kernel written with V reduces in the same order and rounds at the same places everywhere: one 512-bit register, two of 256 bits or a
// plain array make the same bits (but for fused multiply-add where the machine has none, and for bf16 dot products).
// Everything has internal linkage, and nothing of the C++ library is used: these headers are compiled once for each instruction set, and
// a function that the linker may merge would carry one machine's instructions to another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc's own headers (PR 105593)
#endif
#include <immintrin.h>
#endif

#define FR_INLINE static inline __attribute__((always_inline))

namespace {

typedef uint16_t bf16;
constexpr int LANES = 16;

FR_INLINE uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

FR_INLINE float float_of(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

FR_INLINE float widen(bf16 x) { return float_of(uint32_t(x) << 16); }
FR_INLINE float widen(float x) { return x; }

// Round to nearest even; a NaN stays a (quiet) NaN.
FR_INLINE bf16 round_bf16(float x) {
    uint32_t u = bits_of(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return bf16((u >> 16) | 0x40);
    return bf16((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

#if defined(__AVX512F__)

struct V { __m512 x; };
typedef __mmask16 Mask;

FR_INLINE V zero() { return {_mm512_setzero_ps()}; }
FR_INLINE V set(float a) { return {_mm512_set1_ps(a)}; }
FR_INLINE V load(const float* p) { return {_mm512_loadu_ps(p)}; }
FR_INLINE V load(const float* p, int n) { return {_mm512_maskz_loadu_ps(Mask((1u << n) - 1), p)}; }
FR_INLINE void store(float* p, V a) { _mm512_storeu_ps(p, a.x); }
FR_INLINE void store(float* p, V a, int n) { _mm512_mask_storeu_ps(p, Mask((1u << n) - 1), a.x); }
FR_INLINE V widen16(__m256i h) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))}; }
FR_INLINE V load(const bf16* p) { return widen16(_mm256_loadu_si256((const __m256i*)p)); }
FR_INLINE V load(const int8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))}; }
FR_INLINE V operator+(V a, V b) { return {_mm512_add_ps(a.x, b.x)}; }
FR_INLINE V operator-(V a, V b) { return {_mm512_sub_ps(a.x, b.x)}; }
FR_INLINE V operator*(V a, V b) { return {_mm512_mul_ps(a.x, b.x)}; }
FR_INLINE V operator/(V a, V b) { return {_mm512_div_ps(a.x, b.x)}; }
FR_INLINE V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
// Where an operand is NaN the result is b.
FR_INLINE V max(V a, V b) { return {_mm512_max_ps(a.x, b.x)}; }
FR_INLINE V min(V a, V b) { return {_mm512_min_ps(a.x, b.x)}; }
FR_INLINE Mask less(V a, V b) { return _mm512_cmp_ps_mask(a.x, b.x, _CMP_LT_OQ); }
FR_INLINE Mask lanes_from(int first, int end) { return Mask((0xffffu << first) & ((1u << end) - 1)); }
FR_INLINE V select(Mask m, V yes, V no) { return {_mm512_mask_blend_ps(m, no.x, yes.x)}; }
FR_INLINE bool any_nan(V a) { return _mm512_cmp_ps_mask(a.x, a.x, _CMP_UNORD_Q) != 0; }
FR_INLINE V absolute(V a) { return {_mm512_abs_ps(a.x)}; }
// t = 1.5·2²³ + n → 2ⁿ, for an integer n in −126 … 127.
FR_INLINE V power_of_two(V t) {
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(t.x), 23), _mm512_set1_epi32(0x3f800000)))};
}
FR_INLINE __m256 low_half(V a) { return _mm512_castps512_ps256(a.x); }
FR_INLINE __m256 high_half(V a) { return _mm256_castsi256_ps(_mm512_extracti64x4_epi64(_mm512_castps_si512(a.x), 1)); }

#elif defined(__AVX2__)

struct V { __m256 lo, hi; };
struct Mask { __m256 lo, hi; };

FR_INLINE __m256i ramp(int first, int n) {  // lanes first … first+7: all ones below n
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
}
FR_INLINE V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
FR_INLINE V set(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
FR_INLINE V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
FR_INLINE V load(const float* p, int n) { return {_mm256_maskload_ps(p, ramp(0, n)), _mm256_maskload_ps(p + 8, ramp(8, n))}; }
FR_INLINE void store(float* p, V a) { _mm256_storeu_ps(p, a.lo), _mm256_storeu_ps(p + 8, a.hi); }
FR_INLINE void store(float* p, V a, int n) { _mm256_maskstore_ps(p, ramp(0, n), a.lo), _mm256_maskstore_ps(p + 8, ramp(8, n), a.hi); }
FR_INLINE __m256 widen8(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
FR_INLINE V load(const bf16* p) { return {widen8(_mm_loadu_si128((const __m128i*)p)), widen8(_mm_loadu_si128((const __m128i*)(p + 8)))}; }
FR_INLINE __m256 whole8(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
FR_INLINE V load(const int8_t* p) { return {whole8(p), whole8(p + 8)}; }
FR_INLINE V operator+(V a, V b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
FR_INLINE V operator-(V a, V b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
FR_INLINE V operator*(V a, V b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
FR_INLINE V operator/(V a, V b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
FR_INLINE V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
FR_INLINE V max(V a, V b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
FR_INLINE V min(V a, V b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
FR_INLINE Mask less(V a, V b) { return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)}; }
FR_INLINE Mask lanes_from(int first, int end) {
    return {_mm256_castsi256_ps(_mm256_andnot_si256(ramp(0, first), ramp(0, end))),
            _mm256_castsi256_ps(_mm256_andnot_si256(ramp(8, first), ramp(8, end)))};
}
FR_INLINE V select(Mask m, V yes, V no) { return {_mm256_blendv_ps(no.lo, yes.lo, m.lo), _mm256_blendv_ps(no.hi, yes.hi, m.hi)}; }
FR_INLINE bool any_nan(V a) {
    return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q))) != 0;
}
FR_INLINE V absolute(V a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
FR_INLINE __m256 power_of_two8(__m256 t) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(t), 23), _mm256_set1_epi32(0x3f800000)));
}
FR_INLINE V power_of_two(V t) { return {power_of_two8(t.lo), power_of_two8(t.hi)}; }
FR_INLINE __m256 low_half(V a) { return a.lo; }
FR_INLINE __m256 high_half(V a) { return a.hi; }

#else

struct V { float x[LANES]; };
typedef uint32_t Mask;
#define FR_EACH(expression) V r; for (int l = 0; l < LANES; ++l) r.x[l] = (expression); return r

FR_INLINE V zero() { FR_EACH(0.0f); }
FR_INLINE V set(float a) { FR_EACH(a); }
FR_INLINE V load(const float* p) { FR_EACH(p[l]); }
FR_INLINE V load(const float* p, int n) { FR_EACH(l < n ? p[l] : 0.0f); }
FR_INLINE void store(float* p, V a) { memcpy(p, a.x, sizeof a.x); }
FR_INLINE void store(float* p, V a, int n) { memcpy(p, a.x, size_t(n) * 4); }
FR_INLINE V load(const bf16* p) { FR_EACH(widen(p[l])); }
FR_INLINE V load(const int8_t* p) { FR_EACH(float(p[l])); }
FR_INLINE V operator+(V a, V b) { FR_EACH(a.x[l] + b.x[l]); }
FR_INLINE V operator-(V a, V b) { FR_EACH(a.x[l] - b.x[l]); }
FR_INLINE V operator*(V a, V b) { FR_EACH(a.x[l] * b.x[l]); }
FR_INLINE V operator/(V a, V b) { FR_EACH(a.x[l] / b.x[l]); }
#if defined(__FP_FAST_FMAF)
FR_INLINE V fma(V a, V b, V c) { FR_EACH(__builtin_fmaf(a.x[l], b.x[l], c.x[l])); }
#else  // without the instruction a fused multiply-add would be a library call for every lane
FR_INLINE V fma(V a, V b, V c) { FR_EACH(a.x[l] * b.x[l] + c.x[l]); }
#endif
FR_INLINE V max(V a, V b) { FR_EACH(a.x[l] > b.x[l] ? a.x[l] : b.x[l]); }
FR_INLINE V min(V a, V b) { FR_EACH(a.x[l] < b.x[l] ? a.x[l] : b.x[l]); }
FR_INLINE Mask less(V a, V b) {
    Mask m = 0;
    for (int l = 0; l < LANES; ++l) m |= Mask(a.x[l] < b.x[l]) << l;
    return m;
}
FR_INLINE Mask lanes_from(int first, int end) { return (0xffffu << first) & ((1u << end) - 1); }
FR_INLINE V select(Mask m, V yes, V no) { FR_EACH((m >> l) & 1 ? yes.x[l] : no.x[l]); }
FR_INLINE bool any_nan(V a) {
    bool found = false;
    for (int l = 0; l < LANES; ++l) found |= a.x[l] != a.x[l];
    return found;
}
FR_INLINE V absolute(V a) { FR_EACH(float_of(bits_of(a.x[l]) & 0x7fffffffu)); }
FR_INLINE V power_of_two(V t) { FR_EACH(float_of((bits_of(t.x[l]) << 23) + 0x3f800000u)); }

#endif

// Sum and maximum over the lanes: halves onto each other, 16 → 8 → 4 → 2 → 1.
#if defined(__AVX2__)
FR_INLINE float sum(V a) {
    __m256 h = _mm256_add_ps(low_half(a), high_half(a));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
FR_INLINE float maximum(V a) {
    __m256 h = _mm256_max_ps(low_half(a), high_half(a));
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
#else
FR_INLINE float sum(V a) {
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; ++l) a.x[l] += a.x[l + half];
    return a.x[0];
}
FR_INLINE float maximum(V a) {
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; ++l) a.x[l] = a.x[l] > a.x[l + half] ? a.x[l] : a.x[l + half];
    return a.x[0];
}
#endif

FR_INLINE V load(const bf16* p, int n) {
    if (n == LANES) return load(p);
    bf16 part[LANES] = {};
    memcpy(part, p, size_t(n) * 2);
    return load(part);
}

FR_INLINE void store(bf16* p, V a, int n) {
    float part[LANES];
    store(part, a);
    for (int l = 0; l < n; ++l) p[l] = round_bf16(part[l]);
}

}  // namespace
