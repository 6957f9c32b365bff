#include "moegraph-add-rows.cuh"
#include "moegraph-match.cuh"

constexpr int MOEGRAPH_ADD_ROWS_TERMS   = 16; // ADD_IDs
constexpr int MOEGRAPH_ADD_ROWS_THREADS = 256;

struct moegraph_add_rows_args {
    const float * x;       // vectors
    const float * weights; // one of each vector
    float       * rows;
    const int   * target;
    const int   * terms[MOEGRAPH_ADD_ROWS_TERMS]; // which vector is added; below 0: none
    int           n_terms;
    int           n;       // values of a row
    int64_t       stride;  // floats, between rows
};

// One block a target.
static __global__ void __launch_bounds__(MOEGRAPH_ADD_ROWS_THREADS) moegraph_add_rows_kernel(
        const moegraph_add_rows_args args) {
    int   from[MOEGRAPH_ADD_ROWS_TERMS];
    float weight[MOEGRAPH_ADD_ROWS_TERMS];
    bool  any = false;
#pragma unroll
    for (int t = 0; t < MOEGRAPH_ADD_ROWS_TERMS; ++t) {
        from[t]   = t < args.n_terms ? args.terms[t][blockIdx.x] : -1;
        weight[t] = from[t] < 0 ? 0.0f : args.weights[from[t]];
        any       = any || from[t] >= 0;
    }
    if (!any) {
        return; // a row that is named more than once
    }
    float * row = args.rows + args.target[blockIdx.x]*args.stride;
    for (int i = 4*threadIdx.x; i < args.n; i += 4*MOEGRAPH_ADD_ROWS_THREADS) {
        float4 sum = *(const float4 *) (row + i);
#pragma unroll
        for (int t = 0; t < MOEGRAPH_ADD_ROWS_TERMS; ++t) {
            if (from[t] < 0) {
                continue;
            }
            const float4 x = *(const float4 *) (args.x + (int64_t) from[t]*args.n + i);
            // rounded twice, as product and sum are
            sum.x = __fadd_rn(sum.x, __fmul_rn(x.x, weight[t]));
            sum.y = __fadd_rn(sum.y, __fmul_rn(x.y, weight[t]));
            sum.z = __fadd_rn(sum.z, __fmul_rn(x.z, weight[t]));
            sum.w = __fadd_rn(sum.w, __fmul_rn(x.w, weight[t]));
        }
        *(float4 *) (row + i) = sum;
    }
}

static const ggml_tensor * moegraph_viewed(const ggml_tensor * t) {
    while (t->op == GGML_OP_RESHAPE) {
        t = t->src[0];
    }
    return t;
}

static bool moegraph_is_plain_f32(const ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 && ggml_is_contiguous(t) && (uintptr_t) t->data % 16 == 0;
}

// Indices of m rows.
static bool moegraph_is_list(const ggml_tensor * t, const int64_t m) {
    return t->type == GGML_TYPE_I32 && ggml_is_contiguous(t) && ggml_nelements(t) == m;
}

// Vectors of n values, each with a weight.
static bool moegraph_is_weighted(const ggml_tensor * mul) {
    const ggml_tensor * x = mul->src[0];
    const ggml_tensor * w = mul->src[1];
    return moegraph_is_plain_f32(x) && x->ne[0] % 4 == 0 && w->type == GGML_TYPE_F32 && ggml_is_contiguous(w) &&
        w->ne[0] == 1 && w->ne[1] == x->ne[1] && w->ne[2] == x->ne[2] && w->ne[3] == x->ne[3];
}

int moegraph_add_rows_try(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, const int i) {
    const ggml_tensor * mul = cgraph->nodes[i];
    if (mul->op != GGML_OP_MUL || !moegraph_is_weighted(mul)) {
        return 0;
    }
    const ggml_op head[] = { GGML_OP_MUL, GGML_OP_GET_ROWS, GGML_OP_ADD_ID };
    int found[3];
    if (moegraph_find_ops(cgraph, i, head, 3, found) < 0) {
        return 0;
    }
    const ggml_tensor * get  = cgraph->nodes[found[1]];
    const ggml_tensor * rows = get->src[0];
    const int64_t n = mul->ne[0];
    const int64_t m = ggml_nelements(get)/n;
    if (rows->type != GGML_TYPE_F32 || rows->ne[0] != n || rows->nb[0] != sizeof(float) || rows->nb[1] % 16 != 0 ||
            (uintptr_t) rows->data % 16 != 0 || !moegraph_is_list(get->src[1], m) || m == 0) {
        return 0;
    }

    moegraph_add_rows_args args = {};
    args.x       = (const float *) mul->src[0]->data;
    args.weights = (const float *) mul->src[1]->data;
    args.rows    = (float *) rows->data;
    args.target  = (const int *) get->src[1]->data;
    args.n       = n;
    args.stride  = rows->nb[1]/sizeof(float);

    // a sum after the other, and nothing else in between
    const ggml_tensor * sum = get;
    int last = found[1];
    for (int j = found[1] + 1; ; ++j) {
        if (j >= cgraph->n_nodes) {
            return 0;
        }
        const ggml_tensor * node = cgraph->nodes[j];
        if (moegraph_is_view_op(node)) {
            continue;
        }
        if ((node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0 || (sum->flags & GGML_TENSOR_FLAG_OUTPUT) != 0 ||
                ggml_node_get_use_count(cgraph, last) != 1 || moegraph_viewed(node->src[0]) != sum) {
            return 0;
        }
        last = j;
        if (node->op == GGML_OP_SET_ROWS) {
            const ggml_tensor * to = node->src[1];
            if (args.n_terms == 0 || node->data != rows->data || node->nb[1] != rows->nb[1] ||
                    node->type != GGML_TYPE_F32 || to->data != get->src[1]->data || !moegraph_is_list(to, m)) {
                return 0;
            }
            break;
        }
        if (node->op != GGML_OP_ADD_ID || args.n_terms == MOEGRAPH_ADD_ROWS_TERMS ||
                moegraph_viewed(node->src[1]) != mul || !moegraph_is_list(node->src[2], m)) {
            return 0;
        }
        args.terms[args.n_terms++] = (const int *) node->src[2]->data;
        sum = node;
    }
    // the products are read by the sums alone, through one view of them or each by itself
    const int n_uses = ggml_node_get_use_count(cgraph, i);
    if ((mul->flags & GGML_TENSOR_FLAG_OUTPUT) != 0 || (n_uses != 1 && n_uses != args.n_terms)) {
        return 0;
    }
    moegraph_add_rows_kernel<<<m, MOEGRAPH_ADD_ROWS_THREADS, 0, ctx.stream()>>>(args);
    return last - i;
}
