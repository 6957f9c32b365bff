#include "moegraph-heads.cuh"

#include "moegraph-match.cuh"
#include "moegraph-parents.cuh"

// As many threads as upstream's kernel for norm, weights and rotation has, because they make the order of its sums. A
// thread has one value of a head.
constexpr int MOEGRAPH_HEADS_THREADS = 256;

enum { MOEGRAPH_HEADS_Q, MOEGRAPH_HEADS_K, MOEGRAPH_HEADS_V };

struct moegraph_heads_args {
    const float   * x[3];      // Q, K, V
    int64_t         x_head[2]; // floats between heads
    int64_t         x_row[3];  // floats between rows
    const float   * w[2];
    float           eps[2];
    float         * q;            // [d, n_head, n_rows]
    half          * cache[3];     // nullptr, keys, values
    int64_t         cache_row[3]; // elements between rows
    const int64_t * places[3];    // of the rows in a cache
    const int32_t * pos;
    const float   * factors;      // nullptr: frequencies are as they are
    float           theta_scale;
    float           freq_scale;
    float           attn_factor;
    int             d;
    int             n_dims;    // that rotate
    int             n_head[2];
    int             n_v;       // values of a row of V
    bool            neox;
    bool            early;     // weights, positions and places may be read before the preceding kernel has ended
};

// The cosine and the sine that pair i of a head rotates by; rope.cu has the formula.
static __device__ __forceinline__ float2 moegraph_heads_angle(const moegraph_heads_args & args, const int i, const int pos) {
    const float base  = pos*powf(args.theta_scale, (float) i);
    const float theta = args.freq_scale*(args.factors != nullptr ? base/args.factors[i] : base);
    return make_float2(cosf(theta)*args.attn_factor, sinf(theta)*args.attn_factor);
}

// A block for each head of Q, then for each of K, then for 256 values of V; blockIdx.y: the row. What does not depend on
// the preceding kernel, angles among it, is there before that has ended.
static __global__ void __launch_bounds__(MOEGRAPH_HEADS_THREADS) moegraph_heads_kernel(const moegraph_heads_args args) {
    ggml_cuda_pdl_lc();
    __shared__ float values[MOEGRAPH_HEADS_THREADS];
    __shared__ float sums[MOEGRAPH_HEADS_THREADS/32];
    const int tid  = threadIdx.x;
    const int row  = blockIdx.y;
    const int n_qk = args.n_head[0] + args.n_head[1];
    const int part = (int) blockIdx.x < args.n_head[0] ? MOEGRAPH_HEADS_Q :
                     (int) blockIdx.x < n_qk           ? MOEGRAPH_HEADS_K : MOEGRAPH_HEADS_V;
    const int head = blockIdx.x - (part == MOEGRAPH_HEADS_Q ? 0 : part == MOEGRAPH_HEADS_K ? args.n_head[0] : n_qk);

    // the pair of values that the thread writes
    const bool mine  = part != MOEGRAPH_HEADS_V && 2*tid < args.d;
    const bool turns = 2*tid < args.n_dims;
    const bool apart = args.neox && turns;
    const int  i0    = apart ? tid : 2*tid;
    const int  i1    = apart ? tid + args.n_dims/2 : 2*tid + 1;
    float   w0 = 0.0f, w1 = 0.0f;
    float2  angle = make_float2(1.0f, 0.0f);
    int64_t place = 0;
    if (!args.early) {
        ggml_cuda_pdl_sync();
    }
    if (mine) {
        w0 = args.w[part][i0];
        w1 = args.w[part][i1];
        if (turns) {
            angle = moegraph_heads_angle(args, tid, args.pos[row]);
        }
    }
    if (part != MOEGRAPH_HEADS_Q) {
        place = args.places[part][row]*args.cache_row[part];
    }
    if (args.early) {
        ggml_cuda_pdl_sync();
    }

    if (part == MOEGRAPH_HEADS_V) {
        const int i = head*MOEGRAPH_HEADS_THREADS + tid;
        if (i < args.n_v) {
            args.cache[part][place + i] = __float2half(args.x[part][row*args.x_row[part] + i]);
        }
        return;
    }
    const float x = tid < args.d ? args.x[part][row*args.x_row[part] + head*args.x_head[part] + tid] : 0.0f;
    values[tid] = x;
    float squares = warp_reduce_sum(__fmul_rn(x, x));
    if (tid % 32 == 0) {
        sums[tid/32] = squares;
    }
    __syncthreads();
    squares = warp_reduce_sum(tid % 32 < MOEGRAPH_HEADS_THREADS/32 ? sums[tid % 32] : 0.0f);
    const float scale = rsqrtf(squares/args.d + args.eps[part]);
    if (!mine) {
        return;
    }
    const float x0 = scale*values[i0]*w0;
    const float x1 = scale*values[i1]*w1;
    // contracted as upstream's kernel is, so that keys and queries have its bits
    const float y0 = turns ? __fmaf_rn(x0, angle.x, -__fmul_rn(x1, angle.y)) : x0;
    const float y1 = turns ? __fmaf_rn(x1, angle.x, __fmul_rn(x0, angle.y)) : x1;
    if (part == MOEGRAPH_HEADS_Q) {
        float * q = args.q + ((int64_t) row*args.n_head[0] + head)*args.d;
        q[i0] = y0;
        q[i1] = y1;
    } else {
        half * k = args.cache[part] + place + head*args.d;
        k[i0] = __float2half(y0);
        k[i1] = __float2half(y1);
    }
}

