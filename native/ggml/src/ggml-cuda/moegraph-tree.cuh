#pragma once

#include "common.cuh"

// The short convolution and the delta rule over trees of rows (moegraph.h).
void moegraph_tree_delta_net(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void moegraph_tree_conv(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
