#pragma once

#include "moegraph-attn-kernel.cuh"

// Launches the kernel for one size of a head; moegraph-attn-N.cu has the code for size N.

constexpr int MOEGRAPH_ATTN_MAX_TILES = 16; // of columns in a block
constexpr int MOEGRAPH_ATTN_MAX_SLOTS = 8;

template <int d, bool refined, int NC, int WC>
static void moegraph_attn_launch_kernel(
        ggml_backend_cuda_context & ctx, const moegraph_attn_args & args, const size_t smem, const size_t most) {
    const auto & device = ggml_cuda_info().devices[ctx.device];
    // one block on each multiprocessor, the same number for each head of keys: lengths change without a new capture
    const int n_plans = (args.n_rows + MOEGRAPH_ATTN_PLANNED - 1)/MOEGRAPH_ATTN_PLANNED;
    const int n = std::max(1, std::min(device.nsm/(args.n_head_kv*n_plans), args.n_rows*args.n_splits));
    CUDA_SET_SHARED_MEMORY_LIMIT((moegraph_attn_kernel<d, refined, NC, WC>), most);
    const ggml_cuda_kernel_launch_params params(
        dim3(n, args.n_head_kv, n_plans), dim3(MOEGRAPH_ATTN_THREADS), smem, ctx.stream());
    ggml_cuda_kernel_launch(moegraph_attn_kernel<d, refined, NC, WC>, params, args);
}

// Sets the number of columns and slots. A second slot is worth more than columns: with one, nothing is loaded while a
// tile is computed.
static size_t moegraph_attn_share_memory(moegraph_attn_args & args, const int d, const size_t most, const bool async) {
    const size_t row = d*sizeof(half);
    size_t quantized = 0, raw = 0, halves = 0; // bytes of a tile: of quants, as it is copied, made of quants
    for (int i = 0; i < 2; ++i) {
        const size_t bytes = MOEGRAPH_ATTN_TILE*(size_t) args.head[i];
        raw = std::max(raw, bytes);
        if (args.type[i] != GGML_TYPE_F16) {
            quantized = std::max(quantized, bytes);
            halves    = MOEGRAPH_ATTN_TILE*row;
        }
    }
    const size_t of_column = moegraph_attn_column_bytes(d, args.refined, args.refined_p);
    const auto   rows_with = [&](const size_t slots) -> int {
        int n_tiles = MOEGRAPH_ATTN_MAX_TILES;
        while (n_tiles > 0 && halves + slots + n_tiles*of_column > most) {
            n_tiles /= 2;
        }
        return n_tiles*MOEGRAPH_ATTN_COLS/args.n_group;
    };
    int n_rows = async ? rows_with(2*raw) : 0;
    const bool one = n_rows == 0;
    if (one) { // halves may extend into what quants become: those are not there at the same time
        raw    = quantized > 0 ? quantized : raw;
        n_rows = rows_with(raw);
    }
    GGML_ASSERT(n_rows > 0);
    const int n_planned = std::min(args.n_rows, MOEGRAPH_ATTN_PLANNED);
    const int n_chunks  = (n_planned + n_rows - 1)/n_rows;
    n_rows          = (n_planned + n_chunks - 1)/n_chunks;
    args.n_tiles    = 1; // a power of two, as there are kernels for
    while (args.n_tiles*MOEGRAPH_ATTN_COLS < n_rows*args.n_group) {
        args.n_tiles *= 2;
    }
    args.n_chunk    = args.n_tiles*MOEGRAPH_ATTN_COLS/args.n_group;
    args.slot_bytes = (int) raw;
    args.n_slots    = one ? 1 : std::min<size_t>(
        MOEGRAPH_ATTN_MAX_SLOTS, (most - halves - args.n_tiles*of_column)/raw);
    return args.n_tiles*of_column + halves + args.n_slots*raw;
}

template <int d, bool refined>
static void moegraph_attn_launch_width(ggml_backend_cuda_context & ctx, moegraph_attn_args args) {
    const auto & device = ggml_cuda_info().devices[ctx.device];
    const size_t most   = device.smpbo - sizeof(moegraph_attn_plan);
    const size_t smem   = moegraph_attn_share_memory(args, d, most, cp_async_available(device.cc));
    if (args.n_tiles == 1) {
        moegraph_attn_launch_kernel<d, refined, 1, 1>(ctx, args, smem, most);
    } else if (args.n_tiles == 2) {
        moegraph_attn_launch_kernel<d, refined, 2, 1>(ctx, args, smem, most);
    } else if (args.n_tiles == 4) {
        moegraph_attn_launch_kernel<d, refined, 4, 1>(ctx, args, smem, most);
    } else if (args.n_tiles == 8) {
        moegraph_attn_launch_kernel<d, refined, 4, 2>(ctx, args, smem, most);
    } else {
        moegraph_attn_launch_kernel<d, refined, 4, 4>(ctx, args, smem, most);
    }
}

template <int d>
void moegraph_attn_launch(ggml_backend_cuda_context & ctx, const moegraph_attn_args & args) {
    if constexpr (d == 256) {
        if (!args.refined) {
            return moegraph_attn_launch_width<d, false>(ctx, args);
        }
    }
    moegraph_attn_launch_width<d, true>(ctx, args);
}
