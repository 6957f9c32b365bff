#pragma once

#include "common.cuh"

#include "ggml-impl.h"

// If node i begins the norms, weights and rotations of heads of Q and K and the writes of K and V to caches of halves, runs
// them as one kernel. Returns how many nodes behind i that covers, 0 if there are none (then nothing has been run).
int moegraph_heads_try(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i);
