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

// a0 b0 a1 b1 …, of which the last ones may be missing.
FR_INLINE __m512bh paired(__m256i a, __m256i b) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2,
                                           17, 1, 16, 0);
    return (__m512bh)_mm512_permutexvar_epi16(order, _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
}
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

// Scores of Q queries against P pages. A query is D floats, or pairs of bf16.
template <int Q, int P, class T>
FR_INLINE void score_tile(const float* const* q, const T* const* keys, int D, float* const* out) {
    V acc[Q][P];
    FR_UNROLL
    for (int i = 0; i < Q; ++i)
        for (int p = 0; p < P; ++p) acc[i][p] = zero();
    if constexpr (PAIRED<T>) {
#if defined(__AVX512BF16__)
        const auto step = [&](int d, bool both) {
            __m512bh k[P];
            for (int p = 0; p < P; ++p) k[p] = paired(half(keys[p] + d * PAGE), both ? half(keys[p] + (d + 1) * PAGE) : _mm256_setzero_si256());
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

template <int Q, class T>
void score_pages(const float* const* q, const T* const* keys, int page0, int page1, int D, float* const* scores) {
    constexpr int P = Q <= 2 ? 4 : Q <= 4 ? 3 : 2;
    int page = page0;
    float* out[Q];
    for (; page + P <= page1; page += P) {
        for (int i = 0; i < Q; ++i) out[i] = scores[i] + page * PAGE;
        score_tile<Q, P>(q, keys + page, D, out);
    }
    for (; page < page1; ++page) {
        for (int i = 0; i < Q; ++i) out[i] = scores[i] + page * PAGE;
        score_tile<Q, 1>(q, keys + page, D, out);
    }
}

template <class T, int Q = SCORE_TILE>
FR_INLINE void score(int count, const float* const* q, const T* const* keys, int page0, int page1, int D, float* const* scores) {
    if constexpr (Q > 0) {
        if (count == Q)
            score_pages<Q>(q, keys, page0, page1, D, scores);
        else
            score<T, Q - 1>(count, q, keys, page0, page1, D, scores);
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
    if (peak > mass.most) {
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

// out[i][d …] += Σ share · value over all positions of some pages, for Q queries.
template <int Q, int N, bool FULL, class T>
void value_tile(const float* const* s, const T* const* values, int page0, int page1, int D, int d, int rest, float* const* out) {
    V acc[Q][N];
    FR_UNROLL
    for (int i = 0; i < Q; ++i) load_all<N, FULL>(out[i] + d, rest, acc[i]);
    for (int page = page0; page < page1; ++page) {
        const T* v = values[page] + d;
        const float* share[Q];
        for (int i = 0; i < Q; ++i) share[i] = shares<T>(s[i], page);
        if constexpr (PAIRED<T>) {
#if defined(__AVX512BF16__)
            for (int pair = 0; pair < PAGE / 2; ++pair, v += 2 * D) {
                __m512bh x[N];
                for (int n = 0; n < N; ++n)
                    x[n] = FULL ? paired(half(v + n * LANES), half(v + D + n * LANES)) : paired(half(v, rest), half(v + D, rest));
                FR_UNROLL
                for (int i = 0; i < Q; ++i)
                    for (int n = 0; n < N; ++n) acc[i][n] = dot(x[n], ((const uint32_t*)share[i])[pair], acc[i][n]);
            }
#endif
        } else {
            for (int at = 0; at < PAGE; ++at, v += D) {
                V x[N];
                load_all<N, FULL>(v, rest, x);
                FR_UNROLL
                for (int i = 0; i < Q; ++i) {
                    V w = set(share[i][at]);
                    for (int n = 0; n < N; ++n) acc[i][n] = fma(w, x[n], acc[i][n]);
                }
            }
        }
    }
    FR_UNROLL
    for (int i = 0; i < Q; ++i) store_all<N, FULL>(out[i] + d, rest, acc[i]);
}

// The same for one query and any range of positions; of a pair only what lies in it is read (the other share is 0).
template <int N, bool FULL, class T>
void value_range(const float* s, const T* const* values, int first, int end, int D, int d, int rest, float* out) {
    V acc[N];
    load_all<N, FULL>(out + d, rest, acc);
    if constexpr (PAIRED<T>) {
#if defined(__AVX512BF16__)
        for (int p = first / 2 * 2; p < end; p += 2) {
            const T* v = values[p / PAGE] + int64_t(p % PAGE) * D + d;
            const auto entry = [&](bool seen, const T* at) { return !seen ? _mm256_setzero_si256() : FULL ? half(at) : half(at, rest); };
            for (int n = 0; n < N; ++n)
                acc[n] = dot(paired(entry(p >= first, v + n * LANES), entry(p + 1 < end, v + D + n * LANES)), ((const uint32_t*)s)[p / 2], acc[n]);
        }
#endif
    } else {
        for (int p = first; p < end; ++p) {
            V x[N], w = set(s[p]);
            load_all<N, FULL>(values[p / PAGE] + int64_t(p % PAGE) * D + d, rest, x);
            for (int n = 0; n < N; ++n) acc[n] = fma(w, x[n], acc[n]);
        }
    }
    store_all<N, FULL>(out + d, rest, acc);
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

template <class T, int Q = VALUE_TILE>
FR_INLINE void weigh(int count, const float* const* s, const T* const* values, int page0, int page1, int D, float* const* out) {
    if constexpr (Q > 0) {
        if (count != Q) return weigh<T, Q - 1>(count, s, values, page0, page1, D, out);
        by_dimensions(D, [&]<int N, bool FULL>(int d, int rest) { value_tile<Q, N, FULL>(s, values, page0, page1, D, d, rest, out); });
    }
}

template <class T>
FR_INLINE void weigh_range(const float* s, const T* const* values, int first, int end, int D, float* out) {
    if (first >= end) return;
    by_dimensions(D, [&]<int N, bool FULL>(int d, int rest) { value_range<N, FULL>(s, values, first, end, D, d, rest, out); });
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
void score_block(const Queries& all, const View* views, const T* const* keys, int D) {
    const int queries = all.count(), group = all.group;
    for (int i = 0; i < queries; i += SCORE_TILE) {
        const int count = queries - i < SCORE_TILE ? queries - i : SCORE_TILE;
        int page0 = BLOCK, page1 = 0;
        for (int r = i / group; r <= (i + count - 1) / group; ++r) {
            if (!views[r].end) continue;
            if (views[r].first / PAGE < page0) page0 = views[r].first / PAGE;
            if (views[r].shared > page1) page1 = views[r].shared;
        }
        score<T>(count, all.q + i, keys, page0, page1, D, all.s + i);
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
void weigh_block(const Queries& all, const View* views, const T* const* values, int D) {
    const int queries = all.count(), group = all.group;
    for (int i = 0; i < queries; i += VALUE_TILE) {
        const int count = queries - i < VALUE_TILE ? queries - i : VALUE_TILE;
        int page0 = 0, page1 = BLOCK;  // pages that every query of the tile sees whole, in the shared place
        for (int j = 0; j < count; ++j) {
            const View& view = views[(i + j) / group];
            if (pages_for(view.first) > page0) page0 = pages_for(view.first);
            const int whole = view.end / PAGE < view.shared ? view.end / PAGE : view.shared;
            if (whole < page1) page1 = whole;
        }
        if (page1 < page0) page1 = page0;
        for (int j = 0; j < count; ++j) {
            const View& view = views[(i + j) / group];
            const int reach = view.shared * PAGE < view.end ? view.shared * PAGE : view.end;
            weigh_range(all.s[i + j], values, view.first, page0 * PAGE < reach ? page0 * PAGE : reach, D, all.out[i + j]);
        }
        if (page0 < page1) weigh<T>(count, all.s + i, values, page0, page1, D, all.out + i);
        for (int j = 0; j < count; ++j) {
            const View& view = views[(i + j) / group];
            const float* s = all.s[i + j];
            const int reach = view.shared * PAGE < view.end ? view.shared * PAGE : view.end;
            weigh_range(s, values, page1 * PAGE > view.first ? page1 * PAGE : view.first, reach, D, all.out[i + j]);
            if (!view.tail_values) continue;
            const int begin = view.shared * PAGE;
            for (int p = begin > view.first ? begin : view.first; p < view.end;) {
                const int end = (p / PAGE + 1) * PAGE < view.end ? (p / PAGE + 1) * PAGE : view.end;
                const T* page = page_of(values, view.tail_values, view, p / PAGE, D);
                weigh_range(shares<T>(s, p / PAGE), &page, p % PAGE, p % PAGE + end - p, D, all.out[i + j]);
                p = end;
            }
        }
    }
}

// Pages lie scattered, and the machine's own prefetcher stops at the end of each: without this every page would be waited for.
template <class T>
FR_INLINE void fetch(const T* const* pages, int page0, int page1, int D) {
    for (int page = page0; page < page1; ++page)
        for (int64_t at = 0; at < page_elements<T>(D); at += 64 / int64_t(sizeof(T))) __builtin_prefetch(pages[page] + at, 0, 2);
}

// The pages that begin what a segment's rows see, of one KV head: a task that comes next finds them in cache.
template <class T>
FR_INLINE void fetch_segment(const fr::Attention& a, const void* cache, int segment, int kv_head) {
    const int end = a.context[segment] + a.known[segment], first = a.window > 0 && end > a.window ? (end - a.window) / PAGE : 0;
    const int last = pages_for(end) < first + BLOCK ? pages_for(end) : first + BLOCK;
    for (int page = first; page < last; ++page) {
        const T* at = (const T*)cache + (int64_t(a.pages[int64_t(segment) * a.page_columns + page]) * a.kv_heads + kv_head) * page_elements<T>(a.D);
        fetch(&at, 0, 1, a.D);
    }
}

template <class T>
void attend(const fr::Attention& a, const fr::AttentionTask& task, const fr::AttentionTask* next, void* memory) {
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
        const int64_t at = (int64_t(a.pages[int64_t(segment) * a.page_columns + page]) * a.kv_heads + kv_head) * page_elements<T>(D);
        keys[page] = (const T*)a.keys + at;
        values[page] = (const T*)a.values + at;
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
    for (int page = first / BLOCK * BLOCK; page < pages; page += BLOCK) {
        const int from = first > page ? first : page, to = shared < page + BLOCK ? shared : page + BLOCK;
        fetch(keys, from, to, D), fetch(values, from, to, D);
        for (int r = 0; r < rows; ++r) here[r] = within_block<T>(views[r], page, D);
        score_block<T>(all, here, keys + page, D);
        if (next) fetch_segment<T>(a, a.keys, next->segment, next->kv_head);
        for (int i = 0; i < queries; ++i)
            if (here[i / group].end) soften(a, here[i / group], keys + page, values + page, all.s[i], all.mass[i], all.out[i]);
        if (next) fetch_segment<T>(a, a.values, next->segment, next->kv_head);
        next = nullptr;
        weigh_block<T>(all, here, values + page, D);
    }
    for (int i = 0; i < queries; ++i) {
        const V total = set(sum(load(all.mass[i].lanes)) + all.mass[i].sink);
        for (int d = 0; d < D; d += LANES) {
            const int n = D - d < LANES ? D - d : LANES;
            store(all.out[i] + d, load(all.out[i] + d, n) / total, n);
        }
    }
}

void attention(const fr::Attention& a, const fr::AttentionTask& task, const fr::AttentionTask* next, void* scratch) {
    if (a.format == fr::BF16)
        attend<bf16>(a, task, next, scratch);
    else if (a.format == fr::INT8)
        attend<int8_t>(a, task, next, scratch);
    else
        attend<float>(a, task, next, scratch);
}

}  // namespace
