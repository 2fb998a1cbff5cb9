// The ops that work row by row.
#pragma once

#include "arith.h"
#include "kernels.h"
#include "kv.h"

namespace {

// Σ x² in sixteen lanes, lane = index mod 16.
FR_INLINE float sum_of_squares(const float* x, int count) {
    V total = zero();
    int i = 0;
    for (; i + LANES <= count; i += LANES) {
        V a = load(x + i);
        total = fma(a, a, total);
    }
    if (i < count) {
        V a = load(x + i, count - i);
        total = fma(a, a, total);
    }
    return sum(total);
}

// f(i, n) for each run of n ≤ 16 elements.
template <class F>
FR_INLINE void each(int64_t count, F f) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) f(i, LANES);
    if (i < count) f(i, int(count - i));
}

FR_INLINE V get(const float* p, int n) { return n == LANES ? load(p) : load(p, n); }
FR_INLINE void put(float* p, V a, int n) { n == LANES ? store(p, a) : store(p, a, n); }

FR_INLINE void normalize(const float* x, const float* weight, float* out, int count, float eps) {
    const V factor = set(1.0f / __builtin_sqrtf(sum_of_squares(x, count) / float(count) + eps));
    each(count, [&](int64_t i, int n) { put(out + i, get(x + i, n) * factor * get(weight + i, n), n); });
}

void norm(const float* x, const float* weight, float* out, int32_t H, float eps, int32_t row0, int32_t row1) {
    for (int64_t r = row0; r < row1; ++r) normalize(x + r * H, weight, out + r * H, H, eps);
}

void add(const float* x, const float* residual, float* out, int64_t count, float scale) {
    const V s = set(scale);
    each(count, [&](int64_t i, int n) { put(out + i, get(residual + i, n) + s * get(x + i, n), n); });
}

template <class T>
void embed_rows(const T* table, const int32_t* tokens, float* out, int32_t H, float scale, int32_t row0, int32_t row1) {
    const V s = set(scale);
    for (int64_t r = row0; r < row1; ++r) {
        const T* from = table + int64_t(tokens[r]) * H;
        each(H, [&](int64_t i, int n) { put(out + r * H + i, load(from + i, n) * s, n); });
    }
}

void embed(const void* table, fr::Format format, const int32_t* tokens, float* out, int32_t H, float scale, int32_t row0, int32_t row1) {
    if (format == fr::BF16)
        embed_rows((const bf16*)table, tokens, out, H, scale, row0, row1);
    else
        embed_rows((const float*)table, tokens, out, H, scale, row0, row1);
}

FR_INLINE void rotate(float* x, const float* cos, const float* sin, int half) {
    each(half, [&](int64_t i, int n) {
        V a = get(x + i, n), b = get(x + half + i, n), c = get(cos + i, n), s = get(sin + i, n);
        put(x + i, a * c - b * s, n);
        put(x + half + i, b * c + a * s, n);
    });
}

// Heads head0 … head1 of q and k, counted together. A norm over all heads together needs them all.
void rope(const fr::Rope& r, int32_t row0, int32_t row1, int32_t head0, int32_t head1) {
    const int64_t stride = int64_t(r.heads + 2 * r.kv_heads) * r.D;
    const int q1 = head1 < r.heads ? head1 : r.heads, k0 = head0 > r.heads ? head0 - r.heads : 0, k1 = head1 - r.heads;
    for (int64_t row = row0; row < row1; ++row) {
        float* q = r.qkv + row * stride;
        float* k = q + int64_t(r.heads) * r.D;
        if (r.q_norm)
            for (int i = head0 * r.D; i < q1 * r.D; i += r.q_norm_size) normalize(q + i, r.q_norm, q + i, r.q_norm_size, r.eps);
        if (r.k_norm)
            for (int i = k0 * r.D; i < k1 * r.D; i += r.k_norm_size) normalize(k + i, r.k_norm, k + i, r.k_norm_size, r.eps);
        if (!r.half) continue;
        const int64_t at = int64_t(r.positions[row]) * r.half;
        for (int h = head0; h < head1; ++h) rotate(q + int64_t(h) * r.D, r.cos + at, r.sin + at, r.half);
    }
}

