#pragma once

#include "common.cuh"

#include "ggml-backend-impl.h"

// Experts whose gate and up are one tensor: a product of both, a view of each half of its rows, a GLU. Gate and up are
// described as products of half the tensor each, for the kernels that compute two products and a GLU in one.
struct moegraph_gate_up {
    ggml_tensor   x_gate; // half of the weights
    ggml_tensor   x_up;
    ggml_tensor   gate;   // products with them that are in no graph: src[0] is one of the above
    ggml_tensor   up;
    ggml_tensor * glu;
    int           n_nodes; // from the product to the GLU
};

// Whether node i is such a product, of few rows, that nothing but the GLU behind it needs, and whose operands are apart
// from what the GLU writes. Fills result, which must stay where it is.
bool moegraph_gate_up_match(const ggml_cgraph * cgraph, int i, moegraph_gate_up & result);

// Asks that what such a product reads keeps its memory until the GLU has run.
void moegraph_gate_up_keep(const ggml_cgraph * cgraph, int i, const ggml_backend_graph_optimize_params * params);
