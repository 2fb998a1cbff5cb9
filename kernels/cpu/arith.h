// Elementary functions on V. Every step is one rounded operation or one fused multiply-add, so all instruction sets with FMA agree.
#pragma once

#include "vec.h"

namespace {

// eˣ by x = n·ln 2 + r, |r| ≤ ln 2 / 2, and a polynomial of degree 6 in r (Cephes expf's coefficients): about 1 ulp. Below −87.33 exactly 0,
// above 88.37 the value there. NaN stays NaN.
FR_INLINE V exponential(V x) {
    const V low = set(-87.33f);
    V c = min(set(88.37f), max(low, x));
    const V shift = set(12582912.0f);  // 1.5·2²³: adding it rounds to an integer
    V t = fma(c, set(1.44269504088896341f), shift);
    V n = t - shift;
    V r = fma(n, set(-0.693359375f), c);
    r = fma(n, set(2.12194440e-4f), r);
    V p = set(1.9875691500e-4f);
    p = fma(p, r, set(1.3981999507e-3f));
    p = fma(p, r, set(8.3334519073e-3f));
    p = fma(p, r, set(4.1665795894e-2f));
    p = fma(p, r, set(1.6666665459e-1f));
    p = fma(p, r, set(5.0000001201e-1f));
    V y = fma(p, r * r, r) + set(1.0f);
    return select(less(x, low), zero(), y * power_of_two(t));
}

// tanh: odd polynomial near 0 (Cephes tanhf), 1 − 2/(e²ˣ + 1) beyond.
FR_INLINE V hyperbolic_tangent(V x) {
    V z = x * x;
    V p = set(-5.70498872745e-3f);
    p = fma(p, z, set(2.06390887954e-2f));
    p = fma(p, z, set(-5.37397155531e-2f));
    p = fma(p, z, set(1.33314422036e-1f));
    p = fma(p, z, set(-3.33332819422e-1f));
    V near = fma(p * z, x, x);
    V far = set(1.0f) - set(2.0f) / (exponential(x + x) + set(1.0f));
    return select(less(absolute(x), set(0.625f)), near, far);
}

FR_INLINE V sigmoid_times(V x, V z) { return x / (set(1.0f) + exponential(zero() - z)); }  // x·σ(z)

// The activations; the numbers are those of backends/cpu/native_ops.py.
enum Activation { SILU, GELU, GELU_TANH, RELU, RELU2 };

template <int KIND>
FR_INLINE V activate(V x) {
    if constexpr (KIND == SILU) return sigmoid_times(x, x);
    if constexpr (KIND == GELU_TANH) {  // x/2·(1 + tanh u) = x·σ(2u)
        V u = fma(x * x * x, set(0.044715f), x) * set(2.0f * 0.7978845608028654f);
        return sigmoid_times(x, u);
    }
    if constexpr (KIND == GELU) {
        float part[LANES];
        store(part, x);
        for (int l = 0; l < LANES; ++l) part[l] = 0.5f * part[l] * (1.0f + __builtin_erff(part[l] * 0.70710678118654752f));
        return load(part);
    }
    V r = max(zero(), x);
    if constexpr (KIND == RELU2) return r * r;
    return r;
}

}  // namespace
