// The dice of forerun/dice.md, bit by bit: Philox4x32-10, then −ln(−ln(1 − u)) in single float32 operations. This file must be compiled
// without contraction of multiply and add (-ffp-contract=off). Plain loops over arrays, which compilers turn into vectors.
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
