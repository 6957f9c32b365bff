#include "moegraph-rows.cuh"
#include "moegraph-context.cuh"
#include "moegraph-done.cuh"
#include "moegraph-one.cuh"
#include "moegraph-match.cuh"
#include "moegraph-router.cuh"
#include "moegraph-rows-kernel.cuh"
#include "moegraph-wide.cuh"
#include "mmvq.cuh"

#include "moegraph.h"

#include <algorithm>

constexpr int MOEGRAPH_MIN_TOKENS  = 5;    // of MUL_MAT_ID; below that an expert seldom has two rows
constexpr int MOEGRAPH_MAX_EXPERTS = 4000; // three counters each, in 48 KB of shared memory

ggml_type moegraph_rows_type(const ggml_tensor * t) {
    const size_t strides = t->ne[2] == 1 ? t->nb[1] : t->nb[1] | t->nb[2];
    const bool   whole   = t->ne[0] % MOEGRAPH_CHUNK == 0 && strides % 16 == 0;
    if (t->ne[3] != 1 || t->nb[0] != ggml_type_size(t->type) || (uintptr_t) t->data % 16 != 0) {
        return GGML_TYPE_F32;
    }
    switch (t->type) {
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q4_K:
        case GGML_TYPE_Q5_K:
            return whole ? t->type : GGML_TYPE_F32;
        case GGML_TYPE_Q8_0:
            return whole ? t->type : strides % 2 == 0 ? MOEGRAPH_TYPE_Q8_0_ODD : GGML_TYPE_F32;
        case GGML_TYPE_Q6_K:
            return strides % 2 == 0 ? t->type : GGML_TYPE_F32;
        case GGML_TYPE_MXFP4:
            return t->type;
        default:
            return GGML_TYPE_F32;
    }
}

bool moegraph_rows_supported(const ggml_tensor * dst, const ggml_tensor * gate, const int cc) {
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];
    const bool mmid = dst->op == GGML_OP_MUL_MAT_ID;

    if (src0 == nullptr || src1 == nullptr) {
        return false; // the slices of the path that sorts on the host name no sources
    }
    if (!GGML_CUDA_CC_IS_NVIDIA(cc) || !turing_mma_available(cc) || src1->type != GGML_TYPE_F32 ||
            dst->type != GGML_TYPE_F32) {
        return false;
    }
    const ggml_type type = moegraph_rows_type(src0);
    if (type == GGML_TYPE_F32 || (gate != nullptr && moegraph_rows_type(gate->src[0]) != type)) {
        return false;
    }
    if (src1->nb[0] != sizeof(float) || (uintptr_t) src1->data % 16 != 0 || src1->nb[1] % 16 != 0 ||
            src1->nb[2] % 16 != 0 ||
            src1->ne[3] != 1 || dst->ne[3] != 1 || dst->nb[0] != sizeof(float)) {
        return false;
    }
    const bool one = moegraph_one_supported(dst, type, cc);
    // Fewer rows are for other vector kernels, and more without asynchronous copies. But their sums have other orders.
    const bool apart = moegraph_rows_are_apart(dst);
    const bool async = cp_async_available(cc);
    if (mmid) {
        const int64_t n_tokens = dst->ne[2];
        // gpt-oss: upstream's vector kernels add biases and compute the GLU, also where a graph cannot fuse they compute the
        // products, so that bits do not depend on residency; and with many choices its few experts fill upstream's larger
        // tiles: of 2,048 choices, ours are 10 % quicker with gpt-oss-20b, of 8,192 slower (H200)
        const bool mxfp4 = type == GGML_TYPE_MXFP4 && !apart;
        return n_tokens >= (apart || one ? 1 : async && !mxfp4 ? MOEGRAPH_MIN_TOKENS : MMVQ_MAX_BATCH_SIZE + 1) &&
            !(mxfp4 && ggml_nelements(dst->src[2]) > 2048) &&
            dst->ne[1]*n_tokens <= MOEGRAPH_MAX_SLOTS &&
            src0->ne[2] <= MOEGRAPH_MAX_EXPERTS && dst->src[2]->nb[0] == sizeof(int32_t) && dst->src[2]->ne[2] == 1;
    }
    const int64_t n_cols = dst->ne[1];
    return n_cols >= (apart || async ? 1 : MMVQ_MAX_BATCH_SIZE + 1) && (apart || n_cols <= MOEGRAPH_MAX_COLS) &&
        src0->ne[2] == 1 && src1->ne[2] == 1;
}

