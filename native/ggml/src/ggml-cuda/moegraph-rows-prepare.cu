#include "moegraph-context.cuh"
#include "moegraph-rows.cuh"
#include "moegraph-rows-types.cuh"
#include "moegraph-wide.cuh"

#include <algorithm>

constexpr int MOEGRAPH_PREP_WARPS = MOEGRAPH_PREP_THREADS/32;

// Exclusive sum over the threads of a block of MOEGRAPH_PREP_THREADS threads; *total is the sum of all.
static __device__ __forceinline__ int moegraph_block_scan(const int value, int * total) {
    __shared__ int warp_sums[MOEGRAPH_PREP_WARPS];
    int sum = value;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFF, sum, offset);
        sum += (int) (threadIdx.x % 32) >= offset ? other : 0;
    }
    if (threadIdx.x % 32 == 31) {
        warp_sums[threadIdx.x/32] = sum;
    }
    __syncthreads();
    int before = 0;
    *total = 0;
#pragma unroll
    for (int w = 0; w < MOEGRAPH_PREP_WARPS; ++w) {
        before += w < (int) (threadIdx.x/32) ? warp_sums[w] : 0;
        *total += warp_sums[w];
    }
    return before + sum - value;
}

// Lists the experts in use with their slots, at most MOEGRAPH_TILE_COLS in a group. Ids outside of the experts go to
// groups of their own. One block, a thread for each slot. Which slots meet in a group does not change any result.
static __device__ void moegraph_list_few(
        const int32_t * ids, const int stride_ids, const int n_used, const int n_slots, const int n_experts,
        moegraph_group * groups, int * n_groups) {
    extern __shared__ int counts[]; // [n_experts + 1], then the first group of each
    int * first = counts + n_experts + 1;
    const int slot = threadIdx.x;

    for (int i = threadIdx.x; i <= n_experts; i += blockDim.x) {
        counts[i] = 0;
    }
    int id = 0;
    if (slot < n_slots) {
        id = ids[(slot / n_used)*stride_ids + slot % n_used];
        id = (uint32_t) id < (uint32_t) n_experts ? id : n_experts;
    }
    __syncthreads();
    const int rank = slot < n_slots ? atomicAdd(&counts[id], 1) : -1;
    __syncthreads();
    int total;
    const int n_here = rank == 0 ? (counts[id] + MOEGRAPH_TILE_COLS - 1) / MOEGRAPH_TILE_COLS : 0;
    const int before = moegraph_block_scan(n_here, &total);
    if (rank == 0) {
        first[id] = before;
    }
    __syncthreads();
    if (rank >= 0) {
        moegraph_group * group = groups + first[id] + rank/MOEGRAPH_TILE_COLS;
        group->slots[rank % MOEGRAPH_TILE_COLS] = slot;
        if (rank % MOEGRAPH_TILE_COLS == 0) {
            group->expert = id < n_experts ? id : -1;
            group->n      = min(MOEGRAPH_TILE_COLS, counts[id] - rank);
        }
    }
    if (threadIdx.x == 0) {
        *n_groups = total;
    }
}

