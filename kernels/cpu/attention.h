// Attention of a few rows of one sequence over its pages, for one KV head and the query heads that share it.
//
// A row sees exactly one entry for each position 0 … its own (engine/batch.py). Positions come in blocks of 256, the same for every row: a
// block's keys and values are read from memory once, for all queries, and stay in cache meanwhile. For every query, block by block:
//   1. a score for each position: one chain of multiply-adds over the head dimension, sixteen positions side by side (keys lie transposed);
//   2. the exact maximum so far (where it grew, what was summed before is scaled down), then exp and its sum in sixteen lanes,
//      lane = position mod 16, pages in ascending order;
//   3. the weighted sum of values: one chain over ascending positions for each dimension. Behind the last block, one division by the sum.
// Codes of 8 bits are multiplied as they are; a key's scale meets its score, a value's scale its share.
// With bf16 dot products keys and values in bf16 meet queries and shares rounded to bf16, as a product's activations are: two dimensions,
// two positions (2j and 2j + 1) in one step of the chain.
// So the bits depend on the query and on what it sees, position by position, never on the rows beside it, on chunks, on threads or on where
// a tree keeps its nodes. Entries that a row does not see are never read into its values (a stale NaN stays harmless).
//
// Rows whose entries all lie in their natural place, slot page(p), share every page. A node of a tree shares the pages below the first
// position where its branch leaves that place; from there on its entries are copied into pages of its own (its tail).
#pragma once

#include "arith.h"
#include "kernels.h"
#include "kv.h"

