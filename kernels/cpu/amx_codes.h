// Products with weights of 8 or 4 bits by AMX: weights lie as in quant.h, and sums are the same whole numbers, so the same bits come out.
//
// A number of a row is two bytes: q = 256 · high + low, both signed, as |q| ≤ 32639 = 127 · 256 + 127. They are two rows of a tile, so that
// eight rows of x fill it, and one product of tiles sums up both:
//
//   packed rows (a row tile of M ≤ 8):   [group][row][high, low][k: 32] bytes; one scale a column: [two groups][row][high, low][k: 64], filled up
//                                        with zeros; then [group][row] Σq as float, where a format asks for it; then [span][row] steps
//   codes, spread out (a group):         [k/4: 8][half: 2][column: 16][k%4] bytes, of which each half is a tile of eight rows, or of sixteen
//
// 8 bits: two lines of quant.h, of two k each, are one here. What mixes their words does so within quarters of a vector, so the columns come out in
// another order: 0–3, 8–11, 16–19, 24–27, then those between. 4 bits: a line holds eight k of sixteen columns and is masked twice; the k come
// out as 0, 4, 1, 5 and 2, 6, 3, 7, and rows are packed in that order.
//
// A span's codes are spread out once for all row tiles of a task, into a buffer in the nearest cache, a step ahead of the first one's products.
#pragma once

#include "amx.h"
#include "codes.h"
#include "kernels.h"

namespace {

constexpr int CODED_ROWS = SIDE / 2;        // most rows of a row tile
constexpr int SPREAD = GROUP * fr::PANEL;   // bytes of a group that is spread out
constexpr int SPREAD_ROW = fr::PANEL * 4;   // of four k
constexpr int QUADS = GROUP / 4;            // such rows
static_assert(LARGEST <= 127 * 256 + 127);

// Where a group's codes lie, 8 bits each: spread out.
struct Octets {
    static constexpr int CODES = GROUP * fr::PANEL;
    FR_INLINE void spread(const uint8_t* codes, uint8_t* to, const Fetch& fetch) {
        for (int quad = 0; quad < QUADS; ++quad, codes += 128, to += SPREAD_ROW) {
            fetch.pair(2 * quad), fetch.pair(2 * quad + 1);
            const __m512i a = _mm512_load_si512(codes), b = _mm512_load_si512(codes + 64);
            _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
            _mm512_store_si512(to + 64, _mm512_unpackhi_epi16(a, b));
        }
    }
    // Two vectors of columns as they lie in a weight ↔ as they lie here.
    FR_INLINE void mix(V (&a)[2]) {
        const __m512 low = _mm512_shuffle_f32x4(a[0].x, a[1].x, 0x88), high = _mm512_shuffle_f32x4(a[0].x, a[1].x, 0xdd);
        a[0].x = low, a[1].x = high;
    }
    FR_INLINE void unmix(V (&a)[2]) {
        const __m512i low = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), high = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
        const __m512d x = _mm512_castps_pd(a[0].x), y = _mm512_castps_pd(a[1].x);
        a[0].x = _mm512_castpd_ps(_mm512_permutex2var_pd(x, low, y)), a[1].x = _mm512_castpd_ps(_mm512_permutex2var_pd(x, high, y));
    }
    FR_INLINE __m256i order(__m256i bytes) { return bytes; }  // k of a group
};

