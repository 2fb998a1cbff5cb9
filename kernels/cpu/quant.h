// Products with weights of 8 or 4 bits.
//
// Weights come in groups of 32 along K: w = unit[column] · (scale[group, column] · code + minimum[group, column]). A row of activations is
// rounded to 16 bits group by group, x ≈ step · q with |q| ≤ 32767 reaching the group's largest value: finer than bf16. The products of codes
// and q are then whole numbers, and so is their sum over a group, exactly, in any order and on any machine:
//
//   y = unit · Σ over groups, in order, in float:   fma(Σ code·q, scale·step, …),   then fma(minimum, step·Σq, …)
//
// So an element of y is one chain again, as in matmul.h, and every instruction set that fuses multiply-add makes the same bits.
//
//   panel of 32 columns:   groups one after the other, then 32 units (float)
//   group, 8 bits:         [k/2: 16][column: 32][k%2] signed bytes
//   group, 4 bits:         [k/8: 4][column: 32][k%2] words of four codes 0 … 15: k/2%4 = 0 in the lowest four bits
//                          then, by format, 32 scales and 32 minima (f16)
//   packed rows, a group:  [k/2: 16][row] pairs of q, [row] steps, [row] integers that the sum starts with, [row] step·Σq
//
// The integer that a sum starts with is −8·Σq where codes stand for code − 8, else 0.
#pragma once

#include "matmul.h"
#if defined(FR_NEON)
#include "neon_ints.h"
#endif

#define FR_METHOD inline __attribute__((always_inline))

namespace {

constexpr int GROUP = fr::GROUP;
constexpr int PAIRS = GROUP / 2;
constexpr int HALF = fr::PANEL / 2;  // columns of a vector

// Up to WHOLE_ROWS rows meet a whole panel at once, more of them one half of it after the other. Registers hold the sums of a group and
// those over groups of a tile, KEPT vectors each; where there are fewer, memory holds the latter.
#if defined(__AVX512F__)
constexpr int KEPT = TILE_ROWS, WHOLE_ROWS = TILE_ROWS / 2;
#else
constexpr int KEPT = 2, WHOLE_ROWS = TILE_ROWS;
#endif

#if defined(__AVX512F__)

typedef int32_t Ints __attribute__((vector_size(64)));  // unlike __m512i it aliases nothing, and arrays of it stay in registers
struct I { Ints x; };    // sixteen int32, or as many pairs of int16

FR_INLINE I splat(int32_t a) { return {(Ints)_mm512_set1_epi32(a)}; }
FR_INLINE I dot(I sum, I w, I q) {
#if defined(__AVX512VNNI__)
    return {(Ints)_mm512_dpwssd_epi32((__m512i)sum.x, (__m512i)w.x, (__m512i)q.x)};
#else
    return {sum.x + (Ints)_mm512_madd_epi16((__m512i)w.x, (__m512i)q.x)};
#endif
}
FR_INLINE I operator+(I a, I b) { return {a.x + b.x}; }
FR_INLINE V to_float(I a) { return {_mm512_cvtepi32_ps((__m512i)a.x)}; }
FR_INLINE I load_bytes(const int8_t* p) { return {(Ints)_mm512_cvtepi8_epi16(_mm256_load_si256((const __m256i*)p))}; }
FR_INLINE I load_words(const uint16_t* p) { return {(Ints)_mm512_load_si512(p)}; }
template <int AT>
FR_INLINE I nibbles(I w) {
    if constexpr (AT == 3) return {(Ints)_mm512_srli_epi16((__m512i)w.x, 12)};
    return {(Ints)_mm512_and_si512(AT ? _mm512_srli_epi16((__m512i)w.x, 4 * AT) : (__m512i)w.x, _mm512_set1_epi16(15))};
}
FR_INLINE V load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_load_si256((const __m256i*)p))}; }
// The low 16 bits of every lane.
FR_INLINE void store_low(int16_t* p, V a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_castps_si512(a.x))); }

#elif defined(__AVX2__)

struct I { __m256i lo, hi; };

