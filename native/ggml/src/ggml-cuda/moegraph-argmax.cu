#include "moegraph-argmax.cuh"

#include "moegraph-match.cuh"

#include <climits>

constexpr int MOEGRAPH_ARGMAX_THREADS = 256;
constexpr int MOEGRAPH_ARGMAX_PARTS   = 64;

struct moegraph_max {
    float value;
    int   index;
};

struct moegraph_argmax_part {
    moegraph_max best;
    float        sum;
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

// The sum over the threads of a block; only the first thread gets it.
static __device__ __forceinline__ float moegraph_block_sum(float sum) {
    __shared__ float warps[MOEGRAPH_ARGMAX_THREADS/32];
    sum = warp_reduce_sum(sum);
    if (threadIdx.x % 32 == 0) {
        warps[threadIdx.x/32] = sum;
    }
    __syncthreads();
    for (int i = 1; i < MOEGRAPH_ARGMAX_THREADS/32 && threadIdx.x == 0; ++i) {
        sum += warps[i];
    }
    return sum;
}

static __global__ void moegraph_argmax_parts(const float * x, moegraph_argmax_part * parts, const int n) {
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const int     per_part = (n + MOEGRAPH_ARGMAX_PARTS - 1) / MOEGRAPH_ARGMAX_PARTS;
    const int     begin    = blockIdx.x*per_part;
    const int     end      = min(begin + per_part, n);
    const float * row      = x + (int64_t) blockIdx.y*n;

    moegraph_max best = { -INFINITY, INT_MAX };
    float        sum  = 0.0f;
    for (int i = begin + threadIdx.x; i < end; i += MOEGRAPH_ARGMAX_THREADS) {
        best = moegraph_max_of(best, { row[i], i });
        sum += row[i];
    }
    best = moegraph_block_max(best);
    sum  = moegraph_block_sum(sum);
    if (threadIdx.x == 0) {
        parts[blockIdx.y*MOEGRAPH_ARGMAX_PARTS + blockIdx.x] = { best, sum };
    }
}

// check: the sum of a row and of the n_hidden values of a row of hidden, or nullptr.
static __global__ void moegraph_argmax_rows(
        const moegraph_argmax_part * parts, int32_t * dst, const float * hidden, const int n_hidden, float * check) {
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    moegraph_max best = { -INFINITY, INT_MAX };
    float        sum  = 0.0f;
    for (int i = threadIdx.x; i < MOEGRAPH_ARGMAX_PARTS; i += MOEGRAPH_ARGMAX_THREADS) {
        const moegraph_argmax_part part = parts[blockIdx.x*MOEGRAPH_ARGMAX_PARTS + i];
        best = moegraph_max_of(best, part.best);
        sum += part.sum;
    }
    for (int i = threadIdx.x; i < n_hidden; i += MOEGRAPH_ARGMAX_THREADS) {
        sum += hidden[(int64_t) blockIdx.x*n_hidden + i];
    }
    best = moegraph_block_max(best);
    sum  = moegraph_block_sum(sum);
    if (threadIdx.x == 0) {
        dst[blockIdx.x] = best.index == INT_MAX ? -1 : best.index;
        if (check != nullptr) {
            check[blockIdx.x] = sum;
        }
    }
}

static bool moegraph_argmax_checked(
        ggml_backend_cuda_context & ctx, ggml_tensor * dst, const ggml_tensor * hidden, ggml_tensor * check) {
    const ggml_tensor * src0 = dst->src[0];
    const int64_t n      = src0->ne[0];
    const int64_t n_rows = ggml_nrows(src0);
    if (n < 16384 || n > INT_MAX/2 || n_rows > 64) {
        return false;
    }
    cudaStream_t stream = ctx.stream();
    ggml_cuda_pool_alloc<moegraph_argmax_part> parts(ctx.pool());
    parts.alloc(n_rows*MOEGRAPH_ARGMAX_PARTS);
    const ggml_cuda_kernel_launch_params params_parts(dim3(MOEGRAPH_ARGMAX_PARTS, n_rows),
        dim3(MOEGRAPH_ARGMAX_THREADS), (size_t) 0, stream);
    ggml_cuda_kernel_launch(moegraph_argmax_parts, params_parts, (const float *) src0->data, parts.get(), (int) n);
    const ggml_cuda_kernel_launch_params params_rows(dim3(n_rows), dim3(MOEGRAPH_ARGMAX_THREADS), (size_t) 0, stream);
    ggml_cuda_kernel_launch(moegraph_argmax_rows, params_rows, (const moegraph_argmax_part *) parts.get(),
        (int32_t *) dst->data, hidden ? (const float *) hidden->data : nullptr, hidden ? (int) hidden->ne[0] : 0,
        check ? (float *) check->data : nullptr);
    return true;
}

bool moegraph_argmax(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    return moegraph_argmax_checked(ctx, dst, nullptr, nullptr);
}

int moegraph_argmax_try(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, const int i) {
    static const ggml_op ops[5] = { GGML_OP_ARGMAX, GGML_OP_SUM_ROWS, GGML_OP_SUM_ROWS, GGML_OP_SUM_ROWS, GGML_OP_ADD };
    int found[5];
    const int last = moegraph_find_ops(cgraph, i, ops, 5, found);
    if (last < 0) {
        return 0;
    }
    ggml_tensor       * argmax = cgraph->nodes[found[0]];
    const ggml_tensor * of_row = cgraph->nodes[found[1]];
    const ggml_tensor * parts  = cgraph->nodes[found[2]];
    const ggml_tensor * all    = cgraph->nodes[found[3]];
    ggml_tensor       * check  = cgraph->nodes[found[4]];
    const ggml_tensor * logits = argmax->src[0];
    const ggml_tensor * hidden = of_row->src[0];
    const int64_t n_rows = ggml_nrows(logits);
    if (!ggml_node_has_n_uses(cgraph, found[1], 1) || !ggml_node_has_n_uses(cgraph, found[2], 1) ||
            !ggml_node_has_n_uses(cgraph, found[3], 1) || check->src[0] != of_row || check->src[1] != all ||
            parts->src[0]->data != logits->data || all->src[0]->data != parts->data ||
            ggml_nelements(parts->src[0]) != ggml_nelements(logits) ||
            ggml_nelements(all->src[0]) != ggml_nelements(parts) || ggml_nelements(all) != n_rows ||
            ggml_nelements(of_row) != n_rows || ggml_nelements(check) != n_rows) {
        return 0;
    }
    const ggml_tensor * floats[] = { logits, hidden, parts->src[0], all->src[0], check };
    for (const ggml_tensor * t : floats) {
        if (t->type != GGML_TYPE_F32 || !ggml_is_contiguous(t)) {
            return 0;
        }
    }
    const ggml_tensor * written[] = { argmax, check };
    for (const ggml_tensor * t : written) { // blocks write while others still read
        if (!moegraph_apart(t, logits) || !moegraph_apart(t, hidden)) {
            return 0;
        }
    }
    return moegraph_apart(argmax, check) && moegraph_argmax_checked(ctx, argmax, hidden, check) ? last - i : 0;
}
