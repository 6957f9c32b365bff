#include "moegraph-router.cuh"

#include "moegraph-arrive.cuh"
#include "moegraph-context.cuh"
#include "moegraph-done.cuh"
#include "moegraph-fetch.cuh"
#include "moegraph-match.cuh"
#include "moegraph-norm-row.cuh"
#include "moegraph-one.cuh"
#include "moegraph-publish.cuh"
#include "moegraph-rows.cuh"

#include "moegraph.h"

constexpr int ROUTER_ROWS    = 2;   // of weights, for a block
constexpr int ROUTER_THREADS = 256; // that share a row, as those of upstream's vector kernel do
constexpr int ROUTER_WARPS   = ROUTER_THREADS/32;
constexpr int ROUTER_LOADS   = 8;   // of two values each, at most, for a thread
constexpr int ROUTER_EXPERTS = 512; // at most
constexpr int ROUTER_BLOCK   = ROUTER_ROWS*ROUTER_THREADS;
constexpr int ROUTER_NORM    = 4*ROUTER_BLOCK; // values of a norm at least half and at most twice
static_assert(ROUTER_ROWS*ROUTER_WARPS <= 32, "a warp adds up what the warps of a block have");

// The look-up of slots that follows: whichever expert is missing is given one, and fetched by the kernel of gate and up.
struct moegraph_router_look_up {
    const int32_t * ids;     // [n_used] that are looked up instead of those that were chosen, or nullptr
    const int32_t * table;   // [n_experts]: the slot of an expert, or -1
    const int2    * victims; // [n_victims]: a slot, and the expert in it, or -1
    int32_t       * slots;   // [n_used], packed (moegraph_one_pack); nullptr: nothing is looked up
    int32_t       * told;    // [n_used] host memory that gets the ids, or nullptr
    int             n_victims;
    int             n_slots;
};

struct moegraph_router_args {
    moegraph_add_norm_args norm; // what x is computed with, if it is not there yet
    const float * w;       // [n, n_experts]
    const float * x;       // [n]
    const float * bias;    // [n_experts], added to scores for the choice, or nullptr
    float       * logits;  // [n_experts]
    unsigned    * arrived; // blocks with rows; the last one sets it to 0 for the next launch
    const float * gate_w;  // [n] of a shared expert's gate, or nullptr; only with a norm
    float       * gate;    // its product with the norm
    int32_t     * ids;     // [n_used]
    float       * weights; // [n_used]
    int64_t       stride_w; // floats
    int           n;
    int           n_used;
    int           early;   // w may be read before the preceding kernel has ended
    bool          sigmoid; // scores are not a softmax
    bool          normed;  // weights are divided by their sum, which is clamp at least
    float         clamp;
    float         scale;
    moegraph_router_look_up look_up;
};

// The rule of moegraph_fetch_rows (moegraph.h) for one row: lane l has id number l, and victim l. slots: of all experts. Keep in
// step with moegraph_fetch_assign (moegraph-fetch.cu).
static __device__ __forceinline__ void moegraph_router_find_slots(const moegraph_router_look_up & args, const int n_used,
        const int id, const int32_t * slots, const int n_experts, const int2 victim) {
    const int  lane = threadIdx.x;
    const bool mine = lane < n_used && id >= 0 && id < n_experts;
    int slot = mine ? slots[id] : -1, expert = -1;
    if (__ballot_sync(0xFFFFFFFF, mine && slot < 0) != 0) {
        bool spare = lane < args.n_victims && victim.x >= 0 && victim.x < args.n_slots;
        int  first = lane; // that has the same id
        for (int k = n_used - 1; k >= 0; --k) {
            const int other = __shfl_sync(0xFFFFFFFF, id, k);
            spare = spare && (victim.y < 0 || other != victim.y);
            first = other == id && k < lane ? k : first;
        }
        const unsigned before  = (1u << lane) - 1;
        const unsigned usable  = __ballot_sync(0xFFFFFFFF, spare);
        const unsigned missing = __ballot_sync(0xFFFFFFFF, mine && slot < 0 && first == lane);
        int from = -1; // the lane with this lane's victim
        for (int l = 0; l < args.n_victims; ++l) {
            from = (usable >> l & 1) != 0 && __popc(usable & ((1u << l) - 1)) == __popc(missing & before) ? l : from;
        }
        const int given = __shfl_sync(0xFFFFFFFF, victim.x, max(from, 0));
        if ((missing >> lane & 1) != 0 && from >= 0) {
            slot   = given;
            expert = id;
        }
        const int same = __shfl_sync(0xFFFFFFFF, slot, first);
        if (mine && slot < 0 && same >= 0) { // the same id again: its blocks copy the same bytes, as they do not wait for others
            slot   = same;
            expert = id;
        }
    }
    if (lane < n_used) {
        args.slots[lane] = moegraph_one_pack(slot, expert);
    }
}