FR_INLINE I splat(int32_t a) { return {_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }
FR_INLINE I dot(I sum, I w, I q) {
    return {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(w.lo, q.lo)), _mm256_add_epi32(sum.hi, _mm256_madd_epi16(w.hi, q.hi))};
}
FR_INLINE I operator+(I a, I b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
FR_INLINE V to_float(I a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
FR_INLINE I load_bytes(const int8_t* p) {
    return {_mm256_cvtepi8_epi16(_mm_load_si128((const __m128i*)p)), _mm256_cvtepi8_epi16(_mm_load_si128((const __m128i*)(p + 16)))};
}
FR_INLINE I load_words(const uint16_t* p) { return {_mm256_load_si256((const __m256i*)p), _mm256_load_si256((const __m256i*)(p + 16))}; }
template <int AT>
FR_INLINE I nibbles(I w) {
    const __m256i mask = _mm256_set1_epi16(15);
    return {_mm256_and_si256(_mm256_srli_epi16(w.lo, 4 * AT), mask), _mm256_and_si256(_mm256_srli_epi16(w.hi, 4 * AT), mask)};
}
FR_INLINE __m256 half8(const uint16_t* p) {
    const __m256i h = _mm256_cvtepu16_epi32(_mm_load_si128((const __m128i*)p));
    const __m256 size = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_and_si256(h, _mm256_set1_epi32(0x7fff)), 13));
    const __m256 sign = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_and_si256(h, _mm256_set1_epi32(0x8000)), 16));
    return _mm256_or_ps(_mm256_mul_ps(size, _mm256_set1_ps(0x1p112f)), sign);
}
FR_INLINE V load_half(const uint16_t* p) { return {half8(p), half8(p + 8)}; }
FR_INLINE void store_low(int16_t* p, V a) {
    alignas(32) uint32_t bits[LANES];
    _mm256_store_ps((float*)bits, a.lo), _mm256_store_ps((float*)bits + 8, a.hi);
    for (int l = 0; l < LANES; ++l) p[l] = int16_t(bits[l]);
}

#elif !defined(FR_NEON)  // neon_ints.h

struct I { int32_t x[LANES]; };

FR_INLINE I splat(int32_t a) {
    I r;
    for (int l = 0; l < LANES; ++l) r.x[l] = a;
    return r;
}
FR_INLINE I dot(I sum, I w, I q) {
    for (int l = 0; l < LANES; ++l) sum.x[l] += int16_t(w.x[l]) * int16_t(q.x[l]) + (w.x[l] >> 16) * (q.x[l] >> 16);
    return sum;
}
FR_INLINE I operator+(I a, I b) {
    for (int l = 0; l < LANES; ++l) a.x[l] += b.x[l];
    return a;
}
FR_INLINE V to_float(I a) { FR_EACH(float(a.x[l])); }
FR_INLINE I load_bytes(const int8_t* p) {
    I r;
    for (int l = 0; l < LANES; ++l) r.x[l] = int32_t(uint32_t(uint16_t(p[2 * l])) | uint32_t(p[2 * l + 1]) << 16);
    return r;
}
FR_INLINE I load_words(const uint16_t* p) {
    I r;
    for (int l = 0; l < LANES; ++l) r.x[l] = int32_t(uint32_t(p[2 * l]) | uint32_t(p[2 * l + 1]) << 16);
    return r;
}
template <int AT>
FR_INLINE I nibbles(I w) {
    for (int l = 0; l < LANES; ++l) w.x[l] = int32_t(uint32_t(w.x[l]) >> (4 * AT) & 0x000f000fu);
    return w;
}
// Finite numbers only, as scales are; a subnormal becomes exact through the multiplication.
FR_INLINE V load_half(const uint16_t* p) { FR_EACH(float_of(bits_of(float_of(uint32_t(p[l] & 0x7fff) << 13) * 0x1p112f) | uint32_t(p[l] & 0x8000) << 16)); }
FR_INLINE void store_low(int16_t* p, V a) {
    for (int l = 0; l < LANES; ++l) p[l] = int16_t(bits_of(a.x[l]));
}

#endif

// With few rows a chain of sixteen additions would be waited for: whole numbers may be added in several, as the order is free.
// Where a vector is several registers, there are enough sums without.
#if defined(FR_NEON)
constexpr int chains(int) { return 1; }
#else
constexpr int chains(int M) { return M == 1 ? 4 : M <= 3 ? 2 : 1; }
#endif