namespace {

constexpr int PAGE = fr::PAGE;
constexpr int SCORE_TILE = 8;   // queries that meet a page of keys at once
constexpr int BLOCK = 16;       // pages whose keys and values pass by all queries together
constexpr int VALUE_TILE = 6;   // queries that meet a page of values at once, four vectors of dimensions each
constexpr int ASKING = 4;       // queries of a tile at most that asks for lines with each step: with more, asking would cost more than waiting

struct View {          // what one row sees
    int first, end;    // positions [first, end)
    int shared;        // pages below this index are the sequence's own
    const void* tail_keys;
    const void* tail_values;
};

// Of one query: the largest score so far, exp of the rest of what the softmax divides by, and its sums in lanes.
struct Mass {
    float most, sink;
    float lanes[LANES];
};

struct Scratch {
    char* at;
    template <class T>
    T* take(size_t count) {
        T* p = (T*)at;
        at += (count * sizeof(T) + 63) / 64 * 64;
        return p;
    }
};

FR_INLINE int natural_slot(const fr::Attention& a, int segment, int position) {
    return a.pages[int64_t(segment) * a.page_columns + position / PAGE] * PAGE + position % PAGE;
}

// The first position where the row's branch leaves its natural place, or its own position + 1.
FR_INLINE int leaves_at(const fr::Attention& a, int segment, int row) {
    const int base = a.starts[segment] + a.known[segment];
    int at = a.positions[row] + 1;
    for (int r = row, p = a.positions[row]; r >= base; r = a.parents[r], --p)
        if (p >= a.page_columns * PAGE || a.slots[r] != natural_slot(a, segment, p)) at = p;
    return at;
}

FR_INLINE int pages_for(int positions) { return (positions + PAGE - 1) / PAGE; }
FR_INLINE int words_of(int D) { return (D + LANES - 1) / LANES * LANES / 2; }  // of a query in pairs

size_t attention_bytes(const fr::Attention& a, int32_t segment, int32_t row0, int32_t row1) {
    const size_t rows = size_t(row1 - row0), queries = rows * (a.heads / a.kv_heads);
    int most = 0;
    size_t tail_pages = 0;
    for (int r = row0; r < row1; ++r) {
        const int end = a.positions[r] + 1, leaves = leaves_at(a, segment, r);
        if (end > most) most = end;
        if (leaves < end) tail_pages += size_t(pages_for(end) - leaves / PAGE);
    }
    const size_t pages = size_t(pages_for(most));
    return 2 * rows * sizeof(View) + pages * 2 * sizeof(void*) + queries * (BLOCK * PAGE * 4 + 3 * sizeof(void*) + sizeof(Mass) + words_of(a.D) * 4) +
           tail_pages * 2 * fr::page_bytes(a.format, a.D) + 64 * (11 + 2 * rows);
}

// Copies the entries from page `shared` on into pages of the row's own.
template <class T>
void build_tail(const fr::Attention& a, int segment, int kv_head, int row, View& view, Scratch& scratch) {
    const int D = a.D, pages = pages_for(view.end) - view.shared;
    const int64_t block = page_elements<T>(D);
    T* keys = scratch.take<T>(size_t(pages * block));
    T* values = scratch.take<T>(size_t(pages * block));
    memset(keys, 0, size_t(pages * block) * sizeof(T));
    const int base = a.starts[segment] + a.known[segment];
    int r = row;
    for (int p = view.end - 1; p >= view.shared * PAGE; --p) {
        int slot;
        if (r >= base) {
            slot = a.slots[r];
            r = a.parents[r];
        } else {
            slot = natural_slot(a, segment, p);
        }
        const int64_t page = (int64_t(slot / PAGE) * a.kv_heads + kv_head) * block;
        const T *key = (const T*)a.keys + page, *value = (const T*)a.values + page;
        const int from = slot % PAGE, at = p % PAGE;
        T *to_key = keys + (p / PAGE - view.shared) * block, *to_value = values + (p / PAGE - view.shared) * block;
        for (int d = 0; d < D; ++d) to_key[d * PAGE + at] = key[d * PAGE + from];
        memcpy(to_value + int64_t(at) * D, value + int64_t(from) * D, size_t(D) * sizeof(T));
        if constexpr (SCALED<T>) scales_of(to_key, D)[at] = scales_of(key, D)[from], scales_of(to_value, D)[at] = scales_of(value, D)[from];
    }
    view.tail_keys = keys;
    view.tail_values = values;
}

// Whether entries are multiplied in pairs.
#if defined(__AVX512BF16__)
template <class T>
constexpr bool PAIRED = sizeof(T) == 2;

// a0 a1 … a15 b0 b1 … b15 → a0 b0 a1 b1 …
FR_INLINE __m512bh paired(__m512i ab) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2,
                                           17, 1, 16, 0);
    return (__m512bh)_mm512_permutexvar_epi16(order, ab);
}
FR_INLINE __m512bh paired(__m256i a, __m256i b) { return paired(_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1)); }
FR_INLINE __m256i half(const bf16* p) { return _mm256_loadu_si256((const __m256i*)p); }
FR_INLINE __m256i half(const bf16* p, int n) { return _mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), p); }
FR_INLINE V dot(__m512bh pairs, uint32_t by, V sum) { return {_mm512_dpbf16_ps(sum.x, pairs, (__m512bh)_mm512_set1_epi32(int(by)))}; }

// x [D] → words_of(D) pairs of bf16, zeros behind the last.
FR_INLINE void pair_up(const float* x, int D, uint32_t* to) {
    for (int d = 0; d < D; d += LANES) {
        const V a = D - d < LANES ? load(x + d, D - d) : load(x + d);
        _mm256_storeu_si256((__m256i*)(to + d / 2), (__m256i)_mm512_cvtneps_pbh(a.x));
    }
}
#else
template <class T>
constexpr bool PAIRED = false;
#endif

// The shares of the positions of a page: floats, or pairs of bf16 in half the place.
template <class T>
FR_INLINE const float* shares(const float* s, int page) {
    return s + page * (PAIRED<T> ? PAGE / 2 : PAGE);
}

// What is read later: pages, keys or values of one KV head, then some lines of anything else. Pages lie scattered, and the machine's own
// prefetcher stops at the end of each, so they are asked for while others are computed, as many lines with each step as the step reads: a
// core that is asked for more at once than it can wait for forgets some (Zen 5: one line in eight of a page or more).
template <class T>
struct Ahead {
    const T* pages[2 * BLOCK];
    int count = 0, asked = 0;
    const char *more = nullptr, *at = nullptr, *end = nullptr;
    int64_t lines = 0;  // of `more`

