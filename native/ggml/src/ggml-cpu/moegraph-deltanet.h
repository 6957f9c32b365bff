#pragma once

#include "ggml-cpu-impl.h"

#ifdef __cplusplus
extern "C" {
#endif

    // GGML_OP_MOEGRAPH_CONV and GGML_OP_MOEGRAPH_DELTA_NET (moegraph.h), and the bytes of scratch memory that they need.
    void   moegraph_compute_forward_conv(const struct ggml_compute_params * params, struct ggml_tensor * dst);
    void   moegraph_compute_forward_delta_net(const struct ggml_compute_params * params, struct ggml_tensor * dst);
    size_t moegraph_conv_work_size(const struct ggml_tensor * dst, int n_tasks);
    size_t moegraph_delta_net_work_size(const struct ggml_tensor * dst, int n_tasks);

#ifdef __cplusplus
}
#endif
