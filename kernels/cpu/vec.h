// Sixteen floats at once, the same operations on every instruction set.
//
// A kernel written with V reduces in the same order and rounds at the same places everywhere: one 512-bit register, two of 256 bits, four of
// 128 or a plain array make the same bits (but for fused multiply-add where the machine has none, and for bf16 dot products).
// Everything has internal linkage, and nothing of the C++ library is used: these headers are compiled once for each instruction set, and
// a function that the linker may merge would carry one machine's instructions to another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc's own headers (PR 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#endif

#if defined(__aarch64__) && !defined(FR_SCALAR)  // there every machine has NEON, so the scalar form has to ask to do without
#define FR_NEON
#include <arm_neon.h>
#endif

#define FR_INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define FR_UNROLL _Pragma("unroll")
#else
#define FR_UNROLL _Pragma("GCC unroll 32")  // else gcc keeps arrays of more than sixteen in memory
#endif

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

#elif defined(FR_NEON)

struct V { float32x4_t a, b, c, d; };  // lanes 0 … 3, 4 … 7, 8 … 11, 12 … 15
struct Mask { uint32x4_t a, b, c, d; };

FR_INLINE V set(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}; }
FR_INLINE V zero() { return set(0.0f); }
FR_INLINE V load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
FR_INLINE V load(const float* p, int n) {
    float part[LANES] = {};
    memcpy(part, p, size_t(n) * 4);
    return load(part);
}
FR_INLINE void store(float* p, V x) { vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b), vst1q_f32(p + 8, x.c), vst1q_f32(p + 12, x.d); }
FR_INLINE void store(float* p, V x, int n) {
    float part[LANES];
    store(part, x);
    memcpy(p, part, size_t(n) * 4);
}
FR_INLINE float32x4_t widen4(uint16x4_t h) { return vreinterpretq_f32_u32(vshll_n_u16(h, 16)); }
FR_INLINE V load(const bf16* p) { return {widen4(vld1_u16(p)), widen4(vld1_u16(p + 4)), widen4(vld1_u16(p + 8)), widen4(vld1_u16(p + 12))}; }
FR_INLINE V load(const int8_t* p) {
    const int8x16_t x = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_high_s8(x);
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)), vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
            vcvtq_f32_s32(vmovl_high_s16(high))};
}
#define FR_FOUR(f) {f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d)}
FR_INLINE V operator+(V x, V y) { return FR_FOUR(vaddq_f32); }
FR_INLINE V operator-(V x, V y) { return FR_FOUR(vsubq_f32); }
FR_INLINE V operator*(V x, V y) { return FR_FOUR(vmulq_f32); }
FR_INLINE V operator/(V x, V y) { return FR_FOUR(vdivq_f32); }
FR_INLINE V fma(V x, V y, V z) { return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)}; }
FR_INLINE Mask less(V x, V y) { return FR_FOUR(vcltq_f32); }
#undef FR_FOUR
FR_INLINE V select(Mask m, V yes, V no) {
    return {vbslq_f32(m.a, yes.a, no.a), vbslq_f32(m.b, yes.b, no.b), vbslq_f32(m.c, yes.c, no.c), vbslq_f32(m.d, yes.d, no.d)};
}
// The machine's own maximum is NaN where an operand is; here it is y, as elsewhere.
FR_INLINE V max(V x, V y) { return select(less(y, x), x, y); }
FR_INLINE V min(V x, V y) { return select(less(x, y), x, y); }
FR_INLINE uint32x4_t between(int32x4_t lane, int first, int end) {
    return vandq_u32(vcgeq_s32(lane, vdupq_n_s32(first)), vcltq_s32(lane, vdupq_n_s32(end)));
}
FR_INLINE Mask lanes_from(int first, int end) {
    const int32x4_t lane = {0, 1, 2, 3};
    return {between(lane, first, end), between(lane, first - 4, end - 4), between(lane, first - 8, end - 8), between(lane, first - 12, end - 12)};
}
FR_INLINE bool any_nan(V x) {
    const uint32x4_t low = vandq_u32(vceqq_f32(x.a, x.a), vceqq_f32(x.b, x.b)), high = vandq_u32(vceqq_f32(x.c, x.c), vceqq_f32(x.d, x.d));
    return vminvq_u32(vandq_u32(low, high)) == 0;
}
FR_INLINE V absolute(V x) { return {vabsq_f32(x.a), vabsq_f32(x.b), vabsq_f32(x.c), vabsq_f32(x.d)}; }
FR_INLINE float32x4_t power_of_two4(float32x4_t t) {
    return vreinterpretq_f32_s32(vaddq_s32(vshlq_n_s32(vreinterpretq_s32_f32(t), 23), vdupq_n_s32(0x3f800000)));
}
FR_INLINE V power_of_two(V t) { return {power_of_two4(t.a), power_of_two4(t.b), power_of_two4(t.c), power_of_two4(t.d)}; }

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
#elif defined(FR_NEON)
FR_INLINE float sum(V x) {
    const float32x4_t q = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    return vpadds_f32(vadd_f32(vget_low_f32(q), vget_high_f32(q)));
}
FR_INLINE float maximum(V x) {
    float part[LANES];
    store(part, max({x.a, x.b, x.a, x.b}, {x.c, x.d, x.c, x.d}));
    for (int half = LANES / 4; half; half /= 2)
        for (int l = 0; l < half; ++l) part[l] = part[l] > part[l + half] ? part[l] : part[l + half];
    return part[0];
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

#if defined(__AVX512BF16__)
// 32 floats of a row, or `left` of them and zeros, as sixteen pairs of bf16.
FR_INLINE __m512i pairs(const float* x, int left) {
    const V low = left >= LANES ? load(x) : load(x, left);
    const V high = left >= 2 * LANES ? load(x + LANES) : left > LANES ? load(x + LANES, left - LANES) : zero();
    return (__m512i)_mm512_cvtne2ps_pbh(high.x, low.x);
}
#endif

}  // namespace
