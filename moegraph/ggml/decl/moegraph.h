// What our patches add to ggml's interface. The C compiler checks every line against the real header.

#define MOEGRAPH_TREE_ROWS ...

struct ggml_tensor * moegraph_ssm_conv_tree(struct ggml_context * ctx, struct ggml_tensor * sx, struct ggml_tensor * c,
    struct ggml_tensor * parents);
struct ggml_tensor * moegraph_gated_delta_net_tree(struct ggml_context * ctx, struct ggml_tensor * q, struct ggml_tensor * k,
    struct ggml_tensor * v, struct ggml_tensor * g, struct ggml_tensor * beta, struct ggml_tensor * state,
    struct ggml_tensor * parents);

#define MOEGRAPH_FETCH_IDS ...

struct ggml_tensor * moegraph_fetch_rows(struct ggml_context * ctx, struct ggml_tensor * table, struct ggml_tensor * ids,
    struct ggml_tensor * victims, struct ggml_tensor * from, struct ggml_tensor * to);
