#include "moegraph.h"

static void moegraph_check_parents(const struct ggml_tensor * parents, int64_t n_tokens, int64_t n_seqs) {
    GGML_ASSERT(parents->type == GGML_TYPE_I32);
    GGML_ASSERT(ggml_is_contiguous(parents));
    GGML_ASSERT(parents->ne[0] == n_tokens && parents->ne[1] == n_seqs && parents->ne[2] == 1 && parents->ne[3] == 1);
    GGML_ASSERT(n_tokens <= MOEGRAPH_TREE_ROWS);
}

struct ggml_tensor * moegraph_ssm_conv_tree(
        struct ggml_context * ctx,
        struct ggml_tensor  * sx,
        struct ggml_tensor  * c,
        struct ggml_tensor  * parents) {
    struct ggml_tensor * result = ggml_ssm_conv(ctx, sx, c);
    moegraph_check_parents(parents, result->ne[1], result->ne[2]);
    result->op     = GGML_OP_MOEGRAPH_CONV;
    result->src[2] = parents;
    return result;
}

struct ggml_tensor * moegraph_gated_delta_net_tree(
        struct ggml_context * ctx,
        struct ggml_tensor  * q,
        struct ggml_tensor  * k,
        struct ggml_tensor  * v,
        struct ggml_tensor  * g,
        struct ggml_tensor  * beta,
        struct ggml_tensor  * state,
        struct ggml_tensor  * parents) {
    const int64_t n_tokens = v->ne[2];
    const int64_t n_seqs   = v->ne[3];
    GGML_ASSERT(g->ne[0] == 1);
    GGML_ASSERT(ggml_are_same_shape(q, k) && q->ne[0] == v->ne[0] && q->ne[2] == n_tokens);
    GGML_ASSERT(v->ne[1] % q->ne[1] == 0 && n_seqs % q->ne[3] == 0);
    moegraph_check_parents(parents, n_tokens, n_seqs);

    struct ggml_tensor * result = ggml_gated_delta_net(ctx, q, k, v, g, beta, state, 1);
    result->ne[1] = n_tokens*n_seqs; // without the states behind the scores
    result->nb[2] = result->nb[3] = result->nb[1]*result->ne[1];
    result->op_params[0] = 0;
    result->op     = GGML_OP_MOEGRAPH_DELTA_NET;
    result->src[6] = parents;
    return result;
}
