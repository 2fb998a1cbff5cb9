// How products take weights from memory: what is fetched before it is multiplied, by whom, and how far ahead.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace {

// How far ahead of the multiplications weights are fetched, in bytes (16 and 32 KiB: the same on Zen 5; 4 and 16 KiB: the same on a Xeon). For one
// row AMD's own prefetcher keeps up best alone (Product::unasked), with a Xeon's alone a step takes 1.27 times as long; with more rows the
// multiplications fill its window: 8 rows take 1.27 times as long without (Zen 5, 1.4 on Zen 4).
constexpr int64_t AHEAD = 8192;

// Two panels at once hide the latency of the multiplications, which matters where weights come from a core's own cache. From memory a second
// stream costs bandwidth: one thread then reads 19 instead of 23 GB/s (measured, Zen 4).
constexpr int64_t TWIN_BYTES = 512 << 10;  // of a whole matrix

constexpr int SPARSE = 4;  // steps between two lines of what is read later, at least: what is multiplied next comes first

constexpr int K_BLOCK = 2048;  // a panel's block is 128 KiB of bf16: half of a small L2

// Scattered lines that a run asks for, one every so many steps (0 = none), so that they come while it multiplies.
struct Trickle {
    const char* const* piece = nullptr;  // the one after this
    const char *at = nullptr, *end = nullptr;
    int64_t bytes = 0;  // of a piece
    int every = 0;
};

FR_INLINE void ask(Trickle& t) {
    if (t.at == t.end) t.at = *t.piece++, t.end = t.at + t.bytes;
    __builtin_prefetch(t.at, 0, 2);
    t.at += 64;
}

FR_INLINE int tile_start(const fr::Product& p, int t) { return int(int64_t(p.rows) * t / p.tiles); }

// The share in p.soon of a run over `here` of `steps` steps of a panel: as large as that of any other.
FR_INLINE Trickle trickle(const fr::Product& p, int steps, int panel, int tile, int s, int here) {
    if (!p.soon.count) return {};
    const int64_t per = p.soon.bytes / 64, run = (int64_t(panel) * p.tiles + tile) * steps + s;
    const int64_t all = p.soon.count * per, whole = int64_t((p.N + fr::PANEL - 1) / fr::PANEL) * p.tiles * steps;
    const int64_t from = all * run / whole, lines = all * (run + here) / whole - from;
    if (!lines) return {};
    const char* const* piece = p.soon.at + from / per;
    const auto every = int((here + lines - 1) / lines);
    return {piece + 1, *piece + from % per * 64, *piece + p.soon.bytes, p.soon.bytes, every > SPARSE ? every : SPARSE};
}

}  // namespace
