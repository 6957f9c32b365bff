#include "moegraph-candidates.h"

struct ggml_tensor * moegraph_candidates(
        struct ggml_context * ctx,
        struct ggml_tensor  * logits,
        struct ggml_tensor  * draws) {
    GGML_ASSERT(logits->type == GGML_TYPE_F32 && ggml_is_contiguous(logits) && ggml_is_matrix(logits));
    GGML_ASSERT(draws->type == GGML_TYPE_I32 && ggml_is_contiguous(draws) && ggml_is_matrix(draws));
    GGML_ASSERT(draws->ne[0] == MOEGRAPH_DRAW_WORDS && draws->ne[1] == logits->ne[1]);
    GGML_ASSERT(logits->ne[0] < (1 << 30) && logits->ne[1] <= MOEGRAPH_DRAW_ROWS);
    GGML_ASSERT(sizeof(struct moegraph_draw) == MOEGRAPH_DRAW_WORDS*sizeof(int32_t));

    const int64_t n_words = sizeof(struct moegraph_listed)/sizeof(int32_t);
    struct ggml_tensor * result = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_words, logits->ne[1]);
    result->op     = GGML_OP_MOEGRAPH_CANDIDATES;
    result->src[0] = logits;
    result->src[1] = draws;
    return result;
}