// A warp chooses from the logits, with the bits of upstream's topk_moe_cuda: lane l has the experts l, l + 32, ...
template <int n_mine>
static __device__ __forceinline__ void moegraph_router_choose(const moegraph_router_args & args) {
    const int lane = threadIdx.x;
    float    score[n_mine];
    uint32_t key[n_mine]; // what the choice goes by; 0: chosen
#pragma unroll
    for (int i = 0; i < n_mine; ++i) {
        score[i] = __ldcg(args.logits + lane + 32*i);
    }
    const moegraph_router_look_up & look_up = args.look_up;
    __shared__ int32_t slots[32*n_mine];
    int2 victim = make_int2(-1, -1);
    int  given  = 0;
    if (look_up.slots != nullptr) {
#pragma unroll
        for (int i = 0; i < n_mine; ++i) {
            slots[lane + 32*i] = __ldcg(look_up.table + lane + 32*i);
        }
        victim = lane < look_up.n_victims ? __ldcg(look_up.victims + lane) : victim;
        given  = look_up.ids != nullptr && lane < args.n_used ? __ldcg(look_up.ids + lane) : 0;
    }
    ggml_cuda_pdl_lc();
    if (args.sigmoid) {
#pragma unroll
        for (int i = 0; i < n_mine; ++i) {
            score[i] = 1.0f/(1.0f + expf(-score[i]));
        }
    } else {
        float largest = -INFINITY;
#pragma unroll
        for (int i = 0; i < n_mine; ++i) {
            largest = fmaxf(largest, score[i]);
        }
        largest = warp_reduce_max(largest);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < n_mine; ++i) {
            score[i] = expf(score[i] - largest);
            sum += score[i];
        }
        sum = warp_reduce_sum(sum);
        const float inverse = 1.0f/sum;
#pragma unroll
        for (int i = 0; i < n_mine; ++i) {
            score[i] *= inverse;
        }
    }
#pragma unroll
    for (int i = 0; i < n_mine; ++i) {
        score[i] = score[i] != score[i] ? -FLT_MAX : score[i];
        const uint32_t u = __float_as_uint(args.bias != nullptr ? score[i] + args.bias[lane + 32*i] : score[i]);
        key[i] = u ^ (u >> 31 != 0 ? 0xFFFFFFFFu : 0x80000000u); // in the order of the floats
    }

    int   chosen = 0;    // choice number `lane`
    float weight = 0.0f; // of it
    float sum    = 0.0f; // of those of this lane's experts
    for (int k = 0; k < args.n_used; ++k) {
        uint32_t best  = key[0];
        float    mine  = score[0];
        int      place = 0;
#pragma unroll
        for (int i = 1; i < n_mine; ++i) {
            if (key[i] > best) {
                best  = key[i];
                mine  = score[i];
                place = i;
            }
        }
        const uint32_t most   = __reduce_max_sync(0xFFFFFFFF, best);
        const int      expert = (int) __reduce_min_sync(0xFFFFFFFF, best == most ? (uint32_t) (lane + 32*place) : UINT_MAX);
        const float    value  = __shfl_sync(0xFFFFFFFF, mine, expert % 32);
        if (expert % 32 == lane) {
            sum += value;
#pragma unroll
            for (int i = 0; i < n_mine; ++i) {
                key[i] = i == expert/32 ? 0 : key[i];
            }
        }
        if (k == lane) {
            chosen = expert;
            weight = value;
        }
    }
    if (args.normed) {
        weight *= 1.0f/fmaxf(warp_reduce_sum(sum), args.clamp);
    }
    if (lane < args.n_used) {
        args.ids[lane]     = chosen;
        args.weights[lane] = weight*args.scale;
    }
    const int id = look_up.ids != nullptr ? given : chosen;
    if (look_up.told != nullptr && lane < args.n_used) {
        look_up.told[lane] = id;
    }
    if (look_up.slots != nullptr) {
        __syncwarp();
        moegraph_router_find_slots(look_up, args.n_used, id, slots, 32*n_mine, victim);
    }
}

