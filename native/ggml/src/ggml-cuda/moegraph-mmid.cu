#include "moegraph-mmid.cuh"

static constexpr int MMID_NWARPS = 8;

// absent entries count as those of one more expert behind all others
static __device__ __forceinline__ int mmid_expert(
        const ggml_cuda_mmid_args & args, const uint3 & n_expert_used, const int i) {
    const uint2 token_slot = fast_div_modulo((uint32_t) i, n_expert_used);
    const uint32_t id = args.ids[int64_t(token_slot.x)*args.si1 + token_slot.y];
    return min(id, (uint32_t) args.n_experts);
}

// One block per expert and one for the absent entries; each warp owns a range of entries.
__launch_bounds__(MMID_NWARPS*ggml_cuda_get_physical_warp_size(), 1)
static __global__ void mmid_sort(const ggml_cuda_mmid_args args, const uint3 n_expert_used) {
    constexpr int warp_size = ggml_cuda_get_physical_warp_size();

    const int expert  = blockIdx.x;
    const int lane    = threadIdx.x;
    const int warp    = threadIdx.y;
    const int n       = args.n_tokens*args.n_expert_used;
    const int n_warp  = (n + MMID_NWARPS*warp_size - 1) / (MMID_NWARPS*warp_size) * warp_size;
    const int i_begin = min(warp*n_warp, n);
    const int i_end   = min(i_begin + n_warp, n);

    int n_below  = 0;
    int n_own    = 0;
    int n_absent = 0;
    for (int i = i_begin + lane; i < i_end; i += warp_size) {
        const int e = mmid_expert(args, n_expert_used, i);
        n_below  += e <  expert;
        n_own    += e == expert;
        n_absent += e == args.n_experts;
    }
    n_below  = warp_reduce_sum<warp_size>(n_below);
    n_own    = warp_reduce_sum<warp_size>(n_own);
    n_absent = warp_reduce_sum<warp_size>(n_absent);

    __shared__ int counts[MMID_NWARPS][3];
    if (lane == 0) {
        counts[warp][0] = n_below;
        counts[warp][1] = n_own;
        counts[warp][2] = n_absent;
    }
    __syncthreads();

    int bound = 0; // sorted position of this expert's first entry
    int pos   = 0; // ... of this warp's first entry of this expert
    n_absent  = 0;
#pragma unroll
    for (int w = 0; w < MMID_NWARPS; ++w) {
        bound    += counts[w][0];
        pos      += counts[w][0] + (w < warp ? counts[w][1] : 0);
        n_absent += counts[w][2];
    }
    if (lane == 0 && warp == 0) {
        args.expert_bounds[expert] = bound;
    }

    const int i_last = n_own > 0 ? i_end : i_begin;
    for (int i0 = i_begin; i0 < i_last; i0 += warp_size) {
        const int i   = i0 + lane;
        const int own = i < i_end && mmid_expert(args, n_expert_used, i) == expert;
        if (!warp_reduce_any<warp_size>(own)) {
            continue;
        }
        const int n_upto = warp_prefix_inclusive_sum<int, warp_size>(own);
        if (own) {
            const int p = pos + n_upto - 1;
            args.ids_dst[p] = i;
            if (args.write_inverse) {
                args.ids_src1[i] = p;
            } else {
                const uint2 token_slot = fast_div_modulo((uint32_t) i, n_expert_used);
                args.ids_src1[p] = token_slot.x*args.sis1 + token_slot.y % args.nchannels_y;
            }
        }
        pos += __shfl_sync(0xFFFFFFFF, n_upto, warp_size - 1, warp_size);
    }

    // No product writes the rows of absent entries, all blocks share the work of clearing them:
    if (n_absent > 0) {
        for (int i = warp*gridDim.x + expert; i < n; i += MMID_NWARPS*gridDim.x) {
            if (mmid_expert(args, n_expert_used, i) < args.n_experts) {
                continue;
            }
            for (int col = lane; col < args.ncols_dst; col += warp_size) {
                args.dst[i*args.stride_dst + col] = 0.0f;
            }
        }
    }

    if (expert == args.n_experts) {
        const int tid = warp*warp_size + lane;
        for (int i = tid; i < args.n_pad; i += MMID_NWARPS*warp_size) {
            args.ids_dst[n + i] = 0;
        }
        for (int i = tid; i < args.n_ypad; i += MMID_NWARPS*warp_size) {
            args.y_pad[i] = 0;
        }
    }
}

void ggml_cuda_mmid_sort(const ggml_cuda_mmid_args & args, cudaStream_t stream) {
    GGML_ASSERT(int64_t(args.n_tokens)*args.n_expert_used < INT_MAX/2);

    const int warp_size = ggml_cuda_info().devices[ggml_cuda_get_device()].warp_size;

    const dim3 block_nums(args.n_experts + 1, 1, 1);
    const dim3 block_dims(warp_size, MMID_NWARPS, 1);
    mmid_sort<<<block_nums, block_dims, 0, stream>>>(args, init_fastdiv_values(args.n_expert_used));
    CUDA_CHECK(cudaGetLastError());
}
