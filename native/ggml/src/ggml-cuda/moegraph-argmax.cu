#include "moegraph-argmax.cuh"

#include <climits>

constexpr int MOEGRAPH_ARGMAX_THREADS = 256;
constexpr int MOEGRAPH_ARGMAX_PARTS   = 64;

struct moegraph_max {
    float value;
    int   index;
};

// The lower index wins among equal values, whatever the order of comparisons. NaN never wins.
static __device__ __forceinline__ moegraph_max moegraph_max_of(const moegraph_max a, const moegraph_max b) {
    return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}

static __device__ __forceinline__ moegraph_max moegraph_block_max(moegraph_max best) {
    __shared__ moegraph_max warps[MOEGRAPH_ARGMAX_THREADS/32];
    for (int round = 0; round < 2; ++round) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            moegraph_max other;
            other.value = __shfl_xor_sync(0xFFFFFFFF, best.value, offset);
            other.index = __shfl_xor_sync(0xFFFFFFFF, best.index, offset);
            best = moegraph_max_of(best, other);
        }
        if (round == 0) {
            if (threadIdx.x % 32 == 0) {
                warps[threadIdx.x/32] = best;
            }
            __syncthreads();
            best = warps[threadIdx.x % (MOEGRAPH_ARGMAX_THREADS/32)];
        }
    }
    return best;
}

static __global__ void moegraph_argmax_parts(const float * x, moegraph_max * parts, const int n) {
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const int     per_part = (n + MOEGRAPH_ARGMAX_PARTS - 1) / MOEGRAPH_ARGMAX_PARTS;
    const int     begin    = blockIdx.x*per_part;
    const int     end      = min(begin + per_part, n);
    const float * row      = x + (int64_t) blockIdx.y*n;

    moegraph_max best = { -INFINITY, INT_MAX };
    for (int i = begin + threadIdx.x; i < end; i += MOEGRAPH_ARGMAX_THREADS) {
        best = moegraph_max_of(best, { row[i], i });
    }
    best = moegraph_block_max(best);
    if (threadIdx.x == 0) {
        parts[blockIdx.y*MOEGRAPH_ARGMAX_PARTS + blockIdx.x] = best;
    }
}

static __global__ void moegraph_argmax_rows(const moegraph_max * parts, int32_t * dst) {
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    moegraph_max best = { -INFINITY, INT_MAX };
    for (int i = threadIdx.x; i < MOEGRAPH_ARGMAX_PARTS; i += MOEGRAPH_ARGMAX_THREADS) {
        best = moegraph_max_of(best, parts[blockIdx.x*MOEGRAPH_ARGMAX_PARTS + i]);
    }
    best = moegraph_block_max(best);
    if (threadIdx.x == 0) {
        dst[blockIdx.x] = best.index == INT_MAX ? -1 : best.index;
    }
}

bool moegraph_argmax(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * src0 = dst->src[0];
    const int64_t n      = src0->ne[0];
    const int64_t n_rows = ggml_nrows(src0);
    if (n < 16384 || n > INT_MAX/2 || n_rows > 64) {
        return false;
    }
    cudaStream_t stream = ctx.stream();
    ggml_cuda_pool_alloc<moegraph_max> parts(ctx.pool(), n_rows*MOEGRAPH_ARGMAX_PARTS);
    const ggml_cuda_kernel_launch_params params_parts(dim3(MOEGRAPH_ARGMAX_PARTS, n_rows),
        dim3(MOEGRAPH_ARGMAX_THREADS), (size_t) 0, stream);
    ggml_cuda_kernel_launch(moegraph_argmax_parts, params_parts, (const float *) src0->data, parts.get(), (int) n);
    const ggml_cuda_kernel_launch_params params_rows(dim3(n_rows), dim3(MOEGRAPH_ARGMAX_THREADS), (size_t) 0, stream);
    ggml_cuda_kernel_launch(moegraph_argmax_rows, params_rows, (const moegraph_max *) parts.get(),
        (int32_t *) dst->data);
    return true;
}
