#pragma once

#include "common.cuh"

// Argmax of few long rows with many blocks a row. Returns false, and does nothing, where the plain kernel does better.
bool moegraph_argmax(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
