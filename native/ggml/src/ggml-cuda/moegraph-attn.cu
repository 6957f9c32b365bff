#include "moegraph-attn.cuh"

#include "moegraph-attn-kernel.cuh"
#include "moegraph-rows-types.cuh"

template <int d>
void moegraph_attn_launch(ggml_backend_cuda_context & ctx, const moegraph_attn_args & args, ggml_type type_k,
    ggml_type type_v);

constexpr int MOEGRAPH_ATTN_SUM_THREADS = 256;
constexpr int MOEGRAPH_ATTN_SUM_LANES   = 16; // of 4 elements each: 64 in a block
constexpr int MOEGRAPH_ATTN_SUM_SLICES  = MOEGRAPH_ATTN_SUM_THREADS/MOEGRAPH_ATTN_SUM_LANES;

// Sum or maximum over the block; every thread gets it. The order is that of the threads' numbers.
template <typename F>
static __device__ __forceinline__ float moegraph_attn_over_block(float x, float * smem, const F & f) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        x = f(x, __shfl_xor_sync(0xFFFFFFFF, x, offset));
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        smem[threadIdx.x/32] = x;
    }
    __syncthreads();
    x = smem[0];
    for (int w = 1; w < MOEGRAPH_ATTN_SUM_THREADS/32; ++w) {
        x = f(x, smem[w]);
    }
    return x;
}

// Adds up the splits of a row and head, for 64 elements. Which thread adds which splits depends on their number alone.
__launch_bounds__(MOEGRAPH_ATTN_SUM_THREADS)
static __global__ void moegraph_attn_sum_kernel(
        const __grid_constant__ moegraph_attn_args args, float * dst, const int d) {
    extern __shared__ float moegraph_attn_weights[]; // of the splits
    __shared__ float4 sums[MOEGRAPH_ATTN_SUM_SLICES][MOEGRAPH_ATTN_SUM_LANES];
    __shared__ float  over[MOEGRAPH_ATTN_SUM_THREADS/32];

    const int tid = threadIdx.x;
    const int row = blockIdx.x/args.n_head;
    const int at  = blockIdx.y*MOEGRAPH_ATTN_SUM_LANES + tid % MOEGRAPH_ATTN_SUM_LANES; // 4 elements

    ggml_cuda_pdl_sync();
    ggml_cuda_pdl_lc();
    const int n = moegraph_attn_n_splits(moegraph_attn_n_keys(args.pool, args.rows + row*MOEGRAPH_ATTN_WORDS));
    const float2 * max_sum = args.max_sum + (int64_t) blockIdx.x*args.n_splits;
    const float4 * partial = (const float4 *) args.partial + (int64_t) blockIdx.x*args.n_splits*(d/4) + at;

    float most = -INFINITY;
    for (int i = tid; i < n; i += MOEGRAPH_ATTN_SUM_THREADS) {
        most = fmaxf(most, max_sum[i].x);
    }
    most = moegraph_attn_over_block(most, over, [](const float x, const float y) { return fmaxf(x, y); });
    float total = 0.0f;
    for (int i = tid; i < n; i += MOEGRAPH_ATTN_SUM_THREADS) {
        const float2 x      = max_sum[i];
        const float  weight = exp2f(x.x - most);
        moegraph_attn_weights[i] = weight;
        total = fmaf(weight, x.y, total);
    }
    total = moegraph_attn_over_block(total, over, [](const float x, const float y) { return x + y; });

    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int i = tid/MOEGRAPH_ATTN_SUM_LANES; i < n; i += MOEGRAPH_ATTN_SUM_SLICES) {
        const float  weight = moegraph_attn_weights[i];
        const float4 x      = partial[(int64_t) i*(d/4)];
        sum.x = fmaf(weight, x.x, sum.x);
        sum.y = fmaf(weight, x.y, sum.y);
        sum.z = fmaf(weight, x.z, sum.z);
        sum.w = fmaf(weight, x.w, sum.w);
    }
    sums[tid/MOEGRAPH_ATTN_SUM_LANES][tid % MOEGRAPH_ATTN_SUM_LANES] = sum;
    __syncthreads();
    if (tid < MOEGRAPH_ATTN_SUM_LANES) {
#pragma unroll
        for (int i = 1; i < MOEGRAPH_ATTN_SUM_SLICES; ++i) {
            const float4 x = sums[i][tid];
            sum.x += x.x;
            sum.y += x.y;
            sum.z += x.z;
            sum.w += x.w;
        }
        const float scale = n > 0 ? 1.0f/total : 0.0f; // a row without keys is zero
        ((float4 *) dst)[(int64_t) blockIdx.x*(d/4) + at] =
            make_float4(sum.x*scale, sum.y*scale, sum.z*scale, sum.w*scale);
    }
}

