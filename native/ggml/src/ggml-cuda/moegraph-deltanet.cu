#include "moegraph-conv.cuh"
#include "moegraph-delta-step.cuh"
#include "moegraph-deltanet.cuh"
#include "moegraph-match.cuh"
#include "moegraph-rows.cuh"
#include "moegraph-rows-types.cuh"
#include "unary.cuh"

#include <vector>

constexpr int MOEGRAPH_STEP_THREADS = 128; // channels of a block
constexpr int MOEGRAPH_STEP_TOKENS  = 32; // of a block; a tree has no more
constexpr int MOEGRAPH_STEP_SEQS    = 65535; // blocks in y, and in z
constexpr int MOEGRAPH_GATED_THREADS = 256;

// The first blocks take 128 channels each, the others the gates, if there are any. blockIdx.y: the sequence, z: which 32 rows.
template <int d, bool tree>
static __global__ void moegraph_step_kernel(const moegraph_step_args args) {
    ggml_cuda_pdl_lc();
    const int s = blockIdx.y;
    if ((int) blockIdx.x >= args.n_conv_blocks) {
        ggml_cuda_pdl_sync();
        const int i = (blockIdx.x - args.n_conv_blocks)*MOEGRAPH_STEP_THREADS + threadIdx.x;
        if (blockIdx.z == 0 && i < args.n_v*args.n_tokens) {
            const int64_t at = (int64_t) s*args.n_v*args.n_tokens + i;
            const int     h  = i % args.n_v;
            const float   x  = args.alpha[at] + args.dt[h];
            args.beta_out[at] = 1.0f/(1.0f + expf(-args.beta[at]));
            args.gate[at]     = (x > 20.0f ? x : logf(1.0f + expf(x)))*args.a[h];
        }
        return;
    }

    __shared__ float values[MOEGRAPH_STEP_TOKENS][MOEGRAPH_STEP_THREADS];
    __shared__ moegraph_conv_windows<MOEGRAPH_STEP_D_CONV, tree ? MOEGRAPH_STEP_TOKENS : 1> windows;
    const int first = blockIdx.x*MOEGRAPH_STEP_THREADS;
    const int c     = first + threadIdx.x;
    int    slot = 0;
    float4 w4   = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (args.early_slots) {
        slot = args.slots[s];
    }
    if (args.early_w) {
        w4 = *(const float4 *) (args.w + (int64_t) c*MOEGRAPH_STEP_D_CONV);
    }
    ggml_cuda_pdl_sync();
    if (!args.early_slots) {
        slot = args.slots[s];
    }
    if (!args.early_w) {
        w4 = *(const float4 *) (args.w + (int64_t) c*MOEGRAPH_STEP_D_CONV);
    }

    const int     row0   = blockIdx.z*MOEGRAPH_STEP_TOKENS;
    const int     n_here = min(MOEGRAPH_STEP_TOKENS, args.n_tokens - row0);
    const float   w[MOEGRAPH_STEP_D_CONV] = { w4.x, w4.y, w4.z, w4.w };
    const float * qkv  = args.qkv + s*args.qkv_s + c;
    float       * conv = args.conv + ((int64_t) s*args.n_tokens + row0)*args.n_channels + c;
    const bool    norm = first < 2*args.n_qk;
    const auto put = [&](const int t, const float sum) {
        const float y = ggml_cuda_op_silu_single(sum);
        conv[(int64_t) t*args.n_channels] = y;
        if (norm) {
            values[t][threadIdx.x] = y;
        }
    };
    float * past = args.pool + slot*args.pool_s + (int64_t) c*(MOEGRAPH_STEP_D_CONV - 1);
    if (slot < 0 || slot >= args.n_slots) {
        for (int t = 0; t < n_here; ++t) {
            put(t, 0.0f);
        }
    } else if (tree) {
        windows.make(args.parents + (int64_t) s*args.n_tokens, args.n_tokens, 0, args.n_tokens);
        windows.convolve(past, qkv, args.qkv_t, args.n_tokens, w, put);
    } else {
        float x[MOEGRAPH_STEP_D_CONV];
        const int n_rows = moegraph_n_rows(args.lengths, s, args.n_tokens);
        const int n_real = max(0, min(n_here, n_rows - row0));
        moegraph_conv_chain<MOEGRAPH_STEP_D_CONV>(past, qkv, args.qkv_t, row0, n_real, w, x, put);
        for (int t = n_real; t < n_here; ++t) {
            put(t, 0.0f);
        }
        if (row0 == 0) { // the block that reads the state writes it: no other one would know when it has
#pragma unroll
            for (int j = 0; j < MOEGRAPH_STEP_D_CONV - 1; ++j) {
                past[j] = n_real < n_rows ? qkv[(n_rows - (MOEGRAPH_STEP_D_CONV - 1) + j)*args.qkv_t] : x[j];
            }
        }
    }
    if (!norm) {
        return;
    }
    __syncthreads();

    // one warp a head and token
    constexpr int n_heads = MOEGRAPH_STEP_THREADS/d;
    constexpr int n_lane  = d/WARP_SIZE;
    const bool    is_k  = first >= args.n_qk;
    const int     lane  = threadIdx.x % WARP_SIZE;
    float       * dst   = is_k ? args.k : args.q;
    for (int item = threadIdx.x/WARP_SIZE; item < n_heads*n_here; item += MOEGRAPH_STEP_THREADS/WARP_SIZE) {
        const int t    = item/n_heads;
        const int from = (item % n_heads)*d;
        float v[n_lane];
        float squares = 0.0f;
#pragma unroll
        for (int j = 0; j < n_lane; ++j) {
            v[j] = values[t][from + j*WARP_SIZE + lane];
            squares += v[j]*v[j];
        }
        squares = warp_reduce_sum<WARP_SIZE>(squares);
        const float scale = rsqrtf(squares/d + args.eps[is_k]);
        float * row = dst + ((int64_t) s*args.n_tokens + row0 + t)*args.n_qk + (first - (is_k ? args.n_qk : 0)) + from;
#pragma unroll
        for (int j = 0; j < n_lane; ++j) {
            row[j*WARP_SIZE + lane] = scale*v[j]*args.scale[is_k];
        }
    }
}