// 4 bits. OFFSET: codes stand for code − 8.
template <bool OFFSET>
struct Quartets {
    static constexpr int CODES = GROUP * fr::PANEL / 2;
    FR_INLINE void spread(const uint8_t* codes, uint8_t* to, const Fetch& fetch) {
        const __m512i mask = _mm512_set1_epi8(15), offset = _mm512_set1_epi8(OFFSET ? 8 : 0);
        for (int octet = 0; octet < GROUP / 8; ++octet, to += 2 * SPREAD_ROW)
            for (int half = 0; half < 2; ++half, codes += 64) {
                fetch.pair(4 * octet + 2 * half), fetch.pair(4 * octet + 2 * half + 1);
                const __m512i words = _mm512_load_si512(codes);
                __m512i low = _mm512_and_si512(words, mask), high = _mm512_and_si512(_mm512_srli_epi16(words, 4), mask);
                if constexpr (OFFSET) low = _mm512_sub_epi8(low, offset), high = _mm512_sub_epi8(high, offset);
                _mm512_store_si512(to + half * 64, low), _mm512_store_si512(to + SPREAD_ROW + half * 64, high);
            }
    }
    FR_INLINE void mix(V (&)[2]) {}
    FR_INLINE void unmix(V (&)[2]) {}
    FR_INLINE __m256i order(__m256i bytes) {
        const __m128i places = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
        return _mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(places));
    }
};

// What the formats do differently. STEP: groups whose products are summed up in tiles at a time.
struct ByColumn {
    using Codes = Octets;
    static constexpr int STEP = 2, PARTS = 0;
    static constexpr bool MINIMA = false;
};
template <class CODES, bool MINIMUM>
struct ByGroup {
    using Codes = CODES;
    static constexpr int STEP = 1, PARTS = MINIMUM ? 2 : 1;  // scales, minima
    static constexpr bool MINIMA = MINIMUM;
};

// Bytes of a packed row. Lines are not shared by rows, so that a row of a tile is one line or half of one.
template <class Scaled>
constexpr int64_t coded_bytes(int groups) {
    const int64_t steps = (groups + Scaled::STEP - 1) / Scaled::STEP, spans = (groups + SPAN - 1) / SPAN;
    return (steps * Scaled::STEP * GROUP * 2 + (Scaled::MINIMA ? groups * 4 : 0) + spans * 4 + 63) / 64 * 64;
}

// A row tile's packed rows.
template <class Scaled>
struct Rows {
    int count;
    char* halves;
    float *totals, *steps;
    Rows(const fr::Product& p, int t, int groups) {
        const int row = tile_start(p, t);
        count = tile_start(p, t + 1) - row;
        halves = (char*)p.packed + row * coded_bytes<Scaled>(groups);
        totals = (float*)(halves + (groups + Scaled::STEP - 1) / Scaled::STEP * step());
        steps = totals + (Scaled::MINIMA ? groups * count : 0);
    }
    int64_t step() const { return int64_t(Scaled::STEP) * GROUP * 2 * count; }  // bytes
};

// A span of a row tile by a panel.
struct Span {
    int groups;
    const uint8_t* codes;      // null: they are spread out already
    const uint16_t* scales;
    int64_t bytes;             // of a group
    const char* halves;
    int64_t step;              // bytes
    const float *totals, *steps;
    int rows, columns;         // valid ones
    float* y;
    int64_t y_stride;
    const float *units, *bias;
    bool first, last;          // of K
};

typedef int32_t Halves[2][LANES];  // of a row, high or low

FR_INLINE V join_halves(const Halves& high, const Halves& low, int j) {
    return {_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(high[j]), 8), _mm512_load_si512(low[j])))};
}

// The sums of rows up to R, in `sum`.
template <class Scaled, int R>
struct Spans;

