// Which forms of the kernels a machine runs.
#pragma once

#include <vector>

#include "kernels.h"

namespace fr {

// What a machine has, as far as forms differ.
struct Machine {
    bool avx2 = false;        // and fused multiply-add
    bool avx512 = false;      // F, BW, VL, DQ
    bool avx512bf16 = false;  // and VNNI
    bool amx = false;         // tiles, with bf16 and bytes
    bool tiles = false;       // the system keeps them for this process
    bool neonbf16 = false;
};

// This one. Asks the system for tiles.
Machine machine();

// Best first.
std::vector<const Kernels*> forms(const Machine& has);

// Whether integer additions have units of their own beside dot products (Product::crossing). Where both share them, crossing takes longer.
bool adds_beside_dots();

// Whether weights for one row come fastest when nobody asks for them (Product::unasked).
bool prefetches_alone();

}  // namespace fr
