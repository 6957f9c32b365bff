// Expert FFN on the CPU for the few rows of a decode step, on threads of its own.
//
// ggml's graph of the same FFN is a dozen ops for one expert, each behind a barrier, and the threads do not touch
// the weights of an op before the one before it is done. Memory is what the time goes into, so here every thread
// reads ahead, the weights of down included, while it still computes gate and up. The arithmetic is ggml's: the
// same conversions, dot products and activation, one row at a time, and sums in routing order. Results do not
// depend on the number of threads.

#pragma once

#include "ggml.h"
#include "ggml-cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

// The stacks of a layer: gate, up [n_embd, n_ff, n_expert] and down [n_ff, n_embd, n_expert]. Rows are
// contiguous; strides are bytes from expert to expert.
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

// Start n_threads - 1 threads; the caller of mg_cpu_ffn_compute is one more. NULL without memory or threads.
struct mg_cpu_ffn * mg_cpu_ffn_new(int n_threads, int n_embd, int n_ff, int n_expert_used, int max_rows);
void mg_cpu_ffn_free(struct mg_cpu_ffn * cold);

// y [n_embd, n_rows] = the sum over k of weights[k] * FFN of expert ids[k], for x [n_embd, n_rows] and ids, weights
// [n_expert_used, n_rows]. An id below 0 or from n_expert on adds nothing. One call at a time.
void mg_cpu_ffn_compute(struct mg_cpu_ffn * cold, const struct mg_cpu_ffn_layer * layer, const float * x,
        const int32_t * ids, const float * weights, int n_rows, float * y);

#ifdef __cplusplus
}
#endif
