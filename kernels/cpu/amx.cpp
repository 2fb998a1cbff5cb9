// What AMX does better than AVX512-BF16: products. Everything else is that form's own (forms.cpp).
#include <algorithm>

#include "kernels.h"

#if __has_include(<amxtileintrin.h>)  // compilers and assemblers since gcc 11 and clang 11 know tiles
#include "amx_bf16.h"
#include "amx_codes.h"

namespace fr {

extern const Kernels kernels_avx512bf16;

namespace {

const Products& others = kernels_avx512bf16;

// Whether a product of codes is made of tiles.
bool coded(Format format, int32_t rows) { return format >= INT8 && rows > dot_rows(format); }

int32_t tiles(Format format, int32_t rows) {
    if (format == BF16) return (rows + MOST_ROWS - 1) / MOST_ROWS;
    return coded(format, rows) ? code_tiles(rows) : others.tiles(format, rows);
}

size_t packed_bytes(Format format, int32_t K) {
    if (format == BF16) return size_t(row_bytes(K));
    const size_t bytes = others.packed_bytes(format, K);
    return format >= INT8 ? std::max(bytes, packed_codes_bytes(format, K)) : bytes;
}

void pack_columns(const Product& p, int32_t tile, const float* x, int64_t stride, int32_t k0, int32_t count) {
    p.format == BF16 ? pack_columns_bf16(p, tile, x, stride, k0, count) : others.pack_columns(p, tile, x, stride, k0, count);
}

void pack_rows(const Product& p, int32_t tile0, int32_t tile1) {
    if (coded(p.format, p.rows)) return pack_codes(p, tile0, tile1);
    if (p.format != BF16) return others.pack_rows(p, tile0, tile1);
    for (int t = tile0; t < tile1; ++t) pack_columns_bf16(p, t, p.x + int64_t(tile_start(p, t)) * p.K, p.K, 0, p.K);
}

void multiply(const Product& p, int32_t panel0, int32_t panel1, int32_t tile0, int32_t tile1) {
    if (p.format == BF16) return multiply_bf16(p, panel0, panel1, tile0, tile1);
    coded(p.format, p.rows) ? multiply_codes(p, panel0, panel1, tile0, tile1) : others.multiply(p, panel0, panel1, tile0, tile1);
}

// Multiplying takes so little that fewer, longer tasks pay: two of rows each thread, as each reads all of the weight again.
constexpr int32_t ROW_TASKS = 2, ROW_TASK = MOST_ROWS, STREAM_ROWS = 64, GATED_SUMS = 8192;  // 32 KiB of sums
constexpr Products PRODUCTS{tiles, packed_bytes, pack_rows, pack_columns, multiply, ROW_TASKS, ROW_TASK, STREAM_ROWS, GATED_SUMS};

}  // namespace

extern const Products* const products_amx;
const Products* const products_amx = &PRODUCTS;

}  // namespace fr

#else

namespace fr {
extern const Products* const products_amx;
const Products* const products_amx = nullptr;
}  // namespace fr

#endif
