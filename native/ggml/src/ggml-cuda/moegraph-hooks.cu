#include "moegraph-hooks.cuh"

#include "moegraph-add-rows.cuh"
#include "moegraph-argmax.cuh"
#include "moegraph-attn.cuh"
#include "moegraph-candidates.cuh"
#include "moegraph-conv.cuh"
#include "moegraph-deltanet.cuh"
#include "moegraph-done.cuh"
#include "moegraph-fetch.cuh"
#include "moegraph-gate-up.cuh"
#include "moegraph-heads.cuh"
#include "moegraph-norm.cuh"
#include "moegraph-one.cuh"
#include "moegraph-recurrence.cuh"
#include "moegraph-router.cuh"
#include "moegraph-rows.cuh"

bool moegraph_supports_op(const int device, const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_MOEGRAPH_FETCH_ROWS:
        case GGML_OP_MOEGRAPH_CANDIDATES:
            return true; // the constructors check types and shapes
        case GGML_OP_MOEGRAPH_CONV:
            return moegraph_conv_supported(op);
        case GGML_OP_MOEGRAPH_DELTA_NET:
            return moegraph_delta_net_supported(op);
        case GGML_OP_MOEGRAPH_ATTN:
            return moegraph_attn_supported(device, op);
        default:
            return false;
    }
}

size_t moegraph_alloc_size(const ggml_tensor * tensor) {
    return tensor->op == GGML_OP_MOEGRAPH_ATTN ? moegraph_attn_alloc_size(tensor) : ggml_nbytes(tensor);
}

void moegraph_compute_forward(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    switch (dst->op) {
        case GGML_OP_MOEGRAPH_FETCH_ROWS:
            moegraph_fetch_rows(ctx, dst);
            break;
        case GGML_OP_MOEGRAPH_CONV:
            moegraph_conv(ctx, dst, dst, false);
            break;
        case GGML_OP_MOEGRAPH_DELTA_NET:
            moegraph_delta_net(ctx, dst);
            break;
        case GGML_OP_MOEGRAPH_ATTN:
            moegraph_attn(ctx, dst);
            break;
        case GGML_OP_MOEGRAPH_CANDIDATES:
            moegraph_candidates_rows(ctx, dst);
            break;
        default:
            GGML_ABORT("%s: no kernel for %s", __func__, ggml_op_name(dst->op));
    }
}

bool moegraph_multiplies_apart(const ggml_tensor * product) {
    const int  cc   = ggml_cuda_info().devices[ggml_cuda_get_device()].cc;
    const bool mmid = product->op == GGML_OP_MUL_MAT_ID;
    if (!moegraph_rows_are_apart(product)) {
        return moegraph_rows_is_one(product, cc) || (mmid && moegraph_one_down_supported(product));
    }
    return moegraph_rows_supported(product, nullptr, cc) || (!mmid && moegraph_rows_f32_supported(product));
}

bool moegraph_mul_mat(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    if (dst->op == GGML_OP_MUL_MAT && moegraph_rows_f32_supported(dst)) {
        moegraph_rows_f32_mul_mat(ctx, dst);
        return true;
    }
    if (dst->op == GGML_OP_MUL_MAT_ID && moegraph_one_down(ctx, dst, nullptr, nullptr, nullptr, dst, false)) {
        return true;
    }
    return moegraph_mul_mat_glu(ctx, dst, nullptr, nullptr);
}

bool moegraph_mul_mat_glu(ggml_backend_cuda_context & ctx, ggml_tensor * up, const ggml_tensor * gate,
        ggml_tensor * glu) {
    if (!moegraph_rows_supported(up, gate, ggml_cuda_info().devices[ctx.device].cc)) {
        return false;
    }
    moegraph_rows_mul_mat(ctx, up, gate, glu);
    return true;
}

int moegraph_try_fuse(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, const int i) {
    static int (* const attempts[])(ggml_backend_cuda_context &, const ggml_cgraph *, int) = {
        moegraph_router_try,                         // may begin with a norm
        moegraph_gated_norm_try, moegraph_heads_try, // longer than a lone norm
        moegraph_argmax_try, moegraph_attn_try, moegraph_add_norm_try, moegraph_deltanet_input_try,
        moegraph_rows_try_biased, moegraph_add_rows_try,
    };
    for (const auto attempt : attempts) {
        if (const int n = attempt(ctx, cgraph, i)) {
            return n;
        }
    }
    return 0;
}

int moegraph_try_group(ggml_backend_cuda_context & ctx, ggml_cgraph * cgraph, const int i) {
    return moegraph_rows_try_group(ctx, cgraph, i);
}

void moegraph_keep(const ggml_cgraph * cgraph, const int i, const ggml_backend_graph_optimize_params * params) {
    moegraph_add_norm_keep(cgraph, i, params);
    moegraph_router_keep(cgraph, i, params);
    moegraph_deltanet_keep(cgraph, i, params);
    moegraph_branch_keep(cgraph, i, params);
    moegraph_gate_up_keep(cgraph, i, params);
    moegraph_publish_keep(cgraph, i, params);
    moegraph_rows_keep(cgraph, i, params);
}

moegraph_evaluation::moegraph_evaluation(
        ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, const bool may_branch)
    : ctx(ctx), cgraph(cgraph), branches(ctx, cgraph, may_branch), publisher(ctx) {
    moegraph_done_clear(ctx);
    moegraph_rows_begin(ctx, cgraph);
    moegraph_router_begin(ctx);
}

int moegraph_evaluation::try_alone(const int i, const moegraph_compute compute) {
    int n_done = 0;
    while (i + n_done < cgraph->n_nodes && moegraph_done_has(ctx, cgraph->nodes[i + n_done])) {
        ++n_done;
    }
    if (n_done > 0) {
        return n_done;
    }
    const int n_published = publisher.try_publish(cgraph, i, compute);
    return n_published ? n_published : moegraph_apart_try(ctx, cgraph, i, compute);
}

void moegraph_evaluation::end() {
    branches.before(cgraph->n_nodes);
    publisher.join();
}
