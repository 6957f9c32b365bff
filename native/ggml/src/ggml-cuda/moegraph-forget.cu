#include "moegraph-forget.h"

#include "common.cuh"
#include "ggml-backend-impl.h"
#include "ggml-cuda.h"

void moegraph_forget_graph(ggml_backend_t backend, const ggml_tensor * first) {
#ifdef USE_CUDA_GRAPH
    if (ggml_backend_is_cuda(backend)) {
        ggml_backend_cuda_context * ctx = (ggml_backend_cuda_context *) backend->context;
        ggml_cuda_set_device(ctx->device);
        ctx->cuda_graphs.erase(first);
    }
#else
    GGML_UNUSED(backend);
    GGML_UNUSED(first);
#endif
}
