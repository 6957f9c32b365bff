#pragma once

#include "common.cuh"

#include "ggml-backend-impl.h"

using moegraph_compute = bool (*)(ggml_backend_cuda_context & ctx, ggml_tensor * node);

// A graph tells the host things while it runs: copies of 32-bit elements into pinned host memory that no later node
// reads. They leave on a stream of their own (a branch of the captured graph), in the order of the nodes: whoever sees
// an element of the last of up to four copies in a row sees all of those before it. A ranking (product of one row,
// argsort) that only the host reads is computed beside the graph, too.
class moegraph_publisher {
public:
    explicit moegraph_publisher(ggml_backend_cuda_context & ctx) : ctx(ctx) {}

    // Launches what starts at node i. Returns how many nodes it spans, 0 if there is nothing.
    int try_publish(const ggml_cgraph * cgraph, int i, moegraph_compute compute);

    // Call behind the last node: the graph ends when its copies have.
    void join();

private:
    cudaStream_t fork(int no);

    ggml_backend_cuda_context & ctx;
    bool forked[2] = { false, false }; // to the streams of copies and of rankings
};

// Asks that what is read or written there from node i on keeps its memory until the graph ends.
void moegraph_publish_keep(const ggml_cgraph * cgraph, int i, const ggml_backend_graph_optimize_params * params);

// Whether node i copies something to the host that the graph itself does not read, as its maker promises.
bool moegraph_is_published(const ggml_cgraph * cgraph, int i);

// The copy of one row of ids to the host behind node i, before any expert: nullptr if there is none, or if it is told together
// with something else.
ggml_tensor * moegraph_publish_find(const ggml_cgraph * cgraph, int i, const ggml_tensor * ids);
