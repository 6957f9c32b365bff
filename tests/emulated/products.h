// What programs with the files ROWS of tests/helpers/emulated.py share: their kernels' shared memory.
#pragma once

#include "driver.h"

EMULATED_SHARED(int4, moegraph_router_smem);
EMULATED_SHARED(char4, moegraph_rows_smem);
EMULATED_SHARED(int4, moegraph_one_smem);
EMULATED_SHARED(char4, moegraph_wide_smem);
EMULATED_SHARED(float4, moegraph_f32_smem);
EMULATED_SHARED(int, counts);

// Appends the sum over a token's experts of rows [n, n_used, 1], in their order, as build_expert_sum does
// (moegraph/graphs/layer.py): all views come before the sums.
[[maybe_unused]] static ggml_tensor * append_expert_sum(tensors & t, ggml_tensor * rows) {
    ggml_build_forward_expand(t.graph, rows);
    std::vector<ggml_tensor *> views;
    for (int i = 0; i < rows->ne[1]; ++i) {
        views.push_back(ggml_view_2d(t.ctx, rows, rows->ne[0], 1, rows->nb[2], i*rows->nb[1]));
        ggml_build_forward_expand(t.graph, views.back());
    }
    ggml_tensor * sum = views[0];
    for (int i = 1; i < rows->ne[1]; ++i) {
        sum = t.place(ggml_add(t.ctx, sum, views[i]));
    }
    ggml_build_forward_expand(t.graph, sum);
    return sum;
}
