#pragma once

#include "common.cuh"

#include "ggml-impl.h"

// GGML_OP_MOEGRAPH_ATTN (moegraph.h).
void moegraph_attn(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// If node i is one whose result is multiplied by the sigmoid of a gate, runs both as one. Returns how many nodes behind i
// that covers, 0 if there are none (then nothing has been run).
int moegraph_attn_try(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i);

bool moegraph_attn_supported(int device, const ggml_tensor * dst);

// Bytes of the result and of the partial sums behind it.
size_t moegraph_attn_alloc_size(const ggml_tensor * dst);
