#include "moegraph-norm.cuh"
#include "moegraph-norm-row.cuh"
#include "moegraph-match.cuh"
#include "moegraph-router.cuh"
#include "moegraph-rows.cuh"

constexpr int MOEGRAPH_NORM_MAX = 8192; // values of a row

// One block a row. A block has little to do and much to wait for, so everything is loaded before the first reduction,
// and weights that are constant before the preceding kernel has ended.
template <int n_threads, int n_values>
static __global__ void __launch_bounds__(n_threads, 1) moegraph_add_norm_kernel(const moegraph_add_norm_args args) {
    ggml_cuda_pdl_lc();
    const int64_t offset = (int64_t) blockIdx.x*args.n;
    moegraph_add_norm_row<n_threads, n_values>(args, blockIdx.x, [&](int, const int i, const float4 sum, const float4 v) {
        moegraph_add_norm_write(args, offset + i, sum, v);
    });
}

static bool moegraph_same_or_apart(const ggml_tensor * a, const ggml_tensor * b) {
    return a->data == b->data || moegraph_apart(a, b);
}

// A vector of n weights for every row. All blocks read it, so nothing may be written there.
static bool moegraph_is_weights(const ggml_tensor * w, const ggml_tensor * sum, const ggml_tensor * dst) {
    return w->type == GGML_TYPE_F32 && w->ne[0] == sum->ne[0] && ggml_nelements(w) == w->ne[0] &&
        ggml_is_contiguous(w) && (uintptr_t) w->data % 16 == 0 && moegraph_apart(w, sum) && moegraph_apart(w, dst);
}

static bool moegraph_is_plain(const ggml_tensor * t, const ggml_tensor * like) {
    return t->type == GGML_TYPE_F32 && ggml_are_same_shape(t, like) && ggml_is_contiguous(t) &&
        (uintptr_t) t->data % 16 == 0;
}

// The gate of a shared expert in front of the sum: [product], sigmoid, mul. Returns how many nodes that is, and the
// result and its operand in gated and term.
static int moegraph_gate_match(
        const ggml_cgraph * cgraph, const int i, moegraph_add_norm_nodes & m, const ggml_tensor ** gated,
        const ggml_tensor ** term) {
    ggml_tensor * const * nodes = cgraph->nodes + i;
    const int first = nodes[0]->op == GGML_OP_MUL_MAT ? 1 : 0;
    if (i + first + 1 >= cgraph->n_nodes) {
        return 0;
    }
    const ggml_tensor * sigmoid = nodes[first];
    const ggml_tensor * mul     = nodes[first + 1];
    if (sigmoid->op != GGML_OP_UNARY || ggml_get_unary_op(sigmoid) != GGML_UNARY_OP_SIGMOID || sigmoid->ne[0] != 1 ||
            mul->op != GGML_OP_MUL || mul->src[1] != sigmoid || (first && sigmoid->src[0] != nodes[0])) {
        return 0;
    }
    for (int k = 0; k < first + 2; ++k) {
        if (!ggml_node_has_n_uses(cgraph, i + k, 1)) {
            return 0;
        }
    }
    m.gate    = sigmoid->src[0];
    m.product = first ? nodes[0] : nullptr;
    *gated    = mul;
    *term     = mul->src[0];
    return first + 2;
}

// A norm and its weights, from node i on.
static bool moegraph_norm_match(const ggml_cgraph * cgraph, const int i, moegraph_add_norm_nodes & m) {
    if (i + 1 >= cgraph->n_nodes) {
        return false;
    }
    m.norm = cgraph->nodes[i];
    m.dst  = cgraph->nodes[i + 1];
    if (m.norm->op != GGML_OP_RMS_NORM || m.dst->op != GGML_OP_MUL ||
            (m.dst->src[0] == m.norm) == (m.dst->src[1] == m.norm) || !ggml_node_has_n_uses(cgraph, i, 1)) {
        return false;
    }
    m.w = m.dst->src[0] == m.norm ? m.dst->src[1] : m.dst->src[0];
    return true;
}

