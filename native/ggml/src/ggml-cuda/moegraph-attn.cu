#include "moegraph-attn.cuh"

#include "moegraph-attn-stage.cuh"
#include "moegraph-rows-types.cuh"

#include <algorithm>

constexpr int MOEGRAPH_ATTN_TOGETHER = 4*MOEGRAPH_ATTN_PLANNED; // rows of a launch: each has up to 1 MiB of partial sums

template <int d> void moegraph_attn_launch(ggml_backend_cuda_context & ctx, const moegraph_attn_args & args);

constexpr int MOEGRAPH_ATTN_SUM_THREADS = 256;
constexpr int MOEGRAPH_ATTN_SUM_BATCH   = 8; // partial sums that a thread loads at once

// The weights of the splits of a row and head, split lane + 32*j in weights[j]; refined: without the sums of the splits'
// own weights. Returns the sum of all weights, and of the sink's. By each warp.
template <bool refined>
static __device__ __forceinline__ float moegraph_attn_weigh_splits(
        const float2 * max_sum, const int n, const float sink, float weights[MOEGRAPH_ATTN_SPLITS/32]) {
    float2 x[MOEGRAPH_ATTN_SPLITS/32];
    float  most = sink, total = 0.0f;
#pragma unroll
    for (int j = 0; j < MOEGRAPH_ATTN_SPLITS/32; ++j) {
        const int i = threadIdx.x % 32 + 32*j;
        x[j] = i < n ? max_sum[i] : make_float2(-INFINITY, 0.0f);
        most = fmaxf(most, x[j].x);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFF, most, offset));
    }
#pragma unroll
    for (int j = 0; j < MOEGRAPH_ATTN_SPLITS/32; ++j) {
        const float weight = exp2f((x[j].x - most)*MOEGRAPH_ATTN_LOG2E);
        weights[j] = refined ? weight : weight*x[j].y;
        total = fmaf(weight, x[j].y, total);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        total += __shfl_xor_sync(0xFFFFFFFF, total, offset);
    }
    return total + exp2f(fmaf(sink - most, MOEGRAPH_ATTN_LOG2E, MOEGRAPH_ATTN_BOOST)); // as the splits' weights are
}

// Eight elements of a partial sum, as they are stored: floats if refined, else halves.
template <bool refined> struct moegraph_attn_eight {
    static constexpr int n = refined ? 2 : 1;

    uint4 raw[n];

    __device__ __forceinline__ void load(const void * partial, const int64_t at) {
#pragma unroll
        for (int i = 0; i < n; ++i) {
            raw[i] = ((const uint4 *) partial)[at*n + i];
        }
    }

    // Adds the elements times weight to sum.
    __device__ __forceinline__ void add_to(float sum[8], const float weight) const {
#pragma unroll
        for (int i = 0; i < n; ++i) {
            const uint32_t x[4] = { raw[i].x, raw[i].y, raw[i].z, raw[i].w };
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (refined) {
                    float y;
                    memcpy(&y, &x[j], sizeof(y));
                    sum[4*i + j] = fmaf(weight, y, sum[4*i + j]);
                } else {
                    const float2 y = __half22float2(moegraph_attn_half2(x[j]));
                    sum[2*j]     = fmaf(weight, y.x, sum[2*j]);
                    sum[2*j + 1] = fmaf(weight, y.y, sum[2*j + 1]);
                }
            }
        }
    }
};