// Sums of a group, M rows by 32 columns, in g[row + M · chain]: what the two widths of codes do differently.
struct Bytes {
    static constexpr int CODES = GROUP * fr::PANEL;
    template <int M, int N, int C>
    FR_INLINE void sum(I (&g)[M * C][N], const uint8_t* codes, const int32_t* q) {
        for (int pairs = 0; pairs < PAIRS; pairs += C)
            for (int c = 0; c < C; ++c) {
                const int pair = pairs + c;
                const int8_t* at = (const int8_t*)codes + pair * 2 * fr::PANEL;
                I w[N];
                for (int j = 0; j < N; ++j) w[j] = load_bytes(at + j * fr::PANEL);
                FR_UNROLL
                for (int m = 0; m < M; ++m) {
                    const I x = splat(q[pair * M + m]);
                    for (int j = 0; j < N; ++j) g[m + M * c][j] = dot(g[m + M * c][j], w[j], x);
                }
            }
    }
    static constexpr int HALF_CODES = fr::PANEL;  // bytes to the codes of the second half
};

struct Nibbles {
    static constexpr int CODES = GROUP * fr::PANEL / 2;
    static constexpr int HALF_CODES = 2 * fr::PANEL;
    template <int AT, int M, int N, int C>
    FR_INLINE void plane(I (&g)[M * C][N], const I (&words)[N], const int32_t* q) {
        I w[N];
        for (int j = 0; j < N; ++j) w[j] = nibbles<AT>(words[j]);
        FR_UNROLL
        for (int m = 0; m < M; ++m) {
            const I x = splat(q[AT * M + m]);
            for (int j = 0; j < N; ++j) g[m + M * (AT % C)][j] = dot(g[m + M * (AT % C)][j], w[j], x);
        }
    }
    template <int M, int N, int C>
    FR_INLINE void sum(I (&g)[M * C][N], const uint8_t* codes, const int32_t* q) {
        for (int octet = 0; octet < PAIRS / 4; ++octet) {
            const uint16_t* at = (const uint16_t*)codes + octet * 2 * fr::PANEL;
            I words[N];
            for (int j = 0; j < N; ++j) words[j] = load_words(at + j * fr::PANEL);
            plane<0, M, N, C>(g, words, q + 4 * octet * M);
            plane<1, M, N, C>(g, words, q + 4 * octet * M);
            plane<2, M, N, C>(g, words, q + 4 * octet * M);
            plane<3, M, N, C>(g, words, q + 4 * octet * M);
        }
    }
};

// Bytes of a group: codes, and by format scales and minima.
FR_INLINE int group_bytes(fr::Format format) {
    const int codes = format == fr::INT8 || format == fr::INT8_GROUPS ? Bytes::CODES : Nibbles::CODES;
    return codes + 2 * fr::PANEL * (int(format != fr::INT8) + int(format == fr::INT4));
}

constexpr int ROW_WORDS = PAIRS + 3;  // of a packed row, a group

// Sums over groups, M rows by N vectors: in registers, or where a group's sums need them all, in memory meanwhile.
template <int M, int N, bool IN_REGISTERS = (M * N <= KEPT)>
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
    FR_METHOD void leave() { asm volatile("" : : "r"(at) : "memory"); }  // lest the compiler carries them through the group
};

// M rows by a panel or (N = 1) the half of one, `t.steps` groups. w: codes of the first column; units, scales: of that column.
template <class Codes, int M, int N, bool SCALES, bool MINIMA>
void group_tile(const Tile& t, int bytes, const uint8_t* w, const uint16_t* scale, const int32_t* x, const float* units) {
    constexpr int C = chains(M);
    const bool full = t.columns >= N * LANES;
    Sums<M, N> sums;
    {
        V y[M][N];
        if (!t.first) full ? begin<M, N, true>(t, y) : begin<M, N, false>(t, y);
        FR_UNROLL
        for (int m = 0; m < M; ++m)
            for (int j = 0; j < N; ++j) sums.put(m, j, t.first ? zero() : y[m][j]);
    }
    for (int s = 0; s < t.steps; ++s, w += bytes, scale += bytes / 2, x += M * ROW_WORDS) {
        if (t.ahead)  // scales and minima too: a line that nobody asked for costs as much as a group of codes
            for (int at = 0; at < bytes; at += 64) __builtin_prefetch(w + t.ahead + at, 0, 2);
        const int32_t* start = x + (PAIRS + 1) * M;
        const float *step = (const float*)x + PAIRS * M, *total = step + 2 * M;
        I g[M * C][N];
        FR_UNROLL
        for (int m = 0; m < M * C; ++m)
            for (int j = 0; j < N; ++j) g[m][j] = splat(m < M ? start[m] : 0);
        sums.leave();
        Codes::template sum<M, N, C>(g, w, x);
        sums.leave();
        for (int m = M; m < M * C; ++m)
            for (int j = 0; j < N; ++j) g[m % M][j] = g[m % M][j] + g[m][j];
        for (int j = 0; j < N; ++j) {
            const V by = SCALES ? load_half(scale + j * HALF) : zero();
            FR_UNROLL
            for (int m = 0; m < M; ++m) sums.put(m, j, fma(to_float(g[m][j]), SCALES ? by * set(step[m]) : set(step[m]), sums.get(m, j)));
        }
        if constexpr (MINIMA)
            for (int j = 0; j < N; ++j) {
                const V minimum = load_half(scale + fr::PANEL + j * HALF);
                FR_UNROLL
                for (int m = 0; m < M; ++m) sums.put(m, j, fma(minimum, set(total[m]), sums.get(m, j)));
            }
    }
    V y[M][N];
    for (int j = 0; j < N; ++j) {
        const V unit = load(units + j * LANES);
        FR_UNROLL
        for (int m = 0; m < M; ++m) y[m][j] = t.last ? sums.get(m, j) * unit : sums.get(m, j);
    }
    full ? finish<M, N, true>(t, y) : finish<M, N, false>(t, y);
}

