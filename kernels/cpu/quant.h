// Products with weights of 8 or 4 bits.
//
// Weights come in groups of 32 along K: w = unit[column] · (scale[group, column] · code + minimum[group, column]). A row of activations is
// rounded to 16 bits span by span of 512: x ≈ step · q with |q| ≤ 32639 reaching the span's largest value. The products of codes and q are
// then whole numbers, and so is their sum, exactly, in any order and on any machine:
//
//   y = unit · Σ over spans, in order, in float:   fma(sum of the span, step, …)
//   sum of a span, one scale a column:   Σ code·q: even 512 · 128 · 32639 fits 32 bits
//   sum of a span, groups, in order, in float:   fma(Σ code·q, scale, …),   then fma(minimum, Σq, …)
//
// So an element of y is one chain again, as in matmul.h, and every instruction set that fuses multiply-add makes the same bits.
//
//   panel of 32 columns:   groups one after the other, then 32 units (float)
//   group, 8 bits:         [k/2: 16][column: 32][k%2] signed bytes
//   group, 4 bits:         [k/8: 4][column: 32][k%2] words of four codes 0 … 15: k/2%4 = 0 in the lowest four bits
//                          then, by format, 32 scales and 32 minima (f16)
//   packed rows (a tile):  [group][row][k/2: 16] pairs of q, then [group][row] the whole numbers that sums start with: where codes stand for
//                          code − 8 it is −8·Σq, and rows that are crossed (codes.h) have theirs; then [group][row] Σq as float, where a format
//                          asks for it; then [span][row] steps
#pragma once

#include "codes.h"
#include "matmul.h"
#include "rounding.h"

namespace {

constexpr int VECTORS = fr::PANEL / LANES;  // of a panel's columns

// Most rows of a tile, and of one whose sums over groups stay in registers beside those of a group: else memory holds the former.
#if defined(__AVX512VNNI__)
constexpr int CODE_ROWS = 10, KEPT_ROWS = 6;  // with all that crossing holds (codes.h), 32 registers are enough for ten
#elif defined(__AVX512F__)
constexpr int CODE_ROWS = TILE_ROWS, KEPT_ROWS = 6;
#else
constexpr int CODE_ROWS = TILE_ROWS, KEPT_ROWS = 1;
#endif

// Bytes of a group: codes, and by format scales and minima.
FR_INLINE int group_bytes(fr::Format format) {
    const int codes = format == fr::INT8 || format == fr::INT8_GROUPS ? Bytes::CODES : Nibbles::CODES;
    return codes + 2 * fr::PANEL * (int(format != fr::INT8) + int(format == fr::INT4));
}

// Of a packed row: pairs, what goes with their sums, steps.
FR_INLINE int64_t row_words(int groups) { return int64_t(groups) * (PAIRS + 2) + (groups + SPAN - 1) / SPAN; }

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
    const int32_t* starts;  // one a row and group
    const float* totals;    // as many
    const float* steps;     // one a row and span
};

// The sums of a span, M rows by N vectors, of which W rows are crossed, from `a` on, which moves behind them. One scale a column: a sum of
// whole numbers.
struct Columns {
    using Codes = Bytes;
    template <int M, int N, int W>
    FR_INLINE void span(Block& a, int groups, Fetch& fetch, V (&sum)[M][N]) {
        Whole<Codes, M, N, W> g;
        g.begin(W ? a.starts : nullptr);
        a.starts += groups * M;
        for (int s = 0; s < groups; ++s, a.codes += Codes::CODES, a.x += M * PAIRS, fetch.next_group()) g.add(a.codes, a.x, fetch);
        FR_UNROLL
        for (int m = 0; m < M; ++m)
            for (int j = 0; j < N; ++j) sum[m][j] = to_float(g.get(m, j));
    }
};

