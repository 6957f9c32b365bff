#pragma once

#include "common.cuh"

// The slot look-up that fetches what is not there (moegraph.h).
// Waits until rows that were on their way are there.
static __device__ __forceinline__ void moegraph_fetch_wait(const int32_t * there) {
    while (*(const volatile int32_t *) there == 0) {
    }
    __threadfence();
}

void moegraph_fetch_rows(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