// What others read of a norm, by one block: sum, norm and its quantized rows, and the product of a shared expert's gate, with
// the bits of moegraph_add_norm_kernel.
template <int n_norm>
static __device__ __forceinline__ void moegraph_router_row(const moegraph_router_args & args) {
    __shared__ float shared[32];
    ggml_cuda_pdl_lc();
    if (!args.norm.early) {
        ggml_cuda_pdl_sync();
    }
    float4 w[n_norm];
#pragma unroll
    for (int k = 0; k < n_norm; ++k) {
        const int i = 4*(threadIdx.x + k*ROUTER_BLOCK);
        w[k] = args.gate_w != nullptr && i < args.norm.n ? *(const float4 *) (args.gate_w + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    float gate = 0.0f;
    moegraph_add_norm_row<ROUTER_BLOCK, n_norm>(args.norm, 0, [&](const int k, const int i, const float4 sum, const float4 v) {
        gate = __fadd_rn(gate, moegraph_gate_4(v, w[k]));
        moegraph_add_norm_write(args.norm, i, sum, v);
    });
    if (args.gate_w != nullptr) {
        gate = block_reduce<block_reduce_method::SUM, ROUTER_BLOCK>(gate, shared);
        if (threadIdx.x == 0) {
            *args.gate = gate;
        }
    }
}

// A block multiplies ROUTER_ROWS rows of weights, which it requests before it waits for the activations. The block that
// ends last has all logits before it, and chooses. n_norm: each block computes the norm for itself, four values a thread that
// often; the first block writes it, and has no rows. Grid: rows of weights, behind one block for a norm.
template <int n_mine, int n_norm>
static __global__ void __launch_bounds__(ROUTER_BLOCK, 2) moegraph_router_kernel(const moegraph_router_args args) {
#if __CUDA_ARCH__ >= GGML_CUDA_CC_AMPERE || !defined(__CUDA_ARCH__)
    extern __shared__ int4 moegraph_router_smem[];
    __shared__ float sums[ROUTER_ROWS*ROUTER_WARPS];
    float        * row   = (float *) moegraph_router_smem;
    const int      lane  = threadIdx.x % 32;
    const int      first = threadIdx.x % ROUTER_THREADS;
    const int      block = blockIdx.x - (n_norm > 0 ? 1 : 0);
    if constexpr (n_norm > 0) {
        if (block < 0) {
            moegraph_router_row<n_norm>(args);
            return;
        }
    }
    const float2 * w     = (const float2 *) (args.w + (ROUTER_ROWS*block + threadIdx.x/ROUTER_THREADS)*args.stride_w);
    const float2 * x     = (const float2 *) (n_norm > 0 ? row : args.x);
    if (!args.early) {
        ggml_cuda_pdl_sync();
    }
    float2 v[ROUTER_LOADS];
#pragma unroll
    for (int k = 0; k < ROUTER_LOADS; ++k) {
        v[k] = 2*ROUTER_THREADS*k < args.n ? w[first + ROUTER_THREADS*k] : make_float2(0.0f, 0.0f);
    }
    if constexpr (n_norm > 0) {
        moegraph_add_norm_row<ROUTER_BLOCK, n_norm>(args.norm, 0, [&](int, const int i, const float4, const float4 normed) {
            *(float4 *) (row + i) = normed;
        });
        __syncthreads();
    } else if (args.early) {
        ggml_cuda_pdl_sync();
    }
    float sum = 0.0f; // in the order of upstream's vector kernel
#pragma unroll
    for (int k = 0; k < ROUTER_LOADS; ++k) {
        if (2*ROUTER_THREADS*k < args.n) {
            const float2 y = x[first + ROUTER_THREADS*k];
            sum = __fmaf_rn(v[k].y, y.y, __fmaf_rn(v[k].x, y.x, sum));
        }
    }
    sum = warp_reduce_sum<32>(sum);
    if (lane == 0) {
        sums[threadIdx.x/32] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= 32) {
        return;
    }
    sum = sums[lane % (ROUTER_ROWS*ROUTER_WARPS)];
#pragma unroll
    for (int step = ROUTER_WARPS/2; step > 0; step /= 2) {
        sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFF, sum, step, 32));
    }
#pragma unroll
    for (int r = 0; r < ROUTER_ROWS; ++r) {
        const float logit = __shfl_sync(0xFFFFFFFF, sum, r*ROUTER_WARPS);
        if (lane == 0) {
            args.logits[ROUTER_ROWS*block + r] = logit;
        }
    }
    const unsigned before = __shfl_sync(0xFFFFFFFF, lane == 0 ? moegraph_arrive(args.arrived) : 0u, 0);
    if (before != gridDim.x - (n_norm > 0 ? 2 : 1)) {
        ggml_cuda_pdl_lc();
        return;
    }
    __syncwarp();
    if (lane == 0) {
        *args.arrived = 0;
    }
    moegraph_router_choose<n_mine>(args);
#else
    GGML_UNUSED(args);
    NO_DEVICE_CODE;
#endif // __CUDA_ARCH__ >= GGML_CUDA_CC_AMPERE
}

