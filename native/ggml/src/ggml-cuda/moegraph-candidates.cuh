#pragma once

#include "common.cuh"

// The likeliest tokens of rows of logits, and those of the largest scores (moegraph.h).
void moegraph_candidates_rows(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