bool moegraph_rows_is_one(const ggml_tensor * dst, const int cc) {
    return moegraph_rows_supported(dst, nullptr, cc) && moegraph_one_supported(dst, moegraph_rows_type(dst->src[0]), cc);
}

template <ggml_type type, int n_tiles, bool glu>
static void moegraph_rows_launch(const moegraph_rows_args & args0, const int n_groups, cudaStream_t stream) {
    moegraph_rows_args args = args0;
    const ggml_cuda_device_info::cuda_device_info & dev = ggml_cuda_info().devices[ggml_cuda_get_device()];
    constexpr size_t warp_bytes = MOEGRAPH_STAGES*(glu ? 2 : 1)*MOEGRAPH_TILE_ROWS*moegraph_x<type>::pitch;

    int n_warps = moegraph_rows_divide<type, glu>(args);
    while (n_warps < 4 && 2*n_warps*warp_bytes <= 48*1024) {
        n_warps *= 2;
    }
    const dim3 grid(moegraph_rows_lay_out(args, n_warps, true), n_groups, 1);
    const dim3 block(32, n_warps, 1);

    const ggml_cuda_kernel_launch_params params(grid, block, n_warps*warp_bytes, stream);
    const auto kernel = moegraph_rows_kernel<type, n_tiles, glu>;
    CUDA_SET_SHARED_MEMORY_LIMIT(kernel, dev.smpbo);
    ggml_cuda_kernel_launch(kernel, params, args);
}

template <bool glu>
static void moegraph_rows_switch_tiles(
        const ggml_type type, const moegraph_rows_args & args, const int n_groups, cudaStream_t stream) {
    moegraph_switch_type(type, [&](const auto t) {
        switch (args.groups != nullptr ? 1 : (args.n_cols + 7)/8) {
            case 1: moegraph_rows_launch<t.value, 1, glu>(args, n_groups, stream); break;
            case 2: moegraph_rows_launch<t.value, 2, glu>(args, n_groups, stream); break;
            case 3: moegraph_rows_launch<t.value, 3, glu>(args, n_groups, stream); break;
            case 4: moegraph_rows_launch<t.value, 4, glu>(args, n_groups, stream); break;
            default: GGML_ABORT("fatal error");
        }
    });
}

// What a product becomes: a node behind it that adds a bias, or combines it with a gate product (gate) by a GLU (out).
struct moegraph_rows_end {
    ggml_tensor       * out       = nullptr; // the product itself, or the node
    const ggml_tensor * bias      = nullptr; // of one row only
    const ggml_tensor * gate      = nullptr;
    const ggml_tensor * bias_gate = nullptr;
};

// What a kernel gets for n_dst products of the same activations; a gate only goes with one. one: kernels of one row.
static moegraph_rows_args moegraph_rows_fill(ggml_tensor * const * dsts, const moegraph_rows_end * ends, const int n_dst,
        const bool one, const moegraph_rows_operands & operands) {
    const ggml_tensor * gate = ends[0].gate;
    const ggml_tensor * glu  = gate ? ends[0].out : nullptr;
    const ggml_tensor * dst  = dsts[0];
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];
    const ggml_tensor * ids  = dst->op == GGML_OP_MUL_MAT_ID ? dst->src[2] : nullptr;
    const int64_t  n_values  = src1->ne[0];

    moegraph_rows_args args = {};
    args.n_segments = n_dst;
    args.early      = !gate || moegraph_is_constant(gate->src[0]);
    args.apart      = moegraph_rows_are_apart(dst);
    for (int i = 0; i < n_dst; ++i) {
        const ggml_tensor * w   = dsts[i]->src[0];
        const ggml_tensor * out = ends[i].out;
        args.segments[i] = {
            (const char *) w->data, (float *) out->data, (int64_t) (out->nb[1]/sizeof(float)), (int) w->ne[1], 0, 1,
            ends[i].bias ? (const float *) ends[i].bias->data : nullptr };
        args.early = args.early && moegraph_is_constant(w);
        args.stride_dst_token = out->nb[2]/sizeof(float);
    }
    args.x_gate           = gate ? (const char *) gate->src[0]->data : nullptr;
    args.bias_gate        = ends[0].bias_gate ? (const float *) ends[0].bias_gate->data : nullptr;
    args.stride_bias      = ids && ends[0].bias ? ends[0].bias->nb[1]/sizeof(float) : 0;
    args.y                = operands.y;
    args.raw              = operands.raw;
    args.groups           = operands.groups;
    args.n_groups         = operands.n_groups;
    args.ids              = one && ids ? (const int32_t *) ids->data : nullptr;
    args.n_experts        = src0->ne[2];
    args.row_bytes        = (int) ggml_row_size(src0->type, n_values);
    args.stride_row       = src0->nb[1];
    args.stride_expert    = src0->nb[2];
    args.n_cols           = ids ? 0 : src1->ne[1];
    args.n_chunks         = moegraph_padded(n_values)/MOEGRAPH_CHUNK;
    args.n_used           = ids ? ids->ne[0] : 1;
    args.n_y              = ids ? src1->ne[1] : 1;
    args.glu_op           = glu ? ggml_get_glu_op(glu) : 0;
    args.glu_limit        = glu ? ggml_get_op_params_f32(glu, 3) : 0.0f;
    args.group_cols       = operands.group_cols;
    return args;
}