    void add(const T* page) { pages[count++] = page; }
    void add(const T* const* all, int from, int to) {
        for (; from < to; ++from) add(all[from]);
    }
    bool turn(int D) {
        if (asked == count && !lines) return false;
        const bool page = asked < count;
        at = page ? (const char*)pages[asked++] : more;
        end = at + (page ? page_elements<T>(D) * int64_t(sizeof(T)) : 64 * lines);
        if (!page) lines = 0;
        return true;
    }
    inline __attribute__((always_inline)) void ask(int some, int D) {
        if (at >= end && !turn(D)) return;
        for (int line = 0; line < some; ++line) __builtin_prefetch(at + 64 * line, 0, 2);
        at += 64 * some;
    }
    void rest(int D) {
        while (at < end || turn(D)) ask(1, D);
    }
};

// Scores of Q queries against P pages. A query is D floats, or pairs of bf16.
template <int Q, int P, class T>
FR_INLINE void score_tile(const float* const* q, const T* const* keys, int D, float* const* out, Ahead<T>* ahead = nullptr) {
    V acc[Q][P];
    FR_UNROLL
    for (int i = 0; i < Q; ++i)
        for (int p = 0; p < P; ++p) acc[i][p] = zero();
    if constexpr (PAIRED<T>) {
#if defined(__AVX512BF16__)
        const auto step = [&](int d, bool both) {
            __m512bh k[P];
            if (ahead) ahead->ask(P, D);
            for (int p = 0; p < P; ++p) {
                const T* key = keys[p] + d * PAGE;
                k[p] = both ? paired(_mm512_loadu_si512(key)) : paired(half(key), _mm256_setzero_si256());
            }
            FR_UNROLL
            for (int i = 0; i < Q; ++i)
                for (int p = 0; p < P; ++p) acc[i][p] = dot(k[p], ((const uint32_t*)q[i])[d / 2], acc[i][p]);
        };
        for (int d = 0; d + 1 < D; d += 2) step(d, true);
        if (D % 2) step(D - 1, false);
#endif
    } else {
        for (int d = 0; d < D; ++d) {
            V k[P];
            if (ahead && d * PAGE * int(sizeof(T)) % 64 == 0) ahead->ask(P, D);
            for (int p = 0; p < P; ++p) k[p] = load(keys[p] + d * PAGE);
            FR_UNROLL
            for (int i = 0; i < Q; ++i) {
                V x = set(q[i][d]);
                for (int p = 0; p < P; ++p) acc[i][p] = fma(x, k[p], acc[i][p]);
            }
        }
    }
    FR_UNROLL
    for (int i = 0; i < Q; ++i)
        for (int p = 0; p < P; ++p) store(out[i] + p * PAGE, acc[i][p]);
}

// Pages in tiles. A query has a chain of sums for each page of its tile, and each step of a chain waits for the one before it; so up to four
// queries take up to four pages together and never leave one alone: five are 3 + 2, six 3 + 3. More queries have chains enough in any tile.
template <int Q, class T>
void score_pages(const float* const* q, const T* const* keys, int page0, int page1, int D, float* const* scores, Ahead<T>& ahead) {
    constexpr int MOST = Q <= 4 ? 4 : 2;
    for (int page = page0, here; page < page1; page += here) {
        const int left = page1 - page;
        here = left <= MOST ? left : left < MOST + 3 && MOST > 2 ? 3 : MOST;
        Ahead<T>* const beside = Q <= ASKING ? &ahead : nullptr;
        float* out[Q];
        for (int i = 0; i < Q; ++i) out[i] = scores[i] + page * PAGE;
        switch (here) {
            case 1: score_tile<Q, 1>(q, keys + page, D, out, beside); break;
            case 2: score_tile<Q, 2>(q, keys + page, D, out, beside); break;
            case 3: score_tile<Q, MOST < 3 ? 1 : 3>(q, keys + page, D, out, beside); break;
            case 4: score_tile<Q, MOST < 4 ? 1 : 4>(q, keys + page, D, out, beside); break;
        }
    }
}

