// Activations as whole numbers of 16 bits, for weights of codes (quant.h): x ≈ step · q, span by span.
#pragma once

#include "ints.h"
#include "kernels.h"

namespace {

constexpr int GROUP = fr::GROUP;
constexpr int SPAN = 16;             // groups of activations that share a step
constexpr int LARGEST = 32767 - 128;  // of the whole numbers that they are rounded to: with a code added they still have 16 bits
constexpr float SMALLEST = 1e-30f;   // a span whose largest value is below counts as zeros
static_assert(int64_t(SPAN) * GROUP * 128 * LARGEST < int64_t(1) << 31);

// How `count` values of a row become whole numbers: x ≈ step · q, q ≈ inverse · x. One NaN or infinity makes the step a NaN.
struct Rounding {
    float step, inverse;
};

FR_INLINE Rounding rounding(const float* x, int count) {
    V peak = zero(), spoilt = zero();
    int k = 0;
    const auto take = [&](V a) { peak = max(peak, absolute(a)), spoilt = fma(a, zero(), spoilt); };
    for (; k + LANES <= count; k += LANES) take(load(x + k));
    if (k < count) take(load(x + k, count - k));
    const float largest = maximum(peak);
    if (any_nan(spoilt)) return {__builtin_nanf(""), 0.0f};
    return largest > SMALLEST ? Rounding{largest / LARGEST, LARGEST / largest} : Rounding{0.0f, 0.0f};
}

// One group of one row (or the `count` that are left): q, and returned Σq.
FR_INLINE float round_group(const float* x, int count, float inverse, void* q) {
    if (inverse == 0.0f) {
        memset(q, 0, GROUP * 2);
        return 0.0f;
    }
    const V a = count >= LANES ? load(x) : load(x, count);
    const V b = count >= GROUP ? load(x + LANES) : count > LANES ? load(x + LANES, count - LANES) : zero();
    const V magic = set(12582912.0f);  // 1.5·2²³: the fraction rounds away
    const V u = a * set(inverse) + magic, v = b * set(inverse) + magic;
    store_low(q, u, v);
    return sum((u - magic) + (v - magic));
}

}  // namespace
