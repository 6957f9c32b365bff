#pragma once

#include "moegraph-apart.cuh"
#include "moegraph-branch.cuh"
#include "moegraph-publish.cuh"

// What ggml-cuda.cu calls of our kernels.

// Our ops (GGML_OP_MOEGRAPH_*): whether this backend computes one, and its launch.
bool moegraph_supports_op(int device, const ggml_tensor * op);
void moegraph_compute_forward(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// Bytes of a tensor: its elements, and what an op of ours keeps behind them.
size_t moegraph_alloc_size(const ggml_tensor * tensor);

// MUL_MAT and MUL_MAT_ID of a few rows, alone or combined with a gate product by a GLU. Returns whether a kernel of
// ours has computed it.
bool moegraph_mul_mat(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
bool moegraph_mul_mat_glu(ggml_backend_cuda_context & ctx, ggml_tensor * up, const ggml_tensor * gate,
    ggml_tensor * glu);

// Whether a kernel of ours computes a product that upstream shall not fuse. Where rows are to be kept apart, it would do so for
// one row only, and the row would have other bits than among others; else the kernel for one row is faster, and a residual
// sum behind it is fused with its norm.
bool moegraph_multiplies_apart(const ggml_tensor * product);

// Runs what starts at node i as one kernel, if one of ours covers it. Returns how many nodes behind node i that covers,
// 0 if nothing has been run. _group: products of the same activations; it comes last, after upstream's own fusions.
int moegraph_try_fuse(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i);
int moegraph_try_group(ggml_backend_cuda_context & ctx, ggml_cgraph * cgraph, int i);

// Asks that what our kernels read at once keeps its memory long enough, where node i starts a pattern.
void moegraph_keep(const ggml_cgraph * cgraph, int i, const ggml_backend_graph_optimize_params * params);

// One evaluation of a graph: which nodes run beside others, and on which stream.
class moegraph_evaluation {
public:
    // may_branch: upstream's own concurrent streams are not in use.
    moegraph_evaluation(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, bool may_branch);

    // Call before node i is launched: changes to the stream of the node.
    void before(int i) { branches.before(i); }

    // Passes over nodes that are done, or launches the copies to the host that start at node i, or a product whose rows are
    // kept apart. Returns how many nodes that covers, 0 for none.
    int try_alone(int i, moegraph_compute compute);

    // Call after the last node: the graph ends when its branches have.
    void end();

private:
    ggml_backend_cuda_context & ctx;
    const ggml_cgraph * cgraph;
    moegraph_branches   branches;
    moegraph_publisher  publisher;
};
