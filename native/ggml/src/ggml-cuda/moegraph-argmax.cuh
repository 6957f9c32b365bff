#pragma once

#include "common.cuh"

#include "ggml-impl.h"

// Argmax of few long rows with many blocks a row. Returns false, and does nothing, where the plain kernel does better.
bool moegraph_argmax(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// If node i is one whose logits and hidden rows are also summed, as the head checks them, runs all that as one; the order of
// that sum is another. Returns how many nodes behind i that covers, 0 if there are none (then nothing has been run).
int moegraph_argmax_try(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i);