// d/4 threads a row.
template <int d>
static __global__ void moegraph_gated_norm_kernel(
        const float * x, const float * w, const float * z, float * dst, moegraph_block_y * y, const int n_rows,
        const int early, const float eps) {
    ggml_cuda_pdl_lc();
    constexpr int n_threads = d/4;
    const int     row = blockIdx.x*(MOEGRAPH_GATED_THREADS/n_threads) + threadIdx.x/n_threads;
    const int     i   = 4*(threadIdx.x % n_threads);
    if (!early) {
        ggml_cuda_pdl_sync();
    }
    const float4  f   = *(const float4 *) (w + i);
    if (early) {
        ggml_cuda_pdl_sync();
    }
    if (row >= n_rows) {
        return; // whole groups of n_threads
    }
    const int64_t at = (int64_t) row*d + i;
    const float4  v  = *(const float4 *) (x + at);
    const float4  g  = *(const float4 *) (z + at);
    moegraph_gated_row<d>(v, f, g, eps, dst + at, y ? y + at/32 : nullptr);
}

static bool moegraph_is_f32(const ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 && ggml_is_contiguous(t) && (uintptr_t) t->data % 16 == 0;
}

static bool moegraph_has_ne(const ggml_tensor * t, const int64_t ne0, const int64_t ne1, const int64_t ne2) {
    return t->ne[0] == ne0 && t->ne[1] == ne1 && t->ne[2] == ne2 && t->ne[3] == 1;
}

// Without gates, BETA to GATE are nullptr: a commit has them from the pass before.
struct moegraph_step_nodes {
    enum { BETA, ADD, SOFTPLUS, GATE, CONV, SILU, Q_NORM, Q, K_NORM, K, N };
    ggml_tensor * at[N];
    int           found[N];
    int           last;

    bool has_gates() const { return at[BETA] != nullptr; }
};

