// What an instruction set provides: a table of kernels. run.cpp cuts the work into tasks and calls them; a kernel computes its part and
// allocates nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fr {

enum Format : int32_t { F32 = 0, BF16 = 1, INT8 = 2, INT8_GROUPS = 3, INT4 = 4, INT4_SYMMETRIC = 5 };  // tables: the first two; caches: the first three

constexpr int PANEL = 32;         // columns of a packed weight that lie together
constexpr int HALF = PANEL / 2;   // of gate, and of up, in a panel of both
constexpr int GROUP = 32;         // k of a quantised weight that share a scale
constexpr int PAGE = 16;          // positions of a KV page
// Bytes of a page of one KV head, keys or values (kv.h).
static constexpr size_t page_bytes(Format format, int D) { return size_t(PAGE) * (format == INT8 ? size_t(D) + 4 : size_t(D) * (format == BF16 ? 2 : 4)); }
// Bytes of a packed panel of a weight (matmul.h, quant.h).
static constexpr size_t panel_bytes(Format format, int K) {
    if (format == F32) return size_t(K) * PANEL * 4;
    if (format == BF16) return size_t(K + 1) / 2 * PANEL * 4;
    const int codes = format < INT4 ? 8 : 4, scales = format == INT8 ? 0 : format == INT4 ? 2 : 1;
    return (size_t(K + GROUP - 1) / GROUP * (GROUP * size_t(codes) / 8 + 2 * size_t(scales)) + 4) * PANEL;
}
constexpr int ROW_BLOCK = 32;     // most rows of one attention task

// Memory that lies scattered: `count` pieces of `bytes`, a multiple of a cache line.
struct Pieces {
    const char* const* at = nullptr;
    int64_t count = 0, bytes = 0;
};

// y [rows, N] = x [rows, K] · wᵀ (+ bias). w is packed: f32 [N/32][K][32]; bf16 [N/32][K/2][32][2], both padded with zeros;
// quant.h says how quantised weights and their rows lie.
// x is packed by pack_rows into row tiles: of `rows` rows the tile t takes rows·t/tiles … rows·(t+1)/tiles.
struct Product {
    const void* w;
    const float* x;   // [rows, K], before packing
    void* packed;     // rows · packed_bytes(K)
    const float* bias;
    float* y;
    int64_t y_stride;  // floats
    int32_t y_column;  // the column that y begins with
    int32_t K, N, rows, tiles;
    Format format;
    int32_t next;  // the panel that this thread most likely begins with afterwards, −1 = none
    bool cold;     // it has just begun
    bool crossing; // rows of whole numbers may be crossed (quant.h): the same bits, where additions cost nothing beside dot products
    bool unasked;  // a single row's weights are not fetched ahead: the machine's own prefetcher does best alone (stream.h)
    Pieces soon;   // what an op that comes soon reads: runs over weights may fetch it meanwhile, each its share
};

struct Attention {
    const float* qkv;  // [n, (heads + 2·kv_heads)·D]
    const void* keys;   // this layer: [pages, kv_heads, D, 16]
    const void* values;  // this layer: [pages, kv_heads, 16, D]
    const float* sinks;  // [heads] or null
    float* out;          // [n, heads·D]
    const int32_t *positions, *slots, *parents, *starts, *known, *context, *pages;
    int32_t page_columns, heads, kv_heads, D, window;
    float scale, softcap;
    Format format;
};

// Rows of a segment from `row0` to `row1` (flat indices, at most ROW_BLOCK), one KV head.
struct AttentionTask {
    int32_t segment, kv_head, row0, row1;
};

// What an attention task's thread asks memory for meanwhile: what its next task reads, and lines of what comes after all tasks.
struct Beside {
    const AttentionTask* next;  // what the thread most likely does next, or null
    bool asked;                 // this task was its guess before, so that what it reads is on its way
    const char* more;
    int32_t lines;
};

struct Rope {
    float* qkv;
    const int32_t* positions;
    const float *cos, *sin, *q_norm, *k_norm;
    int32_t heads, kv_heads, D, half, q_norm_size, k_norm_size;
    float eps;
};

