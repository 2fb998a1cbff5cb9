// Products of activations with packed weights.
//
// One rule makes them batch-invariant: an element of y is one chain of accumulations over k = 0, 1, 2, …, in one lane. Which rows share
// a tile, which panels share a task and where K is cut (the partial sum is stored and loaded again, exactly) changes nothing.
//
//   packed weight of 32 columns (a panel)        packed rows (a tile of M)
//   bf16: [k/2][column][k%2]                      with bf16 dot products [k/2][row][k%2] bf16
//   f32:  [k][column]                             else                   [k][row] float
//
// For few rows the weights stream from memory once; for many, a block of a panel stays in cache while all row tiles pass over it.
#pragma once

#include "kernels.h"
#include "stream.h"
#include "vec.h"
#if defined(FR_NEON)
#include "neon_bf16.h"
#endif

namespace {

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 14;   // 28 accumulators of 32 registers
constexpr int TWIN_ROWS = 4;    // up to here two panels at once, if they lie in cache
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 3;    // 12 accumulators of 16 registers
constexpr int TWIN_ROWS = 1;
#elif defined(FR_NEON)
constexpr int TILE_ROWS = 3;    // 24 accumulators of 32 registers
constexpr int TWIN_ROWS = 1;
#else
#if !defined(FR_ROWS)
#define FR_ROWS 4  // fewer where sanitizers watch every access to the plain arrays: compiling them takes minutes
#endif
constexpr int TILE_ROWS = FR_ROWS;
constexpr int TWIN_ROWS = 0;
#endif

#if defined(__AVX512BF16__) || defined(FR_NEON_DOTS)
constexpr bool DOTS = true;
#else
constexpr bool DOTS = false;
#endif

// One step of the chain: `K` elements of k. Weights and activations of a step, and how they meet in M rows by N vectors of columns: half a panel,
// one, or two.
struct StepF32 {
    static constexpr int K = 1;
    static constexpr int W = fr::PANEL;  // weight elements of a panel in a step
    static constexpr int A = 1;          // activation elements of a row in a step
    typedef float Weight;
    typedef float Act;
    template <int M, int N>
    FR_INLINE void go(V (&acc)[M][N], const Weight* const (&w)[(N + 1) / 2], const Act* x) {
        V b[N];
        for (int j = 0; j < N; ++j) b[j] = load(w[j / 2] + j % 2 * LANES);
        FR_UNROLL
        for (int m = 0; m < M; ++m) {
            V a = set(x[m]);
            for (int j = 0; j < N; ++j) acc[m][j] = fma(a, b[j], acc[m][j]);
        }
    }
};

#if defined(__AVX512BF16__)
struct StepBf16 {
    static constexpr int K = 2;
    static constexpr int W = fr::PANEL * 2;
    static constexpr int A = 1;
    typedef bf16 Weight;
    typedef uint32_t Act;  // two bf16
    template <int M, int N>
    FR_INLINE void go(V (&acc)[M][N], const Weight* const (&w)[(N + 1) / 2], const Act* x) {
        __m512bh b[N];
        for (int j = 0; j < N; ++j) b[j] = (__m512bh)_mm512_load_si512(w[j / 2] + j % 2 * 2 * LANES);
        FR_UNROLL
        for (int m = 0; m < M; ++m) {
            __m512bh a = (__m512bh)_mm512_set1_epi32(int(x[m]));
            for (int j = 0; j < N; ++j) acc[m][j].x = _mm512_dpbf16_ps(acc[m][j].x, b[j], a);
        }
    }
};
#elif !defined(FR_NEON_DOTS)
#if !defined(FR_NEON)
// 16 columns, two k each → the even and the odd k as floats.
FR_INLINE void split_pairs(const bf16* w, V& even, V& odd) {
#if defined(__AVX512F__)
    __m512i pair = _mm512_load_si512(w);
    even.x = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
    odd.x = _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(int(0xffff0000u))));
#elif defined(__AVX2__)
    const __m256i high = _mm256_set1_epi32(int(0xffff0000u));
    __m256i a = _mm256_load_si256((const __m256i*)w), b = _mm256_load_si256((const __m256i*)(w + 16));
    even = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
    odd = {_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high))};