using GroupTileFn = void (*)(const Tile&, int, const uint8_t*, const uint16_t*, const int32_t*, const float*);

// A tile of exactly `rows` rows, between LEAST and MOST, and N vectors.
template <class Codes, int N, bool SCALES, bool MINIMA, int LEAST, int MOST>
FR_INLINE GroupTileFn choose_groups(int rows) {
    if constexpr (MOST < LEAST) {
        return nullptr;
    } else {
        return rows == MOST ? group_tile<Codes, MOST, N, SCALES, MINIMA> : choose_groups<Codes, N, SCALES, MINIMA, LEAST, MOST - 1>(rows);
    }
}

template <class Codes, bool SCALES, bool MINIMA>
void multiply_groups(const fr::Product& p, int panel0, int panel1, int tile0, int tile1) {
    const int groups = (p.K + GROUP - 1) / GROUP, bytes = group_bytes(p.format);
    const int64_t stride = int64_t(groups) * bytes + fr::PANEL * 4, x_row = int64_t(groups) * ROW_WORDS;
    const bool alone = tile1 - tile0 == 1;
    const int block = alone ? groups : K_BLOCK / GROUP;
    for (int panel = panel0; panel < panel1; ++panel) {
        const uint8_t* first = (const uint8_t*)p.w + panel * stride;
        const float* units = (const float*)(first + int64_t(groups) * bytes);
        for (int s = 0; s < groups; s += block) {
            const int here = groups - s < block ? groups - s : block;
            const uint8_t* w = first + int64_t(s) * bytes;
            const uint16_t* scale = (const uint16_t*)(w + Codes::CODES);
            for (int t = tile0; t < tile1; ++t) {
                const int row = tile_start(p, t), rows = tile_start(p, t + 1) - row, column = panel * fr::PANEL;
                const int32_t* x = (const int32_t*)p.packed + row * x_row + int64_t(s) * rows * ROW_WORDS;
                const bool next = t + 1 == tile1 && panel + 1 < panel1;
                const int64_t ahead = alone ? (rows > TWIN_ROWS ? AHEAD : 0) : next ? stride : 0;
                Tile job{here, 0, p.y + row * p.y_stride + (column - p.y_column), p.y_stride, p.bias ? p.bias + column : nullptr,
                         p.N - column, s == 0, s + here == groups, ahead};
                if (rows <= WHOLE_ROWS) {
                    choose_groups<Codes, 2, SCALES, MINIMA, 1, WHOLE_ROWS>(rows)(job, bytes, w, scale, x, units);
                    continue;
                }
                const GroupTileFn run = choose_groups<Codes, 1, SCALES, MINIMA, WHOLE_ROWS + 1, TILE_ROWS>(rows);
                run(job, bytes, w, scale, x, units);
                if (job.columns <= LANES) continue;
                job.y += LANES, job.columns -= LANES, job.ahead = 0;
                if (job.bias) job.bias += LANES;
                run(job, bytes, w + Codes::HALF_CODES, scale + HALF, x, units + LANES);
            }
        }
    }
}

// One group of one row: its whole numbers are in q. Below 1e-30 a group counts as zeros; one NaN or infinity makes the step a NaN.
struct Rounded {
    float step, sum;
};