template <class T, int Q = SCORE_TILE>
FR_INLINE void score(int count, const float* const* q, const T* const* keys, int page0, int page1, int D, float* const* scores, Ahead<T>& ahead) {
    if constexpr (Q > 0) {
        if (count == Q)
            score_pages<Q>(q, keys, page0, page1, D, scores, ahead);
        else
            score<T, Q - 1>(count, q, keys, page0, page1, D, scores, ahead);
    }
}

// A page of a row's own: from the sequence's, or from its tail.
template <class T>
FR_INLINE const T* page_of(const T* const* pages, const void* tail, const View& view, int page, int D) {
    return page < view.shared ? pages[page] : (const T*)tail + (page - view.shared) * page_elements<T>(D);
}

// Raw scores of a block → exp(score − maximum so far), 0 outside of [first, end), times the scales of values that have some. What the query
// has summed before, `mass` and out [D], is brought to the new maximum.
template <class T>
FR_INLINE void soften(const fr::Attention& a, const View& view, const T* const* keys, const T* const* values, float* s, Mass& mass, float* out) {
    const int page0 = view.first / PAGE, page1 = pages_for(view.end);
    const V minus = set(-__builtin_inff()), scale = set(a.scale);
    V most = minus;
    for (int page = page0; page < page1; ++page) {
        V x = load(s + page * PAGE) * scale;
        if constexpr (SCALED<T>) x = x * load(scales_of(page_of(keys, view.tail_keys, view, page, a.D), a.D));
        if (a.softcap > 0.0f) x = set(a.softcap) * hyperbolic_tangent(x / set(a.softcap));
        const int from = view.first - page * PAGE, to = view.end - page * PAGE;
        if (from > 0 || to < PAGE) x = select(lanes_from(from > 0 ? from : 0, to < PAGE ? to : PAGE), x, minus);
        store(s + page * PAGE, x);
        most = max(most, x);
    }
    V total = load(mass.lanes);
    const float peak = maximum(most);
    if (peak > mass.most && mass.most == -__builtin_inff()) {
        mass.most = peak, mass.sink = 0.0f;  // of nothing so far there is nothing to scale
    } else if (peak > mass.most) {
        const V factor = exponential(set(mass.most - peak));
        total = total * factor;
        float lane[LANES];
        store(lane, factor);
        mass.sink *= lane[0], mass.most = peak;
        for (int d = 0; d < a.D; d += LANES) {
            const int n = a.D - d < LANES ? a.D - d : LANES;
            store(out + d, load(out + d, n) * factor, n);
        }
    }
    const V shift = set(mass.most);
    for (int page = page0; page < page1; ++page) {
        V e = exponential(load(s + page * PAGE) - shift);
        if constexpr (PAIRED<T>) {
#if defined(__AVX512BF16__)
            const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(e.x);  // its place is that of a score that has been read
            _mm256_storeu_si256((__m256i*)(s + page * (PAGE / 2)), rounded);
            total = total + widen16(rounded);
#endif
        } else {
            total = total + e;
            if constexpr (SCALED<T>) e = e * load(scales_of(page_of(values, view.tail_values, view, page, a.D), a.D));
            store(s + page * PAGE, e);
        }
    }
    store(mass.lanes, total);
}

// N vectors of dimensions, all full, or one of `rest` elements.
template <int N, bool FULL, class T>
FR_INLINE void load_all(const T* p, int rest, V (&to)[N]) {
    for (int n = 0; n < N; ++n) to[n] = FULL ? load(p + n * LANES) : load(p, rest);
}

template <int N, bool FULL>
FR_INLINE void store_all(float* p, int rest, const V (&from)[N]) {
    for (int n = 0; n < N; ++n) FULL ? store(p + n * LANES, from[n]) : store(p, from[n], rest);
}

