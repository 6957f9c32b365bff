#include "moegraph-attn.cuh"

#include "moegraph-attn-stage.cuh"
#include "moegraph-rows-types.cuh"

template <int d> void moegraph_attn_launch(ggml_backend_cuda_context & ctx, const moegraph_attn_args & args);

constexpr int MOEGRAPH_ATTN_SUM_THREADS = 256;
constexpr int MOEGRAPH_ATTN_SUM_LANES   = 16; // of 4 elements each: 64 in a block
constexpr int MOEGRAPH_ATTN_SUM_SLICES  = MOEGRAPH_ATTN_SUM_THREADS/MOEGRAPH_ATTN_SUM_LANES;
constexpr int MOEGRAPH_ATTN_SUM_DEPTH   = MOEGRAPH_ATTN_SPLITS/MOEGRAPH_ATTN_SUM_SLICES; // splits of a slice

// The weights of the splits of a row and head, split lane + 32*j in weights[j]; refined: without the sums of the splits'
// own weights. Returns the sum of all weights. By each warp.
template <bool refined>
static __device__ __forceinline__ float moegraph_attn_weigh_splits(
        const float2 * max_sum, const int n, float weights[MOEGRAPH_ATTN_SPLITS/32]) {
    constexpr float log2e = 1.4426950408889634f;
    float2 x[MOEGRAPH_ATTN_SPLITS/32];
    float  most = -INFINITY, total = 0.0f;
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
        const float weight = exp2f((x[j].x - most)*log2e);
        weights[j] = refined ? weight : weight*x[j].y;
        total = fmaf(weight, x[j].y, total);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        total += __shfl_xor_sync(0xFFFFFFFF, total, offset);
    }
    return total;
}