// The same for any number of slots, with at most `cols` in a group.
static __device__ void moegraph_list_many(
        const int32_t * ids, const int stride_ids, const int n_used, const int n_slots, const int n_experts,
        const int cols, moegraph_group * groups, int * n_groups) {
    extern __shared__ int counts[]; // [n_experts + 1], then the first group of each, then how many slots are listed
    int * first  = counts + n_experts + 1;
    int * listed = first + n_experts + 1;
    const auto id_of = [&](const int slot) {
        const int id = ids[(slot / n_used)*stride_ids + slot % n_used];
        return (uint32_t) id < (uint32_t) n_experts ? id : n_experts;
    };

    for (int i = threadIdx.x; i <= n_experts; i += blockDim.x) {
        counts[i] = 0;
        listed[i] = 0;
    }
    __syncthreads();
    for (int slot = threadIdx.x; slot < n_slots; slot += blockDim.x) {
        atomicAdd(&counts[id_of(slot)], 1);
    }
    __syncthreads();
    int total = 0;
    for (int i0 = 0; i0 <= n_experts; i0 += blockDim.x) {
        const int i = i0 + threadIdx.x;
        const int n = i <= n_experts ? (counts[i] + cols - 1)/cols : 0;
        int more;
        const int before = total + moegraph_block_scan(n, &more);
        if (i <= n_experts) {
            first[i] = before;
        }
        for (int j = 0; j < n; ++j) {
            groups[before + j].expert = i < n_experts ? i : -1;
            groups[before + j].n      = min(cols, counts[i] - j*cols);
        }
        total += more;
        __syncthreads(); // before the sums of the scan are written again
    }
    for (int slot = threadIdx.x; slot < n_slots; slot += blockDim.x) {
        const int id   = id_of(slot);
        const int rank = atomicAdd(&listed[id], 1);
        groups[first[id] + rank/cols].slots[rank % cols] = slot;
    }
    if (threadIdx.x == 0) {
        *n_groups = total;
    }
}

// Quantizes rows of floats, 8 threads a block of 32 values, in one format or both. With ids the first block lists the
// groups instead.
static __global__ void __launch_bounds__(MOEGRAPH_PREP_THREADS) moegraph_prepare_kernel(
        const float * x, moegraph_block_y * y, block_q8_1 * q8_1, const int64_t stride_row, const int64_t stride_token,
        const int n_values, const int n_rows, const int n_y,
        const int32_t * ids, const int stride_ids, const int n_used, const int n_slots, const int n_experts,
        const int cols, moegraph_group * groups, int * n_groups) {
    ggml_cuda_pdl_lc(); // the product that follows loads weights meanwhile
    ggml_cuda_pdl_sync();
    int block = blockIdx.x;
    if (ids != nullptr) {
        if (block == 0) {
            if (n_slots <= MOEGRAPH_FEW_SLOTS) {
                moegraph_list_few(ids, stride_ids, n_used, n_slots, n_experts, groups, n_groups);
            } else {
                moegraph_list_many(ids, stride_ids, n_used, n_slots, n_experts, cols, groups, n_groups);
            }
            return;
        }
        --block;
    }
    const int64_t i   = ((int64_t) block*blockDim.x + threadIdx.x)*4;
    const int     row = i / moegraph_padded(n_values);
    const int     col = i % moegraph_padded(n_values);
    if (row >= n_rows) {
        return; // whole groups of 8 threads: n_values is a multiple of 32
    }
    const float4 v = col < n_values ? *(const float4 *) (x + (row / n_y)*stride_token + (row % n_y)*stride_row + col) :
        make_float4(0.0f, 0.0f, 0.0f, 0.0f);

    if (y != nullptr) {
        moegraph_quantize_4(v, y + i/32);
    }
    if (q8_1 != nullptr && col < n_values) { // of a single row
        moegraph_quantize_q8_1_4(v, q8_1 + i/32);
    }
}

// The tensor that was computed: reading through another view of it gives the same values from the same place.
static const ggml_tensor * moegraph_origin(const ggml_tensor * t) {
    while (moegraph_is_view_op(t) && t->src[0] != nullptr && t->src[0]->data == t->data) {
        t = t->src[0];
    }
    return t;
}