#if defined(__AVX512BF16__)
// Two rows of values side by side, for N vectors of dimensions. Two full vectors are interleaved within each quarter of a register, so their
// sums take turns (`take_turns`, `in_order`): quarters 0, 2, 4, 6 and 1, 3, 5, 7.
template <int N, bool FULL>
FR_INLINE void pair_rows(const bf16* a, const bf16* b, int rest, __m512bh (&to)[N]) {
    for (int n = 0; n + 1 < N; n += 2) {
        const __m512i first = _mm512_loadu_si512(a + n * LANES), second = _mm512_loadu_si512(b + n * LANES);
        to[n] = (__m512bh)_mm512_unpacklo_epi16(first, second), to[n + 1] = (__m512bh)_mm512_unpackhi_epi16(first, second);
    }
    const int last = (N - 1) * LANES;
    if constexpr (N % 2) to[N - 1] = FULL ? paired(half(a + last), half(b + last)) : paired(half(a + last, rest), half(b + last, rest));
}

// The same where only one of the rows is seen; the other's share is 0.
template <int N, bool FULL>
FR_INLINE void pair_rows(const bf16* a, bool first_seen, const bf16* b, bool second_seen, int rest, __m512bh (&to)[N]) {
    alignas(64) bf16 none[N * LANES] = {};
    pair_rows<N, FULL>(first_seen ? a : none, second_seen ? b : none, rest, to);
}

template <int N>
FR_INLINE void take_turns(V (&acc)[N]) {
    for (int n = 0; n + 1 < N; n += 2) {
        const __m512 a = acc[n].x, b = acc[n + 1].x;
        acc[n].x = _mm512_shuffle_f32x4(a, b, 0x88), acc[n + 1].x = _mm512_shuffle_f32x4(a, b, 0xdd);
    }
}

template <int N>
FR_INLINE void in_order(V (&acc)[N]) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int n = 0; n + 1 < N; n += 2) {
        const __m512 even = acc[n].x, odd = acc[n + 1].x;
        acc[n].x = _mm512_permutex2var_ps(even, low, odd), acc[n + 1].x = _mm512_permutex2var_ps(even, high, odd);
    }
}
#endif

// out[i][d …] += Σ share · value over positions [first, end), for Q queries. Of a pair that begins before or ends behind them only what lies in
// them is read.
template <int Q, int N, bool FULL, class T>
void value_tile(const float* const* s, const T* const* values, int first, int end, int D, int d, int rest, float* const* out, Ahead<T>& ahead) {
    V acc[Q][N];
    FR_UNROLL
    for (int i = 0; i < Q; ++i) load_all<N, FULL>(out[i] + d, rest, acc[i]);
#if defined(__AVX512BF16__)
    FR_UNROLL
    for (int i = 0; i < Q; ++i)
        if constexpr (PAIRED<T>) take_turns(acc[i]);
#endif
    for (int page = first / PAGE; page * PAGE < end; ++page) {
        const int from = first > page * PAGE ? first - page * PAGE : 0, to = end - page * PAGE < PAGE ? end - page * PAGE : PAGE;
        const T* v = values[page] + d;
        const float* share[Q];
        for (int i = 0; i < Q; ++i) share[i] = shares<T>(s[i], page);
        if constexpr (PAIRED<T>) {
#if defined(__AVX512BF16__)
            const auto add = [&](const __m512bh(&x)[N], int pair) {
                if (Q <= ASKING) ahead.ask(N, D);
                FR_UNROLL
                for (int i = 0; i < Q; ++i)
                    for (int n = 0; n < N; ++n) acc[i][n] = dot(x[n], ((const uint32_t*)share[i])[pair], acc[i][n]);
            };
            const int whole = to / 2;
            int pair = from / 2;
            __m512bh x[N];
            if (from % 2) pair_rows<N, FULL>(nullptr, false, v + from * D, true, rest, x), add(x, pair++);
            for (const T* at = v + 2 * pair * D; pair < whole; ++pair, at += 2 * D) pair_rows<N, FULL>(at, at + D, rest, x), add(x, pair);
            if (to % 2 && pair == whole) pair_rows<N, FULL>(v + (to - 1) * D, true, nullptr, false, rest, x), add(x, whole);
#endif
        } else {
            v += from * D;
            for (int at = from; at < to; ++at, v += D) {
                V x[N];
                if (Q <= ASKING) ahead.ask((N * LANES * int(sizeof(T)) + 63) / 64, D);
                load_all<N, FULL>(v, rest, x);
                FR_UNROLL
                for (int i = 0; i < Q; ++i) {
                    V w = set(share[i][at]);
                    for (int n = 0; n < N; ++n) acc[i][n] = fma(w, x[n], acc[i][n]);
                }
            }
        }
    }
#if defined(__AVX512BF16__)
    FR_UNROLL
    for (int i = 0; i < Q; ++i)
        if constexpr (PAIRED<T>) in_order(acc[i]);
#endif
    FR_UNROLL
    for (int i = 0; i < Q; ++i) store_all<N, FULL>(out[i] + d, rest, acc[i]);
}