struct moegraph_router_nodes {
    const ggml_tensor * product;
    const ggml_tensor * scores;
    const ggml_tensor * bias;  // or nullptr
    const ggml_tensor * clamp; // of the sum that weights are divided by, or nullptr
    const ggml_tensor * scale; // or nullptr
    const ggml_tensor * ids;
    const ggml_tensor * weights;
    int                 n_ops;
};

// From the product to the last view of the weights, in the order of build_router (moegraph/arch/blocks/router.py).
static bool moegraph_router_match(const ggml_cgraph * cgraph, const int i, moegraph_router_nodes & m) {
    ggml_tensor * const * nodes = cgraph->nodes + i;
    ggml_op ops[13];
    int     from[13]; // which of the nodes the first operand is
    int     n = 0;
    const auto is   = [&](const int k, const ggml_op op) { return i + k < cgraph->n_nodes && nodes[k]->op == op; };
    const auto push = [&](const ggml_op op, const int src) {
        ops[n]  = op;
        from[n] = src;
        return n++;
    };
    if (!is(0, GGML_OP_MUL_MAT)) {
        return false;
    }
    push(GGML_OP_MUL_MAT, -1);
    const bool sigmoid = is(1, GGML_OP_UNARY);
    const int  scores  = push(sigmoid ? GGML_OP_UNARY : GGML_OP_SOFT_MAX, 0);
    const int  column  = push(GGML_OP_RESHAPE, scores);
    const bool biased  = is(n, GGML_OP_ADD);
    const int  sorted  = push(GGML_OP_ARGSORT, biased ? push(GGML_OP_ADD, scores) : scores);
    const int  ids     = push(GGML_OP_VIEW, sorted);
    const int  chosen  = push(GGML_OP_GET_ROWS, column);
    const bool normed  = is(n, GGML_OP_RESHAPE) && is(n + 1, GGML_OP_SUM_ROWS);
    int clamp = 0, divided = 0;
    if (normed) {
        const int row = push(GGML_OP_RESHAPE, chosen);
        clamp   = push(GGML_OP_CLAMP, push(GGML_OP_SUM_ROWS, row));
        divided = push(GGML_OP_DIV, row);
        push(GGML_OP_RESHAPE, divided);
    }
    const bool scaled = is(n, GGML_OP_SCALE) && nodes[n]->src[0] == nodes[n - 1];
    if (scaled) {
        push(GGML_OP_SCALE, n - 1);
    }
    const int outputs[2] = { i + ids, i + n - 1 };
    if (!ggml_can_fuse_subgraph(cgraph, i, n, ops, outputs, 2)) {
        return false;
    }
    for (int k = 1; k < n; ++k) {
        if (nodes[k]->src[0] != nodes[from[k]]) {
            return false;
        }
    }
    m.product = nodes[0];
    m.scores  = nodes[scores];
    m.bias    = biased ? nodes[sorted - 1]->src[1] : nullptr;
    m.clamp   = normed ? nodes[clamp] : nullptr;
    m.scale   = scaled ? nodes[n - 1] : nullptr;
    m.ids     = nodes[ids];
    m.weights = nodes[n - 1];
    m.n_ops   = n;
    const bool plain = sigmoid ? ggml_get_unary_op(m.scores) == GGML_UNARY_OP_SIGMOID :
        ggml_get_op_params_f32(m.scores, 0) == 1.0f && ggml_get_op_params_f32(m.scores, 1) == 0.0f &&
        m.scores->src[1] == nullptr && m.scores->src[2] == nullptr;
    return plain && nodes[chosen]->src[1] == m.ids && (!normed || nodes[divided]->src[1] == m.clamp) &&
        (!scaled || ggml_get_op_params_f32(m.scale, 1) == 0.0f) &&
        ggml_get_op_params_i32(nodes[sorted], 0) == GGML_SORT_ORDER_DESC;
}

