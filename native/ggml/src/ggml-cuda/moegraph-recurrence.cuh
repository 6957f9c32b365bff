#pragma once

#include "common.cuh"

// GGML_OP_MOEGRAPH_DELTA_NET (moegraph.h).
bool moegraph_delta_net_supported(const ggml_tensor * dst);
void moegraph_delta_net(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// The same with parents.
bool moegraph_delta_tree_supported(const ggml_tensor * dst);
void moegraph_delta_tree(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