static bool moegraph_step_match(const ggml_cgraph * cgraph, const int i, moegraph_step_nodes & m) {
    using nodes = moegraph_step_nodes;
    const int first = cgraph->nodes[i]->op == GGML_OP_MOEGRAPH_CONV ? nodes::CONV : nodes::BETA;
    static const ggml_op ops[nodes::N] = {
        GGML_OP_UNARY, GGML_OP_ADD, GGML_OP_UNARY, GGML_OP_MUL, GGML_OP_MOEGRAPH_CONV, GGML_OP_UNARY,
        GGML_OP_RMS_NORM, GGML_OP_SCALE, GGML_OP_RMS_NORM, GGML_OP_SCALE,
    };
    int * found = m.found;
    m.last = moegraph_find_ops(cgraph, i, ops + first, nodes::N - first, found + first);
    if (m.last < 0) {
        return false;
    }
    for (int n = 0; n < nodes::N; ++n) {
        m.at[n] = n < first ? nullptr : cgraph->nodes[found[n]];
    }
    ggml_tensor ** at = m.at;
    for (const int n : { nodes::ADD, nodes::SOFTPLUS, nodes::CONV, nodes::Q_NORM, nodes::K_NORM }) {
        if (n >= first && !ggml_node_has_n_uses(cgraph, found[n], 1)) {
            return false;
        }
    }
    const bool gates = !m.has_gates() ||
        (moegraph_is_unary(at[nodes::BETA], GGML_UNARY_OP_SIGMOID) &&
        moegraph_is_unary(at[nodes::SOFTPLUS], GGML_UNARY_OP_SOFTPLUS) &&
        at[nodes::SOFTPLUS]->src[0] == at[nodes::ADD] && at[nodes::GATE]->src[0] == at[nodes::SOFTPLUS]);
    return gates && moegraph_is_unary(at[nodes::SILU], GGML_UNARY_OP_SILU) &&
        at[nodes::SILU]->src[0] == at[nodes::CONV] && at[nodes::Q]->src[0] == at[nodes::Q_NORM] && at[nodes::K]->src[0] == at[nodes::K_NORM] &&
        at[nodes::Q_NORM]->src[0]->view_src == at[nodes::SILU] &&
        at[nodes::K_NORM]->src[0]->view_src == at[nodes::SILU];
}

static bool moegraph_step_may_begin(const ggml_tensor * node) {
    return node->op == GGML_OP_MOEGRAPH_CONV || moegraph_is_unary(node, GGML_UNARY_OP_SIGMOID);
}