struct moegraph_heads_nodes {
    enum { Q_NORM, Q_MUL, Q, K_NORM, K_MUL, K, K_SET, V_SET, N };

    ggml_tensor * at[N];
    int           last;
};

static bool moegraph_heads_match(const ggml_cgraph * cgraph, const int i, moegraph_heads_nodes & m) {
    using nodes = moegraph_heads_nodes;
    static const ggml_op ops[nodes::N] = { GGML_OP_RMS_NORM, GGML_OP_MUL, GGML_OP_ROPE, GGML_OP_RMS_NORM, GGML_OP_MUL,
        GGML_OP_ROPE, GGML_OP_SET_ROWS, GGML_OP_SET_ROWS };
    int found[nodes::N];
    m.last = moegraph_find_ops(cgraph, i, ops, nodes::N, found);
    if (m.last < 0) {
        return false;
    }
    for (int n = 0; n < nodes::N; ++n) {
        m.at[n] = cgraph->nodes[found[n]];
    }
    for (const int n : { nodes::Q_NORM, nodes::Q_MUL, nodes::K_NORM, nodes::K_MUL, nodes::K }) {
        if (!ggml_node_has_n_uses(cgraph, found[n], 1)) {
            return false;
        }
    }
    // the one that reads K is a view, and it is for the cache alone
    const ggml_tensor * rows = m.at[nodes::K_SET]->src[0];
    bool alone = false;
    for (int n = found[nodes::K] + 1; n < found[nodes::K_SET]; ++n) {
        alone = alone || (cgraph->nodes[n] == rows && ggml_node_get_use_count(cgraph, n) == 1);
    }
    return alone && moegraph_is_view_op(rows) && rows->src[0] == m.at[nodes::K] && rows->data == m.at[nodes::K]->data &&
        (rows->flags & GGML_TENSOR_FLAG_OUTPUT) == 0 && m.at[nodes::Q_MUL]->src[0] == m.at[nodes::Q_NORM] &&
        m.at[nodes::K_MUL]->src[0] == m.at[nodes::K_NORM] && m.at[nodes::Q]->src[0] == m.at[nodes::Q_MUL] &&
        m.at[nodes::K]->src[0] == m.at[nodes::K_MUL];
}

// Rows of a cache of halves that are written.
static bool moegraph_heads_can_set(const ggml_tensor * set, const int64_t n_values, const int64_t n_rows) {
    const ggml_tensor * rows = set->src[0];
    return set->type == GGML_TYPE_F16 && set->nb[0] == sizeof(half) && set->src[1]->type == GGML_TYPE_I64 &&
        ggml_is_contiguous(set->src[1]) && ggml_nelements(set->src[1]) == n_rows && rows->type == GGML_TYPE_F32 &&
        rows->nb[0] == sizeof(float) && rows->ne[0] == n_values && ggml_nelements(rows) == n_values*n_rows;
}

