// The dice of forerun/dice.md, bit by bit: Philox4x32-10, then −ln(−ln(1 − u)) in single float32 operations. This file must be compiled
// without contraction of multiply and add (-ffp-contract=off). Plain loops over arrays, which compilers turn into vectors; but for AVX-512
// by hand, where they do so badly.
#pragma once

#include "vec.h"

namespace {

constexpr int BLOCKS = 16;  // Philox blocks at once: 64 token ids

typedef uint32_t Words[BLOCKS];
typedef float Floats[BLOCKS];

FR_INLINE void philox(Words k0, Words k1, Words c0, Words c1, Words c2, Words c3) {
    for (int round = 0; round < 10; ++round)
        for (int i = 0; i < BLOCKS; ++i) {
            const uint64_t p0 = uint64_t(0xD2511F53u) * c0[i], p1 = uint64_t(0xCD9E8D57u) * c2[i];
            c0[i] = uint32_t(p1 >> 32) ^ c1[i] ^ k0[i];
            c2[i] = uint32_t(p0 >> 32) ^ c3[i] ^ k1[i];
            c1[i] = uint32_t(p1);
            c3[i] = uint32_t(p0);
            k0[i] += 0x9E3779B9u;
            k1[i] += 0xBB67AE85u;
        }
}

FR_INLINE float assemble(float f, float e) {
    const float q = f * f;
    float p = float_of(0xbd9c5abcu);
    p = p * f;
    p = p + float_of(0x3e02adb4u);
    p = p * f;
    p = p + float_of(0xbe06c2a1u);
    p = p * f;
    p = p + float_of(0x3e116d0fu);
    p = p * f;
    p = p + float_of(0xbe2a3922u);
    p = p * f;
    p = p + float_of(0x3e4cd004u);
    p = p * f;
    p = p + float_of(0xbe800113u);
    p = p * f;
    p = p + float_of(0x3eaaaaaau);
    float y = (f * q) * p;
    y = y - q * 0.5f;
    y = y + e * float_of(0xb95e8083u);
    y = f + y;
    return y + e * float_of(0x3f318000u);
}

// x = (1 + f) · 2ᵉ.
FR_INLINE void split(float x, float& f, float& e) {
    const int32_t b = int32_t(bits_of(x));
    const int32_t exponent = (b - 0x3f3504f3) >> 23;
    f = float_of(uint32_t(b) - (uint32_t(exponent) << 23)) - 1.0f;
    e = float(exponent);
}

FR_INLINE float gumbel_of_word(uint32_t v) {
    const float u = (float(v) + 0.5f) * float_of(0x2f800000u);  // · 2⁻³²
    const float x = (float(0xffffffffu - v) + 0.5f) * float_of(0x2f800000u);
    float f, e;
    split(x, f, e);
    const bool near = v < (1u << 30);
    f = near ? -u : f;
    e = near ? 0.0f : e;
    const float inner = -assemble(f, e);
    split(inner, f, e);
    return -assemble(f, e);
}

#if defined(__AVX512F__)

// The same for sixteen at once.

FR_INLINE V constant(uint32_t bits) { return set(float_of(bits)); }
FR_INLINE V negative(V x) { return {_mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x.x), _mm512_set1_epi32(int(0x80000000u))))}; }

FR_INLINE V assemble(V f, V e) {
    const V q = f * f;
    V p = constant(0xbd9c5abcu) * f + constant(0x3e02adb4u);
    p = p * f + constant(0xbe06c2a1u);
    p = p * f + constant(0x3e116d0fu);
    p = p * f + constant(0xbe2a3922u);
    p = p * f + constant(0x3e4cd004u);
    p = p * f + constant(0xbe800113u);
    p = p * f + constant(0x3eaaaaaau);
    const V y = f + ((f * q) * p - q * set(0.5f) + e * constant(0xb95e8083u));
    return y + e * constant(0x3f318000u);
}

FR_INLINE void split(V x, V& f, V& e) {
    const __m512i b = _mm512_castps_si512(x.x), exponent = _mm512_srai_epi32(_mm512_sub_epi32(b, _mm512_set1_epi32(0x3f3504f3)), 23);
    f = V{_mm512_castsi512_ps(_mm512_sub_epi32(b, _mm512_slli_epi32(exponent, 23)))} - set(1.0f);
    e = {_mm512_cvtepi32_ps(exponent)};
}

FR_INLINE V gumbel_of_words(__m512i v) {
    const V half = set(0.5f), scale = constant(0x2f800000u);
    const V u = (V{_mm512_cvtepu32_ps(v)} + half) * scale;
    const V x = (V{_mm512_cvtepu32_ps(_mm512_xor_si512(v, _mm512_set1_epi32(-1)))} + half) * scale;
    V f, e;
    split(x, f, e);
    const Mask near = _mm512_cmplt_epu32_mask(v, _mm512_set1_epi32(1 << 30));
    const V inner = negative(assemble(select(near, negative(u), f), select(near, zero(), e)));
    split(inner, f, e);
    return negative(assemble(f, e));
}

// High and low words of sixteen products with m.
FR_INLINE void multiply_words(__m512i a, uint32_t m, __m512i& high, __m512i& low) {
    const __m512i by = _mm512_set1_epi32(int(m)), even = _mm512_mul_epu32(a, by), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), by);
    high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
    low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
}

