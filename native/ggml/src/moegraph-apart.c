#include "moegraph.h"

#include "ggml-impl.h"

// A product uses the first four parameters at most.
#define MOEGRAPH_APART_PARAM 7
#define MOEGRAPH_APART_MARK  0x61706172

static bool moegraph_is_product(const struct ggml_tensor * node) {
    return node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID;
}

void moegraph_keep_rows_apart(struct ggml_cgraph * graph) {
    for (int i = 0; i < graph->n_nodes; ++i) {
        if (moegraph_is_product(graph->nodes[i])) {
            ggml_set_op_params_i32(graph->nodes[i], MOEGRAPH_APART_PARAM, MOEGRAPH_APART_MARK);
        }
    }
}

bool moegraph_rows_are_apart(const struct ggml_tensor * node) {
    return moegraph_is_product(node) && ggml_get_op_params_i32(node, MOEGRAPH_APART_PARAM) == MOEGRAPH_APART_MARK;
}
