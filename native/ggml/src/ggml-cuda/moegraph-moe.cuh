#pragma once

#include "common.cuh"

#include "ggml-backend-impl.h"

// The end of the routed experts of a few tokens: down product (of one token with biases, if there are any), product with
// the routing weights and sum over the experts in one kernel, which quantizes the activations itself.

// Returns the node that multiplies the rows of the product node i, or their sums with biases, with weights, 0 if there is
// none that could be fused with it.
int moegraph_moe_down_mul(const ggml_cgraph * cgraph, int i);

// Runs the product behind rows (the product, or its sum with biases), with the weights (and before them the scale
// of each expert, or nullptr) and the weighted reduction behind it, whose result is node i_dst; of one token perhaps with all up
// to the end of the layer (moegraph-layer-end.cuh). Returns false, and does nothing, if the kernel does not support them.
bool moegraph_moe_down(
        ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i_dst, const ggml_tensor * rows,
        const ggml_tensor * scale, const ggml_tensor * weights);

// Asks that what the kernel reads keeps its memory until the last node. rows: what the weighted reduction reads.
void moegraph_moe_down_keep(const ggml_cgraph * cgraph, int i_dst, const ggml_tensor * rows, const ggml_tensor * scale,
        const ggml_tensor * weights, const ggml_backend_graph_optimize_params * params);
