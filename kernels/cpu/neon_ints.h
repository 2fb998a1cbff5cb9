// Whole numbers on NEON, for quant.h, which says what each function means. There is no dot product of 16 bits: codes are taken apart when they
// are loaded, and even and odd k are multiplied one after the other.
#pragma once

#include "vec.h"

namespace {

// Sixteen sums of four each, or sixteen pairs, taken apart: the even k of columns 0 … 7, of 8 … 15, then the odd ones. A number that was spread
// keeps its pair in the lowest lane of each.
struct I { int32x4_t a, b, c, d; };

FR_INLINE I splat(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x)}; }
FR_INLINE I dot(I sum, I w, I q) {
    const int16x4_t x = vreinterpret_s16_s32(vget_low_s32(q.a));
    const int16x8_t e = vreinterpretq_s16_s32(w.a), f = vreinterpretq_s16_s32(w.b), o = vreinterpretq_s16_s32(w.c), p = vreinterpretq_s16_s32(w.d);
    sum.a = vmlal_lane_s16(vmlal_lane_s16(sum.a, vget_low_s16(e), x, 0), vget_low_s16(o), x, 1);
    sum.b = vmlal_high_lane_s16(vmlal_high_lane_s16(sum.b, e, x, 0), o, x, 1);
    sum.c = vmlal_lane_s16(vmlal_lane_s16(sum.c, vget_low_s16(f), x, 0), vget_low_s16(p), x, 1);
    sum.d = vmlal_high_lane_s16(vmlal_high_lane_s16(sum.d, f, x, 0), p, x, 1);
    return sum;
}
FR_INLINE I operator+(I x, I y) { return {vaddq_s32(x.a, y.a), vaddq_s32(x.b, y.b), vaddq_s32(x.c, y.c), vaddq_s32(x.d, y.d)}; }
FR_INLINE V to_float(I x) { return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b), vcvtq_f32_s32(x.c), vcvtq_f32_s32(x.d)}; }
FR_INLINE I load_bytes(const int8_t* p) {
    const int8x16x2_t x = vld2q_s8(p);
    return {vreinterpretq_s32_s16(vmovl_s8(vget_low_s8(x.val[0]))), vreinterpretq_s32_s16(vmovl_high_s8(x.val[0])),
            vreinterpretq_s32_s16(vmovl_s8(vget_low_s8(x.val[1]))), vreinterpretq_s32_s16(vmovl_high_s8(x.val[1]))};
}
FR_INLINE I load_words(const uint16_t* p) {
    const uint16x8x2_t x = vld2q_u16(p), y = vld2q_u16(p + 16);
    return {vreinterpretq_s32_u16(x.val[0]), vreinterpretq_s32_u16(y.val[0]), vreinterpretq_s32_u16(x.val[1]), vreinterpretq_s32_u16(y.val[1])};
}
template <int AT>
FR_INLINE int32x4_t nibbles8(int32x4_t w) {
    const uint16x8_t x = vreinterpretq_u16_s32(w);
    if constexpr (AT == 0) return vreinterpretq_s32_u16(vandq_u16(x, vdupq_n_u16(15)));
    if constexpr (AT == 3) return vreinterpretq_s32_u16(vshrq_n_u16(x, 12));
    return vreinterpretq_s32_u16(vandq_u16(vshrq_n_u16(x, AT ? 4 * AT : 1), vdupq_n_u16(15)));
}
template <int AT>
FR_INLINE I nibbles(I w) { return {nibbles8<AT>(w.a), nibbles8<AT>(w.b), nibbles8<AT>(w.c), nibbles8<AT>(w.d)}; }
FR_INLINE float32x4_t half4(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
FR_INLINE V load_half(const uint16_t* p) { return {half4(p), half4(p + 4), half4(p + 8), half4(p + 12)}; }
FR_INLINE int16x8_t low8(float32x4_t x, float32x4_t y) { return vmovn_high_s32(vmovn_s32(vreinterpretq_s32_f32(x)), vreinterpretq_s32_f32(y)); }
FR_INLINE void store_low(void* p, V x, V y) {
    const int16x8_t low[] = {low8(x.a, x.b), low8(x.c, x.d), low8(y.a, y.b), low8(y.c, y.d)};
    memcpy(p, low, sizeof low);
}

}  // namespace
