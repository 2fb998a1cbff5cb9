// Products with weights of 8 or 4 bits.
//
// Weights come in groups of 32 along K: w = unit[column] · (scale[group, column] · code + minimum[group, column]). A row of activations is
// rounded to 16 bits span by span of 512: x ≈ step · q with |q| ≤ 32767 reaching the span's largest value. The products of codes and q are
// then whole numbers, and so is their sum, exactly, in any order and on any machine:
//
//   y = unit · Σ over spans, in order, in float:   fma(sum of the span, step, …)
//   sum of a span, one scale a column:   Σ code·q: even 512 · 128 · 32767 fits 32 bits
//   sum of a span, groups, in order, in float:   fma(Σ code·q, scale, …),   then fma(minimum, Σq, …)
//
// So an element of y is one chain again, as in matmul.h, and every instruction set that fuses multiply-add makes the same bits.
//
//   panel of 32 columns:   groups one after the other, then 32 units (float)
//   group, 8 bits:         [k/2: 16][column: 32][k%2] signed bytes
//   group, 4 bits:         [k/8: 4][column: 32][k%2] words of four codes 0 … 15: k/2%4 = 0 in the lowest four bits
//                          then, by format, 32 scales and 32 minima (f16)
//   packed rows (a tile):  [group][row][k/2: 16] pairs of q, then [group][row] what goes with Σq, where a format asks for it: as float, or
//                          where codes stand for code − 8 the integer −8·Σq that the sum starts with; then [span][row] steps
#pragma once

#include "ints.h"
#include "matmul.h"

#define FR_METHOD inline __attribute__((always_inline))