template <int R>
struct Spans<ByColumn, R> {
    FR_INLINE void go(const Span& s, uint8_t* spread, Halves (&made)[2][2 * R], Fetch& fetch, V (&sum)[R][2]) {
        const int steps = (s.groups + 1) / 2;
        const auto prepare = [&](int step) {
            if (step == steps) return;
            for (int g = 2 * step; g < 2 * step + 2; ++g, fetch.next_group()) {
                if (!s.codes) {
                    for (int i = 0; i < PAIRS && i * 64 < fetch.step; ++i) fetch.pair(i);
                } else if (g < s.groups) {
                    Octets::spread(s.codes + g * s.bytes, spread + g * SPREAD, fetch);
                } else {
                    memset(spread + g * SPREAD, 0, SPREAD);
                }
            }
        };
        zero_tile<0>(), zero_tile<1>();
        prepare(0);
        for (int step = 0; step < steps; ++step) {
            prepare(step + 1);
            load_tile<2>(s.halves + step * s.step, TILE_BYTES);
            load_tile<4>(spread + 2 * step * SPREAD, SPREAD_ROW);
            dot_signed<0, 2, 4>();
            load_tile<5>(spread + 2 * step * SPREAD + 64, SPREAD_ROW);
            dot_signed<1, 2, 5>();
        }
        store_tile<0>(made[0][0][0], sizeof(Halves)), store_tile<1>(made[0][0][1], sizeof(Halves));
        FR_UNROLL
        for (int m = 0; m < R; ++m)
            for (int j = 0; j < 2; ++j) sum[m][j] = join_halves(made[0][2 * m], made[0][2 * m + 1], j);
    }
    static Shapes shapes() {
        Shapes all;
        for (int t : {0, 1, 2}) all.set(t, 2 * R);
        for (int t : {4, 5}) all.set(t, SIDE);
        return all;
    }
};

template <class Codes, bool MINIMA, int R>
struct Spans<ByGroup<Codes, MINIMA>, R> {
    FR_INLINE void scale(const Span& s, int g, const Halves (&made)[2 * R], V (&sum)[R][2]) {
        const uint16_t* at = s.scales + g * s.bytes / 2;
        const float* totals = s.totals + g * s.rows;
        V scale[2], minimum[2];
        for (int j = 0; j < 2; ++j) scale[j] = load_half(at + j * LANES), minimum[j] = MINIMA ? load_half(at + fr::PANEL + j * LANES) : zero();
        Codes::mix(scale);
        if constexpr (MINIMA) Codes::mix(minimum);
        FR_UNROLL
        for (int m = 0; m < R; ++m)
            for (int j = 0; j < 2; ++j) {
                sum[m][j] = fma(join_halves(made[2 * m], made[2 * m + 1], j), scale[j], sum[m][j]);
                if constexpr (MINIMA) sum[m][j] = fma(minimum[j], set(totals[m]), sum[m][j]);
            }
    }
    FR_INLINE void go(const Span& s, uint8_t* spread, Halves (&made)[2][2 * R], Fetch& fetch, V (&sum)[R][2]) {
        const auto prepare = [&](int g) {
            if (g == s.groups) return;
            if (s.codes)
                Codes::spread(s.codes + g * s.bytes, spread + g * SPREAD, fetch);
            else
                for (int i = 0; i < PAIRS && i * 64 < fetch.step; ++i) fetch.pair(i);
            fetch.next_group();
        };
        FR_UNROLL
        for (int m = 0; m < R; ++m) sum[m][0] = sum[m][1] = zero();
        prepare(0);
        for (int g = 0; g < s.groups; ++g) {
            prepare(g + 1);
            zero_tile<0>(), zero_tile<1>();
            load_tile<2>(s.halves + g * s.step, GROUP);
            load_tile<4>(spread + g * SPREAD, SPREAD_ROW);
            dot_signed<0, 2, 4>();
            load_tile<5>(spread + g * SPREAD + 64, SPREAD_ROW);
            dot_signed<1, 2, 5>();
            store_tile<0>(made[g % 2][0][0], sizeof(Halves)), store_tile<1>(made[g % 2][0][1], sizeof(Halves));
            if (g) scale(s, g - 1, made[(g - 1) % 2], sum);
        }
        scale(s, s.groups - 1, made[(s.groups - 1) % 2], sum);
    }
    static Shapes shapes() {
        Shapes all;
        for (int t : {0, 1, 2}) all.set(t, 2 * R);
        for (int t : {4, 5}) all.set(t, QUADS);
        all.bytes[2] = GROUP;
        return all;
    }
};

