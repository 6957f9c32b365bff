#pragma once

#include "moegraph-attn-kernel.cuh"

// Launches the kernel for one size of a head; moegraph-attn-N.cu has the code for size N.

constexpr int MOEGRAPH_ATTN_MAX_TILES = 8; // of columns in a block

template <ggml_type type_k, ggml_type type_v, int d, int NC>
static void moegraph_attn_launch_kernel(ggml_backend_cuda_context & ctx, moegraph_attn_args args) {
    const auto & device = ggml_cuda_info().devices[ctx.device];
    const size_t smem_v = MOEGRAPH_ATTN_TILE*moegraph_attn_v<type_v, d>::n_bytes;
    const size_t left   = device.smpbo - sizeof(moegraph_attn_plan) - smem_v;
    const int    fit    = std::min<int>(NC, left/moegraph_attn_smem_per_tile<type_v, d>());
    const size_t most   = fit*moegraph_attn_smem_per_tile<type_v, d>() + smem_v;
    const int    cols   = args.n_rows*args.n_group;
    args.n_tiles = std::min(fit, (cols + MOEGRAPH_ATTN_COLS - 1)/MOEGRAPH_ATTN_COLS);
    GGML_ASSERT(args.n_tiles*MOEGRAPH_ATTN_COLS >= args.n_group);
    const size_t smem = args.n_tiles*moegraph_attn_smem_per_tile<type_v, d>() + smem_v;

    // As many blocks as run at once, the same number for each head of keys: lengths may change without a new capture.
    const int n_blocks = 2*(smem + sizeof(moegraph_attn_plan)) <= device.smpbo ?
        moegraph_attn_blocks<type_k, type_v, d, NC>() : 1;
    const int n_slots  = std::max(1, std::min(device.nsm*n_blocks/args.n_head_kv, args.n_rows*args.n_splits));
    CUDA_SET_SHARED_MEMORY_LIMIT((moegraph_attn_kernel<type_k, type_v, d, NC>), most);
    const ggml_cuda_kernel_launch_params params(
        dim3(n_slots*args.n_head_kv), dim3(MOEGRAPH_ATTN_THREADS), smem, ctx.stream());
    ggml_cuda_kernel_launch(moegraph_attn_kernel<type_k, type_v, d, NC>, params, args);
}

template <ggml_type type_k, ggml_type type_v, int d>
static void moegraph_attn_launch_width(ggml_backend_cuda_context & ctx, const moegraph_attn_args & args) {
    if (args.n_rows*args.n_group <= MOEGRAPH_ATTN_COLS) {
        moegraph_attn_launch_kernel<type_k, type_v, d, 1>(ctx, args);
    } else {
        moegraph_attn_launch_kernel<type_k, type_v, d, MOEGRAPH_ATTN_MAX_TILES>(ctx, args);
    }
}

template <ggml_type type_k, int d>
static void moegraph_attn_launch_v(
        ggml_backend_cuda_context & ctx, const moegraph_attn_args & args, const ggml_type type_v) {
    switch (type_v) {
        case GGML_TYPE_F16:
            return moegraph_attn_launch_width<type_k, GGML_TYPE_F16, d>(ctx, args);
        case GGML_TYPE_Q8_0:
            return moegraph_attn_launch_width<type_k, GGML_TYPE_Q8_0, d>(ctx, args);
        default:
            return moegraph_attn_launch_width<type_k, GGML_TYPE_Q4_0, d>(ctx, args);
    }
}

template <int d>
void moegraph_attn_launch(ggml_backend_cuda_context & ctx, const moegraph_attn_args & args, const ggml_type type_k,
        const ggml_type type_v) {
    switch (type_k) {
        case GGML_TYPE_F16:
            return moegraph_attn_launch_v<GGML_TYPE_F16, d>(ctx, args, type_v);
        case GGML_TYPE_Q8_0:
            return moegraph_attn_launch_v<GGML_TYPE_Q8_0, d>(ctx, args, type_v);
        default:
            return moegraph_attn_launch_v<GGML_TYPE_Q4_0, d>(ctx, args, type_v);
    }
}