// One row whose logits would be those of upstream's vector kernel.
static bool moegraph_router_supported(const moegraph_router_nodes & m, const int cc) {
    const ggml_tensor * w = m.product->src[0];
    const ggml_tensor * x = m.product->src[1];
    const int64_t n = w->ne[0], n_experts = w->ne[1];
    return GGML_CUDA_CC_IS_NVIDIA(cc) && cc >= GGML_CUDA_CC_AMPERE && !moegraph_rows_are_apart(m.product) &&
        w->type == GGML_TYPE_F32 && x->type == GGML_TYPE_F32 && ggml_nrows(x) == 1 && ggml_nrows(w) == n_experts &&
        n % (2*ROUTER_THREADS) == 0 && n <= 2*ROUTER_THREADS*ROUTER_LOADS && w->nb[0] == sizeof(float) &&
        w->nb[1] % 8 == 0 && ggml_is_contiguous(x) && ggml_is_contiguous(m.weights) && m.ids->view_offs == 0 &&
        m.ids->ne[0] <= 32 &&
        (m.bias == nullptr || (m.bias->type == GGML_TYPE_F32 && ggml_nelements(m.bias) == n_experts &&
            ggml_is_contiguous(m.bias))) &&
        (n_experts == 64 || n_experts == 128 || n_experts == 256 || n_experts == 512);
}

// What starts at node i, from the norm or from the product on. There may be no memory yet.
struct moegraph_router_found {
    moegraph_add_norm_nodes norm; // n_ops 0: none
    moegraph_router_nodes   router;
    const ggml_tensor     * gate; // the product of a shared expert's gate with the norm, or nullptr
};