// Whether the shared expert that follows may share a launch with gate and up of a token's experts.
static bool moegraph_rows_have_shared(ggml_backend_cuda_context & ctx, const ggml_tensor * routed) {
    const moegraph_shared_expert & s = moegraph_get_context(ctx).next_shared;
    const int cc = ggml_cuda_info().devices[ctx.device].cc;
    return s.up != nullptr && ctx.curr_stream_no == 0 && !moegraph_done_has(ctx, s.glu) &&
        moegraph_rows_origin(s.up->src[1]) == moegraph_rows_origin(routed->src[1]) &&
        moegraph_rows_type(s.up->src[0]) == GGML_TYPE_Q8_0 && moegraph_rows_supported(s.up, s.gate, cc) &&
        moegraph_rows_is_one(s.up, cc) && ggml_get_glu_op(s.glu) == GGML_GLU_OP_SWIGLU &&
        ggml_get_op_params_i32(s.glu, 1) == 0 && ggml_is_contiguous(s.glu) && ggml_are_same_shape(s.up, s.gate) &&
        ggml_are_same_stride(s.up->src[0], s.gate->src[0]) && s.down->src[0]->type == GGML_TYPE_Q8_0 && s.scale != nullptr;
}

bool moegraph_rows_fetches(ggml_backend_cuda_context & ctx, const ggml_tensor * routed, const ggml_tensor * fetch,
        const ggml_tensor * gate) {
    return moegraph_rows_origin(routed->src[2]) == fetch && routed->src[2]->data == fetch->data &&
        ggml_nelements(routed->src[2]) == ggml_nelements(fetch) && moegraph_rows_have_shared(ctx, routed) &&
        moegraph_get_context(ctx).next_shared.scale == gate &&
        moegraph_rows_is_one(routed, ggml_cuda_info().devices[ctx.device].cc);
}

// Has the launch fetch what the router's look-up did not find. Returns false, and does nothing, if gate and up are not the
// beginning of an expert, or not in pieces of 16 bytes, or have biases, which other warps would copy.
static bool moegraph_rows_set_fetch(
        ggml_backend_cuda_context & ctx, const int32_t * slots, moegraph_rows_args & args) {
    ggml_tensor * node = moegraph_get_context(ctx).router.fetch;
    const ggml_tensor * from = node->src[3], * to = node->src[4];
    const int64_t gate = args.x_gate - (const char *) to->data, up = args.segments[0].x - (const char *) to->data;
    const int64_t n_bytes = from->ne[0]*(int64_t) sizeof(float), size = args.segments[0].n_rows*args.stride_row;
    const int64_t first = std::min(gate, up), second = std::max(gate, up), rest = second + size;
    const uintptr_t bits = (uintptr_t) from->data | (uintptr_t) to->data | (uintptr_t) (args.row_bytes | second | rest | n_bytes);
    const bool biased = args.segments[0].bias != nullptr || args.bias_gate != nullptr;
    const bool packed = first == 0 && second >= size && rest <= n_bytes && args.stride_row == args.row_bytes &&
        args.stride_expert == (int64_t) to->nb[1] && args.n_experts == to->ne[1];
    if (biased || !packed || bits % 16 != 0) {
        return false;
    }
    args.ids   = slots;
    args.fetch = { (const char *) from->data, (char *) to->data, (int32_t *) node->data, (int64_t) from->nb[1],
        (int64_t) to->nb[1], (int) rest, (int) n_bytes };
    return true;
}