// Adds up the splits of a row and head. Which thread adds which splits depends on their number alone.
template <int d, bool refined>
__launch_bounds__(MOEGRAPH_ATTN_SUM_THREADS, refined ? 3 : 4)
static __global__ void moegraph_attn_sum_kernel(const __grid_constant__ moegraph_attn_args args, float * dst) {
    constexpr int n_lanes  = d/8; // of eight elements each
    constexpr int n_slices = MOEGRAPH_ATTN_SUM_THREADS/n_lanes;
    constexpr int n_deep   = MOEGRAPH_ATTN_SPLITS/n_slices; // splits of a slice
    constexpr int n_batch  = n_deep < MOEGRAPH_ATTN_SUM_BATCH ? n_deep : MOEGRAPH_ATTN_SUM_BATCH;
    __shared__ float sums[n_slices][d];

    const int tid   = threadIdx.x;
    const int slice = tid/n_lanes;
    const int at    = tid % n_lanes;

    ggml_cuda_pdl_sync();
    ggml_cuda_pdl_lc();
    const int n_keys = moegraph_attn_n_keys(args.pool, args.rows + blockIdx.x/args.n_head*MOEGRAPH_ATTN_WORDS);
    const int size   = moegraph_attn_split_size(args, n_keys);
    const int n      = moegraph_attn_divide_up(n_keys, size) - moegraph_attn_first(n_keys, args.window)/size;
    const float sink = args.sinks != nullptr ? args.sinks[blockIdx.x % args.n_head] : -INFINITY;
    const int64_t first = (int64_t) blockIdx.x*args.n_splits;

    float weights[MOEGRAPH_ATTN_SPLITS/32], total = 0.0f, sum[8] = {};
#pragma unroll
    for (int j0 = 0; j0 < n_deep; j0 += n_batch) {
        if (j0 == 0 || j0*n_slices < n) {
            moegraph_attn_eight<refined> x[n_batch] = {};
#pragma unroll
            for (int j = 0; j < n_batch; ++j) {
                const int i = slice + (j0 + j)*n_slices;
                if (i < n) {
                    x[j].load(args.partial, (first + i)*n_lanes + at);
                }
            }
            if (j0 == 0) {
                total = moegraph_attn_weigh_splits<refined>(args.max_sum + first, n, sink, weights);
            }
#pragma unroll
            for (int j = 0; j < n_batch; ++j) {
                const int   i      = slice + (j0 + j)*n_slices;
                const float weight = __shfl_sync(0xFFFFFFFF, weights[(j0 + j)*n_slices/32], i % 32);
                x[j].add_to(sum, weight);
            }
        }
    }
    float4 * to = (float4 *) sums[slice] + 2*at;
    to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    __syncthreads();
    if (tid < d) {
        float x = sums[0][tid];
#pragma unroll
        for (int i = 1; i < n_slices; ++i) {
            x += sums[i][tid];
        }
        dst[(int64_t) blockIdx.x*d + tid] = n_keys > 0 ? x*(1.0f/total) : 0.0f; // a row without keys is zero
    }
}

template <int d, bool refined>
static void moegraph_attn_launch_sum(ggml_backend_cuda_context & ctx, const moegraph_attn_args & args, float * dst) {
    const ggml_cuda_kernel_launch_params params(
        dim3(args.n_rows*args.n_head), dim3(MOEGRAPH_ATTN_SUM_THREADS), 0, ctx.stream());
    ggml_cuda_kernel_launch(moegraph_attn_sum_kernel<d, refined>, params, args, dst);
}

// Whether no kernel of this graph writes the tensor.
static bool moegraph_attn_is_input(const ggml_tensor * t) {
    return t->op == GGML_OP_NONE && t->view_src == nullptr;
}

// Bytes of something that each head and split of the rows that are computed together has.
static size_t moegraph_attn_at(const ggml_tensor * dst, const size_t per_split) {
    const ggml_tensor * q = dst->src[0];
    const size_t n_splits = moegraph_attn_most_splits(dst->src[1]->ne[0]/q->ne[0]);
    const size_t n_rows   = std::min<int64_t>(q->ne[2], MOEGRAPH_ATTN_TOGETHER);
    return GGML_PAD(n_rows*q->ne[1]*n_splits*per_split, 128);
}

size_t moegraph_attn_alloc_size(const ggml_tensor * dst) {
    return GGML_PAD(ggml_nbytes(dst), 128) + moegraph_attn_at(dst, dst->src[0]->ne[0]*sizeof(float)) +
        moegraph_attn_at(dst, sizeof(float2));
}

