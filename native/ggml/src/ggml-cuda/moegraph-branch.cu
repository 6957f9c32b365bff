#include "moegraph-branch.cuh"
#include "moegraph-context.cuh"
#include "moegraph-done.cuh"
#include "moegraph-match.cuh"
#include "moegraph-rows.cuh"

constexpr int MOEGRAPH_BRANCH_ROWS = 32;

// A shared expert that starts at node i: up, gate, GLU, down, behind routed experts of the same input. Returns its last
// node, -1 if there is none.
static int moegraph_branch_match(
        const ggml_cgraph * cgraph, const int i, int & fork, moegraph_shared_expert * nodes = nullptr) {
    static const ggml_op ops[4] = { GGML_OP_MUL_MAT, GGML_OP_MUL_MAT, GGML_OP_GLU, GGML_OP_MUL_MAT };
    int found[4];
    const int last = cgraph->nodes[i]->op == GGML_OP_MUL_MAT ? moegraph_find_ops(cgraph, i, ops, 4, found) : -1;
    if (last < 0) {
        return -1;
    }
    const ggml_tensor * a   = cgraph->nodes[found[0]];
    const ggml_tensor * b   = cgraph->nodes[found[1]];
    const ggml_tensor * glu = cgraph->nodes[found[2]];
    const bool both = (glu->src[0] == a && glu->src[1] == b) || (glu->src[0] == b && glu->src[1] == a);
    if (!both || a->src[1] != b->src[1] || cgraph->nodes[found[3]]->src[1] != glu ||
            ggml_nrows(a) > MOEGRAPH_BRANCH_ROWS) {
        return -1;
    }
    for (int k = 0; k < 3; ++k) {
        if (!ggml_node_has_n_uses(cgraph, found[k], 1)) {
            return -1;
        }
    }
    // a sum or a scale right behind would be fused with the last product, and the kernel would read the other side
    const ggml_tensor * down = cgraph->nodes[last];
    int after = last + 1;
    while (after < cgraph->n_nodes && moegraph_is_view_op(cgraph->nodes[after])) {
        ++after;
    }
    if (after < cgraph->n_nodes && (cgraph->nodes[after]->src[0] == down || cgraph->nodes[after]->src[1] == down)) {
        return -1;
    }
    const ggml_tensor * input = a->src[1];
    while (moegraph_is_view_op(input)) {
        input = input->src[0];
    }
    bool routed = false;
    for (fork = i - 1; fork >= 0 && cgraph->nodes[fork] != input; --fork) {
        const ggml_tensor * node = cgraph->nodes[fork];
        const ggml_tensor * read = node->op == GGML_OP_MUL_MAT_ID ? node->src[1] : nullptr;
        while (read != nullptr && moegraph_is_view_op(read)) {
            read = read->src[0];
        }
        routed = routed || read == input;
    }
    if (nodes != nullptr) {
        const ggml_tensor * next = after < cgraph->n_nodes ? cgraph->nodes[after] : nullptr;
        *nodes = { glu->src[1], glu->src[0], cgraph->nodes[found[2]], cgraph->nodes[last],
            next != nullptr && next->op == GGML_OP_MUL_MAT && next->ne[0] == 1 ? next : nullptr };
    }
    return routed ? last : -1;
}

// Whether the memory of two tensors overlaps.
static bool moegraph_touches(const ggml_tensor * a, const ggml_tensor * b) {
    return a->data != nullptr && b->data != nullptr && !moegraph_apart(a, b);
}

// Whether the two sides can run at the same time.
static bool moegraph_branch_is_apart(const ggml_cgraph * cgraph, const int fork, const int first, const int last) {
    for (int i = fork + 1; i < first; ++i) {
        const ggml_tensor * beside = cgraph->nodes[i];
        for (int j = first; j <= last; ++j) {
            const ggml_tensor * node = cgraph->nodes[j];
            if (moegraph_is_view_op(node)) {
                continue;
            }
            bool touches = !moegraph_is_view_op(beside) && moegraph_touches(node, beside);
            for (int k = 0; k < GGML_MAX_SRC && !touches; ++k) {
                touches = (beside->src[k] != nullptr && moegraph_touches(node, beside->src[k])) ||
                    (node->src[k] != nullptr && !moegraph_is_view_op(beside) && moegraph_touches(beside, node->src[k]));
            }
            if (touches) {
                return false;
            }
        }
    }
    return true;
}

moegraph_branches::moegraph_branches(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph,
        const bool enabled) : ctx(ctx) {
    for (int i = 0; enabled && i < cgraph->n_nodes; ++i) {
        branch b;
        b.first = i;
        b.last  = moegraph_branch_match(cgraph, i, b.fork, &b.nodes);
        if (b.last >= 0 && moegraph_branch_is_apart(cgraph, b.fork, b.first, b.last)) {
            branches.push_back(b);
            i = b.last;
        }
    }
    go_on();
}

void moegraph_branches::go_on() {
    ++next;
    moegraph_get_context(ctx).next_shared = next < (int) branches.size() ? branches[next].nodes : moegraph_shared_expert();
}

void moegraph_branches::before(const int i) {
    if (next >= (int) branches.size()) {
        return;
    }
    moegraph_fork_events & events = moegraph_get_context(ctx).branch;
    events.create();
    if (active && i > branches[next].last) {
        CUDA_CHECK(cudaEventRecord(events.join, ctx.stream()));
        ctx.curr_stream_no = 0;
        CUDA_CHECK(cudaStreamWaitEvent(ctx.stream(), events.join));
        moegraph_rows_pin(ctx, nullptr);
        active = false;
        forked = false;
        go_on();
        if (next >= (int) branches.size()) {
            return;
        }
    }
    const branch & b = branches[next];
    if (!forked && i > b.fork) {
        CUDA_CHECK(cudaEventRecord(events.fork, ctx.stream()));
        moegraph_rows_pin(ctx, b.nodes.up->src[1]);
        forked = true;
    }
    if (!active && i == b.first && !moegraph_done_has(ctx, b.nodes.up)) {
        ctx.curr_stream_no = 1;
        CUDA_CHECK(cudaStreamWaitEvent(ctx.stream(), events.fork));
        active = true;
    } else if (!active && i >= b.first) {
        forked = false; // its first node was taken in by another kernel
        moegraph_rows_pin(ctx, nullptr);
        go_on();
    }
}

void moegraph_branch_keep(const ggml_cgraph * cgraph, const int i, const ggml_backend_graph_optimize_params * params) {
    int       fork;
    const int last = moegraph_branch_match(cgraph, i, fork);
    if (last < 0) {
        return;
    }
    for (int j = fork + 1; j < i; ++j) {
        params->add_alloc_dep(params->user_data, cgraph->nodes[j], cgraph->nodes[last]);
        for (ggml_tensor * src : cgraph->nodes[j]->src) {
            if (src != nullptr) {
                params->add_alloc_dep(params->user_data, src, cgraph->nodes[last]);
            }
        }
    }
}
