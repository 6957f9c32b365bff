#pragma once

#include "moegraph-rows-types.cuh"

// What the searches for patterns of nodes share.

// Finds the nodes with these operations from node i on, views between them left out. Returns the index of the last one,
// -1 if there is another operation in between or a node that is not to be computed.
[[maybe_unused]] static int moegraph_find_ops(const ggml_cgraph * cgraph, int i, const ggml_op * ops, const int n_ops,
        int * found) {
    for (int n = 0; n < n_ops; ++i) {
        if (i >= cgraph->n_nodes) {
            return -1;
        }
        const ggml_tensor * node = cgraph->nodes[i];
        if (n > 0 && moegraph_is_view_op(node)) {
            continue;
        }
        if (node->op != ops[n] || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) {
            return -1;
        }
        found[n++] = i;
    }
    return i - 1;
}

[[maybe_unused]] static bool moegraph_is_unary(const ggml_tensor * t, const ggml_unary_op op) {
    return t->op == GGML_OP_UNARY && ggml_get_unary_op(t) == op;
}

[[maybe_unused]] static bool moegraph_apart(const ggml_tensor * a, const ggml_tensor * b) {
    const char * pa = (const char *) a->data;
    const char * pb = (const char *) b->data;
    return pa + ggml_nbytes(a) <= pb || pb + ggml_nbytes(b) <= pa;
}
