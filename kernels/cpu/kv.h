// How an entry of the KV cache is written, and how a page of one KV head lies in it.
//
//   float, bf16    keys [D][16], values [16][D]
//   int8           the same in signed bytes, then 16 scales (float): entry = scale · code, scale = largest |x| of the entry / 127
//
// So scales move with their page. A largest value below 1e-30 counts as zeros; a NaN or infinity makes the scale a NaN, and with it all
// that sees the entry.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace {

FR_INLINE V load(const int8_t* p, int n) {
    if (n == LANES) return load(p);
    int8_t part[LANES] = {};
    memcpy(part, p, size_t(n));
    return load(part);
}

// Elements of T in a page of one KV head.
template <class T>
FR_INLINE int64_t page_elements(int D) {
    return int64_t(fr::page_bytes(sizeof(T) == 1 ? fr::INT8 : sizeof(T) == 2 ? fr::BF16 : fr::F32, D) / sizeof(T));
}

template <class T>
constexpr bool SCALED = sizeof(T) == 1;

// The scales of a page of codes.
FR_INLINE const float* scales_of(const int8_t* page, int D) { return (const float*)(page + fr::PAGE * D); }
FR_INLINE float* scales_of(int8_t* page, int D) { return (float*)(page + fr::PAGE * D); }

// One entry x [D] → codes to[0], to[step], …; returns the scale.
FR_INLINE float write_codes(const float* x, int D, int8_t* to, int step) {
    V most = zero();
    bool nan = false;
    for (int d = 0; d < D; d += LANES) {
        const V a = load(x + d, D - d < LANES ? D - d : LANES);
        nan |= any_nan(a);
        most = max(most, absolute(a));
    }
    const float peak = maximum(most);
    const bool number = !nan && peak <= __FLT_MAX__, filled = number && peak > 1e-30f;
    const float scale = filled ? peak / 127.0f : number ? 0.0f : __builtin_nanf("");
    const V by = set(filled ? scale : 1.0f), magic = set(12582912.0f);  // 1.5·2²³: the fraction rounds away
    for (int d = 0; d < D; d += LANES) {
        const int n = D - d < LANES ? D - d : LANES;
        float part[LANES];
        store(part, filled ? load(x + d, n) / by + magic : magic);
        for (int l = 0; l < n; ++l) to[(d + l) * step] = int8_t(bits_of(part[l]));
    }
    return scale;
}

}  // namespace
