#pragma once

#include "common.cuh"

// SSM_CONV and GATED_DELTA_NET with parents (moegraph.h).
void moegraph_tree_delta_net(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// bias may be nullptr; out is where the result goes, of dst's shape and strides
void moegraph_tree_conv(ggml_backend_cuda_context & ctx, const ggml_tensor * dst, const float * bias, bool silu,
    float * out);
