#pragma once

#include "ggml-cpu-impl.h"

#ifdef __cplusplus
extern "C" {
#endif

    // What ggml-cpu calls for our ops (GGML_OP_MOEGRAPH_*).

    bool moegraph_cpu_supports_op(const struct ggml_tensor * op);

    // bytes of scratch memory that an op needs with n_tasks threads
    size_t moegraph_cpu_work_size(const struct ggml_tensor * op, int n_tasks);

    void moegraph_cpu_compute_forward(const struct ggml_compute_params * params, struct ggml_tensor * dst);

#ifdef __cplusplus
}
#endif