template <class Scaled, int R>
void run_span(const Span& s, uint8_t* spread, Fetch fetch) {
    alignas(64) Halves made[2][2 * R];
    V sum[R][2];
    Spans<Scaled, R>::go(s, spread, made, fetch, sum);
    const auto valid = [&](int j) { return s.columns <= j * LANES ? 0 : s.columns - j * LANES < LANES ? s.columns - j * LANES : LANES; };
    V unit[2], bias[2];
    const bool biased = s.last && s.bias;
    for (int j = 0; j < 2; ++j) {
        unit[j] = s.last ? load(s.units + j * LANES) : set(1.0f);
        bias[j] = biased ? load(s.bias + j * LANES, valid(j)) : zero();
    }
    FR_UNROLL
    for (int m = 0; m < R; ++m) {
        if (m == s.rows) break;
        Scaled::Codes::unmix(sum[m]);
        for (int j = 0; j < 2; ++j) {
            float* y = s.y + m * s.y_stride + j * LANES;
            V value = fma(sum[m][j], set(s.steps[m]), s.first ? zero() : load(y, valid(j))) * unit[j];
            if (biased) value = value + bias[j];
            store(y, value, valid(j));
        }
    }
}

template <class Scaled, int R>
void multiply_rows(const fr::Product& p, int panel0, int panel1, int tile0, int tile1) {
    typedef typename Scaled::Codes Codes;
    const int groups = (p.K + GROUP - 1) / GROUP, runs = tile1 - tile0;
    const int64_t bytes = Codes::CODES + Scaled::PARTS * 2 * fr::PANEL, stride = int64_t(fr::panel_bytes(p.format, p.K));
    alignas(64) uint8_t spread[SPAN * SPREAD];
    shape(Spans<Scaled, R>::shapes());
    for (int panel = panel0; panel < panel1; ++panel) {
        const uint8_t* first = (const uint8_t*)p.w + panel * stride;
        const int column = panel * fr::PANEL;
        for (int g = 0; g < groups; g += SPAN) {
            const int here = groups - g < SPAN ? groups - g : SPAN;
            const uint8_t* codes = first + g * bytes;
            const uint8_t* behind = g + here < groups    ? codes + here * bytes
                                    : panel + 1 < panel1 ? first + stride
                                    : p.next < 0         ? nullptr
                                                         : (const uint8_t*)p.w + p.next * stride;
            const int cold = runs > 1 && p.cold && panel == panel0 && g == 0;
            const int64_t share = behind ? (bytes / (runs - cold) + 63) / 64 * 64 : 0;
            const int near = int(AHEAD) / bytes < here ? int(AHEAD) / bytes : here - 1;
            for (int t = tile0; t < tile1; ++t) {
                const Rows<Scaled> rows(p, t, groups);
                const int row = tile_start(p, t), run = t - tile0 - cold;
                const Span span{here, t == tile0 ? codes : nullptr, (const uint16_t*)(codes + Codes::CODES), bytes,
                                rows.halves + g / Scaled::STEP * rows.step(), rows.step(), rows.totals + g * rows.count,
                                rows.steps + g / SPAN * rows.count, rows.count, p.N - column,
                                p.y + row * p.y_stride + (column - p.y_column), p.y_stride, (const float*)(first + groups * bytes),
                                p.bias ? p.bias + column : nullptr, g == 0, g + here == groups};
                const Trickle soon = trickle(p, groups * PAIRS, panel, t, g * PAIRS, here * PAIRS);
                if (runs == 1 || run < 0)
                    run_span<Scaled, R>(span, spread, {codes + near * bytes, bytes, codes + here * bytes, runs == 1 ? behind : nullptr, soon});
                else
                    run_span<Scaled, R>(span, spread, {behind + share * here * run, share, nullptr, nullptr, soon});
            }
        }
    }
    release();
}