// Runs gate and up of a token's experts together with those of the shared expert of the same row, and fetches what the router's
// look-up did not find. Returns false, and does nothing, if there is no such expert, or if its down would be a launch of its own
// (moegraph-layer-end.cu): then a branch is better.
static bool moegraph_rows_run_shared(
        ggml_backend_cuda_context & ctx, const ggml_tensor * routed, const ggml_type type, moegraph_rows_args args) {
    moegraph_shared_expert s = moegraph_get_context(ctx).next_shared;
    const int32_t * slots = moegraph_router_slots(ctx, routed->src[2]);
    if (!moegraph_rows_have_shared(ctx, routed) || moegraph_router_gate(ctx, s.scale) == nullptr ||
            (slots != nullptr && !moegraph_rows_set_fetch(ctx, slots, args))) {
        return false;
    }
    moegraph_rows_operands operands(ctx.pool());
    moegraph_rows_prepare(ctx, s.up, true, operands); // the row has been quantized for the other experts
    const moegraph_rows_end end = { s.glu, nullptr, s.gate, nullptr };
    moegraph_rows_args shared = moegraph_rows_fill(&s.up, &end, 1, true, operands);
    if (operands.raw != nullptr || !moegraph_one_experts(type, args, shared, ctx.stream())) {
        return false;
    }
    for (const ggml_tensor * node : { s.up, s.gate, s.glu }) {
        moegraph_done_add(ctx, node);
    }
    return true;
}

static void moegraph_rows_run(
        ggml_backend_cuda_context & ctx, ggml_tensor * const * dsts, const moegraph_rows_end * ends, const int n_dst) {
    const ggml_tensor * dst  = dsts[0];
    const ggml_tensor * ids  = dst->op == GGML_OP_MUL_MAT_ID ? dst->src[2] : nullptr;
    const bool          glu  = ends[0].gate != nullptr;
    const ggml_type     type = moegraph_rows_type(dst->src[0]);
    const bool          one  = moegraph_one_supported(dst, type, ggml_cuda_info().devices[ctx.device].cc);
    if (ids && !(one && glu)) {
        moegraph_router_fetch(ctx, ids);
    }
    moegraph_rows_operands operands(ctx.pool());
    moegraph_rows_prepare(ctx, dst, one, operands);
    moegraph_rows_args args = moegraph_rows_fill(dsts, ends, n_dst, one, operands);

    const bool many = moegraph_rows_are_many(dst);
    int n_groups = 1;
    if (ids) { // blocks of groups that there are not end at once
        n_groups = moegraph_max_groups(ids->ne[0]*ids->ne[1], args.n_experts, args.group_cols);
    } else if (many) {
        n_groups = (args.n_cols + args.group_cols - 1)/args.group_cols;
    }
    if (one && ids && glu) {
        if (moegraph_rows_run_shared(ctx, dst, type, args) ||
                (moegraph_router_fetch(ctx, ids) && moegraph_rows_run_shared(ctx, dst, type, args))) {
            return;
        }
    }
    if (one) {
        moegraph_one_mul_mat(type, args, ctx.stream());
    } else if (many) {
        moegraph_wide_mul_mat(type, args, n_groups, ctx.stream());
    } else if (glu) {
        moegraph_rows_switch_tiles<true>(type, args, n_groups, ctx.stream());
    } else {
        moegraph_rows_switch_tiles<false>(type, args, n_groups, ctx.stream());
    }
}

void moegraph_rows_mul_mat(ggml_backend_cuda_context & ctx, ggml_tensor * dst, const ggml_tensor * gate,
        ggml_tensor * glu) {
    const moegraph_rows_end end = { gate ? glu : dst, nullptr, gate, nullptr };
    moegraph_rows_run(ctx, &dst, &end, 1);
}

