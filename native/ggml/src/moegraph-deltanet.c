#include "moegraph.h"

static bool moegraph_is_i32(const struct ggml_tensor * t, int64_t ne0, int64_t ne1) {
    return t->type == GGML_TYPE_I32 && ggml_is_contiguous(t) && t->ne[0] == ne0 && t->ne[1] == ne1 && t->ne[2] == 1 &&
        t->ne[3] == 1;
}

static void moegraph_check_states(const struct ggml_tensor * pool, int64_t n_state, const struct ggml_tensor * slots,
        const struct ggml_tensor * parents, const struct ggml_tensor * lengths, int64_t n_tokens, int64_t n_seqs) {
    GGML_ASSERT(pool->type == GGML_TYPE_F32 && pool->nb[0] == sizeof(float) && pool->nb[1] % sizeof(float) == 0);
    GGML_ASSERT(pool->ne[0] == n_state && pool->ne[2] == 1 && pool->ne[3] == 1);
    GGML_ASSERT(moegraph_is_i32(slots, n_seqs, 1));
    GGML_ASSERT(lengths == NULL || (parents == NULL && moegraph_is_i32(lengths, n_seqs, 1)));
    GGML_ASSERT(parents == NULL || (moegraph_is_i32(parents, n_tokens, n_seqs) && n_tokens <= MOEGRAPH_TREE_ROWS));
}

struct ggml_tensor * moegraph_conv(
        struct ggml_context * ctx,
        struct ggml_tensor  * rows,
        struct ggml_tensor  * kernel,
        struct ggml_tensor  * pool,
        struct ggml_tensor  * slots,
        struct ggml_tensor  * parents,
        struct ggml_tensor  * lengths) {
    const int64_t d_conv = kernel->ne[0];
    GGML_ASSERT(rows->type == GGML_TYPE_F32 && rows->ne[3] == 1 && rows->nb[0] == sizeof(float));
    GGML_ASSERT(rows->nb[1] % sizeof(float) == 0 && rows->nb[2] % sizeof(float) == 0);
    GGML_ASSERT(kernel->type == GGML_TYPE_F32 && ggml_is_contiguous(kernel));
    GGML_ASSERT(kernel->ne[1] == rows->ne[0] && kernel->ne[2] == 1 && kernel->ne[3] == 1);
    GGML_ASSERT(d_conv >= 2 && d_conv <= MOEGRAPH_CONV_WIDTH);
    moegraph_check_states(pool, (d_conv - 1)*rows->ne[0], slots, parents, lengths, rows->ne[1], rows->ne[2]);

    struct ggml_tensor * result = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, rows->ne[0], rows->ne[1], rows->ne[2]);
    result->op     = GGML_OP_MOEGRAPH_CONV;
    result->src[0] = rows;
    result->src[1] = kernel;
    result->src[2] = pool;
    result->src[3] = slots;
    result->src[4] = parents;
    result->src[5] = lengths;
    return result;
}

struct ggml_tensor * moegraph_delta_net(
        struct ggml_context * ctx,
        struct ggml_tensor  * q,
        struct ggml_tensor  * k,
        struct ggml_tensor  * v,
        struct ggml_tensor  * gate,
        struct ggml_tensor  * beta,
        struct ggml_tensor  * pool,
        struct ggml_tensor  * slots,
        struct ggml_tensor  * parents,
        struct ggml_tensor  * lengths) {
    const int64_t S = v->ne[0], H = v->ne[1], n_tokens = v->ne[2], n_seqs = v->ne[3];
    GGML_ASSERT(q->type == GGML_TYPE_F32 && k->type == GGML_TYPE_F32 && v->type == GGML_TYPE_F32);
    GGML_ASSERT(ggml_is_contiguous_rows(q) && ggml_is_contiguous_rows(k) && ggml_is_contiguous_rows(v));
    GGML_ASSERT(ggml_are_same_shape(q, k) && q->ne[0] == S && q->ne[2] == n_tokens && q->ne[3] == n_seqs);
    GGML_ASSERT(H % q->ne[1] == 0);
    GGML_ASSERT(gate->type == GGML_TYPE_F32 && ggml_is_contiguous(gate) && ggml_are_same_shape(gate, beta));
    GGML_ASSERT(beta->type == GGML_TYPE_F32 && ggml_is_contiguous(beta));
    GGML_ASSERT(beta->ne[0] == 1 && beta->ne[1] == H && beta->ne[2] == n_tokens && beta->ne[3] == n_seqs);
    moegraph_check_states(pool, S*S*H, slots, parents, lengths, n_tokens, n_seqs);

    struct ggml_tensor * result = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, S, H, n_tokens, n_seqs);
    result->op     = GGML_OP_MOEGRAPH_DELTA_NET;
    result->src[0] = q;
    result->src[1] = k;
    result->src[2] = v;
    result->src[3] = gate;
    result->src[4] = beta;
    result->src[5] = pool;
    result->src[6] = slots;
    result->src[7] = parents;
    result->src[8] = lengths;
    return result;
}