// The product of a shared expert's gate with row x, behind node i; nullptr if there is none before the next norm.
static const ggml_tensor * moegraph_router_find_gate(const ggml_cgraph * cgraph, int i, const ggml_tensor * x) {
    for (; i + 1 < cgraph->n_nodes && cgraph->nodes[i]->op != GGML_OP_RMS_NORM; ++i) {
        const ggml_tensor * node = cgraph->nodes[i];
        if (node->op == GGML_OP_MUL_MAT && node->src[1] == x && ggml_nelements(node) == 1 &&
                moegraph_is_unary(cgraph->nodes[i + 1], GGML_UNARY_OP_SIGMOID) && cgraph->nodes[i + 1]->src[0] == node) {
            const ggml_tensor * w = node->src[0];
            return w->type == GGML_TYPE_F32 && ggml_is_contiguous(w) && (uintptr_t) w->data % 16 == 0 && moegraph_is_constant(w) ?
                node : nullptr;
        }
    }
    return nullptr;
}

static bool moegraph_router_find(const ggml_cgraph * cgraph, const int i, const int cc, moegraph_router_found & f) {
    if (moegraph_router_match(cgraph, i, f.router)) {
        f.norm.n_ops = 0;
        f.gate = nullptr;
        return moegraph_router_supported(f.router, cc);
    }
    if ((!moegraph_lone_norm_match(cgraph, i, f.norm) && !moegraph_add_norm_match(cgraph, i, f.norm)) ||
            f.norm.norm == nullptr || f.norm.gated >= 0 ||
            !moegraph_router_match(cgraph, i + f.norm.n_ops, f.router) || f.router.product->src[1] != f.norm.dst ||
            !moegraph_router_supported(f.router, cc)) {
        return false;
    }
    const int64_t n = f.norm.dst->ne[0];
    f.gate = moegraph_router_find_gate(cgraph, i + f.norm.n_ops + f.router.n_ops, f.norm.dst);
    return n > ROUTER_NORM/2 && n <= 2*ROUTER_NORM;
}

// Whether nothing is written where blocks read terms of the sum: the block that writes the norm may do so before they have read
// them, and read them itself after the choice.
static bool moegraph_router_is_apart(const ggml_cgraph * cgraph, const int i, const moegraph_router_found & f) {
    for (int k = i; k < i + f.norm.n_ops + f.router.n_ops; ++k) {
        for (const ggml_tensor * t : f.norm.terms) {
            if (t != nullptr && !moegraph_is_view_op(cgraph->nodes[k]) && !moegraph_apart(cgraph->nodes[k], t)) {
                return false;
            }
        }
    }
    return true;
}

// Whether ids are those that the router chooses, and nothing has written to them since.
static bool moegraph_router_is_choice(const moegraph_router_nodes & m, const ggml_tensor * ids) {
    return moegraph_rows_origin(ids) == moegraph_rows_origin(m.ids) && ids->data == m.ids->data;
}

// The look-up of slots behind node i whose experts gate and up can fetch in their own launch (moegraph-one.cu), nullptr if there
// is none before the next norm.
static ggml_tensor * moegraph_router_find_look_up(
        ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i, const moegraph_router_found & f) {
    ggml_tensor * fetch = nullptr;
    for (; i < cgraph->n_nodes && cgraph->nodes[i]->op != GGML_OP_RMS_NORM; ++i) {
        ggml_tensor * node = cgraph->nodes[i];
        if (node->op == GGML_OP_MOEGRAPH_FETCH_ROWS) {
            const ggml_tensor * ids = node->src[1], * table = node->src[0], * victims = node->src[2];
            const bool own = moegraph_router_is_choice(f.router, ids) || moegraph_rows_origin(ids)->op == GGML_OP_NONE;
            if (fetch != nullptr || !own || ggml_nelements(ids) != f.router.ids->ne[0] || ggml_nelements(ids) < 2 ||
                    table->ne[1] != f.router.product->ne[0] || victims->ne[1] > 32 || node->src[4]->ne[1] > UINT16_MAX ||
                    (uintptr_t) victims->data % sizeof(int2) != 0 || !moegraph_is_constant(table) ||
                    !moegraph_is_constant(victims)) {
                return nullptr;
            }
            fetch = node;
        } else if (fetch != nullptr && node->op == GGML_OP_MUL_MAT_ID) {
            return moegraph_rows_fetches(ctx, node, fetch, f.gate) ? fetch : nullptr;
        } else if (fetch != nullptr && !moegraph_is_view_op(node)) {
            for (const ggml_tensor * src : node->src) { // the slots are there when gate and up run
                if (src != nullptr && moegraph_rows_origin(src) == fetch) {
                    return nullptr;
                }
            }
        }
    }
    return nullptr;
}