// A scale a group. OFFSET: codes stand for code − 8. MINIMA: and a minimum.
template <class CODES, bool OFFSET, bool MINIMA>
struct Groups {
    using Codes = CODES;
    template <int M, int N, int W>
    FR_INLINE void span(Block& a, int groups, Fetch& fetch, V (&sum)[M][N]) {
        Sums<M, N, (M <= KEPT_ROWS)> sums;
        FR_UNROLL
        for (int m = 0; m < M; ++m)
            for (int j = 0; j < N; ++j) sums.put(m, j, zero());
        for (int s = 0; s < groups; ++s, fetch.next_group()) {
            Whole<Codes, M, N, W> g;
            g.begin(W || OFFSET ? a.starts : nullptr, OFFSET);
            sums.leave();
            g.add(a.codes, a.x, fetch);
            sums.leave();
            for (int j = 0; j < N; ++j) {
                const V scale = load_half(a.scales + j * LANES), minimum = MINIMA ? load_half(a.scales + fr::PANEL + j * LANES) : zero();
                FR_UNROLL
                for (int m = 0; m < M; ++m) {
                    V value = fma(to_float(g.get(m, j)), scale, sums.get(m, j));
                    if constexpr (MINIMA) value = fma(minimum, set(a.totals[m]), value);
                    sums.put(m, j, value);
                }
            }
            a.codes += a.bytes, a.scales += a.bytes / 2, a.x += M * PAIRS, a.starts += M, a.totals += M;
        }
        FR_UNROLL
        for (int m = 0; m < M; ++m)
            for (int j = 0; j < N; ++j) sum[m][j] = sums.get(m, j);
    }
};

// A span's sums join those of the spans before, which rest in y: registers hold only one of both, and a block that ends K is finished there.
template <int M, int N, bool FULL>
FR_INLINE void join(const Tile& t, const Block& a, bool first, bool last, const V (&sum)[M][N]) {
    V unit[N], bias[N];
    const bool biased = last && t.bias;
    const auto valid = [&](int j) { return t.columns <= j * LANES ? 0 : t.columns - j * LANES < LANES ? t.columns - j * LANES : LANES; };
    for (int j = 0; j < N; ++j) {
        unit[j] = last ? load(a.units + j * LANES) : set(1.0f);
        bias[j] = !biased ? zero() : FULL ? load(t.bias + j * LANES) : load(t.bias + j * LANES, valid(j));
    }
    FR_UNROLL
    for (int m = 0; m < M; ++m)
        for (int j = 0; j < N; ++j) {
            float* y = t.y + m * t.y_stride + j * LANES;
            V value = fma(sum[m][j], set(a.steps[m]), first ? zero() : FULL ? load(y) : load(y, valid(j))) * unit[j];
            if (biased) value = value + bias[j];
            FULL ? store(y, value) : store(y, value, valid(j));
        }
}

// M rows by a panel, `t.steps` groups.
template <class Scaled, int M, int W>
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
        Scaled::template span<M, N, W>(a, t.steps - s < SPAN ? t.steps - s : SPAN, fetch, sum);
        const bool first = t.first && s == 0, last = t.last && s + SPAN >= t.steps;
        full ? join<M, N, true>(t, a, first, last, sum) : join<M, N, false>(t, a, first, last, sum);
    }
}

// A tile of exactly `rows` rows, at most MOST.
template <class Scaled, int MOST = CODE_ROWS>
FR_INLINE void run_block(int rows, bool crossing, const Tile& t, const Block& a, const Fetch& fetch) {
    if constexpr (MOST > 0) {
        if (rows != MOST) return run_block<Scaled, MOST - 1>(rows, crossing, t, a, fetch);
        constexpr int W = crossed_rows(MOST);
        crossing ? block_tile<Scaled, MOST, W>(t, a, fetch) : block_tile<Scaled, MOST, 0>(t, a, fetch);
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
                const int32_t* starts = x + int64_t(groups) * PAIRS * rows;
                const float* totals = (const float*)(starts + groups * rows);
                const float* steps = totals + groups * rows + s / SPAN * rows;
                const Tile job{here, 0, p.y + row * p.y_stride + (column - p.y_column), p.y_stride, p.bias ? p.bias + column : nullptr,
                               p.N - column, s == 0, s + here == groups, 0};
                const Trickle soon = trickle(p, groups * PAIRS, panel, t, s * PAIRS, here * PAIRS);
                const Block a{bytes, codes, (const uint16_t*)(codes + Codes::CODES), units,
                              x + int64_t(s) * PAIRS * rows, starts + s * rows, totals + s * rows, steps};
                if (runs == 1 || run < 0)
                    run_block<Scaled>(rows, p.crossing, job, a, {codes + near * bytes, bytes, codes + here * bytes, runs == 1 ? behind : nullptr, soon});
                else
                    run_block<Scaled>(rows, p.crossing, job, a, {behind + share * here * run, share, nullptr, nullptr, soon});
            }
        }
    }
}

