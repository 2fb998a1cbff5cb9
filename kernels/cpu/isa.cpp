// All kernels for one instruction set. Compiled once for each, with its flags and FR_ISA naming it.
#include "attention.h"
#include "dice.h"
#include "quant.h"
#include "read.h"
#include "rows.h"

#define FR_NAME_(isa) kernels_##isa
#define FR_NAME(isa) FR_NAME_(isa)
#define FR_TEXT_(isa) #isa
#define FR_TEXT(isa) FR_TEXT_(isa)

namespace fr {
extern const Kernels FR_NAME(FR_ISA);
const Kernels FR_NAME(FR_ISA) = {
    {tiles_any, packed_bytes_any, pack_rows_any, pack_columns, multiply_any, 9, 1, 28, 0},
    FR_TEXT(FR_ISA),
    attention_bytes, attention, embed, norm, add, rope, write_kv, gate, gate_panels, cap, divide, pick_part, pick, dice, dice_at, read,
};
}  // namespace fr
