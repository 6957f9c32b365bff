#include "moegraph-attn-launch.cuh"

template void moegraph_attn_launch<128>(ggml_backend_cuda_context & ctx, const moegraph_attn_args & args);