// Shapes, strides and places; needs allocated tensors.
static bool moegraph_step_supported(const moegraph_step_nodes & m) {
    using nodes = moegraph_step_nodes;
    ggml_tensor * const * at = m.at;
    const ggml_tensor * qkv  = at[nodes::CONV]->src[0];
    const ggml_tensor * w    = at[nodes::CONV]->src[1];
    const ggml_tensor * pool = at[nodes::CONV]->src[2];
    const ggml_tensor * slots   = at[nodes::CONV]->src[3];
    const ggml_tensor * parents = at[nodes::CONV]->src[4];
    const ggml_tensor * lengths = at[nodes::CONV]->src[5];
    const ggml_tensor * silu = at[nodes::SILU];
    const ggml_tensor * q    = at[nodes::Q_NORM]->src[0];
    const ggml_tensor * k    = at[nodes::K_NORM]->src[0];

    const int64_t n_channels = silu->ne[0];
    const int64_t n_tokens   = silu->ne[1];
    const int64_t n_seqs     = silu->ne[2];
    const int64_t d          = q->ne[0];
    const int64_t n_qk       = d*q->ne[1];

    const int64_t n_groups   = (n_tokens + MOEGRAPH_STEP_TOKENS - 1)/MOEGRAPH_STEP_TOKENS;
    const bool sizes = (d == 64 || d == 128) && n_groups <= (parents ? 1 : MOEGRAPH_STEP_SEQS) && n_seqs <= MOEGRAPH_STEP_SEQS &&
        n_channels % MOEGRAPH_STEP_THREADS == 0 && n_qk % MOEGRAPH_STEP_THREADS == 0 && 2*n_qk <= n_channels &&
        w->ne[0] == MOEGRAPH_STEP_D_CONV;
    bool heads = ggml_are_same_shape(q, k) && q->ne[2] == n_tokens && q->ne[3] == n_seqs && q->view_offs == 0 &&
        k->view_offs == n_qk*sizeof(float);
    for (const ggml_tensor * t : { q, k }) {
        heads = heads && t->nb[0] == sizeof(float) && t->nb[1] == d*sizeof(float) && t->nb[2] == silu->nb[1] &&
            t->nb[3] == silu->nb[2];
    }
    if (!sizes || !heads || !moegraph_is_f32(w)) {
        return false;
    }
    for (const int n : { nodes::Q, nodes::K }) {
        if (ggml_get_op_params_f32(at[n], 1) != 0.0f) {
            return false; // a scale with a bias
        }
    }
    std::vector<const ggml_tensor *> out = { silu, at[nodes::Q], at[nodes::K] };
    std::vector<const ggml_tensor *> in  = { qkv, w, slots };
    for (const ggml_tensor * t : { parents, lengths }) {
        if (t != nullptr) {
            in.push_back(t);
        }
    }
    const ggml_tensor * beta = nullptr, * alpha = nullptr;
    if (m.has_gates()) {
        beta  = at[nodes::BETA]->src[0];
        alpha = at[nodes::ADD]->src[0];
        const ggml_tensor * dt  = at[nodes::ADD]->src[1];
        const ggml_tensor * a   = at[nodes::GATE]->src[1];
        const int64_t       n_v = alpha->ne[0];
        if (!moegraph_has_ne(alpha, n_v, n_tokens, n_seqs) || ggml_nelements(beta) != ggml_nelements(alpha) ||
                !moegraph_has_ne(dt, n_v, 1, 1) || !moegraph_has_ne(a, n_v, 1, 1) || lengths != nullptr) {
            return false;
        }
        out.insert(out.end(), { at[nodes::BETA], at[nodes::GATE] });
        in.insert(in.end(), { beta, alpha, dt, a });
        if (!moegraph_is_f32(beta) || !moegraph_is_f32(alpha) || !moegraph_is_f32(dt) || !moegraph_is_f32(a)) {
            return false;
        }
    }
    for (const ggml_tensor * t : out) {
        if (!moegraph_is_f32(t)) {
            return false;
        }
    }
    out.push_back(pool);
    // every block writes while others still read; only a value's own thread may find its place taken
    const bool same_rows = n_tokens == 1 && (n_seqs == 1 || qkv->nb[2] == silu->nb[2]);
    for (const ggml_tensor * o : out) {
        for (const ggml_tensor * read : in) {
            const bool own = (o == silu && read == qkv && same_rows) ||
                (m.has_gates() && ((o == at[nodes::BETA] && read == beta) || (o == at[nodes::GATE] && read == alpha)));
            if (!moegraph_apart(o, read) && !(own && o->data == read->data)) {
                return false;
            }
        }
        for (const ggml_tensor * other : out) {
            if (o != other && !moegraph_apart(o, other)) {
                return false;
            }
        }
    }
    return true;
}

// The convolution and its activation: one kernel for two nodes.
static int moegraph_conv_silu_try(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, const int i) {
    static const ggml_op ops[2] = { GGML_OP_MOEGRAPH_CONV, GGML_OP_UNARY };
    int found[2]; // none if node i is another operation
    const int last = moegraph_find_ops(cgraph, i, ops, 2, found);
    if (last < 0 || !ggml_node_has_n_uses(cgraph, i, 1)) {
        return 0;
    }
    const ggml_tensor * conv = cgraph->nodes[i];
    ggml_tensor       * silu = cgraph->nodes[last];
    if (!moegraph_is_unary(silu, GGML_UNARY_OP_SILU) || silu->src[0] != conv || !moegraph_is_f32(silu) ||
            !moegraph_apart(silu, conv->src[0])) {
        return 0;
    }
    moegraph_conv(ctx, conv, silu, true);
    return last - i;
}

struct moegraph_gated_nodes {
    ggml_tensor * norm;
    ggml_tensor * weighted;
    ggml_tensor * silu;
    ggml_tensor * dst;
    int           last;
};

static bool moegraph_gated_match(const ggml_cgraph * cgraph, const int i, moegraph_gated_nodes & m) {
    static const ggml_op ops[4] = { GGML_OP_RMS_NORM, GGML_OP_MUL, GGML_OP_UNARY, GGML_OP_MUL };
    int found[4];
    m.last = moegraph_find_ops(cgraph, i, ops, 4, found);
    if (m.last < 0) {
        return false;
    }
    m.norm     = cgraph->nodes[found[0]];
    m.weighted = cgraph->nodes[found[1]];
    m.silu     = cgraph->nodes[found[2]];
    m.dst      = cgraph->nodes[found[3]];
    return m.weighted->src[0] == m.norm && moegraph_is_unary(m.silu, GGML_UNARY_OP_SILU) &&
        m.dst->src[0] == m.weighted &&
        m.dst->src[1] == m.silu && ggml_node_has_n_uses(cgraph, found[0], 1) &&
        ggml_node_has_n_uses(cgraph, found[1], 1) &&
        ggml_node_has_n_uses(cgraph, found[2], 1);
}