#else
    for (int l = 0; l < LANES; ++l) even.x[l] = widen(w[2 * l]), odd.x[l] = widen(w[2 * l + 1]);
#endif
}
#endif

struct StepBf16 {
    static constexpr int K = 2;
    static constexpr int W = fr::PANEL * 2;
    static constexpr int A = 2;
    typedef bf16 Weight;
    typedef float Act;  // already rounded to bf16; [2][M] a step
    template <int M, int N>
    FR_INLINE void go(V (&acc)[M][N], const Weight* const (&w)[(N + 1) / 2], const Act* x) {
        for (int j = 0; j < N; ++j) {
            V even, odd;
            split_pairs(w[j / 2] + j % 2 * 2 * LANES, even, odd);
            for (int m = 0; m < M; ++m) acc[m][j] = fma(set(x[M + m]), odd, fma(set(x[m]), even, acc[m][j]));
        }
    }
};
#endif

struct Tile {
    int steps;          // of this block of K
    int64_t w_stride;   // weight elements from panel to panel
    float* y;
    int64_t y_stride;
    const float* bias;  // of the first column, or null; added with the last block
    int columns;        // valid ones
    bool first, last;   // block of K
    int64_t ahead;      // fetch weights so many bytes ahead, 0 = not
    const char* next = nullptr;  // or fetch what is multiplied next from here on,
    int64_t next_step = 0;       // so many bytes a step,
    Trickle soon{};              // and what is read later
};

template <int M, int N, bool FULL>
FR_INLINE void begin(const Tile& t, V (&acc)[M][N]) {
    FR_UNROLL
    for (int m = 0; m < M; ++m)
        for (int j = 0; j < N; ++j) acc[m][j] = zero();
    if (t.first) return;
    FR_UNROLL
    for (int m = 0; m < M; ++m)
        for (int j = 0; j < N; ++j) {
            const int left = t.columns - j * LANES;
            const float* y = t.y + m * t.y_stride + j * LANES;
            acc[m][j] = left <= 0 ? zero() : FULL || left >= LANES ? load(y) : load(y, left);
        }
}

template <int M, int N, bool FULL>
FR_INLINE void finish(const Tile& t, const V (&acc)[M][N]) {
    for (int j = 0; j < N; ++j) {
        const int left = FULL ? LANES : t.columns - j * LANES, n = left > LANES ? LANES : left;
        if (n <= 0) continue;
        const bool biased = t.last && t.bias;
        const V bias = biased ? (FULL ? load(t.bias + j * LANES) : load(t.bias + j * LANES, n)) : zero();
        FR_UNROLL
        for (int m = 0; m < M; ++m) {
            const V value = biased ? acc[m][j] + bias : acc[m][j];
            float* y = t.y + m * t.y_stride + j * LANES;
            FULL ? store(y, value) : store(y, value, n);
        }
    }
}

template <class Step, int M, int N>
void tile(const Tile& t, const typename Step::Weight* panel, const typename Step::Act* x) {
    constexpr int PANELS = (N + 1) / 2, BYTES = Step::W * int(sizeof(typename Step::Weight)) * N / 2;  // that a step reads
    const bool full = t.columns >= N * LANES;
    V acc[M][N];
    if (t.first) {  // the sums come to rest where nothing was read: ask for the lines now
        FR_UNROLL
        for (int m = 0; m < M; ++m)
            for (int j = 0; j < N; ++j) __builtin_prefetch(t.y + m * t.y_stride + j * LANES, 1);
    }
    full ? begin<M, N, true>(t, acc) : begin<M, N, false>(t, acc);
    const typename Step::Weight* w[PANELS];
    for (int p = 0; p < PANELS; ++p) w[p] = panel + p * t.w_stride;
    const auto step = [&] {
        Step::template go<M, N>(acc, w, x);
        for (int p = 0; p < PANELS; ++p) w[p] += Step::W;
        x += M * Step::A;
    };
    if (t.ahead) {
        for (int s = 0; s < t.steps; ++s) {
            for (int p = 0; p < PANELS; ++p)
                for (int line = 0; line < BYTES / PANELS; line += 64) __builtin_prefetch((const char*)w[p] + t.ahead + line, 0, 2);
            step();
        }
    } else if (t.next) {
        const char* next = t.next;
        Trickle soon = t.soon;
        for (int s = 0, due = soon.every; s < t.steps; ++s, next += t.next_step) {
            __builtin_prefetch(next, 0, 2);
            if (--due == 0) ask(soon), due = soon.every;
            step();
        }
    } else {
        for (int s = 0; s < t.steps; ++s) step();
    }
    full ? finish<M, N, true>(t, acc) : finish<M, N, false>(t, acc);
}

