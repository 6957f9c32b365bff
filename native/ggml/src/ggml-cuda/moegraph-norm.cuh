#pragma once

#include "common.cuh"

#include "ggml-backend-impl.h"

// Residual sum, rms_norm and the product with its weights in one kernel, which also quantizes the result if a product
// of few rows reads it. A shared expert's gate in front of the sum is taken in: its product, sigmoid and mul. Returns
// how many nodes behind node i that covers, 0 if node i does not start the pattern.
int moegraph_add_norm_try(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i);

// Asks that what the kernel reads keeps its memory until the last node, where node i starts the pattern: the result
// would otherwise often be put partly over a summand.
void moegraph_add_norm_keep(const ggml_cgraph * cgraph, int i, const ggml_backend_graph_optimize_params * params);