// Σ x·x' over the pairs of a group, two by two.
FR_INLINE uint32_t neighbours(const int32_t* pairs) {
#if defined(__AVX512VNNI__)
    const __m512i x = _mm512_loadu_si512(pairs);
    return uint32_t(_mm512_mask_reduce_add_epi32(0x5555, _mm512_madd_epi16(x, _mm512_srli_epi64(x, 32))));
#else
    const auto* x = (const int16_t*)pairs;
    uint32_t sum = 0;
    for (int i = 0; i < GROUP; i += 4) sum += uint32_t(x[i] * x[i + 2]) + uint32_t(x[i + 1] * x[i + 3]);
    return sum;
#endif
}

// Rows lie group by group and not k by k, as bf16's do: nothing is transposed, and a multiplication spreads a pair from any place as fast.
template <fr::Format FORMAT>
void pack_groups(const fr::Product& p, int tile0, int tile1) {
    const int groups = (p.K + GROUP - 1) / GROUP;
    for (int t = tile0; t < tile1; ++t) {
        const int row = tile_start(p, t), M = tile_start(p, t + 1) - row, W = p.crossing ? crossed_rows(M) : 0;
        int32_t* const pairs = (int32_t*)p.packed + row * row_words(groups);
        int32_t* const starts = pairs + int64_t(groups) * PAIRS * M;
        float* const totals = (float*)(starts + groups * M);
        float* const steps = totals + groups * M;
        for (int m = 0; m < M; ++m) {
            const float* x = p.x + int64_t(row + m) * p.K;
            const bool crosses = is_crossed(m, M, W);
            for (int s = 0; s < groups; s += SPAN) {
                const int end = s + SPAN < groups ? s + SPAN : groups, width = p.K - s * GROUP;
                const Rounding made = rounding(x + s * GROUP, width < SPAN * GROUP ? width : SPAN * GROUP);
                steps[s / SPAN * M + m] = made.step;
                uint32_t crossed = 0;  // Σ x·x' of the group, or of the span
                for (int g = s; g < end; ++g) {
                    int32_t* const to = pairs + (int64_t(g) * M + m) * PAIRS;
                    const float total = round_group(x + g * GROUP, p.K - g * GROUP, made.inverse, to);
                    if (crosses) crossed += neighbours(to);
                    if constexpr (FORMAT == fr::INT8) continue;
                    if constexpr (FORMAT == fr::INT4) totals[g * M + m] = total;
                    starts[g * M + m] = int32_t((FORMAT == fr::INT4_SYMMETRIC ? uint32_t(int32_t(-8.0f * total)) : 0) - crossed);
                    crossed = 0;
                }
                if constexpr (FORMAT == fr::INT8) starts[s * M + m] = int32_t(-crossed);
            }
        }
    }
}

// What run.cpp calls for any format.

size_t packed_bytes_any(fr::Format format, int32_t K) {
    return format >= fr::INT8 ? size_t(row_words((K + GROUP - 1) / GROUP)) * 4 : packed_bytes(format, K);
}

int32_t tiles_any(fr::Format format, int32_t rows) {
    return format >= fr::INT8 ? (rows + CODE_ROWS - 1) / CODE_ROWS : tiles_of(rows);
}

void pack_rows_any(const fr::Product& p, int32_t tile0, int32_t tile1) {
    switch (p.format) {
        case fr::INT8: return pack_groups<fr::INT8>(p, tile0, tile1);
        case fr::INT8_GROUPS: return pack_groups<fr::INT8_GROUPS>(p, tile0, tile1);
        case fr::INT4: return pack_groups<fr::INT4>(p, tile0, tile1);
        case fr::INT4_SYMMETRIC: return pack_groups<fr::INT4_SYMMETRIC>(p, tile0, tile1);
        default: return pack_rows(p, tile0, tile1);
    }
}

void multiply_any(const fr::Product& p, int32_t panel0, int32_t panel1, int32_t tile0, int32_t tile1) {
    if (p.format < fr::INT8) return multiply(p, panel0, panel1, tile0, tile1);
    if (p.format == fr::INT8) return multiply_codes<Columns>(p, panel0, panel1, tile0, tile1);
    if (p.format == fr::INT8_GROUPS) return multiply_codes<Groups<Bytes, false, false>>(p, panel0, panel1, tile0, tile1);
    if (p.format == fr::INT4) return multiply_codes<Groups<Nibbles, false, true>>(p, panel0, panel1, tile0, tile1);
    multiply_codes<Groups<Nibbles, true, false>>(p, panel0, panel1, tile0, tile1);
}

}  // namespace