namespace {

constexpr int GROUP = fr::GROUP;
constexpr int PAIRS = GROUP / 2;
constexpr int SPAN = 16;             // groups of activations that share a step
constexpr int LARGEST = 32767;       // of the whole numbers that they are rounded to
constexpr float SMALLEST = 1e-30f;   // a span whose largest value is below counts as zeros
static_assert(int64_t(SPAN) * GROUP * 128 * LARGEST < int64_t(1) << 31);
constexpr int VECTORS = fr::PANEL / LANES;  // of a panel's columns

// Most rows of a tile where groups have scales: the sums of a group and those over groups are KEPT vectors each, and registers hold both. Where
// there are fewer of them, memory holds the latter.
#if defined(__AVX512F__)
constexpr int KEPT = TILE_ROWS, GROUPED_ROWS = TILE_ROWS / VECTORS;
#else
constexpr int KEPT = 2, GROUPED_ROWS = TILE_ROWS;
#endif

// With few rows a chain of sixteen additions would be waited for: whole numbers may be added in several, as the order is free.
// Where a vector is several registers, there are enough sums without.
#if defined(FR_NEON)
constexpr int chains(int) { return 1; }
#elif defined(__AVX512F__)
constexpr int chains(int M) { return M == 1 ? 4 : M <= 4 ? 2 : 1; }
#else
constexpr int chains(int M) { return M == 1 ? 4 : M <= 3 ? 2 : 1; }
#endif

// Codes that a tile asks for on its way, so many bytes a group, a line a pair: all at once they would keep its own loads waiting. From the
// end on they are those of another panel, or none. Beside them what is read later (`soon`, whose steps are pairs). One row asks too, other
// than in matmul.h: multiplying a line of codes takes longer than of bf16, and the machine's own prefetcher falls behind (Zen 5).
struct Fetch {
    const uint8_t* at;
    int64_t step;
    const uint8_t *end, *then;
    Trickle soon{};
    int due = soon.every;
    FR_METHOD void pair(int i) const {
        if (i * 64 < step) __builtin_prefetch(at + i * 64, 0, 2);
    }
    FR_METHOD void next_group() {
        for (int64_t more = PAIRS * 64; more < step; more += 64) __builtin_prefetch(at + more, 0, 2);
        at += step;
        if (at == end) at = then, step = then ? step : 0;
        if (!soon.every) return;
        for (due -= PAIRS; due < 0; due += soon.every) ask(soon);
    }
};

// Sums of a group, M rows by N vectors, in g[row + M · chain]: what the two widths of codes do differently.
struct Bytes {
    static constexpr int CODES = GROUP * fr::PANEL;
    template <int M, int N, int C>
    FR_INLINE void sum(I (&g)[M * C][N], const uint8_t* codes, const int32_t* q, const Fetch& fetch) {
        for (int pairs = 0; pairs < PAIRS; pairs += C)
            for (int c = 0; c < C; ++c) {
                const int pair = pairs + c;
                const int8_t* at = (const int8_t*)codes + pair * 2 * fr::PANEL;
                fetch.pair(pair);
                I w[N];
                for (int j = 0; j < N; ++j) w[j] = load_bytes(at + j * fr::PANEL);
                FR_UNROLL
                for (int m = 0; m < M; ++m) {
                    const I x = splat(q[m * PAIRS + pair]);
                    for (int j = 0; j < N; ++j) g[m + M * c][j] = dot(g[m + M * c][j], w[j], x);
                }
            }
    }
};

struct Nibbles {
    static constexpr int CODES = GROUP * fr::PANEL / 2;
    template <int AT, int M, int N, int C>
    FR_INLINE void plane(I (&g)[M * C][N], const I (&words)[N], const int32_t* q) {
        I w[N];
        for (int j = 0; j < N; ++j) w[j] = nibbles<AT>(words[j]);
        FR_UNROLL
        for (int m = 0; m < M; ++m) {
            const I x = splat(q[m * PAIRS + AT]);
            for (int j = 0; j < N; ++j) g[m + M * (AT % C)][j] = dot(g[m + M * (AT % C)][j], w[j], x);
        }
    }
    template <int M, int N, int C>
    FR_INLINE void sum(I (&g)[M * C][N], const uint8_t* codes, const int32_t* q, const Fetch& fetch) {
        for (int octet = 0; octet < PAIRS / 4; ++octet) {
            const uint16_t* at = (const uint16_t*)codes + octet * 2 * fr::PANEL;
            for (int i = 0; i < 4; ++i) fetch.pair(4 * octet + i);
            I words[N];
            for (int j = 0; j < N; ++j) words[j] = load_words(at + j * fr::PANEL);
            plane<0, M, N, C>(g, words, q + 4 * octet);
            plane<1, M, N, C>(g, words, q + 4 * octet);
            plane<2, M, N, C>(g, words, q + 4 * octet);
            plane<3, M, N, C>(g, words, q + 4 * octet);
        }
    }
};

// Bytes of a group: codes, and by format scales and minima.
FR_INLINE int group_bytes(fr::Format format) {
    const int codes = format == fr::INT8 || format == fr::INT8_GROUPS ? Bytes::CODES : Nibbles::CODES;
    return codes + 2 * fr::PANEL * (int(format != fr::INT8) + int(format == fr::INT4));
}

// Of a packed row: pairs, what goes with their sums, steps.
FR_INLINE int64_t row_words(int groups) { return int64_t(groups) * (PAIRS + 1) + (groups + SPAN - 1) / SPAN; }

// Sums of M rows by N vectors: in registers, or where others need them all, in memory meanwhile.
template <int M, int N, bool IN_REGISTERS>
struct Sums {
    V at[M][N];
    FR_METHOD V get(int m, int j) { return at[m][j]; }
    FR_METHOD void put(int m, int j, V value) { at[m][j] = value; }
    FR_METHOD void leave() {}
};

template <int M, int N>
struct Sums<M, N, false> {
    alignas(64) float at[M][N][LANES];
    FR_METHOD V get(int m, int j) { return load(at[m][j]); }
    FR_METHOD void put(int m, int j, V value) { store(at[m][j], value); }
    FR_METHOD void leave() { asm volatile("" : : "r"(at) : "memory"); }  // lest the compiler carries them along
};

// A block of some rows by a panel, from a span's beginning: `scales` and `units` of its first column, `codes` too.
struct Block {
    int bytes;  // of a group
    const uint8_t* codes;
    const uint16_t* scales;
    const float* units;
    const int32_t* x;       // pairs of the packed rows
    const int32_t* totals;  // one a row and group
    const float* steps;     // one a row and span
};

// The sums of a span, M rows by N vectors, from `a` on, which moves behind them. One scale a column: a sum of whole numbers.
struct Columns {
    using Codes = Bytes;
    static constexpr int ROWS = TILE_ROWS;
    template <int M, int N>
    FR_INLINE void span(Block& a, int groups, Fetch& fetch, V (&sum)[M][N]) {
        constexpr int C = chains(M);
        I g[M * C][N];
        FR_UNROLL
        for (int m = 0; m < M * C; ++m)
            for (int j = 0; j < N; ++j) g[m][j] = splat(0);
        for (int s = 0; s < groups; ++s, a.codes += Codes::CODES, a.x += M * PAIRS, fetch.next_group())
            Codes::sum<M, N, C>(g, a.codes, a.x, fetch);
        FR_UNROLL
        for (int m = 0; m < M; ++m)
            for (int j = 0; j < N; ++j) {
                for (int c = 1; c < C; ++c) g[m][j] = g[m][j] + g[m + M * c][j];
                sum[m][j] = to_float(g[m][j]);
            }
    }
};

// A scale a group. OFFSET: codes stand for code − 8. MINIMA: and a minimum.
template <class CODES, bool OFFSET, bool MINIMA>
struct Groups {
    using Codes = CODES;
    static constexpr int ROWS = GROUPED_ROWS;
    template <int M, int N>
    FR_INLINE void span(Block& a, int groups, Fetch& fetch, V (&sum)[M][N]) {
        constexpr int C = chains(M);
        Sums<M, N, (M * N <= KEPT)> sums;
        FR_UNROLL
        for (int m = 0; m < M; ++m)
            for (int j = 0; j < N; ++j) sums.put(m, j, zero());
        for (int s = 0; s < groups; ++s, a.codes += a.bytes, a.scales += a.bytes / 2, a.x += M * PAIRS, a.totals += M, fetch.next_group()) {
            I g[M * C][N];
            FR_UNROLL
            for (int m = 0; m < M * C; ++m)
                for (int j = 0; j < N; ++j) g[m][j] = splat(OFFSET && m < M ? a.totals[m] : 0);
            sums.leave();
            Codes::template sum<M, N, C>(g, a.codes, a.x, fetch);
            sums.leave();
            for (int m = M; m < M * C; ++m)
                for (int j = 0; j < N; ++j) g[m % M][j] = g[m % M][j] + g[m][j];
            for (int j = 0; j < N; ++j) {
                const V by = load_half(a.scales + j * LANES);
                FR_UNROLL
                for (int m = 0; m < M; ++m) sums.put(m, j, fma(to_float(g[m][j]), by, sums.get(m, j)));
            }
            if constexpr (MINIMA)
                for (int j = 0; j < N; ++j) {
                    const V minimum = load_half(a.scales + fr::PANEL + j * LANES);
                    FR_UNROLL
                    for (int m = 0; m < M; ++m) sums.put(m, j, fma(minimum, set(((const float*)a.totals)[m]), sums.get(m, j)));
                }
        }
        FR_UNROLL
        for (int m = 0; m < M; ++m)
            for (int j = 0; j < N; ++j) sum[m][j] = sums.get(m, j);
    }
};

// A span's sums join those of the spans before, which rest in y: registers hold only one of both, and a block that ends K is finished there.
template <int M, int N, bool FULL>
FR_INLINE void join(const Tile& t, const Block& a, bool first, bool last, const V (&sum)[M][N]) {
    for (int j = 0; j < N; ++j) {
        const int left = FULL ? LANES : t.columns - j * LANES, n = left > LANES ? LANES : left;
        if (n <= 0) continue;
        const bool biased = last && t.bias;
        const V unit = last ? load(a.units + j * LANES) : zero();
        const V bias = !biased ? zero() : FULL ? load(t.bias + j * LANES) : load(t.bias + j * LANES, n);
        FR_UNROLL
        for (int m = 0; m < M; ++m) {
            float* y = t.y + m * t.y_stride + j * LANES;
            V value = fma(sum[m][j], set(a.steps[m]), first ? zero() : FULL ? load(y) : load(y, n));
            if (last) value = value * unit;
            if (biased) value = value + bias;
            FULL ? store(y, value) : store(y, value, n);
        }
    }
}

// M rows by a panel, `t.steps` groups.
template <class Scaled, int M>
void block_tile(const Tile& t, Block a, Fetch fetch) {
    constexpr int N = VECTORS;
    const bool full = t.columns >= N * LANES;
    if (t.first) {  // the sums come to rest where nothing was read: ask for the lines now
        FR_UNROLL
        for (int m = 0; m < M; ++m)
            for (int j = 0; j < N; ++j) __builtin_prefetch(t.y + m * t.y_stride + j * LANES, 1);
    }
    for (int s = 0; s < t.steps; s += SPAN, a.steps += M) {
        V sum[M][N];
        Scaled::template span<M, N>(a, t.steps - s < SPAN ? t.steps - s : SPAN, fetch, sum);
        const bool first = t.first && s == 0, last = t.last && s + SPAN >= t.steps;
        full ? join<M, N, true>(t, a, first, last, sum) : join<M, N, false>(t, a, first, last, sum);
    }
}

// A tile of exactly `rows` rows, at most MOST.
template <class Scaled, int MOST = Scaled::ROWS>
FR_INLINE void run_block(int rows, const Tile& t, const Block& a, const Fetch& fetch) {
    if constexpr (MOST > 0) {
        if (rows != MOST) return run_block<Scaled, MOST - 1>(rows, t, a, fetch);
        block_tile<Scaled, MOST>(t, a, fetch);
    }
}

// Codes arrive while others are multiplied, as in matmul.h: the runs over a block each fetch their share of what comes next, be it another
// task's. A single run fetches some groups ahead, and so does the first one of a thread.
template <class Scaled>
void multiply_codes(const fr::Product& p, int panel0, int panel1, int tile0, int tile1) {
    typedef typename Scaled::Codes Codes;
    const int groups = (p.K + GROUP - 1) / GROUP, bytes = group_bytes(p.format), runs = tile1 - tile0;
    const int64_t stride = int64_t(fr::panel_bytes(p.format, p.K));
    const int block = runs == 1 ? groups : K_BLOCK / GROUP;
    for (int panel = panel0; panel < panel1; ++panel) {
        const uint8_t* first = (const uint8_t*)p.w + panel * stride;
        const float* units = (const float*)(first + int64_t(groups) * bytes);
        for (int s = 0; s < groups; s += block) {
            const int here = groups - s < block ? groups - s : block, column = panel * fr::PANEL;
            const uint8_t* codes = first + int64_t(s) * bytes;
            const uint8_t* behind = s + here < groups    ? codes + int64_t(here) * bytes
                                    : panel + 1 < panel1 ? first + stride
                                    : p.next < 0         ? nullptr
                                                         : (const uint8_t*)p.w + p.next * stride;
            const int cold = runs > 1 && p.cold && panel == panel0 && s == 0;
            const int64_t share = behind ? (bytes / (runs - cold) + 63) / 64 * 64 : 0;
            const int near = int(AHEAD) / bytes < here ? int(AHEAD) / bytes : here - 1;
            for (int t = tile0; t < tile1; ++t) {
                const int row = tile_start(p, t), rows = tile_start(p, t + 1) - row, run = t - tile0 - cold;
                const int32_t* x = (const int32_t*)p.packed + row * row_words(groups);
                const int32_t* totals = x + int64_t(groups) * PAIRS * rows;
                const float* steps = (const float*)(totals + groups * rows) + s / SPAN * rows;
                const Tile job{here, 0, p.y + row * p.y_stride + (column - p.y_column), p.y_stride, p.bias ? p.bias + column : nullptr,
                               p.N - column, s == 0, s + here == groups, 0};
                const Trickle soon = trickle(p, groups * PAIRS, panel, t, s * PAIRS, here * PAIRS);
                const Block a{bytes, codes, (const uint16_t*)(codes + Codes::CODES), units,
                              x + int64_t(s) * PAIRS * rows, totals + s * rows, steps};
                if (runs == 1 || run < 0)
                    run_block<Scaled>(rows, job, a, {codes + near * bytes, bytes, codes + here * bytes, runs == 1 ? behind : nullptr, soon});
                else
                    run_block<Scaled>(rows, job, a, {behind + share * here * run, share, nullptr, nullptr, soon});
            }
        }
    }
}

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

// Rows lie group by group and not k by k, as bf16's do: nothing is transposed, and a multiplication spreads a pair from any place as fast.
// TOTALS: something goes with Σq. OFFSET: namely −8·Σq.
template <bool TOTALS, bool OFFSET>
void pack_groups(const fr::Product& p, int tile0, int tile1) {
    const int groups = (p.K + GROUP - 1) / GROUP;
    for (int t = tile0; t < tile1; ++t) {
        const int row = tile_start(p, t), M = tile_start(p, t + 1) - row;
        int32_t* const pairs = (int32_t*)p.packed + row * row_words(groups);
        int32_t* const totals = pairs + int64_t(groups) * PAIRS * M;
        float* const steps = (float*)(totals + groups * M);
        for (int m = 0; m < M; ++m) {
            const float* x = p.x + int64_t(row + m) * p.K;
            for (int s = 0; s < groups; s += SPAN) {
                const int end = s + SPAN < groups ? s + SPAN : groups, width = p.K - s * GROUP;
                const Rounding made = rounding(x + s * GROUP, width < SPAN * GROUP ? width : SPAN * GROUP);
                steps[s / SPAN * M + m] = made.step;
                for (int g = s; g < end; ++g) {
                    const float total = round_group(x + g * GROUP, p.K - g * GROUP, made.inverse, pairs + (int64_t(g) * M + m) * PAIRS);
                    if constexpr (TOTALS && OFFSET) totals[g * M + m] = int32_t(-8.0f * total);
                    if constexpr (TOTALS && !OFFSET) memcpy(totals + g * M + m, &total, 4);
                }
            }
        }
    }
}

// What run.cpp calls for any format.

size_t packed_bytes_any(fr::Format format, int32_t K) {
    return format >= fr::INT8 ? size_t(row_words((K + GROUP - 1) / GROUP)) * 4 : packed_bytes(format, K);
}

int32_t tiles_any(fr::Format format, int32_t rows) {
    return format > fr::INT8 ? (rows + GROUPED_ROWS - 1) / GROUPED_ROWS : tiles_of(rows);
}

void pack_rows_any(const fr::Product& p, int32_t tile0, int32_t tile1) {
    if (p.format < fr::INT8) return pack_rows(p, tile0, tile1);
    if (p.format < fr::INT4) return pack_groups<false, false>(p, tile0, tile1);
    p.format == fr::INT4 ? pack_groups<true, false>(p, tile0, tile1) : pack_groups<true, true>(p, tile0, tile1);
}

void multiply_any(const fr::Product& p, int32_t panel0, int32_t panel1, int32_t tile0, int32_t tile1) {
    if (p.format < fr::INT8) return multiply(p, panel0, panel1, tile0, tile1);
    if (p.format == fr::INT8) return multiply_codes<Columns>(p, panel0, panel1, tile0, tile1);
    if (p.format == fr::INT8_GROUPS) return multiply_codes<Groups<Bytes, false, false>>(p, panel0, panel1, tile0, tile1);
    if (p.format == fr::INT4) return multiply_codes<Groups<Nibbles, false, true>>(p, panel0, panel1, tile0, tile1);
    multiply_codes<Groups<Nibbles, true, false>>(p, panel0, panel1, tile0, tile1);
}

}  // namespace