// Whether a norm, its weights and a rotation start at node i: upstream has one kernel for them, and the write of keys.
static bool moegraph_is_rotated(const ggml_cgraph * cgraph, const int i) {
    static const ggml_op ops[3] = { GGML_OP_RMS_NORM, GGML_OP_MUL, GGML_OP_ROPE };
    if (!ggml_can_fuse(cgraph, i, ops, 3)) {
        return false;
    }
    const int mode = ggml_get_op_params_i32(cgraph->nodes[i + 2], 2);
    return mode == GGML_ROPE_TYPE_NORMAL || mode == GGML_ROPE_TYPE_NEOX;
}

bool moegraph_lone_norm_match(const ggml_cgraph * cgraph, const int i, moegraph_add_norm_nodes & m) {
    m = {};
    m.gated = -1;
    m.n_ops = 2;
    if (!moegraph_norm_match(cgraph, i, m) || moegraph_is_rotated(cgraph, i) ||
            (m.norm->flags & m.dst->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) {
        return false;
    }
    m.sum      = m.norm->src[0];
    m.terms[0] = m.sum;
    return true;
}

bool moegraph_add_norm_match(const ggml_cgraph * cgraph, const int i, moegraph_add_norm_nodes & m) {
    const ggml_tensor * gated = nullptr;
    const ggml_tensor * term  = nullptr;
    m.gated = -1;
    const int op      = cgraph->nodes[i]->op;
    const int n_gate  = op == GGML_OP_MUL_MAT || op == GGML_OP_UNARY ?
        moegraph_gate_match(cgraph, i, m, &gated, &term) : 0;
    const int i_add   = i + n_gate;
    if (i_add >= cgraph->n_nodes || cgraph->nodes[i_add]->op != GGML_OP_ADD) {
        return false;
    }
    ggml_tensor * const * nodes = cgraph->nodes + i_add;
    const bool chain = i_add + 1 < cgraph->n_nodes && nodes[1]->op == GGML_OP_ADD;
    const int  n_add = chain ? 2 : 1;
    m.sum  = nodes[n_add - 1];
    m.n_ops = n_gate + n_add;
    if (moegraph_norm_match(cgraph, i + m.n_ops, m) && m.norm->src[0] == m.sum) {
        m.n_ops += 2;
    } else if (n_gate > 0) { // a layer ends, and the next one begins in another graph: the same sums in the same order
        m.norm = nullptr;
        m.w    = nullptr;
        m.dst  = m.sum;
    } else {
        return false;
    }
    m.terms[0] = nodes[0]->src[0];
    m.terms[1] = nodes[0]->src[1];
    m.terms[2] = nullptr;
    if (chain) {
        if ((m.sum->src[0] != nodes[0]) == (m.sum->src[1] != nodes[0]) || !ggml_node_has_n_uses(cgraph, i_add, 1)) {
            return false;
        }
        m.terms[2] = m.sum->src[0] == nodes[0] ? m.sum->src[1] : m.sum->src[0];
    }
    for (int t = 0; t < 3 && n_gate > 0; ++t) {
        if (m.terms[t] == gated) {
            m.gated    = t;
            m.terms[t] = term;
        }
    }
    if (n_gate > 0 && m.gated < 0) {
        return false;
    }
    for (int k = 0; k < m.n_ops; ++k) {
        if ((cgraph->nodes[i + k]->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) {
            return false;
        }
    }
    return true;
}

// A gate that can be read or computed in the kernel.
static bool moegraph_gate_supported(const moegraph_add_norm_nodes & m) {
    if (m.product == nullptr) {
        return m.gate->type == GGML_TYPE_F32 && ggml_is_contiguous(m.gate) &&
            ggml_nelements(m.gate) == ggml_nrows(m.sum) && moegraph_apart(m.gate, m.sum) &&
            moegraph_apart(m.gate, m.dst); // other blocks read it
    }
    const ggml_tensor * x = m.product->src[1];
    return moegraph_is_weights(m.product->src[0], m.sum, m.dst) && moegraph_is_plain(x, m.sum) &&
        moegraph_same_or_apart(x, m.sum) && moegraph_same_or_apart(x, m.dst);
}

bool moegraph_add_norm_prepare(
        ggml_backend_cuda_context & ctx, const moegraph_add_norm_nodes & m, moegraph_add_norm_args & args) {
    const ggml_tensor * sum = m.sum;
    const ggml_tensor * dst = m.dst;
    const ggml_tensor * w   = m.w;

    const int64_t n = sum->ne[0];
    if (n % 32 != 0 || n > MOEGRAPH_NORM_MAX || (w != nullptr && !moegraph_is_weights(w, sum, dst)) ||
            !moegraph_is_plain(sum, sum) ||
            !moegraph_is_plain(dst, sum) || !moegraph_same_or_apart(sum, dst)) {
        return false;
    }
    if (m.gated >= 0 && !moegraph_gate_supported(m)) {
        return false;
    }
    for (const ggml_tensor * t : m.terms) {
        if (t != nullptr && (!moegraph_is_plain(t, sum) || !moegraph_same_or_apart(t, sum) ||
                !moegraph_same_or_apart(t, dst))) {
            return false;
        }
    }
    args = {};
    for (int t = 0; t < 3; ++t) {
        args.terms[t] = m.terms[t] ? (const float *) m.terms[t]->data : nullptr;
    }
    args.gated = m.gated;
    args.gate  = m.gated >= 0 && m.product != nullptr ? moegraph_router_gate(ctx, m.product) : nullptr;
    if (args.gate != nullptr) {
        // the router has computed it
    } else if (m.gated >= 0 && m.product != nullptr) {
        args.gate_x = (const float *) m.product->src[1]->data;
        args.gate_w = (const float *) m.product->src[0]->data;
    } else if (m.gated >= 0) {
        args.gate = (const float *) m.gate->data;
    }
    args.sum = m.terms[0] == sum ? nullptr : (float *) sum->data;
    args.n   = n;
    args.early = (w == nullptr || moegraph_is_constant(w)) &&
        (args.gate_w == nullptr || moegraph_is_constant(m.product->src[0]));
    if (w != nullptr) {
        args.w    = (const float *) w->data;
        args.dst  = (float *) dst->data;
        args.y    = (moegraph_block_y *) moegraph_rows_reserve(ctx, dst);
        args.q8_1 = (block_q8_1 *) moegraph_q8_1_reserve(ctx, dst);
        args.eps  = ggml_get_op_params_f32(m.norm, 0);
    }
    return true;
}

int moegraph_add_norm_try(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, const int i) {
    moegraph_add_norm_nodes m;
    moegraph_add_norm_args  args;
    if ((!moegraph_lone_norm_match(cgraph, i, m) && !moegraph_add_norm_match(cgraph, i, m)) ||
            !moegraph_add_norm_prepare(ctx, m, args)) {
        return 0;
    }
    const int n = args.n;
    const auto launch = [&](auto kernel, const int n_threads) {
        const ggml_cuda_kernel_launch_params params(dim3(ggml_nrows(m.sum)), dim3(n_threads), (size_t) 0, ctx.stream());
        ggml_cuda_kernel_launch(kernel, params, args);
    };
    if (n <= 4*64) {
        launch(moegraph_add_norm_kernel<64, 1>, 64);
    } else if (n <= 4*256) {
        launch(moegraph_add_norm_kernel<256, 1>, 256);
    } else if (n <= 4*512) {
        launch(moegraph_add_norm_kernel<512, 1>, 512);
    } else if (n <= 4*512*2) {
        launch(moegraph_add_norm_kernel<512, 2>, 512);
    } else {
        launch(moegraph_add_norm_kernel<512, 4>, 512);
    }
    return m.n_ops - 1;
}

void moegraph_add_norm_keep(const ggml_cgraph * cgraph, const int i,
        const ggml_backend_graph_optimize_params * params) {
    moegraph_add_norm_nodes m;
    if (!moegraph_lone_norm_match(cgraph, i, m) && !moegraph_add_norm_match(cgraph, i, m)) {
        return;
    }
    for (const ggml_tensor * t : m.terms) {
        if (t != nullptr) {
            params->add_alloc_dep(params->user_data, const_cast<ggml_tensor *>(t), m.dst);
        }
    }
    if (m.sum != m.dst) {
        params->add_alloc_dep(params->user_data, m.sum, m.dst);
    }
    if (m.gated >= 0) {
        params->add_alloc_dep(params->user_data, m.product ? m.product->src[1] : const_cast<ggml_tensor *>(m.gate),
            m.dst);
    }
}
