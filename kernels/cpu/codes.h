// Sums of codes and whole numbers, by dot products of pairs: what quant.h's tiles consist of.
#pragma once

#include "ints.h"
#include "rounding.h"
#include "stream.h"

#define FR_METHOD inline __attribute__((always_inline))

namespace {

constexpr int PAIRS = GROUP / 2;

// Rows that are crossed, of M. A dot product of the codes w, w' and the numbers x, x' of two pairs of k is, of whole numbers modulo 2³² and so
// exactly, (w + x')·(w' + x) − w·w' − x·x': one instead of two, and two additions, which some machines have other units for (AMD since Zen 4,
// not Intel). w·w' is the same for all rows and needs another dot product, x·x' is known when a row is packed. Five rows of eight keep
// all units busy.
#if defined(__AVX512VNNI__)
constexpr int crossed_rows(int M) { return M < 5 ? 0 : M * 5 / 8; }
#else
constexpr int crossed_rows(int) { return 0; }
#endif
// Whether row m of M is one of W that are, which lie between the others.
constexpr bool is_crossed(int m, int M, int W) { return m * W / M != (m + 1) * W / M; }

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

// Two pairs of k, their codes v and w, and M rows from x on, of which W are crossed: what they add to the sums. g[M]: to those of v·w.
template <int M, int N, int W>
FR_INLINE void cross(I (&g)[M + 1][N], const I (&v)[N], const I (&w)[N], const int32_t* x) {
    FR_UNROLL
    for (int m = 0; m < M; ++m) {
        const I a = splat(x[m * PAIRS]), b = splat(x[m * PAIRS + 1]);
        for (int j = 0; j < N; ++j)
            g[m][j] = is_crossed(m, M, W) ? dot(g[m][j], add_halves(v[j], b), add_halves(w[j], a)) : dot(dot(g[m][j], v[j], a), w[j], b);
    }
    for (int j = 0; j < N; ++j) g[M][j] = dot(g[M][j], v[j], w[j]);
}

// Sums of a group, M rows by N vectors, in g[row + M · chain], or with rows that are crossed: what the two widths of codes do differently.
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
    template <int M, int N, int W>
    FR_INLINE void sum_crossed(I (&g)[M + 1][N], const uint8_t* codes, const int32_t* q, const Fetch& fetch) {
        for (int pair = 0; pair < PAIRS; pair += 2) {
            const int8_t* at = (const int8_t*)codes + pair * 2 * fr::PANEL;
            fetch.pair(pair), fetch.pair(pair + 1);
            I v[N], w[N];
            for (int j = 0; j < N; ++j) v[j] = load_bytes(at + j * fr::PANEL), w[j] = load_bytes(at + (j + 2) * fr::PANEL);
            cross<M, N, W>(g, v, w, q + pair);
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
    template <int M, int N, int W>
    FR_INLINE void sum_crossed(I (&g)[M + 1][N], const uint8_t* codes, const int32_t* q, const Fetch& fetch) {
        for (int octet = 0; octet < PAIRS / 4; ++octet) {
            const uint16_t* at = (const uint16_t*)codes + octet * 2 * fr::PANEL;
            for (int i = 0; i < 4; ++i) fetch.pair(4 * octet + i);
            I v[N], w[N];
            for (int j = 0; j < N; ++j) v[j] = nibbles<0>(load_words(at + j * fr::PANEL)), w[j] = nibbles<1>(load_words(at + j * fr::PANEL));
            cross<M, N, W>(g, v, w, q + 4 * octet);
            for (int j = 0; j < N; ++j) v[j] = nibbles<2>(load_words(at + j * fr::PANEL)), w[j] = nibbles<3>(load_words(at + j * fr::PANEL));
            cross<M, N, W>(g, v, w, q + 4 * octet + 2);
        }
    }
};

// Sums of whole numbers, M rows by N vectors, of which W rows are crossed.
template <class Codes, int M, int N, int W>
struct Whole {
    static constexpr int C = chains(M), LINES = W ? M + 1 : M * C;
    I at[LINES][N];
    // `starts`: one a row, for all of them or those that are crossed, or null.
    FR_METHOD void begin(const int32_t* starts, bool all = false) {
        FR_UNROLL
        for (int m = 0; m < LINES; ++m)
            for (int j = 0; j < N; ++j) at[m][j] = splat(m < M && starts && (all || is_crossed(m, M, W)) ? starts[m] : 0);
    }
    FR_METHOD void add(const uint8_t* codes, const int32_t* x, const Fetch& fetch) {
        if constexpr (W > 0)
            Codes::template sum_crossed<M, N, W>(at, codes, x, fetch);
        else
            Codes::template sum<M, N, C>(at, codes, x, fetch);
    }
    FR_METHOD I get(int m, int j) const {
        if constexpr (W > 0) return is_crossed(m, M, W) ? at[m][j] - at[M][j] : at[m][j];
        I sum = at[m][j];
        for (int c = 1; c < C; ++c) sum = sum + at[m + M * c][j];
        return sum;
    }
};

}  // namespace