// Finds gate and up of experts with biases and the GLU behind them, of one row. Returns the GLU's node, 0 if node i is none.
// There may be no memory yet.
static int moegraph_rows_find_biased(
        const ggml_cgraph * cgraph, const int i, const int cc, ggml_tensor ** up, moegraph_rows_end & end) {
    static const ggml_op ops[5] = {
        GGML_OP_MUL_MAT_ID, GGML_OP_ADD_ID, GGML_OP_MUL_MAT_ID, GGML_OP_ADD_ID, GGML_OP_GLU };
    int found[5];
    if (cgraph->nodes[i]->op != ops[0] || moegraph_find_ops(cgraph, i, ops, 5, found) < 0) {
        return 0;
    }
    for (int n = 0; n < 4; ++n) {
        if (!ggml_node_has_n_uses(cgraph, found[n], 1)) {
            return 0;
        }
    }
    ggml_tensor * products[2] = { cgraph->nodes[found[0]], cgraph->nodes[found[2]] };
    ggml_tensor * biased[2]   = { cgraph->nodes[found[1]], cgraph->nodes[found[3]] };
    end.out = cgraph->nodes[found[4]];
    const int g = end.out->src[0] == biased[1];
    for (int n = 0; n < 2; ++n) {
        const ggml_tensor * bias = biased[n]->src[1];
        if (biased[n]->src[0] != products[n] || biased[n]->src[2] != products[n]->src[2] ||
                products[n]->src[1] != products[0]->src[1] || products[n]->src[2] != products[0]->src[2] ||
                products[n]->src[0]->nb[1] != products[0]->src[0]->nb[1] ||
                products[n]->src[0]->nb[2] != products[0]->src[0]->nb[2] || !ggml_are_same_shape(products[n], products[0]) ||
                bias->type != GGML_TYPE_F32 || bias->nb[0] != sizeof(float) || bias->nb[1] != biased[0]->src[1]->nb[1]) {
            return 0;
        }
    }
    if (end.out->src[0] != biased[g] || end.out->src[1] != biased[1 - g] || ggml_get_op_params_i32(end.out, 1) != 0 ||
            !ggml_is_contiguous(end.out)) {
        return 0;
    }
    switch (ggml_get_glu_op(end.out)) {
        case GGML_GLU_OP_SWIGLU:
        case GGML_GLU_OP_GEGLU:
        case GGML_GLU_OP_SWIGLU_OAI:
            break;
        default:
            return 0;
    }
    *up           = products[1 - g];
    end.bias      = biased[1 - g]->src[1];
    end.gate      = products[g];
    end.bias_gate = biased[g]->src[1];
    return products[0]->ne[2] == 1 && products[0]->src[1]->ne[1] == 1 && GGML_CUDA_CC_IS_NVIDIA(cc) ? found[4] : 0;
}

int moegraph_rows_try_biased(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, const int i) {
    const int cc = ggml_cuda_info().devices[ctx.device].cc;
    moegraph_rows_end end;
    ggml_tensor * up;
    const int last = moegraph_rows_find_biased(cgraph, i, cc, &up, end);
    if (last == 0 || !moegraph_rows_supported(up, end.gate, cc) || !moegraph_rows_is_one(up, cc) ||
            !moegraph_apart(end.out, up->src[1]) || !moegraph_apart(end.out, up->src[2])) {
        return 0;
    }
    moegraph_rows_run(ctx, &up, &end, 1);
    return last - i;
}

void moegraph_rows_keep(const ggml_cgraph * cgraph, const int i, const ggml_backend_graph_optimize_params * params) {
    moegraph_rows_end end;
    ggml_tensor * up;
    if (moegraph_rows_find_biased(cgraph, i, ggml_cuda_info().devices[ggml_cuda_get_device()].cc, &up, end)) {
        params->add_alloc_dep(params->user_data, up->src[1], end.out);
        params->add_alloc_dep(params->user_data, up->src[2], end.out);
    }
}

