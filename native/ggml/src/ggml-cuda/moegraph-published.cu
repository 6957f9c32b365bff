#include "moegraph-publish.cuh"
#include "moegraph-rows-types.cuh"

#include "moegraph.h"

bool moegraph_is_published(const ggml_cgraph * cgraph, const int i) {
    const ggml_tensor * node = cgraph->nodes[i];
    if (!moegraph_is_publish(node) || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) {
        return false;
    }
    const ggml_tensor * src = node->src[0];
    const ggml_tensor * dst = node->src[1];
    const ggml_backend_buffer_t buffer = dst->view_src != nullptr ? dst->view_src->buffer : dst->buffer;
    const bool rows = ggml_is_contiguous(src) || (src->nb[0] == sizeof(int) && src->ne[2] == 1 && src->ne[3] == 1);
    return buffer != nullptr && ggml_backend_buffer_is_host(buffer) && src->type == dst->type &&
        ggml_type_size(src->type) == sizeof(int) && !ggml_is_quantized(src->type) && rows && ggml_is_contiguous(dst) &&
        ggml_nelements(src) < INT_MAX && ggml_node_get_use_count(cgraph, i) == 0;
}

ggml_tensor * moegraph_publish_find(const ggml_cgraph * cgraph, int i, const ggml_tensor * ids) {
    for (; i < cgraph->n_nodes && cgraph->nodes[i]->op != GGML_OP_MUL_MAT_ID; ++i) {
        if (moegraph_is_published(cgraph, i)) {
            const ggml_tensor * src = cgraph->nodes[i]->src[0];
            const bool alone = !moegraph_is_published(cgraph, i - 1) &&
                (i + 1 == cgraph->n_nodes || !moegraph_is_published(cgraph, i + 1));
            return alone && src->data == ids->data && moegraph_rows_origin(src) == moegraph_rows_origin(ids) && ggml_nelements(src) == ggml_nelements(ids) && ggml_nrows(src) == 1 ?
                cgraph->nodes[i] : nullptr;
        }
    }
    return nullptr;
}
