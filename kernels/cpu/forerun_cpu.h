/* The interface of the CPU kernels: plain C, pointers and sizes.
 *
 * A step is a program: a list of `fr_op`. An op names its tensors by their place in a table of addresses (−1 = none), so that one program
 * serves every batch: only the table and the four sizes change. backends/cpu/native_ops.py writes ops, one at a time or recorded.
 *
 *   code        tensors t[]                                    integers i[]                              floats f[]
 *   EMBED       table tokens out                               H format vocab                            scale
 *   TAKE        x rows out                                     width count (of x: −1 = n, −2 = m)
 *   NORM        x weight out                                   H                                         eps
 *   ADD         x residual out                                 H                                         scale
 *   ADD_NORM    x residual weight normed sum                   H                                         eps scale
 *   MATMUL      x weight bias y                                K N format
 *   MLP         x gate_up bias down bias y                     K F format activation N format_of_down
 *   ROPE        qkv positions cos sin q_norm k_norm            heads kv_heads D half q_size k_size       eps
 *                                                              positions
 *   WRITE_KV    qkv keys values slots                          heads kv_heads D format pages
 *   ATTENTION   qkv keys values out positions slots parents    heads kv_heads D window format pages      scale softcap
 *               starts known context pages sinks
 *   KEEP_KV     keys values source target                      layers pages kv_heads D format count
 *   GATE        x out                                          F activation
 *   MOE         x router experts out                           H E top_k F activation normalize
 *                                                              router_format format
 *   LOGITS      x weight y                                     K N format                                scale softcap
 *   PICK        scores noise tokens logprobs                   V
 *   CHOOSE      x weight temperatures sampled seeds indices    K N format                                scale softcap
 *               tokens logprobs
 *   NOISE       out                                            seed_low seed_high index_low index_high V
 *   NOISE_AT    seeds indices tokens out                       count
 *   CONCAT      out part…                                      count width…
 *
 * Shapes are those of backends/base.py, everything is contiguous. Formats: 0 = float, 1 = bf16; of weights also 2 … 5, kernels.h.
 * Activations: silu gelu gelu_tanh relu relu2 = 0 … 4. `experts`: addresses of the E gate_up weights, then of the E down weights. Weights
 * are packed as kernels.h and quant.h say; keys of a layer lie as [pages, kv_heads, D, 16], values as [pages, kv_heads, 16, D], in float,
 * bf16 or bytes with their scales (2, kv.h). MLP's gate_up has sixteen rows of gate and the same of up in each panel, both filled up with
 * zeros to a multiple of sixteen; its bias, [2F], has not. An op works on n rows, or on m (`rows` = FR_M).
 */
#ifndef FORERUN_CPU_H
#define FORERUN_CPU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { FR_N = 0, FR_M = 1, FR_SEGMENTS = 2, FR_PAGE_COLUMNS = 3, FR_SIZES = 4 };

enum {
    FR_EMBED,
    FR_TAKE,
    FR_NORM,
    FR_ADD,
    FR_ADD_NORM,
    FR_MATMUL,
    FR_ROPE,
    FR_WRITE_KV,
    FR_ATTENTION,
    FR_KEEP_KV,
    FR_GATE,
    FR_MOE,
    FR_LOGITS,
    FR_PICK,
    FR_NOISE,
    FR_NOISE_AT,
    FR_CONCAT,
    FR_CHOOSE,
    FR_MLP
};

typedef struct {
    int32_t code, rows;
    int32_t t[12];
    int32_t i[10];
    float f[4];
} fr_op;

/* FR_RANGE: a token, position, slot, page or row that does not exist. Nothing was read or written there. */
enum { FR_OK = 0, FR_UNKNOWN_OP = 1, FR_MEMORY = 2, FR_RANGE = 3 };

typedef struct fr_context fr_context;

/* `isa`: a name from fr_isas, or null for the best this machine runs. Null if the machine cannot run it. */
fr_context* fr_open(int32_t threads, const char* isa);
void fr_close(fr_context* context);
const char* fr_isa(const fr_context* context);
/* How often the pool stepped back to one thread because another process wanted a core. */
uint64_t fr_stalls(const fr_context* context);
/* The i-th instruction set this machine runs, best first; null past the end. */
const char* fr_isas(int32_t i);
/* Reads memory that begins at a multiple of 8, on all threads, and returns the sum of the 64-bit words of its whole lines: what a step costs
   at the least. */
uint64_t fr_read(fr_context* context, const void* data, int64_t bytes);
/* Runs a program: FR_OK, or why it stopped. Not for two threads at once. */
int32_t fr_run(fr_context* context, const fr_op* ops, int32_t count, void* const* table, const int32_t* sizes);

#ifdef __cplusplus
}
#endif
#endif
