#include "moegraph-cpu.h"
#include "moegraph-attn-cpu.h"
#include "moegraph-candidates-cpu.h"
#include "moegraph-deltanet.h"
#include "moegraph-fetch-cpu.h"

bool moegraph_cpu_supports_op(const struct ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_MOEGRAPH_FETCH_ROWS:
        case GGML_OP_MOEGRAPH_CONV:
        case GGML_OP_MOEGRAPH_DELTA_NET:
        case GGML_OP_MOEGRAPH_ATTN:
        case GGML_OP_MOEGRAPH_CANDIDATES:
            return true; // the constructors check types and shapes
        default:
            return false;
    }
}

size_t moegraph_cpu_work_size(const struct ggml_tensor * op, int n_tasks) {
    switch (op->op) {
        case GGML_OP_MOEGRAPH_CONV:
            return moegraph_conv_work_size(op, n_tasks);
        case GGML_OP_MOEGRAPH_DELTA_NET:
            return moegraph_delta_net_work_size(op, n_tasks);
        case GGML_OP_MOEGRAPH_CANDIDATES:
            return moegraph_candidates_work_size(op, n_tasks);
        default:
            return 0;
    }
}

void moegraph_cpu_compute_forward(const struct ggml_compute_params * params, struct ggml_tensor * dst) {
    switch (dst->op) {
        case GGML_OP_MOEGRAPH_FETCH_ROWS:
            moegraph_compute_forward_fetch_rows(params, dst);
            break;
        case GGML_OP_MOEGRAPH_CONV:
            moegraph_compute_forward_conv(params, dst);
            break;
        case GGML_OP_MOEGRAPH_DELTA_NET:
            moegraph_compute_forward_delta_net(params, dst);
            break;
        case GGML_OP_MOEGRAPH_ATTN:
            moegraph_compute_forward_attn(params, dst);
            break;
        case GGML_OP_MOEGRAPH_CANDIDATES:
            moegraph_compute_forward_candidates(params, dst);
            break;
        default:
            GGML_ABORT("%s: no kernel for %s", __func__, ggml_op_name(dst->op));
    }
}