template <int n_norm>
static void moegraph_router_launch(const moegraph_router_args & args, const int n_experts, const size_t smem, cudaStream_t stream) {
    const ggml_cuda_kernel_launch_params params(dim3(n_experts/ROUTER_ROWS + (n_norm > 0 ? 1 : 0)), dim3(ROUTER_BLOCK), smem, stream);
    switch (n_experts) {
        case 64:  ggml_cuda_kernel_launch(moegraph_router_kernel<2, n_norm>,  params, args); break;
        case 128: ggml_cuda_kernel_launch(moegraph_router_kernel<4, n_norm>,  params, args); break;
        case 256: ggml_cuda_kernel_launch(moegraph_router_kernel<8, n_norm>,  params, args); break;
        default:  ggml_cuda_kernel_launch(moegraph_router_kernel<16, n_norm>, params, args); break;
    }
}

int moegraph_router_try(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, const int i) {
    moegraph_router_state & state = moegraph_get_context(ctx).router;
    const int cc = ggml_cuda_info().devices[ctx.device].cc;
    moegraph_router_found f = {};
    if (ctx.curr_stream_no != 0 || !moegraph_router_find(cgraph, i, cc, f)) {
        return 0;
    }
    const moegraph_router_nodes & m = f.router;
    const ggml_tensor * w = m.product->src[0];
    const ggml_tensor * x = m.product->src[1];
    if ((uintptr_t) w->data % 8 != 0 || (uintptr_t) x->data % 8 != 0) {
        return 0;
    }
    moegraph_router_args args = {};
    args.early = moegraph_is_constant(w);
    size_t smem = 0;
    if (f.norm.n_ops > 0) {
        if (!moegraph_router_is_apart(cgraph, i, f) || !moegraph_add_norm_prepare(ctx, f.norm, args.norm)) {
            return 0;
        }
        args.early = args.early && args.norm.early;
        smem = args.norm.n*sizeof(float);
    }
    args.norm.early = args.early;
    if (state.arrived == nullptr) { // in the stream, so that a graph that is being captured begins with it
        CUDA_CHECK(cudaMalloc((void **) &state.arrived, sizeof(unsigned) + (ROUTER_EXPERTS + 1)*sizeof(float) + 32*sizeof(int32_t)));
        CUDA_CHECK(cudaMemsetAsync(state.arrived, 0, sizeof(unsigned), ctx.stream()));
    }
    args.w        = (const float *) w->data;
    args.x        = (const float *) x->data;
    args.bias     = m.bias != nullptr ? (const float *) m.bias->data : nullptr;
    args.arrived  = state.arrived;
    args.logits   = (float *) (state.arrived + 1);
    args.gate     = args.logits + ROUTER_EXPERTS;
    args.gate_w   = f.gate != nullptr ? (const float *) f.gate->src[0]->data : nullptr;
    args.ids      = (int32_t *) m.ids->data;
    args.weights  = (float *) m.weights->data;
    args.stride_w = w->nb[1]/sizeof(float);
    args.n        = w->ne[0];
    args.n_used   = m.ids->ne[0];
    args.sigmoid  = m.scores->op == GGML_OP_UNARY;
    args.normed   = m.clamp != nullptr;
    args.clamp    = m.clamp != nullptr ? ggml_get_op_params_f32(m.clamp, 0) : 0.0f;
    args.scale    = m.scale != nullptr ? ggml_get_op_params_f32(m.scale, 0) : 1.0f;
    const int behind = i + f.norm.n_ops + m.n_ops;
    ggml_tensor * fetch = moegraph_router_find_look_up(ctx, cgraph, behind, f);
    if (fetch != nullptr) {
        const ggml_tensor * ids = fetch->src[1]; // or others, as those of a recording
        args.look_up.ids       = moegraph_router_is_choice(m, ids) ? nullptr : (const int32_t *) ids->data;
        args.look_up.table     = (const int32_t *) fetch->src[0]->data;
        args.look_up.victims   = (const int2 *) fetch->src[2]->data;
        args.look_up.slots     = (int32_t *) (args.gate + 1);
        args.look_up.n_victims = (int) fetch->src[2]->ne[1];
        args.look_up.n_slots   = (int) fetch->src[4]->ne[1];
        moegraph_done_add(ctx, fetch);
        if (ggml_tensor * told = moegraph_publish_find(cgraph, behind, ids)) {
            args.look_up.told = (int32_t *) told->data;
            moegraph_done_add(ctx, told);
        }
    }
    state.fetch = fetch;
    if (f.norm.n_ops == 0) {
        moegraph_router_launch<0>(args, w->ne[1], smem, ctx.stream());
    } else if (args.n <= ROUTER_NORM) {
        moegraph_router_launch<1>(args, w->ne[1], smem, ctx.stream());
    } else {
        moegraph_router_launch<2>(args, w->ne[1], smem, ctx.stream());
    }
    state.gate_of = f.gate;
    return f.norm.n_ops + m.n_ops - 1;
}