void moegraph_rows_begin(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph) {
    moegraph_rows_state & state = moegraph_get_context(ctx).rows;
    const auto forget = [](moegraph_rows_state::entry & e) {
        e.key  = {};
        e.used = 0;
    };
    std::for_each(std::begin(state.y), std::end(state.y), forget);
    std::for_each(std::begin(state.groups), std::end(state.groups), forget);
    std::for_each(std::begin(state.q8_1), std::end(state.q8_1), forget);
    state.pinned = nullptr;
    state.clock = 0;
    state.changed.clear();
    state.wanted.clear();
    state.wanted_q8_1.clear();
    const int cc = ggml_cuda_info().devices[ctx.device].cc;
    for (int i = 0; i < cgraph->n_nodes; ++i) {
        const ggml_tensor * node = cgraph->nodes[i];
        if (node->view_src != nullptr && !moegraph_is_view_op(node)) {
            state.changed.insert(node->view_src);
        }
        if ((node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID) &&
                moegraph_rows_supported(node, nullptr, cc)) {
            if (moegraph_rows_are_many(node)) {
                continue; // quantized in the pool: these rows would take much memory for good
            }
            state.wanted.insert(moegraph_origin(node->src[1]));
        } else if (node->op == GGML_OP_MUL_MAT_ID && ggml_is_quantized(node->src[0]->type) &&
                ggml_nrows(node->src[1]) == 1 &&
                node->src[1]->ne[0] % MATRIX_ROW_PADDING == 0) {
            state.wanted_q8_1.insert(moegraph_origin(node->src[1]));
        }
    }
}

// What an entry of a tensor's contents is found by; all 0 if they may change within this evaluation.
static std::array<int64_t, 6> moegraph_rows_key(
        const moegraph_rows_state & state, const ggml_tensor * tensor, const int64_t extra) {
    const ggml_tensor * origin = moegraph_origin(tensor);
    if (origin->view_src != nullptr || moegraph_is_view_op(origin) || state.changed.find(origin) != state.changed.end()) {
        return {};
    }
    std::array<int64_t, 6> key = { (int64_t) (intptr_t) origin, tensor->ne[0], ggml_nrows(tensor), extra, 0, 0 };
    if (!ggml_is_contiguous(tensor)) {
        key[3] += tensor->ne[1] << 32;
        key[4]  = tensor->nb[1];
        key[5]  = tensor->nb[2];
    }
    return key;
}

void moegraph_rows_pin(ggml_backend_cuda_context & ctx, const ggml_tensor * tensor) {
    moegraph_rows_state & state = moegraph_get_context(ctx).rows;
    state.pinned = nullptr;
    const std::array<int64_t, 6> key = tensor != nullptr ? moegraph_rows_key(state, tensor, 0) : std::array<int64_t, 6>{};
    for (const moegraph_rows_state::entry & e : state.y) {
        if (key[0] != 0 && e.key == key) {
            state.pinned = &e;
        }
    }
}

// Finds or takes an entry of a tensor's contents, never the pinned one for another's. extra: what else the entry depends on. Returns whether it is filled.
static bool moegraph_rows_find(
        moegraph_rows_state & state, moegraph_rows_state::entry * entries, const int n_entries,
        const ggml_tensor * tensor, const int64_t extra, const size_t size, moegraph_rows_state::entry ** result) {
    const std::array<int64_t, 6> key = moegraph_rows_key(state, tensor, extra);
    *result = nullptr;
    for (int i = 0; i < n_entries; ++i) {
        moegraph_rows_state::entry & e = entries[i];
        if (key[0] != 0 && e.key == key) {
            e.used  = ++state.clock;
            *result = &e;
            return true;
        }
        if (&e != state.pinned && (*result == nullptr || e.used < (*result)->used)) {
            *result = &e;
        }
    }
    moegraph_rows_state::entry & e = **result;
    e.key  = key;
    e.used = ++state.clock;
    if (e.size < size) {
        if (e.data != nullptr) {
            state.retired.push_back(e.data);
        }
        e.size = 64*1024;
        while (e.size < size) {
            e.size *= 2;
        }
        CUDA_CHECK(cudaMalloc(&e.data, e.size));
    }
    return false;
}

