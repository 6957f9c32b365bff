#include "moegraph-moe.cuh"
#include "moegraph-layer-end.cuh"
#include "moegraph-match.cuh"
#include "moegraph-one.cuh"
#include "moegraph-router.cuh"
#include "moegraph-rows-kernel.cuh"
#include "vecdotq.cuh"

#include "moegraph.h"

#include <algorithm>

constexpr int MOEGRAPH_DOWN_TOKENS  = 4;  // from 5 rows on other kernels read an expert once for all of them
constexpr int MOEGRAPH_DOWN_EXPERTS = 16; // used by a token, the limit
constexpr int MOEGRAPH_DOWN_WARPS   = 16; // of a block, if its experts are not more
constexpr int MOEGRAPH_DOWN_ROWS    = 8;  // output rows of a warp
constexpr int MOEGRAPH_DOWN_LOADS   = 4;  // activations that a thread has on their way, in vectors
constexpr int MOEGRAPH_DOWN_PARTS   = 2;  // in which a warp's rows arrive: the first is computed while the second comes

struct moegraph_moe_down_args {
    const char    * x;       // experts
    const float   * y;       // activations [n_values, n_used, n_tokens]
    const int32_t * ids;
    const float   * weights; // [n_used, n_tokens]
    float         * dst;     // [n_rows, n_tokens]
    int64_t         stride_expert; // bytes
    int             stride_ids;
    int             row_bytes;
    int             warp_bytes; // of shared memory for a warp's rows
    int             n_values;
    int             n_rows;
    int             n_experts;
    int             n_used;
    int             n_warps;    // for each expert
    int             early;      // ids and experts may be read before the preceding kernel has ended
};

// How a warp reads a row. values: of a block; lanes: that share a block.
template <ggml_type type> struct moegraph_row_dot;

template <> struct moegraph_row_dot<GGML_TYPE_Q4_0> {
    static constexpr int values = QK4_0, lanes = 2;
    static __device__ __forceinline__ float dot(
            const char * row, const block_q8_1 * y, const int block, const int lane) {
        return vec_dot_q4_0_q8_1(row, y, block, VDR_Q4_0_Q8_1_MMVQ*lane);
    }
};

// Half a block a lane: shared memory is read in words, and put right where a block starts in the middle of one.
template <> struct moegraph_row_dot<GGML_TYPE_Q8_0> {
    static constexpr int values = QK8_0, lanes = 2;
    static __device__ __forceinline__ float dot(
            const char * row, const block_q8_1 * y, const int block, const int lane) {
        const char * b     = row + block*(int) sizeof(block_q8_0);
        const char * q     = b + offsetof(block_q8_0, qs) + 16*lane;
        const int    off   = (int) ((uintptr_t) q & 2);
        const int  * words = (const int *) (q - off);
        const int  * u     = (const int *) y->qs + 4*lane;
        int w[5];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            w[i] = words[i];
        }
        w[4] = off != 0 ? words[4] : 0; // it may be on its way, where it belongs to another row
        int v[4];
        int u4[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            v[i]  = __funnelshift_r(w[i], w[i + 1], 8*off);
            u4[i] = u[i];
        }
        return vec_dot_q8_0_q8_1_impl<float, 4>(v, u4, *(const half *) b, __low2half(y->ds));
    }
};

template <> struct moegraph_row_dot<GGML_TYPE_Q4_K> {
    static constexpr int values = QK_K, lanes = 16;
    static __device__ __forceinline__ float dot(
            const char * row, const block_q8_1 * y, const int block, const int lane) {
        return vec_dot_q4_K_q8_1(row, y, block, VDR_Q4_K_Q8_1_MMVQ*lane);
    }
};

template <> struct moegraph_row_dot<GGML_TYPE_Q5_K> {
    static constexpr int values = QK_K, lanes = 16;
    static __device__ __forceinline__ float dot(
            const char * row, const block_q8_1 * y, const int block, const int lane) {
        return vec_dot_q5_K_q8_1(row, y, block, VDR_Q5_K_Q8_1_MMVQ*lane);
    }
};