static bool moegraph_gated_supported(const moegraph_gated_nodes & m) {
    const ggml_tensor * x = m.norm->src[0];
    const ggml_tensor * w = m.weighted->src[1];
    const ggml_tensor * z = m.silu->src[0];
    const int64_t       d = x->ne[0];
    return (d == 64 || d == 128) && moegraph_has_ne(w, d, 1, 1) && moegraph_apart(m.dst, w) &&
        ggml_are_same_shape(x, z) && ggml_are_same_shape(x, m.dst) &&
        moegraph_is_f32(x) && moegraph_is_f32(w) && moegraph_is_f32(z) && moegraph_is_f32(m.dst) &&
        (m.dst->data == x->data || moegraph_apart(m.dst, x)) && (m.dst->data == z->data || moegraph_apart(m.dst, z));
}

static moegraph_gated_args moegraph_gated_args_of(
        ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, const moegraph_gated_nodes & m) {
    // a product reads it as rows of another length
    const ggml_tensor * read = m.dst;
    if (m.last + 1 < cgraph->n_nodes && cgraph->nodes[m.last + 1]->op == GGML_OP_RESHAPE &&
            cgraph->nodes[m.last + 1]->src[0] == read) {
        read = cgraph->nodes[m.last + 1];
    }
    moegraph_gated_args args;
    args.w   = (const float *) m.weighted->src[1]->data;
    args.z   = (const float *) m.silu->src[0]->data;
    args.dst = (float *) m.dst->data;
    args.y   = (moegraph_block_y *) moegraph_rows_reserve(ctx, read);
    args.eps = ggml_get_op_params_f32(m.norm, 0);
    return args;
}

int moegraph_gated_norm_try(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, const int i) {
    moegraph_gated_nodes m;
    if (cgraph->nodes[i]->op != GGML_OP_RMS_NORM || !moegraph_gated_match(cgraph, i, m) || !moegraph_gated_supported(m)) {
        return 0;
    }
    const ggml_tensor * x = m.norm->src[0];
    const moegraph_gated_args args = moegraph_gated_args_of(ctx, cgraph, m);
    const int64_t d = x->ne[0];
    const int n_rows  = ggml_nrows(x);
    const int n_block = MOEGRAPH_GATED_THREADS/(d/4);
    const ggml_cuda_kernel_launch_params params(
        dim3((n_rows + n_block - 1)/n_block), dim3(MOEGRAPH_GATED_THREADS), (size_t) 0, ctx.stream());
    const auto kernel = d == 128 ? moegraph_gated_norm_kernel<128> : moegraph_gated_norm_kernel<64>;
    ggml_cuda_kernel_launch(kernel, params, (const float *) x->data, args.w, args.z, args.dst, args.y, n_rows,
        (int) moegraph_is_constant(m.weighted->src[1]), args.eps);
    return m.last - i;
}

// The delta rule behind a step, and the gated norm behind that if there is one: nodes that moegraph-delta-step.cu computes with
// the step.
struct moegraph_delta_nodes {
    const ggml_tensor *  delta;
    moegraph_gated_nodes gated;
    bool                 has_gated;
    int                  at; // of delta

    int last() const { return has_gated ? gated.last : at; }
};

static int moegraph_next_node(const ggml_cgraph * cgraph, int i) {
    while (++i < cgraph->n_nodes && moegraph_is_view_op(cgraph->nodes[i])) {
    }
    return i;
}