// `most` rows of a row tile, exactly. One with a row less is multiplied by what stands behind its rows, too, and that is stored nowhere: a product's
// last row tile has most rows.
template <class Scaled, int R = CODED_ROWS>
FR_INLINE void multiply_tiles(int most, const fr::Product& p, int panel0, int panel1, int tile0, int tile1) {
    if constexpr (R > 1) {
        if (most < R) return multiply_tiles<Scaled, R - 1>(most, p, panel0, panel1, tile0, tile1);
    }
    multiply_rows<Scaled, R>(p, panel0, panel1, tile0, tile1);
}

template <class Scaled>
void pack_coded(const fr::Product& p, int tile0, int tile1) {
    const int groups = (p.K + GROUP - 1) / GROUP;
    for (int t = tile0; t < tile1; ++t) {
        const Rows<Scaled> rows(p, t, groups);
        for (int m = 0; m < rows.count; ++m) {
            const float* x = p.x + int64_t(tile_start(p, t) + m) * p.K;
            Rounding made{};
            for (int g = 0; g < groups; ++g) {
                const int left = p.K - g * GROUP;
                if (g % SPAN == 0) {
                    made = rounding(x + g * GROUP, left < SPAN * GROUP ? left : SPAN * GROUP);
                    rows.steps[g / SPAN * rows.count + m] = made.step;
                }
                alignas(64) int16_t q[GROUP];
                const float total = round_group(x + g * GROUP, left, made.inverse, q);
                if constexpr (Scaled::MINIMA) rows.totals[g * rows.count + m] = total;
                const __m512i whole = _mm512_load_si512(q);
                const __m512i high = _mm512_srai_epi16(_mm512_add_epi16(whole, _mm512_set1_epi16(128)), 8);
                char* to = rows.halves + g / Scaled::STEP * rows.step() + m * Scaled::STEP * GROUP * 2 + g % Scaled::STEP * GROUP;
                _mm256_store_si256((__m256i*)to, Scaled::Codes::order(_mm512_cvtepi16_epi8(high)));
                _mm256_store_si256((__m256i*)(to + Scaled::STEP * GROUP), Scaled::Codes::order(_mm512_cvtepi16_epi8(whole)));
                if (Scaled::STEP == 2 && g % 2 == 0 && g + 1 == groups)
                    for (int half : {0, 1}) memset(to + GROUP + half * Scaled::STEP * GROUP, 0, GROUP);
            }
        }
    }
}

template <class F>
FR_INLINE auto by_format(fr::Format format, F&& work) {
    switch (format) {
        case fr::INT8: return work(ByColumn{});
        case fr::INT8_GROUPS: return work(ByGroup<Octets, false>{});
        case fr::INT4: return work(ByGroup<Quartets<false>, true>{});
        default: return work(ByGroup<Quartets<true>, false>{});
    }
}

// So few rows are as fast or faster without tiles.
FR_INLINE int dot_rows(fr::Format format) { return format == fr::INT8 ? 8 : format == fr::INT8_GROUPS ? 16 : 6; }

int code_tiles(int rows) { return (rows + CODED_ROWS - 1) / CODED_ROWS; }

size_t packed_codes_bytes(fr::Format format, int K) {
    return by_format(format, [&](auto scaled) { return size_t(coded_bytes<decltype(scaled)>((K + GROUP - 1) / GROUP)); });
}

void pack_codes(const fr::Product& p, int tile0, int tile1) {
    by_format(p.format, [&](auto scaled) { pack_coded<decltype(scaled)>(p, tile0, tile1); });
}

void multiply_codes(const fr::Product& p, int panel0, int panel1, int tile0, int tile1) {
    int most = 0;
    for (int t = tile0; t < tile1; ++t) most = tile_start(p, t + 1) - tile_start(p, t) > most ? tile_start(p, t + 1) - tile_start(p, t) : most;
    by_format(p.format, [&](auto scaled) { multiply_tiles<decltype(scaled)>(most, p, panel0, panel1, tile0, tile1); });
}

}  // namespace