// Where new entries of a layer's cache come from and go to. kv: of the first row, kv_heads keys of D, then as many values.
struct Entries {
    const float* kv;
    int64_t stride;  // floats from row to row
    void *keys, *values;
    const int32_t* slots;
    int32_t kv_heads, D;
    Format format;
};

// What a part of a row's scores says about its choice. `total`: the best of score + noise, first at `token`, whose score is `score`; `peak`:
// the largest score; `mass`: Σ exp(score − peak). Parts are PICK_PART ids, so that whoever computes them, in whatever order, joins the same
// numbers.
struct Part {
    float total, score, peak, mass;
    int32_t token;
    bool spoilt;  // it holds a NaN
};

constexpr int PICK_PART = 256;  // a multiple of PANEL
constexpr int CHOOSE_ROWS = 64;  // whose choices are made together in the output head

// Of all formats of weights.
struct Products {
    int32_t (*tiles)(Format format, int32_t rows);     // into how many tiles rows are cut
    size_t (*packed_bytes)(Format format, int32_t K);  // of one packed row of x
    void (*pack_rows)(const Product& p, int32_t tile0, int32_t tile1);
    // `count` columns, from k0 on (a multiple of 16), of the rows of one tile: x [rows of the tile, stride]. Only of float and bf16.
    void (*pack_columns)(const Product& p, int32_t tile, const float* x, int64_t stride, int32_t k0, int32_t count);
    void (*multiply)(const Product& p, int32_t panel0, int32_t panel1, int32_t tile0, int32_t tile1);

    int32_t row_tasks;    // for each thread, where rows alone make enough tasks and the weight is near: each reads all of the weight
    int32_t row_task;     // rows of such a task, at least
    int32_t stream_rows;  // so few take weights as memory gives them: a task is a long stream
    int32_t gated_sums;   // of gate and up that are multiplied before any are gated, unless two panels have more
};

struct Kernels : Products {
    const char* name;

    size_t (*attention_bytes)(const Attention& a, int32_t segment, int32_t row0, int32_t row1);
    void (*attention)(const Attention& a, const AttentionTask& task, const Beside& beside, void* scratch);

    void (*embed)(const void* table, Format format, const int32_t* tokens, float* out, int32_t H, float scale, int32_t row0, int32_t row1);
    void (*norm)(const float* x, const float* weight, float* out, int32_t H, float eps, int32_t row0, int32_t row1);
    void (*add)(const float* x, const float* residual, float* out, int64_t count, float scale);
    void (*rope)(const Rope& r, int32_t row0, int32_t row1, int32_t head0, int32_t head1);  // heads of q, then of k
    void (*write_kv)(const Entries& e, int32_t row0, int32_t row1, int32_t head0, int32_t head1);  // heads of k, then of v
    void (*gate)(const float* x, float* out, int32_t F, int32_t activation, int32_t row0, int32_t row1);
    // x [rows, panels · 32], in each panel sixteen columns of gate, then of up → `count` columns of out [rows, stride], which may be x itself.
    void (*gate_panels)(const float* x, const float* gate_bias, const float* up_bias, float* out, int64_t stride, int32_t rows, int32_t count,
                        int32_t activation);
    void (*cap)(float* x, int64_t count, float scale, float softcap);
    void (*divide)(float* x, int64_t count, float by);
    void (*pick_part)(const float* scores, const float* noise, int32_t token0, int32_t count, Part* part);  // of one row
    void (*pick)(const Part* parts, int32_t count, int64_t* token, float* logprob);
    void (*dice)(uint64_t seed, uint64_t index, int32_t token0, int32_t token1, float* out);  // token0 a multiple of 4
    void (*dice_at)(const int64_t* seeds, const int64_t* indices, const int64_t* tokens, int32_t count, float* out);
    uint64_t (*read)(const void* from, int64_t bytes);  // whole lines, as fast as memory gives them; the sum of their words
};

}  // namespace fr
