#pragma once

#include "common.cuh"

#include "ggml-backend-impl.h"

// Gates, short convolution with its state, and the norms of q and k of a gated DeltaNet layer for few tokens: one
// kernel for ten nodes. For more tokens, the convolution and its activation are one. Returns how many nodes behind node
// i that covers, 0 if node i does not start a pattern.
int moegraph_deltanet_input_try(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i);

// rms_norm, its weights and the product with silu(z) behind the recurrence: one kernel, which also quantizes the result
// if a product of few rows reads it. Returns as above.
int moegraph_gated_norm_try(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i);

// Asks that what these kernels read keeps its memory until their last node, where node i starts a pattern.
void moegraph_deltanet_keep(const ggml_cgraph * cgraph, int i, const ggml_backend_graph_optimize_params * params);
