// A floor for a step: nothing but reading, by the widest registers and asked for ahead. (Registers of 128 bits, as any machine of a family
// has them, read 57 GB/s where these read 79 and, asking, 82: two threads, Zen 5.)
#pragma once

#include "stream.h"

namespace {

// Memory begins at any multiple of 8; less than a line at its end is left out.
uint64_t read(const void* from, int64_t bytes) {
    typedef uint64_t Line __attribute__((vector_size(64), may_alias, aligned(8)));
    typedef uint64_t Sum __attribute__((vector_size(64)));
    Sum even{}, odd{};
    const char* at = (const char*)from;
    for (const char* end = at + bytes / 128 * 128; at < end; at += 128) {
        __builtin_prefetch(at + AHEAD, 0, 2), __builtin_prefetch(at + AHEAD + 64, 0, 2);
        even += *(const Line*)at, odd += *(const Line*)(at + 64);
    }
    if (bytes % 128 >= 64) even += *(const Line*)at;
    uint64_t sum = 0;
    for (int word = 0; word < 8; ++word) sum += even[word] + odd[word];
    return sum;
}

}  // namespace
