// Products with bf16 weights by AMX: the weights lie as in matmul.h, and a step is 32 k of sixteen columns, a tile.
//
//   tile of weights: [k/2: 16][column: 16][k%2], a row every 128 bytes of the panel, whose two halves are two tiles
//   packed rows (a row tile of M ≤ 32): [k/32][row][k: 32], filled up with zeros, so that sixteen rows are a tile
//
//   32 rows by one panel               16 rows by one panel, or by two
//             B6   B7                            B5   B6 │ B7   B5
//        A4   S0   S1                       A4   S0   S1 │ S2   S3
//        A5   S2   S3
//
// A sum's rounding: of a step the even k are added up from zero, each product fused into its addition, and the odd k beside them; then both
// are added to each other and what they make to the sum. Everything rounds to nearest even, and subnormal numbers count as zeros. That is not the
// order of AVX512-BF16, so any number of rows goes through here. Steps begin at multiples of 32 whatever the blocks of K, and a sum that is
// stored between two blocks is loaded again as it was: one chain, as matmul.h has it.
#pragma once

#include "amx.h"
#include "kernels.h"
#include "stream.h"
#include "vec.h"

namespace {

constexpr int DEPTH = 2 * SIDE;          // k of a step
constexpr int PAIR_ROW = fr::PANEL * 4;  // bytes of two k of a panel
constexpr int STEP = SIDE * PAIR_ROW;    // bytes of a step
constexpr int MOST_ROWS = 2 * SIDE;      // of a row tile
constexpr int GROUP_PANELS = 4;          // that a row tile meets one after the other, where many do
constexpr int FEW_RUNS = 4;              // over a panel, of which the first one waits for memory

// The sums of a row tile by one panel or two.
struct Sums {
    float* y;
    int64_t stride;     // floats
    const float* bias;  // of the first column, or null; added with the last block
    int rows, columns;  // valid ones
    bool whole;         // all that the shape has are valid
    bool first, last;   // block of K
};

// Weights on their way from memory: the step that is multiplied and the one behind it, in a core's nearest cache. Tiles that are loaded from
// there let one thread read 16.5 GB/s; from lines that have only been asked for 13.5 (and plain reading, asked for ahead, 15.5: Xeon with AMX).
struct Copies {
    alignas(64) char at[2][STEP];
    const char* held = nullptr;  // what at[turn] is a copy of
    int turn = 0;
    inline __attribute__((always_inline)) void take(const char* w, int which) {
        for (int line = 0; line < STEP; line += 64) {
            __builtin_prefetch(w + AHEAD + line, 0, 2);
            _mm512_store_si512(at[which] + line, _mm512_load_si512(w + line));
        }
    }
    // The step at w, with `next` (or null) on its way to its place meanwhile.
    inline __attribute__((always_inline)) const char* get(const char* w, const char* next) {
        if (held != w) take(w, turn);
        const char* const now = at[turn];
        turn ^= 1, held = next;
        if (next) take(next, turn);
        return now;
    }
};

// Where weights and rows are taken from, and what is fetched meanwhile.
struct Source {
    const char* w;
    int64_t panel;  // bytes
    const char* x;
    int64_t x_step;   // bytes
    int steps, tail;  // whole steps, and pairs of k in one that is not, behind them
    Copies* copies;   // weights come from memory, through these, or null
    const char* then;  // behind them another whole step that this call will copy, or null
    const char* next;   // what is multiplied next is fetched from here on,
    int64_t next_step;  // so many bytes a step,
    Trickle soon;       // and what is read later
};

FR_INLINE int valid(int all, int from) { return all - from < 0 ? 0 : all - from < SIDE ? all - from : SIDE; }

template <int T>
FR_INLINE void begin(const Sums& s, int row, int column) {
    if (s.first) return zero_tile<T>();
    const float* y = s.y + row * s.stride + column;
    if (s.whole) return load_tile<T>(y, s.stride * 4);
    alignas(64) float part[SIDE][SIDE] = {};
    const int n = valid(s.columns, column);
    for (int m = 0; m < valid(s.rows, row); ++m) store(part[m], load(y + m * s.stride, n));
    load_tile<T>(part, sizeof part[0]);
}

template <int T>
FR_INLINE void finish(const Sums& s, int row, int column) {
    float* y = s.y + row * s.stride + column;
    const bool biased = s.last && s.bias;
    if (s.whole && !biased) return store_tile<T>(y, s.stride * 4);
    alignas(64) float part[SIDE][SIDE];
    store_tile<T>(part, sizeof part[0]);
    const int n = valid(s.columns, column);
    if (!n) return;
    const V bias = biased ? load(s.bias + column, n) : zero();
    for (int m = 0; m < valid(s.rows, row); ++m) store(y + m * s.stride, biased ? load(part[m]) + bias : load(part[m]), n);
}

// One step from `w` and `x` on: A tiles of rows by P panels.
template <int A, int P>
FR_INLINE void step(const char* w, int64_t panel, const char* x) {
    load_tile<4>(x, TILE_BYTES);
    if constexpr (A == 2) {
        load_tile<6>(w, PAIR_ROW);
        dot_bf16<0, 4, 6>();
        load_tile<7>(w + TILE_BYTES, PAIR_ROW);
        dot_bf16<1, 4, 7>();
        load_tile<5>(x + SIDE * TILE_BYTES, TILE_BYTES);
        dot_bf16<2, 5, 6>();
        dot_bf16<3, 5, 7>();
    } else {
        load_tile<5>(w, PAIR_ROW);
        dot_bf16<0, 4, 5>();
        load_tile<6>(w + TILE_BYTES, PAIR_ROW);
        dot_bf16<1, 4, 6>();
        if constexpr (P == 2) {
            load_tile<7>(w + panel, PAIR_ROW);
            dot_bf16<2, 4, 7>();
            load_tile<5>(w + panel + TILE_BYTES, PAIR_ROW);
            dot_bf16<3, 4, 5>();
        }
    }
}

// The shape for at most so many rows.
FR_INLINE Shapes shape_of(int rows) {
    Shapes all;
    const bool two = rows > SIDE;
    for (int t = 0; t < 8; ++t) all.set(t, SIDE);
    if (two)
        all.set(2, rows - SIDE), all.set(3, rows - SIDE), all.set(5, rows - SIDE);
    else
        for (int t = 0; t < 5; ++t) all.set(t, rows);
    return all;
}

template <int A, int P>
void run_tile(const Sums& s, Source from) {
    if (s.first && from.copies)  // the sums come to rest where nothing was read: ask for the lines now, while memory is what is waited for
        for (int m = 0; m < s.rows; ++m)
            for (int j = 0; j < 2 * P; ++j) __builtin_prefetch(s.y + m * s.stride + j * SIDE, 1);
    begin<0>(s, 0, 0), begin<1>(s, 0, SIDE);
    if constexpr (A == 2) begin<2>(s, SIDE, 0), begin<3>(s, SIDE, SIDE);
    if constexpr (P == 2) begin<2>(s, 0, 2 * SIDE), begin<3>(s, 0, 3 * SIDE);

    const auto advance = [&] { step<A, P>(from.w, from.panel, from.x), from.w += STEP, from.x += from.x_step; };
    if (P == 1 && from.copies) {
        for (int at = 1; at <= from.steps; ++at, from.w += STEP, from.x += from.x_step)
            step<A, 1>(from.copies->get(from.w, at < from.steps ? from.w + STEP : from.then), 0, from.x);
    } else if (from.next) {
        int due = from.soon.every;
        for (int at = 0; at < from.steps; ++at, from.next += from.next_step) {
            for (int64_t line = 0; line < from.next_step; line += 64) __builtin_prefetch(from.next + line, 0, 2);
            if (from.soon.every)
                for (due -= SIDE; due <= 0; due += from.soon.every) ask(from.soon);
            advance();
        }
    } else {
        for (int at = 0; at < from.steps; ++at) advance();
    }
    if (from.tail) {  // behind it the weight may end
        alignas(64) char part[P][STEP] = {};
        for (int p = 0; p < P; ++p) memcpy(part[p], from.w + p * from.panel, size_t(from.tail) * PAIR_ROW);
        step<A, P>(part[0], STEP, from.x);
    }

    finish<0>(s, 0, 0), finish<1>(s, 0, SIDE);
    if constexpr (A == 2) finish<2>(s, SIDE, 0), finish<3>(s, SIDE, SIDE);
    if constexpr (P == 2) finish<2>(s, 0, 2 * SIDE), finish<3>(s, 0, 3 * SIDE);
}

FR_INLINE int64_t row_bytes(int K) { return int64_t(K + DEPTH - 1) / DEPTH * TILE_BYTES; }

// As multiply_format in matmul.h. A row tile with one row less than another has its shape: what stands behind its rows is multiplied too, and
// stored nowhere. The last of a product has the most rows, so that nothing is read behind the end.
void multiply_bf16(const fr::Product& p, int panel0, int panel1, int tile0, int tile1) {
    const int pairs = (p.K + 1) / 2, steps = (pairs + SIDE - 1) / SIDE, runs = tile1 - tile0;
    const int64_t panel_bytes = int64_t(fr::panel_bytes(fr::BF16, p.K)), row_size = row_bytes(p.K);
    int most = 0;
    for (int t = tile0; t < tile1; ++t) most = tile_start(p, t + 1) - tile_start(p, t) > most ? tile_start(p, t + 1) - tile_start(p, t) : most;
    const bool few = runs <= FEW_RUNS, near = int64_t(p.N + fr::PANEL - 1) / fr::PANEL * panel_bytes <= TWIN_BYTES;
    const int block = runs == 1 ? steps : K_BLOCK / DEPTH;
    Copies copies;
    shape(shape_of(most));
    for (int panel = panel0, group; panel < panel1; panel += group) {
        const int left = panel1 - panel, twin = near && most <= SIDE && left > 1 ? 2 : 1;
        group = twin == 2 ? 2 : few || block < steps ? 1 : left < GROUP_PANELS ? left : GROUP_PANELS;
        const char* w = (const char*)p.w + panel * panel_bytes;
        for (int s = 0; s < steps; s += block) {
            const int here = steps - s < block ? steps - s : block;
            const bool first = s == 0, last = s + here == steps;
            const char* block_at = w + int64_t(s) * STEP;
            // Weights arrive while others are multiplied, as in matmul.h.
            const bool cold = few || (p.cold && panel == panel0 && first);
            const char* behind = !last          ? block_at + int64_t(here) * STEP
                                 : group < left ? w + group * panel_bytes
                                 : p.next < 0   ? nullptr
                                                : (const char*)p.w + p.next * panel_bytes;
            const int sharing = cold ? runs - 1 : runs;
            const int64_t share = few ? 0 : (STEP / 64 + sharing - 1) / sharing * 64;
            for (int t = tile0; t < tile1; ++t)
                for (int in_group = 0; in_group < group; in_group += twin) {
                    const int row = tile_start(p, t), rows = tile_start(p, t + 1) - row, column = (panel + in_group) * fr::PANEL;
                    const int tail = last ? pairs % SIDE : 0;
                    const char* from = block_at + in_group * panel_bytes;
                    const bool ahead = cold && t == tile0;
                    // The first of few row tiles takes a panel from memory, and the others find it in the nearest cache.
                    const bool more = last ? in_group + 1 < (few ? left : group) && pairs >= SIDE : pairs - (s + here) * SIDE >= SIDE;
                    const char* then = !more ? nullptr : last ? w + (in_group + 1) * panel_bytes : behind;
                    const char* next = ahead || few || !behind ? nullptr : behind + here * share * ((t - tile0 - cold) * group + in_group);
                    const Sums sums{p.y + row * p.y_stride + (column - p.y_column), p.y_stride, p.bias ? p.bias + column : nullptr,
                                    rows, p.N - column, rows == most && p.N - column >= twin * fr::PANEL, first, last};
                    const Source source{from, panel_bytes, (const char*)p.packed + row * row_size + int64_t(s) * rows * TILE_BYTES,
                                        rows * TILE_BYTES, here - (tail != 0), tail, ahead && !near ? &copies : nullptr, then, next, share,
                                        next ? trickle(p, steps * SIDE, panel + in_group, t, s * SIDE, here * SIDE) : Trickle{}};
                    if (most > SIDE)
                        run_tile<2, 1>(sums, source);
                    else if (twin == 2)
                        run_tile<1, 2>(sums, source);
                    else
                        run_tile<1, 1>(sums, source);
                }
        }
    }
    release();
}

// Columns from k0 on: where a step of 32 k has only half of them here, another task may write the other half.
void pack_columns_bf16(const fr::Product& p, int t, const float* x, int64_t stride, int k0, int count) {
    const int row = tile_start(p, t), M = tile_start(p, t + 1) - row;
    char* const out = (char*)p.packed + row * row_bytes(p.K);
    const int end = k0 + count == p.K ? (p.K + DEPTH - 1) / DEPTH * DEPTH : k0 + count;
    for (int m = 0; m < M; ++m, x += stride)
        for (int k = k0; k < end;) {
            char* to = out + (int64_t(k / DEPTH) * M + m) * TILE_BYTES;
            const int left = k0 + count - k, offset = k % DEPTH;
            if (offset || end - k < DEPTH) {
                const __m512i half = left > 0 ? pairs(x + (k - k0), left < SIDE ? left : SIDE) : _mm512_setzero_si512();
                _mm256_storeu_si256((__m256i*)(to + 2 * offset), _mm512_castsi512_si256(half));
                k += SIDE;
            } else {
                _mm512_storeu_si512(to, pairs(x + (k - k0), left));
                k += DEPTH;
            }
        }
}

}  // namespace
