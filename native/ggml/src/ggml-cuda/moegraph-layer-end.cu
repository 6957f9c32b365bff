#include "moegraph-layer-end.cuh"
#include "moegraph-done.cuh"
#include "moegraph-match.cuh"
#include "moegraph-one.cuh"
#include "moegraph-router.cuh"

struct moegraph_layer_end_nodes {
    int found[9];  // up, gate, GLU, down of the shared expert, [product, sigmoid, mul], sum, sum with the residual
    int n;
    ggml_tensor * down;
    const ggml_tensor * product; // of the shared expert's gate, or nullptr
    const ggml_tensor * residual;
    ggml_tensor * sum;
};

static bool moegraph_layer_end_match(const ggml_cgraph * cgraph, const int i, moegraph_layer_end_nodes & m) {
    static const ggml_op gated[9] = { GGML_OP_MUL_MAT, GGML_OP_MUL_MAT, GGML_OP_GLU, GGML_OP_MUL_MAT, GGML_OP_MUL_MAT,
        GGML_OP_UNARY, GGML_OP_MUL, GGML_OP_ADD, GGML_OP_ADD };
    static const ggml_op plain[6] = {
        GGML_OP_MUL_MAT, GGML_OP_MUL_MAT, GGML_OP_GLU, GGML_OP_MUL_MAT, GGML_OP_ADD, GGML_OP_ADD };
    int first = i + 1;
    while (first < cgraph->n_nodes && moegraph_is_view_op(cgraph->nodes[first])) {
        ++first;
    }
    m.n = moegraph_find_ops(cgraph, first, gated, 9, m.found) >= 0 ? 9 :
        moegraph_find_ops(cgraph, first, plain, 6, m.found) >= 0 ? 6 : 0;
    if (m.n == 0 || !ggml_node_has_n_uses(cgraph, i, 1)) {
        return false;
    }
    for (int k = 0; k < m.n - 1; ++k) {
        if (!ggml_node_has_n_uses(cgraph, m.found[k], 1)) {
            return false;
        }
    }
    const auto node = [&](const int k) { return cgraph->nodes[m.found[k]]; };
    const ggml_tensor * routed = cgraph->nodes[i], * both = node(m.n - 2), * shared = node(m.n - 3);
    m.down    = node(3);
    m.product = m.n == 9 ? node(4) : nullptr;
    m.sum     = node(m.n - 1);
    if (m.down->src[1] != node(2) || both->src[0] != routed || both->src[1] != shared ||
            (m.sum->src[0] == both) == (m.sum->src[1] == both)) { // the order of sums is part of their bits
        return false;
    }
    if (m.product != nullptr && (!moegraph_is_unary(node(5), GGML_UNARY_OP_SIGMOID) || node(5)->src[0] != m.product ||
            shared->src[0] != m.down || shared->src[1] != node(5))) {
        return false;
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
    const float * gate = m.product != nullptr ? moegraph_router_gate(ctx, m.product) : nullptr;
    const moegraph_one_shared_expert shared = { m.down, gate, m.residual };
    if ((m.product != nullptr && gate == nullptr) ||
            !moegraph_one_down(ctx, down, bias, scale, weights, m.sum, early, &shared)) {
        return false;
    }
    for (int k = 3; k < m.n; ++k) {
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
