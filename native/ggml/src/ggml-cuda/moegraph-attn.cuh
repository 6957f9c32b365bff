#pragma once

#include "common.cuh"

// GGML_OP_MOEGRAPH_ATTN (moegraph.h).
void moegraph_attn(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

bool moegraph_attn_supported(int device, const ggml_tensor * dst);

// Bytes of the result and of the partial sums behind it.
size_t moegraph_attn_alloc_size(const ggml_tensor * dst);