template <> struct moegraph_row_dot<GGML_TYPE_Q6_K> {
    static constexpr int values = QK_K, lanes = 32;
    static __device__ __forceinline__ float dot(
            const char * row, const block_q8_1 * y, const int block, const int lane) {
        return vec_dot_q6_K_q8_1(row, y, block, VDR_Q6_K_Q8_1_MMVQ*lane);
    }
};

// Adds up v[r] over the lanes; lane l gets the sum of row l/4.
static __device__ __forceinline__ float moegraph_sum_rows(float (&v)[MOEGRAPH_DOWN_ROWS]) {
    static_assert(MOEGRAPH_DOWN_ROWS == 8, "three steps");
#pragma unroll
    for (int step = 0; step < 3; ++step) {
        const int  n     = 4 >> step;
        const int  other = 16 >> step;
        const bool upper = (threadIdx.x & other) != 0;
#pragma unroll
        for (int i = 0; i < n; ++i) {
            const float give = upper ? v[i] : v[i + n];
            const float keep = upper ? v[i + n] : v[i];
            v[i] = keep + __shfl_xor_sync(0xFFFFFFFF, give, other, 32);
        }
    }
    v[0] += __shfl_xor_sync(0xFFFFFFFF, v[0], 2, 32);
    v[0] += __shfl_xor_sync(0xFFFFFFFF, v[0], 1, 32);
    return v[0];
}

static_assert(MOEGRAPH_DOWN_WARPS <= MOEGRAPH_DOWN_EXPERTS, "sums and weights of a block");

