#include "moegraph-context.cuh"

bool moegraph_fork_events::create() {
    if (fork != nullptr) {
        return false;
    }
    CUDA_CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    return true;
}

moegraph_fork_events::~moegraph_fork_events() {
    if (fork != nullptr) {
        CUDA_CHECK(cudaEventDestroy(fork));
        CUDA_CHECK(cudaEventDestroy(join));
    }
}

moegraph_rows_state::~moegraph_rows_state() {
    for (entry & e : y) {
        CUDA_CHECK(cudaFree(e.data));
    }
    for (entry & e : groups) {
        CUDA_CHECK(cudaFree(e.data));
    }
    for (entry & e : q8_1) {
        CUDA_CHECK(cudaFree(e.data));
    }
    for (void * data : retired) {
        CUDA_CHECK(cudaFree(data));
    }
}

moegraph_step_state::~moegraph_step_state() {
    CUDA_CHECK(cudaFree(arrived));
}

moegraph_router_state::~moegraph_router_state() {
    CUDA_CHECK(cudaFree(arrived));
}

moegraph_context::~moegraph_context() {
    ggml_cuda_set_device(device); // the members are freed next
}

moegraph_context & moegraph_get_context(ggml_backend_cuda_context & ctx) {
    if (!ctx.moegraph) {
        ctx.moegraph = std::make_shared<moegraph_context>(ctx.device);
    }
    return *static_cast<moegraph_context *>(ctx.moegraph.get());
}
