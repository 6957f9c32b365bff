#pragma once

#include "moegraph-publish.cuh"

// Products whose rows must have the bits that they have alone (moegraph_keep_rows_apart): where no kernel for few rows
// sees to that, each row is a product of its own. Returns how many nodes that covers from node i on, 0 if nothing has
// been run.
int moegraph_apart_try(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i, moegraph_compute compute);

// A view of n indices of a dimension.
[[maybe_unused]] static ggml_tensor moegraph_slice(ggml_tensor * t, const int dim, const int64_t first, const int64_t n) {
    ggml_tensor slice = *t;
    slice.op        = GGML_OP_VIEW;
    slice.src[0]    = t;
    slice.src[1]    = nullptr;
    slice.view_src  = t->view_src != nullptr ? t->view_src : t;
    slice.view_offs = t->view_offs + first*t->nb[dim];
    slice.ne[dim]   = n;
    slice.data      = (char *) t->data + first*t->nb[dim];
    return slice;
}
