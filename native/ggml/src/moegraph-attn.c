#include "moegraph-attn.h"

#include <string.h>

static bool moegraph_attn_is_pool(const struct ggml_tensor * t, int64_t d) {
    return (t->type == GGML_TYPE_F16 || t->type == GGML_TYPE_Q8_0 || t->type == GGML_TYPE_Q4_0) &&
        ggml_is_matrix(t) && t->nb[0] == ggml_type_size(t->type) && t->ne[0] % d == 0;
}

struct ggml_tensor * moegraph_attn(
        struct ggml_context * ctx,
        struct ggml_tensor  * q,
        struct ggml_tensor  * k,
        struct ggml_tensor  * v,
        struct ggml_tensor  * pages,
        struct ggml_tensor  * rows,
        int                   page_size,
        float                 scale) {
    const int64_t d = q->ne[0], n_head = q->ne[1], n_rows = q->ne[2];
    GGML_ASSERT(q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float) && q->ne[3] == 1);
    GGML_ASSERT(d % 32 == 0 && d <= MOEGRAPH_ATTN_HEAD && n_rows <= MOEGRAPH_ATTN_ROWS);
    GGML_ASSERT(moegraph_attn_is_pool(k, d) && moegraph_attn_is_pool(v, d));
    GGML_ASSERT(k->ne[0] == v->ne[0] && k->ne[1] == v->ne[1] && n_head % (k->ne[0]/d) == 0);
    GGML_ASSERT(pages->type == GGML_TYPE_I32 && ggml_is_contiguous(pages) && ggml_is_matrix(pages));
    GGML_ASSERT(rows->type == GGML_TYPE_I32 && ggml_is_contiguous(rows) && ggml_is_matrix(rows));
    GGML_ASSERT(rows->ne[0] == MOEGRAPH_ATTN_WORDS && rows->ne[1] == n_rows);
    GGML_ASSERT(page_size >= 16 && (page_size & (page_size - 1)) == 0);
    GGML_ASSERT(pages->ne[0]*page_size <= MOEGRAPH_ATTN_CAPACITY);

    int32_t page_log2 = 0;
    while (1 << page_log2 < page_size) {
        ++page_log2;
    }
    struct ggml_tensor * result = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, d*n_head, n_rows);
    memcpy(result->op_params + 0, &scale,     sizeof(scale));
    memcpy(result->op_params + 1, &page_log2, sizeof(page_log2));
    result->op     = GGML_OP_MOEGRAPH_ATTN;
    result->src[0] = q;
    result->src[1] = k;
    result->src[2] = v;
    result->src[3] = pages;
    result->src[4] = rows;
    return result;
}

void moegraph_attn_add(struct ggml_tensor * attn, struct ggml_tensor * sinks, int window) {
    GGML_ASSERT(attn->op == GGML_OP_MOEGRAPH_ATTN && window >= 0);
    GGML_ASSERT(sinks == NULL || (sinks->type == GGML_TYPE_F32 && ggml_is_contiguous(sinks) &&
        ggml_nelements(sinks) == attn->src[0]->ne[1]));
    attn->op_params[2] = window;
    attn->src[5]       = sinks;
}

struct moegraph_attn_pool moegraph_attn_pool_of(const struct ggml_tensor * op) {
    struct moegraph_attn_pool pool;
    pool.pages     = (const int32_t *) op->src[3]->data;
    pool.n_pages   = (int) op->src[3]->ne[0];
    pool.n_seqs    = (int) op->src[3]->ne[1];
    pool.page_log2 = op->op_params[1];
    pool.n_rows    = (int) op->src[1]->ne[1];
    return pool;
}
