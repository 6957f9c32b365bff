#pragma once

#include "ggml-cpu-impl.h"

#ifdef __cplusplus
extern "C" {
#endif

    // bytes of scratch memory for a tree operation
    size_t moegraph_tree_work_size(const struct ggml_tensor * dst, int n_tasks);

    void moegraph_compute_forward_ssm_conv_tree(const struct ggml_compute_params * params, struct ggml_tensor * dst);
    void moegraph_compute_forward_gated_delta_net_tree(const struct ggml_compute_params * params,
        struct ggml_tensor * dst);

#ifdef __cplusplus
}
#endif