FR_INLINE void narrow(float x, float& to) { to = x; }
FR_INLINE void narrow(float x, bf16& to) { to = round_bf16(x); }

// One entry x [D] → to[0], to[step], … Rounded together first: writing apart is as slow as it is.
template <class T>
FR_INLINE void write_entry(const float* x, int D, T* to, int step) {
    constexpr int PART = 64;
    T part[PART];
    for (int d0 = 0; d0 < D; d0 += PART) {
        const int n = D - d0 < PART ? D - d0 : PART;
        for (int d = 0; d < n; ++d) narrow(x[d0 + d], part[d]);
        for (int d = 0; d < n; ++d) to[int64_t(d0 + d) * step] = part[d];
    }
}

template <class T>
void write_rows(const fr::Entries& e, int row0, int row1, int head0, int head1) {
    for (int row = row0; row < row1; ++row) {
        const int slot = e.slots[row], next = e.slots[row + 4 < row1 ? row + 4 : row];  // a page of another sequence is far away
        for (int head = head0; head < head1; ++head) {
            const bool value = head >= e.kv_heads;
            const int64_t h = value ? head - e.kv_heads : head, size = page_elements<T>(e.D);
            T* cache = (T*)(value ? e.values : e.keys);
            const T* later = cache + (int64_t(next / fr::PAGE) * e.kv_heads + h) * size + (value ? next % fr::PAGE * e.D : 0);
            for (int64_t at = 0; at < (value ? e.D : e.D * fr::PAGE); at += 64 / int(sizeof(T))) __builtin_prefetch(later + at, 1);
            T* page = cache + (int64_t(slot / fr::PAGE) * e.kv_heads + h) * size;
            const int offset = slot % fr::PAGE, step = value ? 1 : fr::PAGE;
            T* to = page + (value ? offset * e.D : offset);
            const float* x = e.kv + row * e.stride + int64_t(head) * e.D;
            if constexpr (SCALED<T>)
                scales_of(page, e.D)[offset] = write_codes(x, e.D, to, step);
            else
                write_entry(x, e.D, to, step);
        }
    }
}

void write_kv(const fr::Entries& e, int32_t row0, int32_t row1, int32_t head0, int32_t head1) {
    if (e.format == fr::BF16)
        write_rows<bf16>(e, row0, row1, head0, head1);
    else if (e.format == fr::INT8)
        write_rows<int8_t>(e, row0, row1, head0, head1);
    else
        write_rows<float>(e, row0, row1, head0, head1);
}

template <int KIND>
void gate_rows(const float* x, float* out, int32_t F, int32_t row0, int32_t row1) {
    for (int64_t r = row0; r < row1; ++r)
        each(F, [&](int64_t i, int n) {
            put(out + r * F + i, activate<KIND>(get(x + 2 * r * F + i, n)) * get(x + (2 * r + 1) * F + i, n), n);
        });
}

void gate(const float* x, float* out, int32_t F, int32_t activation, int32_t row0, int32_t row1) {
    switch (activation) {
        case SILU: return gate_rows<SILU>(x, out, F, row0, row1);
        case GELU: return gate_rows<GELU>(x, out, F, row0, row1);
        case GELU_TANH: return gate_rows<GELU_TANH>(x, out, F, row0, row1);
        case RELU: return gate_rows<RELU>(x, out, F, row0, row1);
        case RELU2: return gate_rows<RELU2>(x, out, F, row0, row1);
    }
}

template <int KIND>
void gate_panels_of(const float* x, const float* gate_bias, const float* up_bias, float* out, int64_t stride, int32_t rows, int32_t count) {
    for (int64_t r = 0; r < rows; ++r, out += stride)
        for (int at = 0; at < count; at += fr::HALF, x += fr::PANEL) {
            const int n = count - at < fr::HALF ? count - at : fr::HALF;
            V gate = load(x), up = load(x + fr::HALF);
            if (gate_bias) gate = gate + get(gate_bias + at, n), up = up + get(up_bias + at, n);
            put(out + at, activate<KIND>(gate) * up, n);
        }
}

