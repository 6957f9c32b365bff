#include "moegraph-gate-up.cuh"
#include "moegraph-apart.cuh"
#include "moegraph-match.cuh"

// Whether a tensor views half of each row of the product, and only the GLU reads it. first, last: the product, the GLU.
static bool moegraph_is_half(
        const ggml_cgraph * cgraph, const int first, const int last, const ggml_tensor * half) {
    const ggml_tensor * product = cgraph->nodes[first];
    int at = first + 1;
    while (at < last && cgraph->nodes[at] != half) {
        ++at;
    }
    if (at == last || half->op != GGML_OP_VIEW || half->src[0] != product || half->view_src != product) {
        return false;
    }
    const size_t behind = half->ne[0]*sizeof(float);
    return half->type == GGML_TYPE_F32 && 2*half->ne[0] == product->ne[0] && half->ne[1] == product->ne[1] &&
        half->ne[2] == product->ne[2] && half->ne[3] == product->ne[3] && ggml_are_same_stride(half, product) &&
        (half->view_offs == 0 || half->view_offs == behind) && (half->flags & GGML_TENSOR_FLAG_OUTPUT) == 0 &&
        ggml_node_get_use_count(cgraph, at) == 1;
}

// Returns the GLU behind a product of gate and up, -1 if node i is none. There may be no memory yet.
static int moegraph_gate_up_find(const ggml_cgraph * cgraph, const int i) {
    const ggml_tensor * product = cgraph->nodes[i];
    if (product->op != GGML_OP_MUL_MAT_ID || product->type != GGML_TYPE_F32 ||
            product->ne[1]*product->ne[2] > MOEGRAPH_MAX_SLOTS || product->src[0]->ne[3] != 1) {
        return -1;
    }
    static const ggml_op ops[2] = { GGML_OP_MUL_MAT_ID, GGML_OP_GLU };
    int found[2];
    if (moegraph_find_ops(cgraph, i, ops, 2, found) < 0 || !ggml_node_has_n_uses(cgraph, i, 2)) {
        return -1;
    }
    const int           last = found[1];
    const ggml_tensor * glu  = cgraph->nodes[last];
    if (ggml_get_glu_op(glu) != GGML_GLU_OP_SWIGLU || ggml_get_op_params_i32(glu, 1) != 0 || glu->src[1] == nullptr ||
            glu->type != GGML_TYPE_F32 || !ggml_is_contiguous(glu)) {
        return -1;
    }
    return moegraph_is_half(cgraph, i, last, glu->src[0]) && moegraph_is_half(cgraph, i, last, glu->src[1]) &&
        glu->src[0]->view_offs != glu->src[1]->view_offs ? last : -1;
}

bool moegraph_gate_up_match(const ggml_cgraph * cgraph, const int i, moegraph_gate_up & result) {
    const int last = moegraph_gate_up_find(cgraph, i);
    if (last < 0) {
        return false;
    }
    ggml_tensor * product = cgraph->nodes[i];
    ggml_tensor * glu     = cgraph->nodes[last];
    // the memory of the product may lie under the result: it is not written
    for (int s = 0; s < 3; ++s) {
        if (!moegraph_apart(glu, product->src[s])) {
            return false;
        }
    }
    const int64_t n    = product->src[0]->ne[1]/2;
    result.x_gate      = moegraph_slice(product->src[0], 1, glu->src[0]->view_offs != 0 ? n : 0, n);
    result.x_up        = moegraph_slice(product->src[0], 1, glu->src[1]->view_offs != 0 ? n : 0, n);
    result.gate        = *product;
    result.gate.src[0] = &result.x_gate;
    result.gate.ne[0]  = glu->ne[0];
    result.up          = *product;
    result.up.src[0]   = &result.x_up;
    result.up.ne[0]    = glu->ne[0];
    result.glu         = glu;
    result.n_nodes     = last - i + 1;
    return true;
}

void moegraph_gate_up_keep(const ggml_cgraph * cgraph, const int i, const ggml_backend_graph_optimize_params * params) {
    const int last = moegraph_gate_up_find(cgraph, i);
    if (last >= 0) {
        params->add_alloc_dep(params->user_data, cgraph->nodes[i]->src[1], cgraph->nodes[last]);
        params->add_alloc_dep(params->user_data, cgraph->nodes[i]->src[2], cgraph->nodes[last]);
    }
}
