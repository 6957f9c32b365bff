#pragma once

#include "common.cuh"

#include "ggml-backend-impl.h"

// The end of a layer with routed experts and a shared one, for one token: both down products, the shared expert's gate, and the
// sums up to the layer's output in one kernel.

// Runs all from the product down (its bias, scale and weights as in moegraph_one_down) to the layer's output, if a launch before
// has computed the shared expert's activations. i: the node that is the sum of the routed experts. The nodes behind it are done
// then. Returns false, and does nothing, if it does not cover them.
bool moegraph_layer_end_try(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i, const ggml_tensor * down,
    const ggml_tensor * bias, const ggml_tensor * scale, const ggml_tensor * weights, bool early);

// The last node that such a kernel would write, node i if there is none.
ggml_tensor * moegraph_layer_end(const ggml_cgraph * cgraph, int i);

// Asks that the shared expert's activations keep their memory until that node.
void moegraph_layer_end_keep(const ggml_cgraph * cgraph, int i, const ggml_backend_graph_optimize_params * params);
