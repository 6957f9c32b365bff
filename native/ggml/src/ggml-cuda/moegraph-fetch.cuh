#pragma once

#include "common.cuh"

// The slot look-up that fetches what is not there (moegraph.h).
void moegraph_fetch_rows(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