// Cuts the dimensions into four vectors at a time, then what is left: f(number of vectors, full, first dimension, elements of the rest).
template <class F>
FR_INLINE void by_dimensions(int D, F f) {
    int d = 0;
    for (; d + 4 * LANES <= D; d += 4 * LANES) f.template operator()<4, true>(d, 0);
    switch ((D - d) / LANES) {
        case 3: f.template operator()<3, true>(d, 0); break;
        case 2: f.template operator()<2, true>(d, 0); break;
        case 1: f.template operator()<1, true>(d, 0); break;
    }
    d = D / LANES * LANES;
    if (d < D) f.template operator()<1, false>(d, D - d);
}

// The weighted values of positions [first, end), for `count` queries.
template <class T, int Q = VALUE_TILE>
FR_INLINE void weigh(int count, const float* const* s, const T* const* values, int first, int end, int D, float* const* out, Ahead<T>& ahead) {
    if constexpr (Q > 0) {
        if (count != Q) return weigh<T, Q - 1>(count, s, values, first, end, D, out, ahead);
        if (first >= end) return;
        by_dimensions(D, [&]<int N, bool FULL>(int d, int rest) { value_tile<Q, N, FULL>(s, values, first, end, D, d, rest, out, ahead); });
    }
}

// What a row sees of the pages from `page` on, counted from there; `end` 0 = nothing.
template <class T>
FR_INLINE View within_block(const View& view, int page, int D) {
    const int base = page * PAGE, most = BLOCK * PAGE;
    if (view.end <= base || view.first >= base + most) return {0, 0, 0, nullptr, nullptr};
    const int behind = page > view.shared ? page - view.shared : 0;  // tail pages of earlier blocks
    const bool tail = view.tail_keys && pages_for(view.end) > view.shared && view.shared < page + BLOCK;
    const auto move = [&](const void* at) { return tail ? (const void*)((const T*)at + behind * page_elements<T>(D)) : nullptr; };
    const int shared = view.shared - page < 0 ? 0 : view.shared - page < BLOCK ? view.shared - page : BLOCK;
    return {view.first > base ? view.first - base : 0, view.end - base < most ? view.end - base : most, shared, move(view.tail_keys),
            move(view.tail_values)};
}

// The queries of some rows, and what has become of them.
struct Queries {
    int rows, group;
    const float** q;  // [D] each, or as many halves
    float** out;      // [D] each
    float** s;        // scores of a block
    Mass* mass;
    int count() const { return rows * group; }
};

template <class T>
void score_block(const Queries& all, const View* views, const T* const* keys, int D, Ahead<T>& ahead) {
    const int queries = all.count(), group = all.group;
    for (int i = 0; i < queries; i += SCORE_TILE) {
        const int count = queries - i < SCORE_TILE ? queries - i : SCORE_TILE;
        int page0 = BLOCK, page1 = 0;
        for (int r = i / group; r <= (i + count - 1) / group; ++r) {
            if (!views[r].end) continue;
            if (views[r].first / PAGE < page0) page0 = views[r].first / PAGE;
            if (views[r].shared > page1) page1 = views[r].shared;
        }
        score<T>(count, all.q + i, keys, page0, page1, D, all.s + i, ahead);
    }
    for (int r = 0; r < all.rows; ++r)
        if (views[r].tail_keys)
            for (int page = views[r].shared; page < pages_for(views[r].end); ++page) {
                const T* key = page_of(keys, views[r].tail_keys, views[r], page, D);
                for (int i = r * group; i < (r + 1) * group; ++i) {
                    float* out = all.s[i] + page * PAGE;
                    score_tile<1, 1>(all.q + i, &key, D, &out);
                }
            }
}

