#include "moegraph.h"

#include "ggml-impl.h"

// ggml_cpy has no parameters of its own.
#define MOEGRAPH_PUBLISH_MARK 0x6d6f6567

struct ggml_tensor * moegraph_publish(struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * host) {
    GGML_ASSERT(ggml_type_size(a->type) == 4 && a->type == host->type && !ggml_is_quantized(a->type));
    struct ggml_tensor * result = ggml_cpy(ctx, a, host);
    ggml_set_op_params_i32(result, 0, MOEGRAPH_PUBLISH_MARK);
    return result;
}

bool moegraph_is_publish(const struct ggml_tensor * node) {
    return node->op == GGML_OP_CPY && ggml_get_op_params_i32(node, 0) == MOEGRAPH_PUBLISH_MARK;
}
