// Expert FFN on the CPU for the few rows of a decode pass, with its own threads.
//
// ggml's graph of the same FFN has a dozen ops for each expert, with a barrier after each, and no thread reads an op's
// weights before the previous op is done. Reading memory takes most of the time. So here each thread prefetches
// weights ahead of its work, those of down already while it computes gate and up. The arithmetic is ggml's: the same
// conversions, dot products and activation, one row at a time, and sums in routing order. Results do not depend on the
// number of threads.

#pragma once

#include "ggml.h"
#include "ggml-cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

// The expert stacks of a layer: gate, up [n_embd, n_ff, n_expert], down [n_ff, n_embd, n_expert]. Rows are contiguous;
// a stride is the number of bytes from one expert to the next.
struct mg_cpu_ffn_layer {
    const void * gate;
    const void * up;
    const void * down;
    size_t gate_stride;
    size_t up_stride;
    size_t down_stride;
    enum ggml_type gate_type;
    enum ggml_type up_type;
    enum ggml_type down_type;
    int n_expert;
};

struct mg_cpu_ffn;

// Starts n_threads - 1 threads; the caller of mg_cpu_ffn_end is one more. NULL if memory or threads run out.
struct mg_cpu_ffn * mg_cpu_ffn_new(int n_threads, int n_embd, int n_ff, int n_expert_used, int max_rows);
void mg_cpu_ffn_free(struct mg_cpu_ffn * ffn);

// Writes to y [n_embd, n_rows] the sum over k of weights[k] times the FFN of expert ids[k] on x [n_embd, n_rows]. ids
// and weights are [n_expert_used, n_rows]. An id outside [0, n_expert) adds nothing. The threads compute from `begin`
// on; `end` takes part in what is left, and y is there when it returns. All arguments stay as they are until then. One
// job at a time, from one thread; `end` without a job does nothing.
void mg_cpu_ffn_begin(struct mg_cpu_ffn * ffn, const struct mg_cpu_ffn_layer * layer, const float * x,
        const int32_t * ids, const float * weights, int n_rows, float * y);
void mg_cpu_ffn_end(struct mg_cpu_ffn * ffn);

#ifdef __cplusplus
}
#endif
