#pragma once

#include "moegraph-context.cuh"

#include "ggml-backend-impl.h"

#include <vector>

// A shared expert does not depend on the router or on the routed experts: for few rows it runs beside them on a stream
// of its own, from where its input is there to where its result is needed.
class moegraph_branches {
public:
    // Finds the shared experts of a graph. Call before its nodes are launched.
    moegraph_branches(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, bool enabled);

    // Call before node i is launched, and with n_nodes behind the last one: changes to the stream of the node.
    void before(int i);

private:
    struct branch {
        int fork;  // the node that computes the input, -1: it is there from the start
        int first;
        int last;
        moegraph_shared_expert nodes;
    };

    void go_on(); // to the next branch

    ggml_backend_cuda_context & ctx;
    std::vector<branch> branches;
    int  next   = -1; // the branch that is looked for
    bool forked = false;
    bool active = false;
};

// Asks that no memory is used by both sides, where node i starts a shared expert.
void moegraph_branch_keep(const ggml_cgraph * cgraph, int i, const ggml_backend_graph_optimize_params * params);
