// Tiles of Intel's AMX: eight registers of up to sixteen rows of 64 bytes, and products of two of them added to a third.
//
// A register's shape is set by `shape`, for all eight at once, and holds for the thread until `release`; both take some 50 ns, so that they
// belong around a task and not into it. Idle threads should have none: what a thread holds is saved whenever it leaves its core.
// Instructions are written out, as the compiler's own functions say nothing of the memory that they read and write.
#pragma once

#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#define FR_WATCHED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FR_WATCHED
#endif
#endif

namespace {

constexpr int SIDE = 16;        // rows of a tile, and its columns of 32 bits
constexpr int TILE_BYTES = 64;  // of a row

// As LDTILECFG reads it.
struct alignas(64) Shapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};  // of a row
    uint8_t rows[16] = {};
    constexpr void set(int tile, int count) { rows[tile] = uint8_t(count), bytes[tile] = TILE_BYTES; }
};

inline __attribute__((always_inline)) void shape(const Shapes& all) { asm volatile("ldtilecfg %0" : : "m"(all)); }
inline __attribute__((always_inline)) void release() { asm volatile("tilerelease"); }

// Sanitizers do not see what tiles read and write: there each row's ends are touched before.
template <int T>
inline __attribute__((always_inline)) void touch([[maybe_unused]] const void* at, [[maybe_unused]] int64_t stride) {
#if defined(FR_WATCHED)
    Shapes now;
    asm volatile("sttilecfg %0" : "=m"(now));
    for (int row = 0; row < now.rows[T]; ++row) {
        const volatile char* from = (const char*)at + row * stride;
        (void)from[0], (void)from[now.bytes[T] - 1];
    }
#endif
}

// `stride`: bytes from row to row.
template <int T>
inline __attribute__((always_inline)) void load_tile(const void* at, int64_t stride) {
    touch<T>(at, stride);
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(at), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline __attribute__((always_inline)) void store_tile(void* at, int64_t stride) {
    touch<T>(at, stride);
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(at), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline __attribute__((always_inline)) void zero_tile() {
    asm volatile("tilezero %%tmm%c0" : : "i"(T));
}

// Tile SUM += tile A · tile B. A: a row's k one after the other; B: of each column four bytes of k one after the other.
// bf16: two k each, summed in float.   Bytes: four k each, summed in int32; signed both, or B's unsigned.
template <int SUM, int A, int B>
inline __attribute__((always_inline)) void dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
}
template <int SUM, int A, int B>
inline __attribute__((always_inline)) void dot_signed() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
}
template <int SUM, int A, int B>
inline __attribute__((always_inline)) void dot_signed_unsigned() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
}

}  // namespace
