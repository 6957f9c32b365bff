#pragma once

#include "common.cuh"

#include "ggml-backend-impl.h"

// The router of one row in one kernel: its product, scores (softmax or sigmoid, with a bias for the choice), top-k, and
// weights. A norm in front of it, and a residual sum in front of that, are taken in, and so is the product of a shared expert's
// gate, wherever it stands behind; the look-up of slots, if gate and up of the experts can fetch (moegraph-one.cu), and the copy
// of the ids to the host. Returns how many nodes behind node i that covers, 0 if node i does not start the pattern.
int moegraph_router_try(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i);

// Where the product of a shared expert's gate with the norm is, one value before its sigmoid, if the router of this layer has
// computed it in this evaluation; nullptr otherwise. The next layer's router writes it again.
const float * moegraph_router_gate(ggml_backend_cuda_context & ctx, const ggml_tensor * product);

// What the router of this layer has looked up in this evaluation for the slots `ids`, or for a view of them: packed
// (moegraph_one_pack), as the launch of gate and up fetches what is missing; nullptr if `ids` are others.
const int32_t * moegraph_router_slots(ggml_backend_cuda_context & ctx, const ggml_tensor * ids);

// Fetches what is missing of them in a launch of its own after all, where gate and up cannot. Returns whether it did.
bool moegraph_router_fetch(ggml_backend_cuda_context & ctx, const ggml_tensor * ids);

// Call before the nodes of a graph are launched.
void moegraph_router_begin(ggml_backend_cuda_context & ctx);

// Asks that what the kernel reads keeps its memory as long as its blocks write, where node i starts the pattern.
void moegraph_router_keep(const ggml_cgraph * cgraph, int i, const ggml_backend_graph_optimize_params * params);
