#include "forms.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace fr {

extern const Kernels kernels_scalar;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512bf16;
extern const Products* const products_amx;  // null: the compiler did not know them
#elif defined(__aarch64__)
extern const Kernels kernels_neon, kernels_neonbf16;
#endif

namespace {

#if defined(__x86_64__)
// Linux gives a process the registers of tiles, 8 KiB a thread, only when it is asked; it says no where a thread's signal stack is too small
// for them. Once for all threads and for good.
bool ask_for_tiles() {
    constexpr long REQUEST = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA: older headers lack them
    static const bool given = syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
    return given;
}

// Older compilers do not know the names.
bool has_amx() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    constexpr unsigned BF16_BIT = 1u << 22, TILE_BIT = 1u << 24, INT8_BIT = 1u << 25;
    return (d & BF16_BIT) && (d & TILE_BIT) && (d & INT8_BIT);
}

const Kernels* amx() {
    static const Kernels all = [] {
        Kernels made = kernels_avx512bf16;
        if (products_amx) static_cast<Products&>(made) = *products_amx;
        made.name = "amx";
        return made;
    }();
    return &all;
}
#endif

}  // namespace

Machine machine() {
    Machine has;
#if defined(__x86_64__)
    __builtin_cpu_init();
    has.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    has.avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                 __builtin_cpu_supports("avx512dq");
    has.avx512bf16 = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    has.amx = has_amx();
    has.tiles = has.amx && ask_for_tiles();
#elif defined(__aarch64__)
    constexpr unsigned long BF16_DOTS = 1ul << 14;  // HWCAP2_BF16, which older headers lack
    has.neonbf16 = getauxval(AT_HWCAP2) & BF16_DOTS;
#endif
    return has;
}

std::vector<const Kernels*> forms([[maybe_unused]] const Machine& has) {
    std::vector<const Kernels*> found;
#if defined(__x86_64__)
    const bool dots = has.avx512 && has.avx512bf16;
    if (dots && has.amx && has.tiles && products_amx) found.push_back(amx());
    if (dots) found.push_back(&kernels_avx512bf16);
    if (has.avx512) found.push_back(&kernels_avx512);
    if (has.avx2) found.push_back(&kernels_avx2);
#elif defined(__aarch64__)
    if (has.neonbf16) found.push_back(&kernels_neonbf16);
    found.push_back(&kernels_neon);
#endif
    found.push_back(&kernels_scalar);
    return found;
}

bool adds_beside_dots() {
#if defined(__x86_64__)
    return __builtin_cpu_is("amd");
#else
    return false;
#endif
}

bool prefetches_alone() {
#if defined(__x86_64__)
    return __builtin_cpu_is("amd");
#else
    return true;  // as it was before machines differed: not measured on ARM
#endif
}

}  // namespace fr