void moegraph_rows_prepare(
        ggml_backend_cuda_context & ctx, const ggml_tensor * dst, const bool one, moegraph_rows_operands & result) {
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];
    const bool          mmid = dst->op == GGML_OP_MUL_MAT_ID;
    const ggml_tensor * ids  = mmid && !one ? dst->src[2] : nullptr;

    const int64_t n_values = src1->ne[0];
    const int64_t n_y      = mmid ? src1->ne[1] : 1;
    const int64_t n_rows_y = mmid ? src1->ne[1]*src1->ne[2] : src1->ne[1];
    const int     n_used   = ids ? ids->ne[0] : 1;
    const int     n_slots  = ids ? ids->ne[0]*ids->ne[1] : 0;
    const int     n_experts = src0->ne[2];
    const bool    many        = moegraph_rows_are_many(dst);
    result.group_cols         = many ? moegraph_wide_cols() : MOEGRAPH_TILE_COLS;
    const int64_t n_padded    = n_rows_y*moegraph_padded(n_values);
    const size_t  size_y      = n_padded/32*sizeof(moegraph_block_y);
    const size_t  size_groups = sizeof(int) + moegraph_max_groups(n_slots, n_experts, result.group_cols)*sizeof(moegraph_group);

    // other streams than the first would race for the cached buffers
    moegraph_rows_state & state = moegraph_get_context(ctx).rows;
    const bool cached = ctx.curr_stream_no == 0;
    char * y      = nullptr;
    char * groups = nullptr;
    bool have_y      = false;
    bool have_groups = ids == nullptr;
    if (cached) {
        moegraph_rows_state::entry * e;
        if (!many) {
            have_y = moegraph_rows_find(state, state.y, moegraph_rows_state::N_CACHED, src1, 0, size_y, &e);
            y = (char *) e->data;
        } else {
            y = result.pool_y.alloc(size_y);
        }
        if (ids) {
            have_groups = moegraph_rows_find(state, state.groups, 2, ids, n_experts, size_groups, &e);
            groups = (char *) e->data;
        }
    } else {
        // A row that was quantized before the fork is there, and pinned. It is the input, not what the branch computes.
        const bool plain = !mmid && !many;
        if (plain && state.pinned != nullptr && state.pinned->key == moegraph_rows_key(state, src1, 0)) {
            result.y = (const moegraph_block_y *) state.pinned->data;
            return;
        }
        if (plain && one && n_rows_y == 1 && n_values <= MOEGRAPH_ONE_RAW && n_values % MOEGRAPH_CHUNK == 0 &&
                (uintptr_t) src1->data % 16 == 0 && moegraph_rows_type(src0) == GGML_TYPE_Q8_0) {
            result.raw = (const float *) src1->data;
            return;
        }
        y = result.pool_y.alloc(size_y);
        if (ids) {
            groups = result.pool_groups.alloc(size_groups);
        }
    }
    int            * n_groups_d = (int *) groups;
    moegraph_group * groups_d   = ids ? (moegraph_group *) (groups + sizeof(int)) : nullptr;

    if (!have_y || !have_groups) {
        const int64_t n_blocks_y = have_y ? 0 : (n_padded/4 + MOEGRAPH_PREP_THREADS - 1) / MOEGRAPH_PREP_THREADS;
        const int64_t n_blocks = n_blocks_y + !have_groups;
        const size_t  smem     = have_groups ? 0 : (many ? 3 : 2)*(n_experts + 1)*sizeof(int);
        const int64_t stride_y = src1->nb[1]/sizeof(float);
        const int64_t stride_t = (mmid ? src1->nb[2] : src1->nb[1])/sizeof(float);
        const ggml_cuda_kernel_launch_params params(dim3(n_blocks), dim3(MOEGRAPH_PREP_THREADS), smem, ctx.stream());
        void * q8_1 = have_y ? nullptr : moegraph_q8_1_reserve(ctx, src1);
        ggml_cuda_kernel_launch(moegraph_prepare_kernel, params,
            (const float *) src1->data, (moegraph_block_y *) y, (block_q8_1 *) q8_1, stride_y, stride_t, (int) n_values,
            (int) n_rows_y, (int) n_y,
            have_groups ? (const int32_t *) nullptr : (const int32_t *) ids->data,
            have_groups ? 0 : (int) (ids->nb[1]/sizeof(int32_t)), n_used, n_slots, n_experts,
            result.group_cols, groups_d, n_groups_d);
    }
    result.y        = (const moegraph_block_y *) y;
    result.groups   = groups_d;
    result.n_groups = n_groups_d;
}

