#include "moegraph-attn.cuh"

#include "moegraph-attn-stage.cuh"
#include "moegraph-match.cuh"
#include "moegraph-rows.cuh"

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

// What becomes of the sums.
struct moegraph_attn_end {
    float            * dst;       // [d*n_head, n_rows]
    const float      * gate;      // the result is multiplied by its sigmoid; nullptr: it is not
    int64_t            gate_head; // floats between heads
    int64_t            gate_row;
    moegraph_block_y * y;         // nullptr: no product of few rows reads the result
};

static __device__ __forceinline__ float moegraph_attn_sigmoid(const float x) {
    return 1.0f/(1.0f + expf(-x));
}

// Adds up the splits of a row and head. Which thread adds which splits depends on their number alone.
template <int d, bool refined>
__launch_bounds__(MOEGRAPH_ATTN_SUM_THREADS, refined ? 3 : 4)
static __global__ void moegraph_attn_sum_kernel(
        const __grid_constant__ moegraph_attn_args args, const moegraph_attn_end end) {
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
    float4 gate = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (end.gate != nullptr && tid < d/4) {
        const int row = blockIdx.x/args.n_head, head = blockIdx.x % args.n_head;
        gate = *(const float4 *) (end.gate + row*end.gate_row + head*end.gate_head + 4*tid);
    }

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
    if (tid < d/4) {
        float4 x = ((const float4 *) sums[0])[tid];
#pragma unroll
        for (int i = 1; i < n_slices; ++i) {
            const float4 y = ((const float4 *) sums[i])[tid];
            x = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
        }
        const float f = 1.0f/total;
        const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f); // a row without keys is zero
        x = n_keys > 0 ? make_float4(x.x*f, x.y*f, x.z*f, x.w*f) : zero;
        if (end.gate != nullptr) {
            x = make_float4(x.x*moegraph_attn_sigmoid(gate.x), x.y*moegraph_attn_sigmoid(gate.y),
                x.z*moegraph_attn_sigmoid(gate.z), x.w*moegraph_attn_sigmoid(gate.w));
        }
        const int64_t i = (int64_t) blockIdx.x*d + 4*tid;
        *(float4 *) (end.dst + i) = x;
        if (end.y != nullptr) {
            moegraph_quantize_4(x, end.y + i/32);
        }
    }
}

template <int d, bool refined>
static void moegraph_attn_launch_sum(
        ggml_backend_cuda_context & ctx, const moegraph_attn_args & args, const moegraph_attn_end & end) {
    const ggml_cuda_kernel_launch_params params(
        dim3(args.n_rows*args.n_head), dim3(MOEGRAPH_ATTN_SUM_THREADS), 0, ctx.stream());
    ggml_cuda_kernel_launch(moegraph_attn_sum_kernel<d, refined>, params, args, end);
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
        ggml_backend_cuda_context & ctx, const moegraph_attn_args & args, const int d, const moegraph_attn_end & end) {
    switch (d) {
        case 64:
            moegraph_attn_launch<64>(ctx, args);
            return moegraph_attn_launch_sum<64, true>(ctx, args, end);
        case 128:
            moegraph_attn_launch<128>(ctx, args);
            return moegraph_attn_launch_sum<128, true>(ctx, args, end);
        case 256:
            moegraph_attn_launch<256>(ctx, args);
            return args.refined ? moegraph_attn_launch_sum<256, true>(ctx, args, end)
                                : moegraph_attn_launch_sum<256, false>(ctx, args, end);
        default:
            GGML_ABORT("a head of %d elements", d);
    }
}

// Computes the attention dst, and, if gate is not nullptr, its product with the sigmoid of gate [d, n_head, n_rows]. out: the
// last node of these.
static void moegraph_attn_gated(
        ggml_backend_cuda_context & ctx, const ggml_tensor * dst, const ggml_tensor * gate, const ggml_tensor * out) {
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

    const auto y = (moegraph_block_y *) moegraph_rows_reserve(ctx, out);
    moegraph_attn_end end = {};
    if (gate != nullptr) {
        end.gate_head = gate->nb[1]/sizeof(float);
        end.gate_row  = gate->nb[2]/sizeof(float);
    }
    for (int64_t row = 0; row < q->ne[2]; row += MOEGRAPH_ATTN_TOGETHER) {
        const int64_t first = row*q->ne[1]*d;
        args.q      = (const char *) q->data + row*q->nb[2];
        args.rows   = (const int32_t *) rows->data + row*MOEGRAPH_ATTN_WORDS;
        args.n_rows = (int) std::min<int64_t>(q->ne[2] - row, MOEGRAPH_ATTN_TOGETHER);
        end.dst     = (float *) out->data + first;
        end.gate    = gate ? (const float *) gate->data + row*end.gate_row : nullptr;
        end.y       = y ? y + first/32 : nullptr;
        moegraph_attn_rows(ctx, args, d, end);
    }
}

void moegraph_attn(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    moegraph_attn_gated(ctx, dst, nullptr, dst);
}

int moegraph_attn_try(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, const int i) {
    static const ggml_op ops[4] = { GGML_OP_MOEGRAPH_ATTN, GGML_OP_CONT, GGML_OP_UNARY, GGML_OP_MUL };
    int found[4];
    const int last = moegraph_find_ops(cgraph, i, ops, 4, found);
    if (last < 0) {
        return 0;
    }
    const ggml_tensor * attn    = cgraph->nodes[found[0]];
    const ggml_tensor * cont    = cgraph->nodes[found[1]];
    const ggml_tensor * sigmoid = cgraph->nodes[found[2]];
    const ggml_tensor * out     = cgraph->nodes[found[3]];
    const ggml_tensor * gate    = cont->src[0];
    const ggml_tensor * q       = attn->src[0];
    for (const int n : { 0, 1, 2 }) {
        if (!ggml_node_has_n_uses(cgraph, found[n], 1)) {
            return 0;
        }
    }
    if (!moegraph_is_unary(sigmoid, GGML_UNARY_OP_SIGMOID) || sigmoid->src[0] != cont || out->src[0] != attn ||
            out->src[1] != sigmoid || !ggml_are_same_shape(gate, q) || !ggml_are_same_shape(out, attn) ||
            gate->type != GGML_TYPE_F32 || out->type != GGML_TYPE_F32 || !ggml_is_contiguous(out) ||
            gate->nb[0] != sizeof(float) || gate->nb[1] % 16 != 0 || gate->nb[2] % 16 != 0 ||
            (uintptr_t) gate->data % 16 != 0 || (uintptr_t) out->data % 16 != 0) {
        return 0;
    }
    // blocks write while others still read the gate and partial sums, and of many rows the queries of later ones
    const char * begin = (const char *) attn->data, * to = (const char *) out->data;
    if (!moegraph_apart(out, gate) || !moegraph_apart(out, q) ||
            (to != begin && to < begin + moegraph_attn_alloc_size(attn) && begin < to + ggml_nbytes(out))) {
        return 0;
    }
    moegraph_attn_gated(ctx, attn, gate, out);
    return last - i;
}