// What node j adds to the product of node i, one row, if nothing but views lies between, and nothing else reads the product:
// a residual, not a constant bias. nullptr if node j is no such sum.
static const ggml_tensor * moegraph_rows_residual(const ggml_cgraph * cgraph, const int i, const int j) {
    const ggml_tensor * sum = cgraph->nodes[j], * from[2] = { sum->src[0], sum->src[1] };
    if (sum->op != GGML_OP_ADD || ggml_nelements(sum) != sum->ne[0] || !ggml_is_contiguous(sum) ||
            ggml_nelements(cgraph->nodes[i]) != ggml_nelements(sum) ||
            !ggml_node_has_n_uses(cgraph, i, 1)) {
        return nullptr;
    }
    for (int k = j - 1; k > i; --k) {
        const ggml_tensor * node = cgraph->nodes[k];
        for (const ggml_tensor *& t : from) {
            if (t == node && node->op == GGML_OP_RESHAPE && ggml_node_get_use_count(cgraph, k) == 1 &&
                    (node->flags & GGML_TENSOR_FLAG_OUTPUT) == 0) {
                t = node->src[0];
            }
        }
    }
    const int own = from[0] == cgraph->nodes[i] ? 0 : 1;
    const ggml_tensor * x = sum->src[1 - own];
    const bool plain = x->type == GGML_TYPE_F32 && ggml_are_same_shape(x, sum) && ggml_is_contiguous(x) &&
        !moegraph_is_constant(x);
    return from[own] == cgraph->nodes[i] && from[1 - own] != cgraph->nodes[i] && plain &&
        (x->data == sum->data || moegraph_apart(x, sum)) ? x : nullptr;
}

int moegraph_rows_try_group(ggml_backend_cuda_context & ctx, ggml_cgraph * cgraph, const int i) {
    const int cc = ggml_cuda_info().devices[ctx.device].cc;
    ggml_tensor * first = cgraph->nodes[i];
    if (first->op != GGML_OP_MUL_MAT || ctx.curr_stream_no != 0 || !moegraph_rows_supported(first, nullptr, cc)) {
        return 0;
    }
    ggml_tensor * dsts[MOEGRAPH_MAX_SEGMENTS] = { first };
    moegraph_rows_end ends[MOEGRAPH_MAX_SEGMENTS];
    ends[0].out = first;
    const bool one = moegraph_rows_is_one(first, cc);
    int at[MOEGRAPH_MAX_SEGMENTS] = { i };
    int n_dst  = 1;
    int i_last = i;
    for (int j = i + 1; j < cgraph->n_nodes; ++j) {
        ggml_tensor * node = cgraph->nodes[j];
        if (moegraph_is_view_op(node)) {
            continue;
        }
        if (const ggml_tensor * residual = one && i_last == i ? moegraph_rows_residual(cgraph, i, j) : nullptr) {
            if ((node->flags & GGML_TENSOR_FLAG_COMPUTE) != 0) {
                ends[0].out  = node;
                ends[0].bias = residual;
                i_last = j;
            }
            break;
        }
        int own = n_dst; // the product to whose row the node adds a bias
        if (one && node->op == GGML_OP_ADD && node->src[1]->type == GGML_TYPE_F32 && ggml_is_contiguous(node->src[1]) &&
                ggml_are_same_shape(node, node->src[0]) && ggml_nelements(node->src[1]) == node->ne[0] &&
                moegraph_is_constant(node->src[1]) && moegraph_apart(node, first->src[1])) {
            for (own = 0; own < n_dst && !(ends[own].out == node->src[0] && ends[own].bias == nullptr &&
                    ggml_node_has_n_uses(cgraph, at[own], 1)); ++own) {
            }
        }
        const bool bias = own < n_dst;
        const bool same = !bias && n_dst < MOEGRAPH_MAX_SEGMENTS && node->op == GGML_OP_MUL_MAT &&
            node->src[1] == first->src[1] && node->src[0]->type == first->src[0]->type &&
            node->src[0]->nb[1] == first->src[0]->nb[1] && moegraph_rows_supported(node, nullptr, cc) &&
            !(j + 2 < cgraph->n_nodes && cgraph->nodes[j + 2]->op == GGML_OP_GLU);
        bool apart = (bias || same) && (node->flags & GGML_TENSOR_FLAG_COMPUTE) != 0;
        for (int d = 0; apart && d < n_dst; ++d) { // results that nobody reads may lie in the same place
            apart = d == own || moegraph_apart(node, ends[d].out);
        }
        if (!apart) {
            break;
        }
        if (bias) {
            ends[own].out  = node;
            ends[own].bias = node->src[1];
        } else {
            at[n_dst] = j;
            ends[n_dst].out = node;
            dsts[n_dst++]   = node;
        }
        i_last = j;
    }
    if (i_last == i) {
        return 0;
    }
    moegraph_rows_run(ctx, dsts, ends, n_dst);
    return i_last - i;
}
