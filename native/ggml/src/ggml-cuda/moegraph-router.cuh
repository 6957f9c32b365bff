#pragma once

#include "common.cuh"

// The router of one row in one kernel: its product, scores (softmax or sigmoid, with a bias for the choice), top-k, and
// weights. Returns how many nodes behind node i that covers, 0 if node i does not start the pattern.
int moegraph_router_try(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i);
