#pragma once

#include "moegraph-context.cuh"

// Nodes that an earlier launch of this evaluation has computed; the evaluation passes over them. Whoever adds one answers for
// its memory: between the launch and the node nothing may use it.
static inline void moegraph_done_add(ggml_backend_cuda_context & ctx, const ggml_tensor * node) {
    moegraph_get_context(ctx).done.insert(node);
}

static inline bool moegraph_done_has(ggml_backend_cuda_context & ctx, const ggml_tensor * node) {
    return moegraph_get_context(ctx).done.count(node) != 0;
}

static inline void moegraph_done_clear(ggml_backend_cuda_context & ctx) {
    moegraph_get_context(ctx).done.clear();
}
