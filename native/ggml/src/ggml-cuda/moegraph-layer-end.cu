#include "moegraph-layer-end.cuh"
#include "moegraph-done.cuh"
#include "moegraph-match.cuh"
#include "moegraph-one.cuh"
#include "moegraph-router.cuh"

constexpr int MOEGRAPH_LAYER_END_OPS = 9;

struct moegraph_layer_end_nodes {
    // of the shared expert: up, gate, GLU, down; its gate's product and sigmoid, and what that multiplies; both sums
    int found[MOEGRAPH_LAYER_END_OPS];
    ggml_tensor * down;
    const ggml_tensor * product;
    const ggml_tensor * residual;
    ggml_tensor * sum;
};

static bool moegraph_layer_end_match(const ggml_cgraph * cgraph, const int i, moegraph_layer_end_nodes & m) {
    static const ggml_op ops[MOEGRAPH_LAYER_END_OPS] = { GGML_OP_MUL_MAT, GGML_OP_MUL_MAT, GGML_OP_GLU, GGML_OP_MUL_MAT,
        GGML_OP_MUL_MAT, GGML_OP_UNARY, GGML_OP_MUL, GGML_OP_ADD, GGML_OP_ADD };
    int first = i + 1;
    while (first < cgraph->n_nodes && moegraph_is_view_op(cgraph->nodes[first])) {
        ++first;
    }
    if (moegraph_find_ops(cgraph, first, ops, MOEGRAPH_LAYER_END_OPS, m.found) < 0 || !ggml_node_has_n_uses(cgraph, i, 1)) {
        return false;
    }
    for (int k = 0; k < MOEGRAPH_LAYER_END_OPS - 1; ++k) {
        if (!ggml_node_has_n_uses(cgraph, m.found[k], 1)) {
            return false;
        }
    }
    const auto node = [&](const int k) { return cgraph->nodes[m.found[k]]; };
    const ggml_tensor * routed = cgraph->nodes[i], * sigmoid = node(5), * gated = node(6), * both = node(7);
    m.down    = node(3);
    m.product = node(4);
    m.sum     = node(8);
    if (m.down->src[1] != node(2) || !moegraph_is_unary(sigmoid, GGML_UNARY_OP_SIGMOID) || sigmoid->src[0] != m.product ||
            gated->src[0] != m.down || gated->src[1] != sigmoid) {
        return false;
    }
    if (both->src[0] != routed || both->src[1] != gated || (m.sum->src[0] == both) == (m.sum->src[1] == both)) {
        return false; // the order of sums is part of their bits
    }
    m.residual = m.sum->src[0] == both ? m.sum->src[1] : m.sum->src[0];
    const auto is_row = [&](const ggml_tensor * t) {
        return t->type == GGML_TYPE_F32 && ggml_are_same_shape(t, m.sum) && ggml_is_contiguous(t);
    };
    return ggml_nelements(m.sum) == m.sum->ne[0] && is_row(m.sum) && is_row(m.residual) && is_row(m.down) && is_row(routed);
}

bool moegraph_layer_end_try(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, const int i,
        const ggml_tensor * down, const ggml_tensor * bias, const ggml_tensor * scale, const ggml_tensor * weights,
        const bool early) {
    moegraph_layer_end_nodes m;
    if (!moegraph_layer_end_match(cgraph, i, m) || !moegraph_done_has(ctx, m.down->src[1]) ||
            (m.residual->data != m.sum->data && !moegraph_apart(m.residual, m.sum))) {
        return false;
    }
    const moegraph_one_shared_expert shared = { m.down, moegraph_router_gate(ctx, m.product), m.residual };
    if (shared.gate == nullptr || !moegraph_one_down(ctx, down, bias, scale, weights, m.sum, early, &shared)) {
        return false;
    }
    for (int k = 3; k < MOEGRAPH_LAYER_END_OPS; ++k) {
        moegraph_done_add(ctx, cgraph->nodes[m.found[k]]);
    }
    return true;
}

ggml_tensor * moegraph_layer_end(const ggml_cgraph * cgraph, const int i) {
    moegraph_layer_end_nodes m;
    return moegraph_layer_end_match(cgraph, i, m) ? m.sum : cgraph->nodes[i];
}

void moegraph_layer_end_keep(const ggml_cgraph * cgraph, const int i, const ggml_backend_graph_optimize_params * params) {
    moegraph_layer_end_nodes m;
    if (moegraph_layer_end_match(cgraph, i, m)) {
        params->add_alloc_dep(params->user_data, m.down->src[1], m.sum);
    }
}