// A block computes some rows of the result, n_warps warps for each chosen expert. There are few bytes to a block, and
// all are on their way to shared memory before it waits for the first; meanwhile it quantizes the activations.
// Grid: (rows, tokens). Block: (32, n_used*n_warps).
template <ggml_type type>
__launch_bounds__(MOEGRAPH_DOWN_EXPERTS*32, 2)
static __global__ void moegraph_moe_down_kernel(const moegraph_moe_down_args args) {
    typedef moegraph_row_dot<type> X;
    constexpr int part_rows = MOEGRAPH_DOWN_ROWS/MOEGRAPH_DOWN_PARTS;

    extern __shared__ int4 moegraph_moe_smem[];
    __shared__ float weights[MOEGRAPH_DOWN_EXPERTS];
    __shared__ float sums[MOEGRAPH_DOWN_EXPERTS*MOEGRAPH_DOWN_ROWS];
    char       * x = (char *) moegraph_moe_smem + threadIdx.y*args.warp_bytes;
    block_q8_1 * y = (block_q8_1 *) ((char *) moegraph_moe_smem + blockDim.y*args.warp_bytes);

    const int token      = blockIdx.y;
    const int slot       = threadIdx.y / args.n_warps;
    const int block_rows = args.n_warps*MOEGRAPH_DOWN_ROWS;
    const int warp_row   = (threadIdx.y % args.n_warps)*MOEGRAPH_DOWN_ROWS;
    const int row        = blockIdx.x*block_rows + warp_row;
    const int n_rows     = min(MOEGRAPH_DOWN_ROWS, args.n_rows - row);

    if (!args.early) {
        ggml_cuda_pdl_sync();
    }
    const int  id      = __ldcg(args.ids + token*args.stride_ids + slot); // what the first cache holds may be older
    const bool present = (uint32_t) id < (uint32_t) args.n_experts && n_rows > 0;
    if (present) {
        const char * src   = args.x + id*args.stride_expert + (int64_t) row*args.row_bytes;
        const int    off   = (int) ((uintptr_t) src & 15); // Q6_K
        const int    n     = off + n_rows*args.row_bytes;
        const int    first = (off + part_rows*args.row_bytes + 15) & ~15;
        src -= off;
        for (int i = 16*threadIdx.x; i < min(first, n); i += 16*32) {
            moegraph_copy_16(x + i, src + i, min(16, n - i));
        }
        moegraph_copy_commit();
        for (int i = first + 16*threadIdx.x; i < n; i += 16*32) {
            moegraph_copy_16(x + i, src + i, min(16, n - i));
        }
        moegraph_copy_commit();
        x += off;
    }
    ggml_cuda_pdl_lc();
    if (args.early) {
        ggml_cuda_pdl_sync();
    }

    // whole groups of 8 threads quantize a block; the loads of a round do not wait for one another
    const int     tid    = 32*threadIdx.y + threadIdx.x;
    const int     stride = 4*32*blockDim.y;
    const int     n_act  = args.n_used*args.n_values;
    const float * act    = args.y + (int64_t) token*n_act;
    for (int i = 4*tid; i < n_act; i += MOEGRAPH_DOWN_LOADS*stride) {
        float4 v[MOEGRAPH_DOWN_LOADS];
#pragma unroll
        for (int l = 0; l < MOEGRAPH_DOWN_LOADS; ++l) {
            v[l] = i + l*stride < n_act ? *(const float4 *) (act + i + l*stride) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
#pragma unroll
        for (int l = 0; l < MOEGRAPH_DOWN_LOADS; ++l) {
            if (i + l*stride < n_act) {
                moegraph_quantize_q8_1_4(v[l], y + (i + l*stride)/QK8_1);
            }
        }
    }
    if (warp_row == 0 && threadIdx.x == 0) {
        // the weight of an expert that is not there may be anything
        weights[slot] = (uint32_t) id < (uint32_t) args.n_experts ? args.weights[token*args.n_used + slot] : 0.0f;
    }
    __syncthreads();

    float acc[MOEGRAPH_DOWN_ROWS] = { 0.0f };
    if (present) {
        const int    n_blocks = args.n_values/X::values;
        const block_q8_1 * ys = y + slot*(args.n_values/QK8_1);
#pragma unroll
        for (int part = 0; part < MOEGRAPH_DOWN_PARTS; ++part) {
            if (part == 0) {
                moegraph_copy_wait<1>();
            } else {
                moegraph_copy_wait<0>();
            }
            __syncwarp();
            for (int block = threadIdx.x / X::lanes; block < n_blocks; block += 32/X::lanes) {
#pragma unroll
                for (int r = part*part_rows; r < (part + 1)*part_rows; ++r) {
                    acc[r] += X::dot(x + r*args.row_bytes, ys + block*(X::values/QK8_1), block, threadIdx.x % X::lanes);
                }
            }
        }
    }
    const float sum = moegraph_sum_rows(acc);
    if (threadIdx.x % 4 == 0) {
        sums[slot*block_rows + warp_row + threadIdx.x/4] = sum;
    }
    __syncthreads();

    const int out = blockIdx.x*block_rows + tid;
    if (tid < block_rows && out < args.n_rows) {
        float result = 0.0f;
        for (int e = 0; e < args.n_used; ++e) {
            result += sums[e*block_rows + tid]*weights[e];
        }
        args.dst[(int64_t) token*args.n_rows + out] = result;
    }
}

int moegraph_moe_down_mul(const ggml_cgraph * cgraph, const int i) {
    if (cgraph->nodes[i]->op != GGML_OP_MUL_MAT_ID || cgraph->nodes[i]->ne[2] > MOEGRAPH_DOWN_TOKENS) {
        return 0;
    }
    static const ggml_op ops[3] = { GGML_OP_MUL_MAT_ID, GGML_OP_ADD_ID, GGML_OP_MUL };
    static const ggml_op plain[2] = { GGML_OP_MUL_MAT_ID, GGML_OP_MUL };
    int found[3];
    const int n = moegraph_find_ops(cgraph, i, plain, 2, found) >= 0 ? 2 : 3;
    if ((n == 3 && moegraph_find_ops(cgraph, i, ops, 3, found) < 0) || !ggml_node_has_n_uses(cgraph, i, 1) ||
            !ggml_node_has_n_uses(cgraph, found[n - 2], 1)) {
        return 0;
    }
    const ggml_tensor * rows = cgraph->nodes[found[n - 2]];
    const ggml_tensor * mul  = cgraph->nodes[found[n - 1]];
    const bool biased = n == 2 || (rows->src[0] == cgraph->nodes[i] && rows->src[2] == cgraph->nodes[i]->src[2] &&
        rows->src[1]->type == GGML_TYPE_F32 && rows->src[1]->nb[0] == sizeof(float));
    return biased && (mul->src[0] == rows || mul->src[1] == rows) ? found[n - 1] : 0;
}

static bool moegraph_moe_down_weights(const ggml_tensor * x) {
    switch (x->type) {
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q4_K:
        case GGML_TYPE_Q5_K:
        case GGML_TYPE_Q6_K:
            break;
        default:
            return false;
    }
    // words of shared memory are read, except for Q6_K
    return x->ne[0] % QK_K == 0 && x->ne[3] == 1 && x->nb[0] == ggml_type_size(x->type) &&
        x->nb[1] == ggml_row_size(x->type, x->ne[0]) && (uintptr_t) x->data % 16 == 0 &&
        x->nb[2] % (x->type == GGML_TYPE_Q6_K ? 2 : 16) == 0;
}

// Whether a kernel in front of this one has read the same ids: the vector kernels with experts wait for what is
// before them, and do not let the next kernel start before that (the one that chooses experts does: it must not be the
// one in front). Whatever starts later finds the ids written.
static bool moegraph_moe_ids_are_old(const ggml_tensor * act, const ggml_tensor * ids) {
    if (act->op != GGML_OP_GLU || act->src[0] == nullptr) {
        return false;
    }
    const ggml_tensor * product = act->src[0]->op == GGML_OP_ADD_ID ? act->src[0]->src[0] : act->src[0];
    product = product->view_src ? product->view_src : product;
    return product->op == GGML_OP_MUL_MAT_ID && ggml_is_quantized(product->src[0]->type) && product->src[2] == ids;
}

static bool moegraph_moe_is_constant(const ggml_tensor * x) {
    const ggml_tensor * root = x->view_src ? x->view_src : x;
    return root->op == GGML_OP_NONE && ggml_backend_buffer_get_usage(root->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

static size_t moegraph_moe_smem_limit() {
    return ggml_cuda_info().devices[ggml_cuda_get_device()].smpbo - 2048; // what is not dynamic counts, too
}

template <ggml_type type>
static void moegraph_moe_down_launch(
        const moegraph_moe_down_args & args, const int n_tokens, const size_t smem, cudaStream_t stream) {
    const int  block_rows = args.n_warps*MOEGRAPH_DOWN_ROWS;
    const dim3 grid((args.n_rows + block_rows - 1)/block_rows, n_tokens, 1);
    const dim3 block(32, args.n_used*args.n_warps, 1);
    const auto kernel = moegraph_moe_down_kernel<type>;
    CUDA_SET_SHARED_MEMORY_LIMIT(kernel, moegraph_moe_smem_limit());
    const ggml_cuda_kernel_launch_params params(grid, block, smem, stream);
    ggml_cuda_kernel_launch(kernel, params, args);
}

bool moegraph_moe_down(
        ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, const int i_dst, const ggml_tensor * rows,
        const ggml_tensor * scale, const ggml_tensor * weights) {
    ggml_tensor * dst = cgraph->nodes[i_dst];
    const ggml_tensor * bias = rows->op == GGML_OP_ADD_ID ? rows->src[1] : nullptr;
    const ggml_tensor * down = bias ? rows->src[0] : rows;
    const ggml_tensor * x   = down->src[0];
    const ggml_tensor * act = down->src[1];
    const ggml_tensor * ids = down->src[2];
    const ggml_cuda_device_info::cuda_device_info & dev = ggml_cuda_info().devices[ctx.device];

    const int  n_used   = down->ne[1];
    const int  n_tokens = down->ne[2];
    const bool early    = moegraph_moe_is_constant(x) && moegraph_moe_ids_are_old(act, ids);
    const bool one      = early && (!bias || moegraph_moe_is_constant(bias));
    if (moegraph_layer_end_try(ctx, cgraph, i_dst, down, bias, scale, weights, one) ||
            moegraph_one_down(ctx, down, bias, scale, weights, dst, one)) {
        return true;
    }
    if (bias || scale || moegraph_rows_are_apart(down)) {
        return false; // its sums have another order than those of more tokens
    }
    if (!GGML_CUDA_CC_IS_NVIDIA(dev.cc) || dev.cc < GGML_CUDA_CC_TURING || !moegraph_moe_down_weights(x) ||
            n_used > MOEGRAPH_DOWN_EXPERTS || n_tokens > MOEGRAPH_DOWN_TOKENS || down->ne[3] != 1) {
        return false;
    }
    if (act->type != GGML_TYPE_F32 || !ggml_is_contiguous(act) || act->ne[1] != n_used ||
            (uintptr_t) act->data % 16 != 0 || ids->nb[0] != sizeof(int32_t) || ids->ne[2] != 1) {
        return false;
    }
    // weights and dst are F32 and contiguous, the reduction has matched; blocks end at different times
    if (!moegraph_apart(dst, act) || !moegraph_apart(dst, ids) || !moegraph_apart(dst, weights)) {
        return false;
    }

    moegraph_moe_down_args args = {};
    args.x             = (const char *) x->data;
    args.y             = (const float *) act->data;
    args.ids           = (const int32_t *) ids->data;
    args.weights       = (const float *) weights->data;
    args.dst           = (float *) dst->data;
    args.stride_expert = x->nb[2];
    args.stride_ids    = ids->nb[1]/sizeof(int32_t);
    args.row_bytes     = x->nb[1];
    args.warp_bytes    = GGML_PAD(MOEGRAPH_DOWN_ROWS*args.row_bytes, 16) + 32; // off 16 bytes, and a word behind
    args.n_values      = x->ne[0];
    args.n_rows        = x->ne[1];
    args.n_experts     = x->ne[2];
    args.n_used        = n_used;
    args.n_warps       = std::max(1, MOEGRAPH_DOWN_WARPS/n_used);
    args.early         = early && moegraph_router_slots(ctx, ids) == nullptr; // the preceding kernel has written them

    const size_t smem_y = (size_t) n_used*args.n_values/QK8_1*sizeof(block_q8_1);
    const auto   smem   = [&] { return (size_t) n_used*args.n_warps*args.warp_bytes + smem_y; };
    while (args.n_warps > 1 && smem() > moegraph_moe_smem_limit()) {
        args.n_warps /= 2;
    }
    if (smem() > moegraph_moe_smem_limit()) {
        return false;
    }
    switch (x->type) {
        case GGML_TYPE_Q4_0: moegraph_moe_down_launch<GGML_TYPE_Q4_0>(args, n_tokens, smem(), ctx.stream()); break;
        case GGML_TYPE_Q8_0: moegraph_moe_down_launch<GGML_TYPE_Q8_0>(args, n_tokens, smem(), ctx.stream()); break;
        case GGML_TYPE_Q4_K: moegraph_moe_down_launch<GGML_TYPE_Q4_K>(args, n_tokens, smem(), ctx.stream()); break;
        case GGML_TYPE_Q5_K: moegraph_moe_down_launch<GGML_TYPE_Q5_K>(args, n_tokens, smem(), ctx.stream()); break;
        case GGML_TYPE_Q6_K: moegraph_moe_down_launch<GGML_TYPE_Q6_K>(args, n_tokens, smem(), ctx.stream()); break;
        default: GGML_ABORT("fatal error");
    }
    return true;
}

void moegraph_moe_down_keep(const ggml_cgraph * cgraph, const int i_dst, const ggml_tensor * rows, const ggml_tensor * scale,
        const ggml_tensor * weights, const ggml_backend_graph_optimize_params * params) {
    rows = rows->op == GGML_OP_ADD_ID ? rows->src[0] : rows;
    if (rows->op != GGML_OP_MUL_MAT_ID) {
        return;
    }
    ggml_tensor * last = moegraph_layer_end(cgraph, i_dst);
    for (const ggml_tensor * t : { (const ggml_tensor *) rows->src[1], (const ggml_tensor *) rows->src[2], scale, weights }) {
        if (t != nullptr) {
            params->add_alloc_dep(params->user_data, const_cast<ggml_tensor *>(t), last);
        }
    }
    moegraph_layer_end_keep(cgraph, i_dst, params);
}