// Whether no kernel of this graph writes the tensor.
static bool moegraph_attn_is_input(const ggml_tensor * t) {
    return t->op == GGML_OP_NONE && t->view_src == nullptr;
}

static int moegraph_attn_most_splits(const ggml_tensor * dst) {
    const moegraph_attn_pool pool = moegraph_attn_pool_of(dst);
    return moegraph_attn_n_splits(pool.n_pages << pool.page_log2);
}

static size_t moegraph_attn_at(const ggml_tensor * dst, const size_t per_split) {
    const size_t n_rows = dst->src[0]->ne[2], n_head = dst->src[0]->ne[1];
    return GGML_PAD(n_rows*n_head*moegraph_attn_most_splits(dst)*per_split, 128);
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
        (q->ne[0] == 64 || q->ne[0] == 128 || q->ne[0] == 256) && q->ne[1]/n_head_kv <= 16;
}

void moegraph_attn(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * q    = dst->src[0];
    const ggml_tensor * k    = dst->src[1];
    const ggml_tensor * v    = dst->src[2];
    const ggml_tensor * rows = dst->src[4];
    GGML_ASSERT((uintptr_t) k->data % 16 == 0 && (uintptr_t) v->data % 16 == 0);
    const int d = (int) q->ne[0];

    moegraph_attn_args args;
    args.q         = (const char *) q->data;
    args.k         = (const char *) k->data;
    args.v         = (const char *) v->data;
    args.rows      = (const int32_t *) rows->data;
    args.partial   = (float *) ((char *) dst->data + GGML_PAD(ggml_nbytes(dst), 128));
    args.max_sum   = (float2 *) ((char *) args.partial + moegraph_attn_at(dst, d*sizeof(float)));
    args.pool      = moegraph_attn_pool_of(dst);
    args.q_head    = q->nb[1];
    args.q_row     = q->nb[2];
    args.k_row     = k->nb[1];
    args.v_row     = v->nb[1];
    args.scale     = ggml_get_op_params_f32(dst, 0)*1.4426950408889634f;
    args.n_rows    = (int) q->ne[2];
    args.n_head    = (int) q->ne[1];
    args.n_head_kv = (int) (k->ne[0]/d);
    args.n_group   = args.n_head/args.n_head_kv;
    args.n_splits  = moegraph_attn_most_splits(dst);
    args.n_tiles   = 0;
    // where ggml's op computes a single row in float32, the same precision is expected of this one
    args.refined   = d < 256 || args.n_group <= 4;
    // rows and pages come from the host: no kernel writes them
    args.early     = moegraph_attn_is_input(rows) && moegraph_attn_is_input(dst->src[3]);

    switch (d) {
        case 64:
            moegraph_attn_launch<64>(ctx, args, k->type, v->type);
            break;
        case 128:
            moegraph_attn_launch<128>(ctx, args, k->type, v->type);
            break;
        case 256:
            moegraph_attn_launch<256>(ctx, args, k->type, v->type);
            break;
        default:
            GGML_ABORT("a head of %d elements", d);
    }
    const ggml_cuda_kernel_launch_params params(dim3(args.n_rows*args.n_head, d/(4*MOEGRAPH_ATTN_SUM_LANES)),
        dim3(MOEGRAPH_ATTN_SUM_THREADS), args.n_splits*sizeof(float), ctx.stream());
    ggml_cuda_kernel_launch(moegraph_attn_sum_kernel, params, args, (float *) dst->data, d);
}