const float * moegraph_router_gate(ggml_backend_cuda_context & ctx, const ggml_tensor * product) {
    const moegraph_router_state & state = moegraph_get_context(ctx).router;
    return state.gate_of == product ? (const float *) (state.arrived + 1) + ROUTER_EXPERTS : nullptr;
}

const int32_t * moegraph_router_slots(ggml_backend_cuda_context & ctx, const ggml_tensor * ids) {
    const moegraph_router_state & state = moegraph_get_context(ctx).router;
    return state.fetch != nullptr && ids->data == state.fetch->data && moegraph_rows_origin(ids) == state.fetch ?
        (const int32_t *) (state.arrived + 1) + ROUTER_EXPERTS + 1 : nullptr;
}

bool moegraph_router_fetch(ggml_backend_cuda_context & ctx, const ggml_tensor * ids) {
    if (moegraph_router_slots(ctx, ids) == nullptr) {
        return false;
    }
    moegraph_router_state & state = moegraph_get_context(ctx).router;
    moegraph_fetch_rows(ctx, state.fetch);
    state.fetch = nullptr;
    return true;
}

void moegraph_router_begin(ggml_backend_cuda_context & ctx) {
    moegraph_get_context(ctx).router.gate_of = nullptr;
    moegraph_get_context(ctx).router.fetch   = nullptr;
}

void moegraph_router_keep(const ggml_cgraph * cgraph, const int i, const ggml_backend_graph_optimize_params * params) {
    moegraph_router_found f = {};
    if (!moegraph_router_find(cgraph, i, ggml_cuda_info().devices[ggml_cuda_get_device()].cc, f)) {
        return;
    }
    ggml_tensor * ids = nullptr; // of a look-up that may run where gate and up do (moegraph_router_fetch)
    for (int k = i + 1; k < cgraph->n_nodes && cgraph->nodes[k]->op != GGML_OP_MUL_MAT_ID; ++k) {
        ids = cgraph->nodes[k]->op == GGML_OP_MOEGRAPH_FETCH_ROWS ? cgraph->nodes[k]->src[1] : ids;
        if (ids != nullptr && k + 1 < cgraph->n_nodes) {
            params->add_alloc_dep(params->user_data, ids, cgraph->nodes[k + 1]);
        }
    }
    if (f.norm.n_ops == 0) {
        return;
    }
    ggml_tensor * until = cgraph->nodes[i + f.norm.n_ops + f.router.n_ops - 1];
    for (const ggml_tensor * t : f.norm.terms) {
        if (t != nullptr) {
            params->add_alloc_dep(params->user_data, const_cast<ggml_tensor *>(t), until);
        }
    }
}