void gate_panels(const float* x, const float* gate_bias, const float* up_bias, float* out, int64_t stride, int32_t rows, int32_t count,
                 int32_t activation) {
    static_assert(fr::HALF == LANES);
    switch (activation) {
        case SILU: return gate_panels_of<SILU>(x, gate_bias, up_bias, out, stride, rows, count);
        case GELU: return gate_panels_of<GELU>(x, gate_bias, up_bias, out, stride, rows, count);
        case GELU_TANH: return gate_panels_of<GELU_TANH>(x, gate_bias, up_bias, out, stride, rows, count);
        case RELU: return gate_panels_of<RELU>(x, gate_bias, up_bias, out, stride, rows, count);
        case RELU2: return gate_panels_of<RELU2>(x, gate_bias, up_bias, out, stride, rows, count);
    }
}

// x ← softcap · tanh(scale · x / softcap), or scale · x where softcap is 0.
void cap(float* x, int64_t count, float scale, float softcap) {
    const V s = set(scale), c = set(softcap);
    each(count, [&](int64_t i, int n) {
        V a = get(x + i, n) * s;
        put(x + i, softcap > 0.0f ? c * hyperbolic_tangent(a / c) : a, n);
    });
}

void divide(float* x, int64_t count, float by) {
    const V d = set(by);
    each(count, [&](int64_t i, int n) { put(x + i, get(x + i, n) / d, n); });
}

// The ids from token0 on; scores and noise begin there. Ties go to the lowest id.
void pick_part(const float* scores, const float* noise, int32_t token0, int32_t count, fr::Part* part) {
    const V minus = set(-__builtin_inff());
    V peak = minus, best = minus;
    bool spoilt = false;
    V winner = zero();  // the number of the vector in which each lane's best was first seen
    const Mask all = lanes_from(0, LANES);
    each(count, [&](int64_t i, int n) {
        const Mask valid = n == LANES ? all : lanes_from(0, n);
        V score = get(scores + i, n), total = noise ? score + get(noise + i, n) : score;
        spoilt |= any_nan(total);
        score = select(valid, score, minus);
        total = select(valid, total, minus);
        peak = max(peak, score);
        const Mask better = less(best, total);
        best = select(better, total, best);
        winner = select(better, set(float(i / LANES)), winner);
    });
    const float most = maximum(best), lanes[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const V place = set(float(LANES)) * winner + load(lanes);
    const int chosen = int(-maximum(select(less(best, set(most)), minus, zero() - place)));  // the first of the best
    const float top = maximum(peak);
    const V shift = set(top >= -__FLT_MAX__ ? top : 0.0f);  // a part of which nothing is possible has no mass
    V mass = zero();
    each(count, [&](int64_t i, int n) {
        V e = exponential(get(scores + i, n) - shift);
        if (n < LANES) e = select(lanes_from(0, n), e, zero());
        mass = mass + e;
    });
    *part = {most, scores[chosen], top, sum(mass), token0 + chosen, spoilt};
}

// argmax of score + noise, and log-softmax(scores) there: score − peak − ln Σ mass, parts in ascending order. A NaN anywhere: token −1 and
// NaN.
void pick(const fr::Part* parts, int32_t count, int64_t* token, float* logprob) {
    const fr::Part* best = parts;
    float peak = parts->peak;
    bool spoilt = false;
    for (const fr::Part* part = parts; part != parts + count; ++part) {
        if (part->total > best->total) best = part;
        if (part->peak > peak) peak = part->peak;
        spoilt |= part->spoilt;
    }
    if (spoilt) {
        *token = -1;
        *logprob = __builtin_nanf("");
        return;
    }
    float mass = 0.0f;
    for (int at = 0; at < count; at += LANES) {
        const int n = count - at < LANES ? count - at : LANES;
        float share[LANES] = {};
        for (int l = 0; l < n; ++l) share[l] = parts[at + l].peak;
        store(share, exponential(load(share) - set(peak)));
        for (int l = 0; l < n; ++l) mass += parts[at + l].mass * share[l];
    }
    *token = best->token;
    *logprob = best->score - peak - float(__builtin_log(double(mass)));
}

}  // namespace