// Tokens token0 (a multiple of 4) … token1 − 1 of one (seed, index); out[0] is token0's.
void dice(uint64_t seed, uint64_t index, int32_t token0, int32_t token1, float* out) {
    const __m512i ramp = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t token = token0; token < token1; token += 4 * LANES, out += 4 * LANES) {
        __m512i c0 = _mm512_add_epi32(ramp, _mm512_set1_epi32(int(token / 4))), c1 = _mm512_set1_epi32(int(uint32_t(index)));
        __m512i c2 = _mm512_set1_epi32(int(uint32_t(index >> 32))), c3 = _mm512_setzero_si512();
        uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
        for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
            __m512i h0, l0, h1, l1;
            multiply_words(c0, 0xD2511F53u, h0, l0);
            multiply_words(c2, 0xCD9E8D57u, h1, l1);
            c0 = _mm512_xor_si512(_mm512_xor_si512(h1, c1), _mm512_set1_epi32(int(k0)));
            c2 = _mm512_xor_si512(_mm512_xor_si512(h0, c3), _mm512_set1_epi32(int(k1)));
            c1 = l1, c3 = l0;
        }
        // Word w of block b is token 4b + w: the four vectors are interleaved, first within quarters, then the quarters.
        const __m512 g0 = gumbel_of_words(c0).x, g1 = gumbel_of_words(c1).x, g2 = gumbel_of_words(c2).x, g3 = gumbel_of_words(c3).x;
        const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(g0, g1)), b = _mm512_castps_pd(_mm512_unpacklo_ps(g2, g3));
        const __m512d c = _mm512_castps_pd(_mm512_unpackhi_ps(g0, g1)), d = _mm512_castps_pd(_mm512_unpackhi_ps(g2, g3));
        const __m512 r0 = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), r1 = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        const __m512 r2 = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), r3 = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
        const __m512 low0 = _mm512_shuffle_f32x4(r0, r1, 0x44), high0 = _mm512_shuffle_f32x4(r0, r1, 0xee);
        const __m512 low1 = _mm512_shuffle_f32x4(r2, r3, 0x44), high1 = _mm512_shuffle_f32x4(r2, r3, 0xee);
        const V values[4] = {{_mm512_shuffle_f32x4(low0, low1, 0x88)}, {_mm512_shuffle_f32x4(low0, low1, 0xdd)},
                             {_mm512_shuffle_f32x4(high0, high1, 0x88)}, {_mm512_shuffle_f32x4(high0, high1, 0xdd)}};
        for (int i = 0; i < 4; ++i) {
            const int64_t left = token1 - token - i * LANES;
            if (left > 0) store(out + i * LANES, values[i], int(left < LANES ? left : LANES));
        }
    }
}

#else

// Tokens token0 (a multiple of 4) … token1 − 1 of one (seed, index); out[0] is token0's.
void dice(uint64_t seed, uint64_t index, int32_t token0, int32_t token1, float* out) {
    for (int64_t token = token0; token < token1; token += 4 * BLOCKS) {
        Words k0, k1, c0, c1, c2, c3;
        for (int i = 0; i < BLOCKS; ++i) {
            k0[i] = uint32_t(seed), k1[i] = uint32_t(seed >> 32);
            c0[i] = uint32_t(token / 4) + uint32_t(i), c1[i] = uint32_t(index), c2[i] = uint32_t(index >> 32), c3[i] = 0;
        }
        philox(k0, k1, c0, c1, c2, c3);
        float values[4 * BLOCKS];
        uint32_t words[4 * BLOCKS];
        for (int i = 0; i < BLOCKS; ++i) words[4 * i] = c0[i], words[4 * i + 1] = c1[i], words[4 * i + 2] = c2[i], words[4 * i + 3] = c3[i];
        for (int i = 0; i < 4 * BLOCKS; ++i) values[i] = gumbel_of_word(words[i]);
        const int64_t left = token1 - token < 4 * BLOCKS ? token1 - token : 4 * BLOCKS;
        memcpy(out + (token - token0), values, size_t(left) * 4);
    }
}

#endif

// Single places: (seed, index, token) each.
void dice_at(const int64_t* seeds, const int64_t* indices, const int64_t* tokens, int32_t count, float* out) {
    for (int32_t first = 0; first < count; first += BLOCKS) {
        const int here = count - first < BLOCKS ? count - first : BLOCKS;
        Words k0 = {}, k1 = {}, c0 = {}, c1 = {}, c2 = {}, c3 = {};
        for (int i = 0; i < here; ++i) {
            const uint64_t seed = uint64_t(seeds[first + i]), index = uint64_t(indices[first + i]);
            k0[i] = uint32_t(seed), k1[i] = uint32_t(seed >> 32);
            c0[i] = uint32_t(tokens[first + i] / 4), c1[i] = uint32_t(index), c2[i] = uint32_t(index >> 32);
        }
        philox(k0, k1, c0, c1, c2, c3);
        Floats values;
        for (int i = 0; i < BLOCKS; ++i) {
            const int which = i < here ? int(tokens[first + i] % 4) : 0;
            values[i] = gumbel_of_word(which < 2 ? (which ? c1[i] : c0[i]) : (which == 2 ? c2[i] : c3[i]));
        }
        memcpy(out + first, values, size_t(here) * 4);
    }
}

}  // namespace