template <class T>
void weigh_block(const Queries& all, const View* views, const T* const* values, int D, Ahead<T>& ahead) {
    const int queries = all.count(), group = all.group;
    for (int i = 0; i < queries; i += VALUE_TILE) {
        const int count = queries - i < VALUE_TILE ? queries - i : VALUE_TILE;
        // f(first of some queries, their number, their row's view, end of what the row sees in the shared place)
        const auto by_row = [&](auto f) {
            for (int at = i, of; at < i + count; at += of) {
                const View& view = views[at / group];
                of = group - at % group < i + count - at ? group - at % group : i + count - at;
                f(at, of, view, view.shared * PAGE < view.end ? view.shared * PAGE : view.end);
            }
        };
        int first = 0, end = BLOCK * PAGE;  // positions, of whole pages, that all queries of the tile see in the shared place
        by_row([&](int, int, const View& view, int reach) {
            if (pages_for(view.first) * PAGE > first) first = pages_for(view.first) * PAGE;
            if (reach / PAGE * PAGE < end) end = reach / PAGE * PAGE;
        });
        if (end < first) end = first;
        by_row([&](int at, int of, const View& view, int reach) {
            weigh<T>(of, all.s + at, values, view.first, first < reach ? first : reach, D, all.out + at, ahead);
        });
        weigh<T>(count, all.s + i, values, first, end, D, all.out + i, ahead);
        by_row([&](int at, int of, const View& view, int reach) {
            weigh<T>(of, all.s + at, values, end > view.first ? end : view.first, reach, D, all.out + at, ahead);
            if (!view.tail_values) return;
            const T* own[BLOCK];
            for (int page = view.shared; page < pages_for(view.end); ++page) own[page] = page_of(values, view.tail_values, view, page, D);
            weigh<T>(of, all.s + at, own, view.shared * PAGE > view.first ? view.shared * PAGE : view.first, view.end, D, all.out + at, ahead);
        });
    }
}

// The page of a segment that holds positions 16·page ….
template <class T>
FR_INLINE const T* own_page(const fr::Attention& a, const void* cache, int segment, int page, int kv_head) {
    return (const T*)cache + (int64_t(a.pages[int64_t(segment) * a.page_columns + page]) * a.kv_heads + kv_head) * page_elements<T>(a.D);
}

// The pages that a task begins with.
template <class T>
void begin_of(const fr::Attention& a, const fr::AttentionTask& task, Ahead<T>& keys, Ahead<T>& values) {
    const int end = a.context[task.segment] + a.known[task.segment], page = a.window > 0 && end > a.window ? (end - a.window) / PAGE : 0;
    const int last = (page / BLOCK + 1) * BLOCK < pages_for(end) ? (page / BLOCK + 1) * BLOCK : pages_for(end);
    for (int at = page; at < last; ++at) {
        keys.add(own_page<T>(a, a.keys, task.segment, at, task.kv_head));
        values.add(own_page<T>(a, a.values, task.segment, at, task.kv_head));
    }
}

