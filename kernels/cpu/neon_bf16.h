// bf16 weights on NEON, for matmul.h. With the dot product of ARMv8.6 a lane holds two k and adds both products at once, as in AVX512-BF16.
// (BFMMLA, four k at once for two rows by two columns, would want another layout of the weights.)
#pragma once

#include "kernels.h"
#include "vec.h"

namespace {

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define FR_NEON_DOTS

struct StepBf16 {
    static constexpr int K = 2;
    static constexpr int W = fr::PANEL * 2;
    static constexpr int A = 1;
    typedef bf16 Weight;
    typedef uint32_t Act;  // two bf16
    // Both products and their sum are rounded to odd before they are added to the lane's (FPCR.EBF, which no system sets, would change it).
    FR_INLINE float32x4_t dot(float32x4_t sum, const Weight* w, bfloat16x8_t x) {
        return vbfdotq_f32(sum, vreinterpretq_bf16_u16(vld1q_u16(w)), x);
    }
    template <int M, int N>
    FR_INLINE void go(V (&acc)[M][N], const Weight* const (&w)[(N + 1) / 2], const Act* x) {
        for (int j = 0; j < N; ++j) {
            const Weight* b = w[j / 2] + j % 2 * 2 * LANES;
            for (int m = 0; m < M; ++m) {
                const bfloat16x8_t a = vreinterpretq_bf16_u32(vdupq_n_u32(x[m]));
                V& y = acc[m][j];
                y = {dot(y.a, b, a), dot(y.b, b + 8, a), dot(y.c, b + 16, a), dot(y.d, b + 24, a)};
            }
        }
    }
};

// A row x [K] → pairs at to[0], to[stride], …
FR_INLINE void pack_pairs(const float* x, int K, uint32_t* to, int stride) {
    for (int k = 0; k < K; k += LANES) {
        const V a = K - k < LANES ? load(x + k, K - k) : load(x + k);
        uint32_t pair[LANES / 2];
        vst1q_u32(pair, vreinterpretq_u32_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(a.a), a.b)));
        vst1q_u32(pair + 4, vreinterpretq_u32_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(a.c), a.d)));
        for (int i = 0; i < LANES / 2 && k + 2 * i < K; ++i, to += stride) *to = pair[i];
    }
}
#else
// 16 columns, two k each → the even and the odd k as floats.
FR_INLINE void split_pairs(const bf16* w, V& even, V& odd) {
    const auto left = [](uint32x4_t x) { return vreinterpretq_f32_u32(vshlq_n_u32(x, 16)); };
    const auto right = [](uint32x4_t x) { return vreinterpretq_f32_u32(vandq_u32(x, vdupq_n_u32(0xffff0000u))); };
    const uint32x4_t a = vreinterpretq_u32_u16(vld1q_u16(w)), b = vreinterpretq_u32_u16(vld1q_u16(w + 8));
    const uint32x4_t c = vreinterpretq_u32_u16(vld1q_u16(w + 16)), d = vreinterpretq_u32_u16(vld1q_u16(w + 24));
    even = {left(a), left(b), left(c), left(d)};
    odd = {right(a), right(b), right(c), right(d)};
}
#endif

}  // namespace