template <class Step>
using TileFn = void (*)(const Tile&, const typename Step::Weight*, const typename Step::Act*);

// A tile of exactly `rows` rows, between LEAST and MOST, and N vectors.
template <class Step, int N, int LEAST, int MOST>
FR_INLINE TileFn<Step> choose(int rows) {
    if constexpr (MOST < LEAST) {
        return nullptr;
    } else {
        return rows == MOST ? tile<Step, MOST, N> : choose<Step, N, LEAST, MOST - 1>(rows);
    }
}

// Into how many tiles so many rows are cut.
FR_INLINE int tiles_of(int rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }

template <class Step>
void multiply_format(const fr::Product& p, int panel0, int panel1, int tile0, int tile1) {
    typedef typename Step::Weight Weight;
    typedef typename Step::Act Act;
    const int steps = (p.K + Step::K - 1) / Step::K;
    const int64_t w_stride = int64_t(steps) * Step::W, x_row = int64_t(steps) * Step::A;
    const int most = (p.rows + p.tiles - 1) / p.tiles;
    const bool alone = tile1 - tile0 == 1;
    const int block = alone ? steps : K_BLOCK / Step::K;
    const bool near = int64_t(p.N + fr::PANEL - 1) / fr::PANEL * w_stride * int64_t(sizeof(Weight)) <= TWIN_BYTES;
    const int runs = tile1 - tile0;  // over the same weights, which a core's own cache keeps meanwhile
    for (int panel = panel0; panel < panel1;) {
        const int twin = near && most <= TWIN_ROWS && panel + 1 < panel1 ? 2 : 1;
        const Weight* w = (const Weight*)p.w + panel * w_stride;
        for (int s = 0; s < steps; s += block) {
            const int here = steps - s < block ? steps - s : block;
            const Weight* from = w + int64_t(s) * Step::W;
            // Weights arrive while others are multiplied. With a single run they are fetched shortly ahead; with several, each run fetches
            // its share of the block that comes next, be it another task's. Nobody has done that for a thread's first block.
            const bool cold = runs == 1 || (p.cold && panel == panel0 && s == 0);
            const Weight* behind = s + here < steps || panel + twin < panel1 ? from + int64_t(here) * Step::W
                                   : p.next < 0                              ? nullptr
                                                                             : (const Weight*)p.w + p.next * w_stride;
            const int64_t step = int64_t(Step::W * sizeof(Weight)) / (cold && !alone ? runs - 1 : runs);
            for (int t = tile0; t < tile1; ++t) {
                const int row = tile_start(p, t), rows = tile_start(p, t + 1) - row;
                const Act* x = (const Act*)p.packed + row * x_row + int64_t(s) * rows * Step::A;
                const int column = panel * fr::PANEL;
                const bool ahead = cold && t == tile0 && !(p.unasked && p.rows == 1);
                const char* next = ahead || runs == 1 || !behind ? nullptr : (const char*)behind + here * step * (t - tile0 - cold);
                const Tile job{here, w_stride, p.y + row * p.y_stride + (column - p.y_column), p.y_stride, p.bias ? p.bias + column : nullptr,
                               p.N - column, s == 0, s + here == steps, ahead ? AHEAD : 0, next, step,
                               next ? trickle(p, steps, panel, t, s, here) : Trickle{}};
                if (twin == 2)
                    choose<Step, 4, 1, TWIN_ROWS>(rows)(job, from, x);
                else
                    choose<Step, 2, 1, TILE_ROWS>(rows)(job, from, x);
            }
        }
        panel += twin;
    }
}

void multiply(const fr::Product& p, int32_t panel0, int32_t panel1, int32_t tile0, int32_t tile1) {
    if (p.format == fr::BF16)
        multiply_format<StepBf16>(p, panel0, panel1, tile0, tile1);
    else
        multiply_format<StepF32>(p, panel0, panel1, tile0, tile1);
}