template <class T>
void attend(const fr::Attention& a, const fr::AttentionTask& task, const fr::Beside& beside, void* memory) {
    const int segment = task.segment, kv_head = task.kv_head, row0 = task.row0, row1 = task.row1;
    const int D = a.D, group = a.heads / a.kv_heads, rows = row1 - row0, queries = rows * group;
    const int64_t in = int64_t(a.heads + 2 * a.kv_heads) * D;
    Scratch scratch{(char*)(((uintptr_t)memory + 63) / 64 * 64)};
    for (int row = row0; row < row1; ++row)
        for (int d = 0; d < group * D; d += LANES) __builtin_prefetch(a.qkv + row * in + int64_t(kv_head) * group * D + d);

    View* views = scratch.take<View>(rows);
    int first = 1 << 30, pages = 0, shared = 0;
    for (int i = 0; i < rows; ++i) {
        const int end = a.positions[row0 + i] + 1, leaves = leaves_at(a, segment, row0 + i);
        views[i] = {a.window > 0 && end > a.window ? end - a.window : 0, end, leaves < end ? leaves / PAGE : pages_for(end), nullptr, nullptr};
        if (views[i].first / PAGE < first) first = views[i].first / PAGE;
        if (pages_for(end) > pages) pages = pages_for(end);
        if (views[i].shared > shared) shared = views[i].shared;
        if (leaves < end) build_tail<T>(a, segment, kv_head, row0 + i, views[i], scratch);
    }
    const T** keys = scratch.take<const T*>(pages);
    const T** values = scratch.take<const T*>(pages);
    for (int page = 0; page < shared; ++page) {
        keys[page] = own_page<T>(a, a.keys, segment, page, kv_head);
        values[page] = own_page<T>(a, a.values, segment, page, kv_head);
    }
    const Queries all{rows, group, scratch.take<const float*>(queries), scratch.take<float*>(queries), scratch.take<float*>(queries),
                      scratch.take<Mass>(queries)};
    float* scores = scratch.take<float>(size_t(queries) * BLOCK * PAGE);
    [[maybe_unused]] uint32_t* queried = scratch.take<uint32_t>(PAIRED<T> ? size_t(queries) * size_t(words_of(D)) : 0);
    for (int i = 0; i < queries; ++i) {
        const int head = kv_head * group + i % group;
        all.q[i] = a.qkv + (row0 + i / group) * in + int64_t(head) * D;
        if constexpr (PAIRED<T>) {
#if defined(__AVX512BF16__)
            uint32_t* pairs = queried + int64_t(i) * words_of(D);
            pair_up(all.q[i], D, pairs);
            all.q[i] = (const float*)pairs;
#endif
        }
        all.out[i] = a.out + (row0 + i / group) * int64_t(a.heads) * D + int64_t(head) * D;
        all.s[i] = scores + int64_t(i) * BLOCK * PAGE;
        all.mass[i] = {a.sinks ? a.sinks[head] : -__builtin_inff(), a.sinks ? 1.0f : 0.0f, {}};
        memset(all.out[i], 0, size_t(D) * 4);
    }

    View* here = scratch.take<View>(rows);
    bool asked = beside.asked;
    for (int page = first / BLOCK * BLOCK; page < pages; page += BLOCK) {
        const int end = page + BLOCK, half = beside.lines / 2;
        Ahead<T> more_keys, more_values;
        if (!asked) {
            more_keys.add(keys, first, shared < end ? shared : end), more_keys.rest(D);
            more_values.add(values, first, shared < end ? shared : end), more_values.rest(D);
            asked = true;
        }
        if (end < pages) {
            more_keys.add(keys, end, shared < end + BLOCK ? shared : end + BLOCK);
            more_values.add(values, end, shared < end + BLOCK ? shared : end + BLOCK);
        } else {
            if (beside.next) begin_of(a, *beside.next, more_keys, more_values);
            more_keys.more = beside.more, more_keys.lines = half;
            more_values.more = beside.more + half * 64, more_values.lines = beside.lines - half;
        }
        for (int r = 0; r < rows; ++r) here[r] = within_block<T>(views[r], page, D);
        score_block<T>(all, here, keys + page, D, more_keys);
        more_keys.rest(D);
        for (int i = 0; i < queries; ++i)
            if (here[i / group].end) soften(a, here[i / group], keys + page, values + page, all.s[i], all.mass[i], all.out[i]);
        weigh_block<T>(all, here, values + page, D, more_values);
        more_values.rest(D);
    }
    for (int i = 0; i < queries; ++i) {
        const V total = set(sum(load(all.mass[i].lanes)) + all.mass[i].sink);
        for (int d = 0; d < D; d += LANES) {
            const int n = D - d < LANES ? D - d : LANES;
            store(all.out[i] + d, load(all.out[i] + d, n) / total, n);
        }
    }
}

void attention(const fr::Attention& a, const fr::AttentionTask& task, const fr::Beside& beside, void* scratch) {
    if (a.format == fr::BF16)
        attend<bf16>(a, task, beside, scratch);
    else if (a.format == fr::INT8)
        attend<int8_t>(a, task, beside, scratch);
    else
        attend<float>(a, task, beside, scratch);
}

}  // namespace