bool moegraph_attn_supported(const int device, const ggml_tensor * dst) {
    const ggml_tensor * q = dst->src[0];
    const int64_t n_head_kv = dst->src[1]->ne[0]/q->ne[0];
    const int64_t alignment = q->ne[0]/16; // of rows of quants: they are copied 4, 8 or 16 bytes a time
    for (int i = 1; i <= 2; ++i) {
        const ggml_tensor * pool = dst->src[i];
        const bool f16 = pool->type == GGML_TYPE_F16;
        if ((!f16 && pool->type != GGML_TYPE_Q8_0 && pool->type != GGML_TYPE_Q4_0) ||
                pool->nb[1] % (f16 ? 16 : alignment) != 0) {
            return false;
        }
    }
    return turing_mma_available(ggml_cuda_info().devices[device].cc) &&
        (q->ne[0] == 64 || q->ne[0] == 128 || q->ne[0] == 256) && q->ne[1]/n_head_kv <= 16 &&
        (ggml_get_op_params_i32(dst, 2) == 0 || moegraph_attn_most_splits(n_head_kv) > 1) &&
        q->nb[1] % 16 == 0 && q->nb[2] % 16 == 0;
}

// Computes at most MOEGRAPH_ATTN_TOGETHER rows.
static void moegraph_attn_rows(
        ggml_backend_cuda_context & ctx, const moegraph_attn_args & args, const int d, float * out) {
    switch (d) {
        case 64:
            moegraph_attn_launch<64>(ctx, args);
            return moegraph_attn_launch_sum<64, true>(ctx, args, out);
        case 128:
            moegraph_attn_launch<128>(ctx, args);
            return moegraph_attn_launch_sum<128, true>(ctx, args, out);
        case 256:
            moegraph_attn_launch<256>(ctx, args);
            return args.refined ? moegraph_attn_launch_sum<256, true>(ctx, args, out)
                                : moegraph_attn_launch_sum<256, false>(ctx, args, out);
        default:
            GGML_ABORT("a head of %d elements", d);
    }
}

void moegraph_attn(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * q    = dst->src[0];
    const ggml_tensor * k    = dst->src[1];
    const ggml_tensor * v    = dst->src[2];
    const ggml_tensor * rows = dst->src[4];
    GGML_ASSERT((uintptr_t) q->data % 16 == 0 && (uintptr_t) k->data % 16 == 0 && (uintptr_t) v->data % 16 == 0);
    const int d = (int) q->ne[0];

    moegraph_attn_args args;
    for (int i = 0; i < 2; ++i) {
        const ggml_tensor * part = dst->src[1 + i];
        args.data[i]   = (const char *) part->data;
        args.stride[i] = (uint32_t) part->nb[1];
        args.head[i]   = moegraph_attn_head_bytes(part->type, d);
        args.type[i]   = part->type;
    }
    args.partial   = (char *) dst->data + GGML_PAD(ggml_nbytes(dst), 128);
    args.max_sum   = (float2 *) ((char *) args.partial + moegraph_attn_at(dst, d*sizeof(float)));
    args.pool      = moegraph_attn_pool_of(dst);
    args.q_head    = q->nb[1];
    args.q_row     = q->nb[2];
    args.sinks     = dst->src[5] != nullptr ? (const float *) dst->src[5]->data : nullptr;
    args.scale     = ggml_get_op_params_f32(dst, 0);
    args.window    = ggml_get_op_params_i32(dst, 2);
    args.n_head    = (int) q->ne[1];
    args.n_head_kv = (int) (k->ne[0]/d);
    args.n_group   = args.n_head/args.n_head_kv;
    args.n_splits  = moegraph_attn_most_splits(args.n_head_kv);
    // where ggml's op computes a single row in float32, the same precision is expected of this one
    args.refined   = d < 256 || args.n_group <= 4;
    args.refined_p = args.refined && v->type == GGML_TYPE_F16;
    // rows and pages come from the host: no kernel writes them
    args.early     = moegraph_attn_is_input(rows) && moegraph_attn_is_input(dst->src[3]);

    for (int64_t row = 0; row < q->ne[2]; row += MOEGRAPH_ATTN_TOGETHER) {
        args.q      = (const char *) q->data + row*q->nb[2];
        args.rows   = (const int32_t *) rows->data + row*MOEGRAPH_ATTN_WORDS;
        args.n_rows = (int) std::min<int64_t>(q->ne[2] - row, MOEGRAPH_ATTN_TOGETHER);
        moegraph_attn_rows(ctx, args, d, (float *) dst->data + row*q->ne[1]*d);
    }
}
