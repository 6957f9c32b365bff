#include "moegraph-apart.cuh"
#include "moegraph-rows.cuh"

#include "moegraph.h"

// Also a product of one row is computed here, because more rows are not fused with what follows either.
int moegraph_apart_try(
        ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, const int i, moegraph_compute compute) {
    ggml_tensor * node = cgraph->nodes[i];
    if ((node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0 || !moegraph_rows_are_apart(node)) {
        return 0;
    }
    const bool mmid = node->op == GGML_OP_MUL_MAT_ID;
    const int  dim  = mmid ? 2 : 1; // of the rows
    if (!mmid && ggml_get_op_params_i32(node, 1) != GGML_HINT_NONE) {
        return 0; // a Hadamard transform has a kernel of its own, with a warp for each row
    }
    ggml_tensor * x = node->src[1];
    if ((!mmid && node->ne[2] != 1) || node->ne[3] != 1 ||
            moegraph_rows_supported(node, nullptr, ggml_cuda_info().devices[ctx.device].cc) ||
            (!mmid && moegraph_rows_f32_supported(node))) {
        return 0;
    }
    for (int64_t row = 0; row < node->ne[dim]; ++row) {
        ggml_tensor x_row = moegraph_slice(x, dim, row, 1);
        ggml_tensor out   = *node;
        out.ne[dim] = 1;
        out.data    = (char *) node->data + row*node->nb[dim];
        out.src[1]  = &x_row;
        ggml_tensor ids;
        if (mmid) {
            ids = moegraph_slice(node->src[2], 1, row, 1);
            out.src[2] = &ids;
        }
        if (!compute(ctx, &out)) {
            GGML_ABORT("%s: no kernel for one row of %s", __func__, node->name);
        }
    }
    return 1;
}