// Adds up the splits of a row and head, for 64 elements. Which thread adds which splits depends on their number alone.
template <bool refined>
__launch_bounds__(MOEGRAPH_ATTN_SUM_THREADS)
static __global__ void moegraph_attn_sum_kernel(
        const __grid_constant__ moegraph_attn_args args, float * dst, const int d) {
    __shared__ float4 sums[MOEGRAPH_ATTN_SUM_SLICES][MOEGRAPH_ATTN_SUM_LANES];

    const int tid   = threadIdx.x;
    const int slice = tid/MOEGRAPH_ATTN_SUM_LANES;
    const int row   = blockIdx.x/args.n_head;
    const int at    = blockIdx.y*MOEGRAPH_ATTN_SUM_LANES + tid % MOEGRAPH_ATTN_SUM_LANES; // 4 elements

    ggml_cuda_pdl_sync();
    ggml_cuda_pdl_lc();
    const int n_keys = moegraph_attn_n_keys(args.pool, args.rows + row*MOEGRAPH_ATTN_WORDS);
    const int size   = moegraph_attn_split_size(n_keys, args.n_splits);
    const int n      = moegraph_attn_divide_up(n_keys, size);
    const int64_t first = (int64_t) blockIdx.x*args.n_splits*(d/4) + at;

    float4 x[MOEGRAPH_ATTN_SUM_DEPTH];
#pragma unroll
    for (int j = 0; j < MOEGRAPH_ATTN_SUM_DEPTH; ++j) {
        const int i = slice + j*MOEGRAPH_ATTN_SUM_SLICES;
        if (refined) {
            x[j] = i < n ? ((const float4 *) args.partial)[first + i*(d/4)] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        } else {
            const uint2  y   = i < n ? ((const uint2 *) args.partial)[first + i*(d/4)] : make_uint2(0, 0);
            const float2 low = __half22float2(moegraph_attn_half2(y.x)), high = __half22float2(moegraph_attn_half2(y.y));
            x[j] = make_float4(low.x, low.y, high.x, high.y);
        }
    }
    float weights[MOEGRAPH_ATTN_SPLITS/32];
    const float total =
        moegraph_attn_weigh_splits<refined>(args.max_sum + (int64_t) blockIdx.x*args.n_splits, n, weights);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int j = 0; j < MOEGRAPH_ATTN_SUM_DEPTH; ++j) {
        const int   i      = slice + j*MOEGRAPH_ATTN_SUM_SLICES;
        const float weight = __shfl_sync(0xFFFFFFFF, weights[j*MOEGRAPH_ATTN_SUM_SLICES/32], i % 32);
        sum.x = fmaf(weight, x[j].x, sum.x);
        sum.y = fmaf(weight, x[j].y, sum.y);
        sum.z = fmaf(weight, x[j].z, sum.z);
        sum.w = fmaf(weight, x[j].w, sum.w);
    }
    sums[slice][tid % MOEGRAPH_ATTN_SUM_LANES] = sum;
    __syncthreads();
    if (tid < MOEGRAPH_ATTN_SUM_LANES) {
#pragma unroll
        for (int i = 1; i < MOEGRAPH_ATTN_SUM_SLICES; ++i) {
            const float4 y = sums[i][tid];
            sum.x += y.x;
            sum.y += y.y;
            sum.z += y.z;
            sum.w += y.w;
        }
        const float scale = n_keys > 0 ? 1.0f/total : 0.0f; // a row without keys is zero
        ((float4 *) dst)[(int64_t) blockIdx.x*(d/4) + at] =
            n_keys > 0 ? make_float4(sum.x*scale, sum.y*scale, sum.z*scale, sum.w*scale)
                       : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

// Whether no kernel of this graph writes the tensor.
static bool moegraph_attn_is_input(const ggml_tensor * t) {
    return t->op == GGML_OP_NONE && t->view_src == nullptr;
}

// Bytes of something that each row, head and split has.
static size_t moegraph_attn_at(const ggml_tensor * dst, const size_t per_split) {
    const ggml_tensor * q = dst->src[0];
    const size_t n_splits = moegraph_attn_most_splits(dst->src[1]->ne[0]/q->ne[0]);
    return GGML_PAD(q->ne[2]*q->ne[1]*n_splits*per_split, 128);
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
        q->nb[1] % 16 == 0 && q->nb[2] % 16 == 0;
}

void moegraph_attn(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * q    = dst->src[0];
    const ggml_tensor * k    = dst->src[1];
    const ggml_tensor * v    = dst->src[2];
    const ggml_tensor * rows = dst->src[4];
    GGML_ASSERT((uintptr_t) q->data % 16 == 0 && (uintptr_t) k->data % 16 == 0 && (uintptr_t) v->data % 16 == 0);
    const int d = (int) q->ne[0];

    moegraph_attn_args args;
    args.q         = (const char *) q->data;
    for (int i = 0; i < 2; ++i) {
        const ggml_tensor * part = dst->src[1 + i];
        args.data[i]   = (const char *) part->data;
        args.stride[i] = part->nb[1];
        args.head[i]   = moegraph_attn_head_bytes(part->type, d);
        args.type[i]   = part->type;
    }
    args.rows      = (const int32_t *) rows->data;
    args.partial   = (char *) dst->data + GGML_PAD(ggml_nbytes(dst), 128);
    args.max_sum   = (float2 *) ((char *) args.partial + moegraph_attn_at(dst, d*sizeof(float)));
    args.pool      = moegraph_attn_pool_of(dst);
    args.q_head    = q->nb[1];
    args.q_row     = q->nb[2];
    args.scale     = ggml_get_op_params_f32(dst, 0);
    args.n_rows    = (int) q->ne[2];
    args.n_head    = (int) q->ne[1];
    args.n_head_kv = (int) (k->ne[0]/d);
    args.n_group   = args.n_head/args.n_head_kv;
    args.n_splits  = moegraph_attn_most_splits(args.n_head_kv);
    if (const char * value = getenv("MG_ATTN_SPLITS")) { // TEMPORARY
        args.n_splits = args.n_splits*atoi(value)/128;
    }
    // where ggml's op computes a single row in float32, the same precision is expected of this one
    args.refined   = d < 256 || args.n_group <= 4;
    args.floats    = getenv("MG_ATTN_FLOATS") != nullptr; // TEMPORARY
    args.refined_p = args.refined && v->type == GGML_TYPE_F16;
    // rows and pages come from the host: no kernel writes them
    args.early     = moegraph_attn_is_input(rows) && moegraph_attn_is_input(dst->src[3]);

    switch (d) {
        case 64:
            moegraph_attn_launch<64>(ctx, args);
            break;
        case 128:
            moegraph_attn_launch<128>(ctx, args);
            break;
        case 256:
            moegraph_attn_launch<256>(ctx, args);
            break;
        default:
            GGML_ABORT("a head of %d elements", d);
    }
    const ggml_cuda_kernel_launch_params params(dim3(args.n_rows*args.n_head, d/(4*MOEGRAPH_ATTN_SUM_LANES)),
        dim3(MOEGRAPH_ATTN_SUM_THREADS), 0, ctx.stream());
    if (getenv("MG_ATTN_CARVE") != nullptr) { // TEMPORARY
        static bool done = false;
        if (!done) {
            CUDA_CHECK(cudaFuncSetAttribute(moegraph_attn_sum_kernel<true>, cudaFuncAttributePreferredSharedMemoryCarveout, 100));
            CUDA_CHECK(cudaFuncSetAttribute(moegraph_attn_sum_kernel<false>, cudaFuncAttributePreferredSharedMemoryCarveout, 100));
            done = true;
        }
    }
    if (args.refined || args.floats) {
        ggml_cuda_kernel_launch(moegraph_attn_sum_kernel<true>, params, args, (float *) dst->data, d);
    } else {
        ggml_cuda_kernel_launch(moegraph_attn_sum_kernel<false>, params, args, (float *) dst->data, d);
    }
}