size_t packed_bytes(fr::Format format, int32_t K) {
    if (format == fr::F32) return size_t(K) * 4;
    return size_t((K + 1) / 2) * (DOTS ? 4 : 8);
}

#if defined(__AVX512BF16__)
// r[i][j] ↔ r[j][i].
FR_INLINE void transpose(__m512i (&r)[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    for (int i = 0; i < 16; i += 4)
        for (int h = 0; h < 2; ++h) {
            r[i + 2 * h] = _mm512_unpacklo_epi64(t[i + h], t[i + h + 2]);
            r[i + 2 * h + 1] = _mm512_unpackhi_epi64(t[i + h], t[i + h + 2]);
        }
    // r[4a + c] holds column c of each quarter q for the rows 4a … 4a+3: gather the quarters.
    for (int c = 0; c < 4; ++c) {
        const __m512i ab = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), ab2 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
        const __m512i cd = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88), cd2 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
        t[c] = _mm512_shuffle_i32x4(ab, cd, 0x88), t[8 + c] = _mm512_shuffle_i32x4(ab, cd, 0xdd);
        t[4 + c] = _mm512_shuffle_i32x4(ab2, cd2, 0x88), t[12 + c] = _mm512_shuffle_i32x4(ab2, cd2, 0xdd);
    }
    for (int i = 0; i < 16; ++i) r[i] = t[i];
}

constexpr int FETCH_ROWS = 64;  // floats that are fetched ahead of each row

// K columns of `count` ≤ 16 rows of a tile of M, side by side.
void pack_together(const float* x, int64_t stride, int K, int count, uint32_t* to, int M) {
    const __mmask16 rows = __mmask16((1u << count) - 1);
    for (int k = 0; k < K; k += 2 * LANES, to += LANES * M) {
        __m512i r[16];
        for (int i = 0; i < count; ++i) {  // more rows than the machine's own prefetcher follows
            const float* later = x + i * stride + k + FETCH_ROWS;
            __builtin_prefetch(later), __builtin_prefetch(later + LANES);
        }
        for (int i = 0; i < 16; ++i) r[i] = i < count ? pairs(x + i * stride + k, K - k) : _mm512_setzero_si512();
        transpose(r);
        for (int i = 0; i < LANES && 2 * i < K - k; ++i) _mm512_mask_storeu_epi32(to + int64_t(i) * M, rows, r[i]);
    }
}
#endif

void pack_columns(const fr::Product& p, int32_t t, const float* x, int64_t stride, int32_t k0, int32_t count) {
    const int row = tile_start(p, t), M = tile_start(p, t + 1) - row;
    char* out = (char*)p.packed + row * packed_bytes(p.format, p.K) + packed_bytes(p.format, k0) * M;
    for (int m = 0; m < M; ++m, x += stride) {
        if (p.format == fr::F32) {
            float* to = (float*)out + m;
            for (int k = 0; k < count; ++k) to[int64_t(k) * M] = x[k];
            continue;
        }
#if defined(__AVX512BF16__)
        if (M >= 4) {
            if (m % LANES == 0) pack_together(x, stride, count, M - m < LANES ? M - m : LANES, (uint32_t*)out + m, M);
            continue;
        }
        uint32_t* to = (uint32_t*)out + m;
        for (int k = 0; k < count; k += 2 * LANES, to += LANES * M) {
            const int left = count - k;
            alignas(64) uint32_t pair[LANES];
            _mm512_store_si512(pair, pairs(x + k, left));
            for (int i = 0; i < LANES && 2 * i < left; ++i) to[i * M] = pair[i];
        }
#elif defined(FR_NEON_DOTS)
        pack_pairs(x, count, (uint32_t*)out + m, M);
#else
        float* to = (float*)out + m;
        for (int k = 0; k < count; ++k) to[int64_t(k) * M] = widen(round_bf16(x[k]));
        if (count % 2) to[int64_t(count) * M] = 0.0f;
#endif
    }
}

void pack_rows(const fr::Product& p, int32_t tile0, int32_t tile1) {
    for (int t = tile0; t < tile1; ++t) pack_columns(p, t, p.x + int64_t(tile_start(p, t)) * p.K, p.K, 0, p.K);
}

}  // namespace
