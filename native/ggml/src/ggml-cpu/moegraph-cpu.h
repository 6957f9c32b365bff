#pragma once

#include "ggml-cpu-impl.h"

#ifdef __cplusplus
extern "C" {
#endif

    // What ggml-cpu calls for our ops (moegraph.h), whose constructors check types and shapes.

    void moegraph_compute_forward_fetch_rows(const struct ggml_compute_params * params, struct ggml_tensor * dst);
    void moegraph_compute_forward_conv(const struct ggml_compute_params * params, struct ggml_tensor * dst);
    void moegraph_compute_forward_delta_net(const struct ggml_compute_params * params, struct ggml_tensor * dst);
    void moegraph_compute_forward_attn(const struct ggml_compute_params * params, struct ggml_tensor * dst);
    void moegraph_compute_forward_candidates(const struct ggml_compute_params * params, struct ggml_tensor * dst);

    // bytes of scratch memory that an op needs with n_tasks threads
    size_t moegraph_conv_work_size(const struct ggml_tensor * op, int n_tasks);
    size_t moegraph_delta_net_work_size(const struct ggml_tensor * op, int n_tasks);
    size_t moegraph_candidates_work_size(const struct ggml_tensor * op, int n_tasks);

#ifdef __cplusplus
}
#endif
