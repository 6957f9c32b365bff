#include "moegraph.h"

struct ggml_tensor * moegraph_fetch_rows(
        struct ggml_context * ctx,
        struct ggml_tensor  * table,
        struct ggml_tensor  * ids,
        struct ggml_tensor  * victims,
        struct ggml_tensor  * from,
        struct ggml_tensor  * to) {
    GGML_ASSERT(table->type == GGML_TYPE_I32 && ggml_is_contiguous(table) && table->ne[0] == 1 && table->ne[2] == 1);
    GGML_ASSERT(ids->type == GGML_TYPE_I32 && ggml_is_contiguous(ids) && ggml_is_vector(ids));
    GGML_ASSERT(ids->ne[0] <= MOEGRAPH_FETCH_IDS);
    GGML_ASSERT(victims->type == GGML_TYPE_I32 && ggml_is_contiguous(victims) && ggml_is_matrix(victims));
    GGML_ASSERT(victims->ne[0] == 2 && victims->ne[1] <= MOEGRAPH_FETCH_IDS);
    GGML_ASSERT(from->type == GGML_TYPE_F32 && ggml_is_matrix(from) && from->ne[1] == table->ne[1]);
    GGML_ASSERT(to->type == GGML_TYPE_F32 && ggml_is_matrix(to) && to->ne[0] == from->ne[0]);
    GGML_ASSERT(from->ne[0] % 4 == 0 && from->nb[0] == sizeof(float) && to->nb[0] == sizeof(float));
    GGML_ASSERT(from->nb[1] % 16 == 0 && to->nb[1] % 16 == 0);

    struct ggml_tensor * result = ggml_get_rows(ctx, table, ids);
    result->op     = GGML_OP_MOEGRAPH_FETCH_ROWS;
    result->src[2] = victims;
    result->src[3] = from;
    result->src[4] = to;
    return result;
}