static bool moegraph_q8_1_wanted(
        const ggml_backend_cuda_context & ctx, const moegraph_rows_state & state, const ggml_tensor * tensor) {
    return ctx.curr_stream_no == 0 && ggml_is_contiguous(tensor) && ggml_nrows(tensor) == 1 &&
        tensor->type == GGML_TYPE_F32 &&
        (uintptr_t) tensor->data % 16 == 0 &&
        state.wanted_q8_1.find(moegraph_origin(tensor)) != state.wanted_q8_1.end();
}

static size_t moegraph_q8_1_size(const ggml_tensor * tensor) {
    return tensor->ne[0]/QK8_1*sizeof(block_q8_1);
}

void * moegraph_q8_1_reserve(ggml_backend_cuda_context & ctx, const ggml_tensor * tensor) {
    moegraph_rows_state & state = moegraph_get_context(ctx).rows;
    if (!moegraph_q8_1_wanted(ctx, state, tensor)) {
        return nullptr;
    }
    moegraph_rows_state::entry * e;
    moegraph_rows_find(state, state.q8_1, 2, tensor, 0, moegraph_q8_1_size(tensor), &e);
    return e->key[0] != 0 ? e->data : nullptr;
}

const void * moegraph_q8_1(ggml_backend_cuda_context & ctx, const ggml_tensor * src1) {
    moegraph_rows_state & state = moegraph_get_context(ctx).rows;
    if (!moegraph_q8_1_wanted(ctx, state, src1)) {
        return nullptr;
    }
    moegraph_rows_state::entry * e;
    if (!moegraph_rows_find(state, state.q8_1, 2, src1, 0, moegraph_q8_1_size(src1), &e)) {
        void *        y        = moegraph_rows_reserve(ctx, src1);
        const int     n_values = src1->ne[0];
        const ggml_cuda_kernel_launch_params params(
            dim3((n_values/4 + MOEGRAPH_PREP_THREADS - 1)/MOEGRAPH_PREP_THREADS), dim3(MOEGRAPH_PREP_THREADS), (size_t) 0,
            ctx.stream());
        ggml_cuda_kernel_launch(moegraph_prepare_kernel, params,
            (const float *) src1->data, (moegraph_block_y *) y, (block_q8_1 *) e->data, (int64_t) 0, (int64_t) 0,
            n_values, 1, 1,
            (const int32_t *) nullptr, 0, 0, 0, 0, 0, (moegraph_group *) nullptr, (int *) nullptr);
    }
    return e->data;
}

void * moegraph_rows_reserve(ggml_backend_cuda_context & ctx, const ggml_tensor * tensor) {
    moegraph_rows_state & state = moegraph_get_context(ctx).rows;
    if (ctx.curr_stream_no != 0 || state.wanted.find(moegraph_origin(tensor)) == state.wanted.end() ||
            !ggml_is_contiguous(tensor) || tensor->ne[0] % MOEGRAPH_CHUNK != 0) {
        return nullptr;
    }
    moegraph_rows_state::entry * e;
    const size_t size = ggml_nelements(tensor)/32*sizeof(moegraph_block_y);
    moegraph_rows_find(state, state.y, moegraph_rows_state::N_CACHED, tensor, 0, size, &e);
    return e->key[0] != 0 && e != state.pinned ? e->data : nullptr; // pinned: it is filled, and the branch reads it
}