FR_INLINE Rounded round_group(const float* x, int count, int16_t (&q)[GROUP]) {
    const int high = count > LANES ? count - LANES : 0;
    const V a = load(x, count > LANES ? LANES : count), b = high ? load(x + LANES, high) : zero();
    const float peak = maximum(max(absolute(a), absolute(b)));
    const V inverse = set(peak > 1e-30f ? 32767.0f / peak : 0.0f), magic = set(12582912.0f);  // 1.5·2²³: the fraction rounds away
    const V u = a * inverse + magic, v = b * inverse + magic;
    store_low(q, u), store_low(q + LANES, v);
    if (any_nan(a) || any_nan(b) || peak > __FLT_MAX__) return {__builtin_nanf(""), 0.0f};
    return {peak > 1e-30f ? peak / 32767.0f : 0.0f, sum((u - magic) + (v - magic))};
}

// The groups of `count` ≤ 16 rows of a tile of M, side by side: pair i of row m to out[i · M + m].
FR_INLINE void interleave(const int16_t (&q)[LANES][GROUP], int count, int32_t* out, int M) {
#if defined(__AVX512BF16__)
    if (count >= 4) {
        __m512i r[LANES];
        for (int i = 0; i < LANES; ++i) r[i] = i < count ? _mm512_load_si512(q[i]) : _mm512_setzero_si512();
        transpose(r);
        for (int i = 0; i < PAIRS; ++i) _mm512_mask_storeu_epi32(out + i * M, __mmask16((1u << count) - 1), r[i]);
        return;
    }
#endif
    for (int m = 0; m < count; ++m)
        for (int i = 0; i < PAIRS; ++i) memcpy(out + i * M + m, q[m] + 2 * i, 4);
}

void pack_groups(const fr::Product& p, int tile0, int tile1) {
    const int groups = (p.K + GROUP - 1) / GROUP;
    const float offset = p.format == fr::INT4_SYMMETRIC ? -8.0f : 0.0f;
    for (int t = tile0; t < tile1; ++t) {
        const int row = tile_start(p, t), M = tile_start(p, t + 1) - row;
        int32_t* out = (int32_t*)p.packed + int64_t(row) * groups * ROW_WORDS;
        for (int g = 0; g < groups; ++g, out += M * ROW_WORDS)
            for (int m = 0; m < M; m += LANES) {
                const int count = M - m < LANES ? M - m : LANES, left = p.K - g * GROUP;
                alignas(64) int16_t q[LANES][GROUP];
                for (int i = 0; i < count; ++i) {
                    const Rounded made = round_group(p.x + int64_t(row + m + i) * p.K + g * GROUP, left < GROUP ? left : GROUP, q[i]);
                    ((float*)out)[PAIRS * M + m + i] = made.step;
                    out[(PAIRS + 1) * M + m + i] = int32_t(offset * made.sum);
                    ((float*)out)[(PAIRS + 2) * M + m + i] = made.step * made.sum;
                }
                interleave(q, count, out + m, M);
            }
    }
}

// What run.cpp calls for any format.

size_t packed_bytes_any(fr::Format format, int32_t K) {
    return format >= fr::INT8 ? size_t((K + GROUP - 1) / GROUP) * ROW_WORDS * 4 : packed_bytes(format, K);
}

int32_t tiles_any(fr::Format format, int32_t rows) {
    return format >= fr::INT8 ? tiles_of(rows) : tiles(format, rows);
}

void pack_rows_any(const fr::Product& p, int32_t tile0, int32_t tile1) {
    p.format >= fr::INT8 ? pack_groups(p, tile0, tile1) : pack_rows(p, tile0, tile1);
}

void multiply_any(const fr::Product& p, int32_t panel0, int32_t panel1, int32_t tile0, int32_t tile1) {
    if (p.format < fr::INT8) return multiply(p, panel0, panel1, tile0, tile1);
    if (p.format == fr::INT8) return multiply_groups<Bytes, false, false>(p, panel0, panel1, tile0, tile1);
    if (p.format == fr::INT8_GROUPS) return multiply_groups<Bytes, true, false>(p, panel0, panel1, tile0, tile1);
    if (p.format == fr::INT4) return multiply_groups<Nibbles, true, true>(p, panel0, panel1, tile0, tile1);
    multiply_groups<Nibbles, true, false>(p, panel0, panel1, tile0, tile1);
}

}  // namespace
