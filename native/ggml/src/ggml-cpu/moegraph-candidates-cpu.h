#pragma once

#include "ggml-cpu-impl.h"

#ifdef __cplusplus
extern "C" {
#endif

    // the likeliest tokens of rows of logits, and those of the largest scores (moegraph.h)
    void   moegraph_compute_forward_candidates(const struct ggml_compute_params * params, struct ggml_tensor * dst);
    size_t moegraph_candidates_work_size(const struct ggml_tensor * op, int n_tasks);

#ifdef __cplusplus
}
#endif