static bool moegraph_heads_supported(const moegraph_heads_nodes & m) {
    using nodes = moegraph_heads_nodes;
    const ggml_tensor * q = m.at[nodes::Q];
    const ggml_tensor * k = m.at[nodes::K];
    const ggml_tensor * v = m.at[nodes::V_SET]->src[0];
    const int64_t d = q->ne[0], n_rows = q->ne[2];
    for (const int part : { 0, 1 }) {
        const ggml_tensor * norm = m.at[part ? nodes::K_NORM : nodes::Q_NORM];
        const ggml_tensor * w    = m.at[part ? nodes::K_MUL : nodes::Q_MUL]->src[1];
        const ggml_tensor * x    = norm->src[0];
        const ggml_tensor * out  = part ? k : q;
        if (x->type != GGML_TYPE_F32 || x->nb[0] != sizeof(float) || x->ne[3] != 1 || w->type != GGML_TYPE_F32 ||
                w->ne[0] != d || ggml_nelements(w) != d || !ggml_is_contiguous(w) || out->type != GGML_TYPE_F32 ||
                !ggml_are_same_shape(x, out) || !ggml_is_contiguous(out) || !moegraph_apart(w, q)) {
            return false;
        }
    }
    const int mode   = ggml_get_op_params_i32(q, 2);
    const int n_dims = ggml_get_op_params_i32(q, 1);
    const ggml_tensor * x = m.at[nodes::Q_NORM]->src[0];
    return d % 2 == 0 && d <= MOEGRAPH_HEADS_THREADS && k->ne[0] == d && k->ne[2] == n_rows && n_rows <= UINT16_MAX &&
        memcmp(q->op_params, k->op_params, sizeof(q->op_params)) == 0 && q->src[1] == k->src[1] && q->src[2] == k->src[2] &&
        q->src[1]->type == GGML_TYPE_I32 && ggml_nelements(q->src[1]) == n_rows &&
        (mode == GGML_ROPE_TYPE_NORMAL || mode == GGML_ROPE_TYPE_NEOX) && n_dims % 2 == 0 && n_dims <= d &&
        ggml_get_op_params_f32(q, 7) == 0.0f && // YaRN: not here
        ggml_get_op_params_i32(q, 15) == 0 &&   // nor an offset of what rotates
        moegraph_heads_can_set(m.at[nodes::K_SET], d*k->ne[1], n_rows) &&
        moegraph_heads_can_set(m.at[nodes::V_SET], v->ne[0], n_rows) &&
        // blocks write Q while others still read; only a head's own block may find its place taken
        ((q->data == x->data && ggml_are_same_stride(q, x)) || moegraph_apart(q, x)) &&
        moegraph_apart(q, m.at[nodes::K_NORM]->src[0]) && moegraph_apart(q, v);
}

int moegraph_heads_try(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, const int i) {
    using nodes = moegraph_heads_nodes;
    nodes m;
    if (cgraph->nodes[i]->op != GGML_OP_RMS_NORM || !moegraph_heads_match(cgraph, i, m) || !moegraph_heads_supported(m)) {
        return 0;
    }
    const ggml_tensor * q       = m.at[nodes::Q];
    const ggml_tensor * v       = m.at[nodes::V_SET]->src[0];
    const ggml_tensor * factors = q->src[2];

    moegraph_heads_args args = {};
    args.early = moegraph_is_input(q->src[1]) && (factors == nullptr || moegraph_is_constant(factors));
    for (const int part : { MOEGRAPH_HEADS_Q, MOEGRAPH_HEADS_K }) {
        const ggml_tensor * norm = m.at[part ? nodes::K_NORM : nodes::Q_NORM];
        const ggml_tensor * w    = m.at[part ? nodes::K_MUL : nodes::Q_MUL]->src[1];
        args.x[part]      = (const float *) norm->src[0]->data;
        args.x_head[part] = norm->src[0]->nb[1]/sizeof(float);
        args.x_row[part]  = norm->src[0]->nb[2]/sizeof(float);
        args.w[part]      = (const float *) w->data;
        args.eps[part]    = ggml_get_op_params_f32(norm, 0);
        args.n_head[part] = (int) norm->ne[1];
        args.early        = args.early && moegraph_is_constant(w);
    }
    for (const int part : { MOEGRAPH_HEADS_K, MOEGRAPH_HEADS_V }) {
        const ggml_tensor * set = m.at[part == MOEGRAPH_HEADS_K ? nodes::K_SET : nodes::V_SET];
        args.cache[part]     = (half *) set->data;
        args.cache_row[part] = set->nb[1]/sizeof(half);
        args.places[part]    = (const int64_t *) set->src[1]->data;
        args.early           = args.early && moegraph_is_input(set->src[1]);
    }
    args.x[MOEGRAPH_HEADS_V]     = (const float *) v->data;
    args.x_row[MOEGRAPH_HEADS_V] = v->nb[1]/sizeof(float);
    args.n_v         = (int) v->ne[0];
    args.q           = (float *) q->data;
    args.pos         = (const int32_t *) q->src[1]->data;
    args.factors     = factors ? (const float *) factors->data : nullptr;
    args.d           = (int) q->ne[0];
    args.n_dims      = ggml_get_op_params_i32(q, 1);
    args.neox        = ggml_get_op_params_i32(q, 2) == GGML_ROPE_TYPE_NEOX;
    args.theta_scale = powf(ggml_get_op_params_f32(q, 5), -2.0f/args.n_dims);
    args.freq_scale  = ggml_get_op_params_f32(q, 6);
    args.attn_factor = ggml_get_op_params_f32(q, 8);

    const int n_v_blocks = (args.n_v + MOEGRAPH_HEADS_THREADS - 1)/MOEGRAPH_HEADS_THREADS;
    const ggml_cuda_kernel_launch_params params(
        dim3(args.n_head[0] + args.n_head[1] + n_v_blocks, (int) q->ne[2]), dim3(MOEGRAPH_HEADS_THREADS), (size_t) 0,
        ctx.stream());
    ggml_cuda_kernel_launch(moegraph_heads_kernel, params, args);
    return m.last - i;
}