// Nobody else may read what is between the nodes.
static bool moegraph_delta_match(const ggml_cgraph * cgraph, const moegraph_step_nodes & step, moegraph_delta_nodes & m) {
    using nodes = moegraph_step_nodes;
    const int i = moegraph_next_node(cgraph, step.last);
    if (!step.has_gates() || i >= cgraph->n_nodes || cgraph->nodes[i]->op != GGML_OP_MOEGRAPH_DELTA_NET ||
            (cgraph->nodes[i]->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) {
        return false;
    }
    const ggml_tensor * delta = m.delta = cgraph->nodes[i];
    for (const int n : { nodes::BETA, nodes::GATE, nodes::Q, nodes::K }) {
        if (!ggml_node_has_n_uses(cgraph, step.found[n], 1)) {
            return false;
        }
    }
    const auto is_of = [&](const ggml_tensor * t, const int n) { return t == step.at[n] || t->view_src == step.at[n]; };
    if (!ggml_node_has_n_uses(cgraph, step.found[nodes::SILU], 3) || delta->src[0] != step.at[nodes::Q] ||
            delta->src[1] != step.at[nodes::K] || delta->src[2]->view_src != step.at[nodes::SILU] ||
            !is_of(delta->src[3], nodes::GATE) || !is_of(delta->src[4], nodes::BETA) ||
            delta->src[6] != step.at[nodes::CONV]->src[3]) {
        return false;
    }
    const int next = moegraph_next_node(cgraph, i);
    m.at        = i;
    m.has_gated = next < cgraph->n_nodes && cgraph->nodes[next]->op == GGML_OP_RMS_NORM &&
        moegraph_gated_match(cgraph, next, m.gated) &&
        (m.gated.norm->src[0] == delta || m.gated.norm->src[0]->view_src == delta);
    return true;
}

// Shapes and places; needs allocated tensors. Blocks write while others still read.
static bool moegraph_delta_supported(const moegraph_step_nodes & step, moegraph_delta_nodes & m) {
    using nodes = moegraph_step_nodes;
    const ggml_tensor * delta = m.delta;
    const ggml_tensor * silu  = step.at[nodes::SILU];
    const ggml_tensor * v     = delta->src[2];
    const size_t n_qk = ggml_nbytes(step.at[nodes::Q])/delta->ne[3]; // bytes of a sequence
    if (!moegraph_delta_step_supported(delta) || !moegraph_is_f32(delta) || v->view_offs != 2*n_qk ||
            v->nb[1] != MOEGRAPH_DELTA_STEP_D*sizeof(float) || v->nb[3] != silu->nb[2] ||
            silu->ne[0] != (2*delta->src[0]->ne[1] + delta->ne[1])*MOEGRAPH_DELTA_STEP_D) {
        return false;
    }
    m.has_gated = m.has_gated && moegraph_gated_supported(m.gated);
    std::vector<const ggml_tensor *> out = { delta, delta->src[5] };
    std::vector<const ggml_tensor *> in  = {
        step.at[nodes::CONV]->src[0], step.at[nodes::CONV]->src[1], delta->src[6], step.at[nodes::BETA]->src[0],
        step.at[nodes::ADD]->src[0], step.at[nodes::ADD]->src[1], step.at[nodes::GATE]->src[1],
    };
    if (m.has_gated) {
        const ggml_tensor * z = m.gated.silu->src[0]; // its place may be the result's, but nothing else's
        if (!moegraph_apart(delta, z) || !moegraph_apart(delta, m.gated.weighted->src[1])) {
            return false;
        }
        out.push_back(m.gated.dst);
    }
    for (const ggml_tensor * o : out) {
        for (const ggml_tensor * read : in) {
            if (!moegraph_apart(o, read)) {
                return false;
            }
        }
    }
    return true;
}

int moegraph_deltanet_input_try(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, const int i) {
    using nodes = moegraph_step_nodes;
    nodes m;
    if (!moegraph_step_may_begin(cgraph->nodes[i]) || !moegraph_step_match(cgraph, i, m) ||
            !moegraph_step_supported(m)) {
        return moegraph_conv_silu_try(ctx, cgraph, i);
    }
    ggml_tensor * const * at = m.at;
    const ggml_tensor * op      = at[nodes::CONV];
    const ggml_tensor * qkv     = op->src[0];
    const ggml_tensor * pool    = op->src[2];
    const ggml_tensor * parents = op->src[4];
    const ggml_tensor * q       = at[nodes::Q_NORM]->src[0];
    const int n_seqs = at[nodes::SILU]->ne[2];

    moegraph_step_args args = {};
    args.qkv        = (const float *) qkv->data;
    args.qkv_t      = qkv->nb[1]/sizeof(float);
    args.qkv_s      = qkv->nb[2]/sizeof(float);
    args.pool       = (float *) pool->data;
    args.pool_s     = pool->nb[1]/sizeof(float);
    args.slots      = (const int32_t *) op->src[3]->data;
    args.parents    = parents ? (const int32_t *) parents->data : nullptr;
    args.lengths    = op->src[5] ? (const int32_t *) op->src[5]->data : nullptr;
    args.w          = (const float *) op->src[1]->data;
    args.conv       = (float *) at[nodes::SILU]->data;
    args.q          = (float *) at[nodes::Q]->data;
    args.k          = (float *) at[nodes::K]->data;
    args.eps[0]     = ggml_get_op_params_f32(at[nodes::Q_NORM], 0);
    args.eps[1]     = ggml_get_op_params_f32(at[nodes::K_NORM], 0);
    args.scale[0]   = ggml_get_op_params_f32(at[nodes::Q], 0);
    args.scale[1]   = ggml_get_op_params_f32(at[nodes::K], 0);
    if (m.has_gates()) {
        args.beta     = (const float *) at[nodes::BETA]->src[0]->data;
        args.beta_out = (float *) at[nodes::BETA]->data;
        args.alpha    = (const float *) at[nodes::ADD]->src[0]->data;
        args.dt       = (const float *) at[nodes::ADD]->src[1]->data;
        args.a        = (const float *) at[nodes::GATE]->src[1]->data;
        args.gate     = (float *) at[nodes::GATE]->data;
        args.n_v      = at[nodes::ADD]->ne[0];
    }
    args.n_channels = at[nodes::SILU]->ne[0];
    args.n_tokens   = at[nodes::SILU]->ne[1];
    args.n_qk       = q->ne[0]*q->ne[1];
    args.n_conv_blocks = args.n_channels/MOEGRAPH_STEP_THREADS;
    args.n_slots    = pool->ne[1];
    args.early_w     = moegraph_is_constant(op->src[1]);
    args.early_slots = moegraph_is_input(op->src[3]);

    moegraph_delta_nodes d;
    if (moegraph_delta_match(cgraph, m, d) && moegraph_delta_supported(m, d)) {
        moegraph_delta_step_args all = {};
        all.step  = args;
        all.delta = moegraph_delta_args_of(d.delta);
        if (d.has_gated) {
            all.gated = moegraph_gated_args_of(ctx, cgraph, d.gated);
        }
        moegraph_delta_step(ctx, all, d.delta);
        return d.last() - i;
    }

    const int n_gate_blocks = (args.n_v*args.n_tokens + MOEGRAPH_STEP_THREADS - 1)/MOEGRAPH_STEP_THREADS;
    const ggml_cuda_kernel_launch_params params(
        dim3(args.n_conv_blocks + n_gate_blocks, n_seqs, (args.n_tokens + MOEGRAPH_STEP_TOKENS - 1)/MOEGRAPH_STEP_TOKENS),
        dim3(MOEGRAPH_STEP_THREADS), (size_t) 0, ctx.stream());
    const auto kernel = q->ne[0] == 128 ?
        (parents ? moegraph_step_kernel<128, true> : moegraph_step_kernel<128, false>) :
        (parents ? moegraph_step_kernel< 64, true> : moegraph_step_kernel< 64, false>);
    ggml_cuda_kernel_launch(kernel, params, args);
    return m.last - i;
}

void moegraph_deltanet_keep(const ggml_cgraph * cgraph, const int i,
        const ggml_backend_graph_optimize_params * params) {
    moegraph_step_nodes step;
    if (moegraph_step_may_begin(cgraph->nodes[i]) && moegraph_step_match(cgraph, i, step)) {
        using nodes = moegraph_step_nodes;
        moegraph_delta_nodes delta;
        const bool joined = moegraph_delta_match(cgraph, step, delta);
        ggml_tensor * last = joined ? cgraph->nodes[delta.last()] : step.at[nodes::K];
        params->add_alloc_dep(params->user_data, step.at[nodes::CONV]->src[0], last);
        if (step.has_gates()) {
            for (const int n : { nodes::BETA, nodes::ADD }) {
                params->add_alloc_dep(params->user_data, step.at[n]->src[0], last);
            }
        }
    }
    moegraph_gated_nodes gated;
    if (cgraph->nodes[i]->op == GGML_OP_RMS_NORM && moegraph_gated_match(cgraph, i, gated)) {
        params->add_alloc_dep(params->user_data, gated.norm->src[0], gated.dst);
        params->add_alloc_dep(params->user_data, gated.silu->src[0], gated.dst);
    }
}
